-- Scheduled jobs, the times that pulse sets its timers for, and schedules (periodic jobs).

-- `scheduled`: ids by due time (ms), with a sequence in the fraction so that equal times keep their order. A new head
-- is published on the channel `due` as ms from now; pulse keeps one timer per queue.

-- As many as one enqueue stores; blocks the server for about 1.5 ms.
local PROMOTED_PER_CALL = 500

-- Pulse sets its timer to `ms` from now, unless it has an earlier one.
function timers.publish(ms)
  redis.call('PUBLISH', channel('due'), string.format('%.0f', math.max(0, ms)))
end

function timers.note_scheduled(id, at_ms)
  journal.note(string.format('scheduled 0 %s %.0f', id, at_ms))
end

-- The caller has noted why the job is ready; without a further event it counts as waiting.
function timers.schedule(id, at_ms)
  local first_ms = timers.first_ms('scheduled')
  redis.call('ZREM', key('scheduled'), id)
  redis.call('ZADD', key('scheduled'), hints.next_score(key('scheduled'), at_ms), id)
  timers.note_scheduled(id, at_ms)
  if first_due_ms == 0 or at_ms < first_due_ms then first_due_ms = at_ms end
  if not first_ms or at_ms < first_ms then timers.publish(at_ms - now_ms) end
end

function timers.make_ready(id, place, run_at_ms)
  if run_at_ms > now_ms then timers.schedule(id, run_at_ms) else hints.push_back(place, { id }) end
end

-- Call it when `number` jobs start to wait that were enqueued earlier. If no other job waits, nothing can have waited
-- since before now, whatever its enqueue time (see counts).
function timers.note_new_waiting(number)
  if number > 0 and hints.main_waiting() + in_lane == number then
    journal.set_count('idle_until_ms', string.format('%.0f', now_ms))
  end
end

-- Makes due jobs waiting, in order. `looks`: also if none is due according to the summary.
function timers.promote(looks)
  if not looks and (first_due_ms == 0 or first_due_ms > now_ms) then return end
  timers.promote_due()
  first_due_ms = timers.first_ms('scheduled') or 0
end

function timers.promote_due()
  local due = redis.call('ZRANGEBYSCORE', key('scheduled'), '-inf', '(' .. string.format('%d', now_ms + 1),
    'LIMIT', 0, math.max(1, records.readable(PROMOTED_PER_CALL, READ_BYTES)))
  if #due == 0 then return end
  redis.call('ZREM', key('scheduled'), unpack(due))
  local packed = redis.call('HMGET', key('jobs'), unpack(due))
  -- One push per list: a command costs more than the ids it moves.
  local promoted, by_place = {}, {}
  for i, id in ipairs(due) do
    if packed[i] then
      local place = records.place_of(packed[i]) or '5'
      local ids = by_place[place] or {}
      by_place[place] = ids
      ids[#ids + 1] = id
      promoted[#promoted + 1] = id
    else
      hints.drop(id)
    end
  end
  for place, ids in pairs(by_place) do hints.push_back(place, ids) end
  timers.note_new_waiting(#promoted)
  journal.note_ids('promoted', 0, promoted)
end

-- run_now: makes a scheduled job ready before its time: one enqueued with a time ahead, or one that waits for its
-- retry. Its counts stay, and it goes where promote would put it.
-- KEYS[1]  the queue's base
-- ARGV     id
-- Returns  {OK, 1 ready | 0 no such job}; {NOT_SCHEDULED, its state}; {NO_QUEUE}
-- States   scheduled -> waiting
function verbs.run_now()
  if not epoch then return { NO_QUEUE } end
  local id = ARGV[1]
  local record = redis.call('HGET', key('jobs'), id)
  if not record then return flows.is_held(id) and { NOT_SCHEDULED, 'held' } or { OK, 0 } end
  local place = records.place_of(record) or '5'
  if not redis.call('ZSCORE', key('scheduled'), id) then
    if redis.call('HEXISTS', key('active'), id) == 1 then return { NOT_SCHEDULED, 'active' } end
    return { NOT_SCHEDULED, place == RETRY_PLACE and 'retry' or 'waiting' }
  end
  redis.call('ZREM', key('scheduled'), id)
  hints.push_back(place, { id })
  timers.note_new_waiting(1)
  -- The age of an item counts from the time at which it is ready.
  timers.set_expiry(id, 0, true)
  journal.note_ids('promoted', 0, { id })
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  return { OK, 1 }
end

-- Other timed sets: `schedules:next` (next ticks), `leases` (items by the time their lease lapses) and `expiries`
-- (items by the time they expire).

function timers.first_ms(name)
  local first = redis.call('ZRANGE', key(name), 0, 0, 'WITHSCORES')
  return first[2] and math.floor(tonumber(first[2]))
end

function timers.set(name, id, at_ms)
  local first_ms = timers.first_ms(name)
  redis.call('ZADD', key(name), string.format('%.0f', at_ms), id)
  if not first_ms or at_ms < first_ms then timers.publish(at_ms - now_ms) end
end

-- Milliseconds until the next timed action; -1 if there is none. `ticks_known`: the caller knows the due ticks. (A tick
-- that cannot be fired stays due; it must not make the caller poll.)
function timers.next_ms(ticks_known)
  local next_ms
  local function consider(at_ms)
    if at_ms and (not next_ms or at_ms < next_ms) then next_ms = at_ms end
  end
  for _, name in ipairs(mode == 'work' and { 'scheduled' } or { 'scheduled', 'leases', 'expiries' }) do
    consider(timers.first_ms(name))
  end
  local least = ticks_known and '(' .. string.format('%.0f', now_ms) or '-inf'
  consider(tonumber(redis.call('ZRANGEBYSCORE', key('schedules:next'), least, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]))
  if flows_on then
    if redis.call('EXISTS', key('resolving')) == 1 then consider(now_ms) end
    consider(timers.first_ms('checks'))
  end
  -- The limits were lifted, and some workers are not woken yet.
  if rate_count + max_active == 0 and redis.call('EXISTS', key('limited')) == 1 then consider(now_ms) end
  if rate_count > 0 and (redis.call('EXISTS', key('limited')) == 1 or suspect_hints + in_lane > 0
    or (on_request and hints.main_waiting() > 0)) then
    local wait_ms = limits.refill_ms()
    consider(wait_ms and now_ms + wait_ms)
  end
  return next_ms and math.max(0, next_ms - now_ms) or -1
end

-- For `item_timeout` of the release modes. `if_earlier`: never postpones an expiry.
function timers.set_expiry(id, from_ms, if_earlier)
  local timeout_ms = option('item_timeout_ms')
  if timeout_ms == 0 or mode == 'work' then return end
  local expires_ms = math.max(now_ms, from_ms) + timeout_ms
  if if_earlier and expires_ms >= tonumber(redis.call('ZSCORE', key('expiries'), id) or math.huge) then return end
  timers.set('expiries', id, expires_ms)
end

-- `schedules`: KEY -> RULE '\n' POLICY '\n' DATA (scheduling.py). `schedules:next`: KEY by next tick (ms). Python
-- computes the ticks from RULE and POLICY (the head) and sends the head back, so that a changed schedule is noticed.
-- `schedules:paused`: KEY -> time of the pause (ms). A paused schedule has no next tick.

local DUE_PER_CALL = 100

-- Returns head and data; nil if the definition is broken.
function schedules.read_definition(definition)
  return string.match(definition, '^([^\n]*\n[^\n]*)\n(.*)$')
end

-- Appends KEY, tick and head of each due tick to `reply`, except for schedules that the caller cannot fire.
function schedules.add_due(reply, excluded)
  local is_excluded = {}
  for _, name in ipairs(excluded) do is_excluded[name] = true end
  local due = redis.call('ZRANGEBYSCORE', key('schedules:next'), '-inf', string.format('%.0f', now_ms), 'WITHSCORES',
    'LIMIT', 0, DUE_PER_CALL + #excluded)
  for at = 1, #due, 2 do
    local definition = not is_excluded[due[at]] and redis.call('HGET', key('schedules'), due[at])
    if definition then
      reply[#reply + 1] = due[at]
      reply[#reply + 1] = due[at + 1]
      reply[#reply + 1] = schedules.read_definition(definition) or ''
    elseif not is_excluded[due[at]] then
      redis.call('ZREM', key('schedules:next'), due[at])
    end
  end
  return reply
end

function schedules.run_id(name, policy, suffix)
  return 'schedule:' .. name .. (policy.overlap == 'queue' and ':' .. suffix or '')
end

function schedules.is_unfinished(id)
  return redis.call('HEXISTS', key('jobs'), id) == 1 or flows.is_held(id)
end

-- `tick`: in ms; nil if it was triggered by hand.
function schedules.store_run(id, policy, identifier, data, run_at_ms, tick)
  local priority = string.format('%d', policy.priority)
  local body = '[' .. identifier .. ',' .. cjson.encode(policy.type) .. ',' .. data .. ']'
  local job = records.new(priority, now_text(), run_at_ms, tick and 'T=' .. tick or '', body)
  redis.call('HSET', key('jobs'), id, records.write(job))
  records.note_size(#body, base)
  journal.note_ids('enqueued', 0, { id })
  timers.make_ready(id, priority, run_at_ms)
  timers.set_expiry(id, run_at_ms)
end

function schedules.is_paused(name)
  return redis.call('HEXISTS', key('schedules:paused'), name) == 1
end

-- `every_ms`: nil for a cron rule, whose next tick is `cron_ms` (nil: none). An interval is due at once if it never
-- ran, else one interval after its last run.
function schedules.first_tick(name, every_ms, cron_ms)
  if not every_ms then return cron_ms end
  local last_run_ms = tonumber(string.match(redis.call('HGET', key('schedules:runs'), name) or '0', '^%d+'))
  return math.max(now_ms, last_run_ms == 0 and 0 or last_run_ms + every_ms)
end

-- set_schedule: creates or changes a schedule. The same rule keeps its next tick. A paused one stays paused.
-- KEYS[1]  the queue's base
-- ARGV     protocol, KEY, definition, interval in ms ('' for a cron rule), first tick of a cron rule (ms)
-- Returns  {OK, 0 unchanged | 1 changed | 2 new, next tick (ms; of a paused one: if it were resumed)}; {NO_QUEUE};
--          {OTHER_PROTOCOL, its number}; {TOO_MANY_SCHEDULES, number of schedules}; {TOO_LARGE, 1, max_data}
-- States   unchanged
function verbs.set_schedule()
  if not epoch then return { NO_QUEUE } end
  if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end

  local MAX_SCHEDULES = 1000
  local name, definition, every_ms = ARGV[2], ARGV[3], tonumber(ARGV[4])
  local before = redis.call('HGET', key('schedules'), name)
  local next_ms = redis.call('ZSCORE', key('schedules:next'), name)
  if before == definition and next_ms then return { OK, 0, tonumber(next_ms) } end
  local count = redis.call('HLEN', key('schedules'))
  if not before and count >= MAX_SCHEDULES then return { TOO_MANY_SCHEDULES, count } end
  local _, data = schedules.read_definition(definition)
  if #data > option('max_data') then return { TOO_LARGE, 1, option('max_data') } end

  local function rule_of(text)
    return string.match(text, '^[^\n]*')
  end

  redis.call('HSET', key('schedules'), name, definition)
  if schedules.is_paused(name) then
    next_ms = schedules.first_tick(name, every_ms, tonumber(ARGV[5]))
  elseif not (before and next_ms and rule_of(before) == rule_of(definition)) then
    next_ms = schedules.first_tick(name, every_ms, tonumber(ARGV[5]))
    redis.call('ZADD', key('schedules:next'), string.format('%.0f', next_ms), name)
    timers.publish(next_ms - now_ms)
  end
  return { OK, before and 1 or 2, tonumber(next_ms) }
end

-- drop_schedule: removes a schedule; its jobs stay.
-- KEYS[1]  the queue's base
-- ARGV     KEY, its definition ('' = any)
-- Returns  {OK, 1 removed | 0 not found, or another definition}; {NO_QUEUE}
-- States   unchanged
function verbs.drop_schedule()
  if not epoch then return { NO_QUEUE } end
  local name, expected = ARGV[1], ARGV[2]
  if expected ~= '' and redis.call('HGET', key('schedules'), name) ~= expected then return { OK, 0 } end
  local dropped = redis.call('HDEL', key('schedules'), name)
  redis.call('ZREM', key('schedules:next'), name)
  redis.call('HDEL', key('schedules:runs'), name)
  redis.call('HDEL', key('schedules:paused'), name)
  return { OK, dropped }
end

-- pause_schedule: a paused schedule has no next tick, and keeps its definition and counts. A tick that is due is fired
-- before this call or not at all.
-- KEYS[1]  the queue's base
-- ARGV     KEY
-- Returns  {OK, 1 paused | 0 it was paused before}; {NO_QUEUE}; {NO_SCHEDULE}
-- States   unchanged
function verbs.pause_schedule()
  if not epoch then return { NO_QUEUE } end
  local name = ARGV[1]
  if redis.call('HEXISTS', key('schedules'), name) == 0 then return { NO_SCHEDULE } end
  local paused_now = redis.call('HSETNX', key('schedules:paused'), name, string.format('%.0f', now_ms))
  redis.call('ZREM', key('schedules:next'), name)
  return { OK, paused_now }
end

-- resume_schedule: ends the pause of a schedule. Its next tick is the first one from now on: the ticks of the pause are
-- neither fired nor counted as missed.
-- KEYS[1]  the queue's base
-- ARGV     KEY, the head for which the tick was computed, interval in ms ('' for a cron rule), next tick of a cron rule
--          (ms; '' = none)
-- Returns  {OK, 1 resumed | 0 it was not paused}; {CHANGED} if the schedule has changed since, or that tick is over;
--          {NO_QUEUE}; {NO_SCHEDULE}
-- States   unchanged
function verbs.resume_schedule()
  if not epoch then return { NO_QUEUE } end
  local name, head, every_ms, cron_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
  local definition = redis.call('HGET', key('schedules'), name)
  if not definition then return { NO_SCHEDULE } end
  if not schedules.is_paused(name) then return { OK, 0 } end
  if schedules.read_definition(definition) ~= head or (cron_ms and cron_ms < now_ms) then return { CHANGED } end
  redis.call('HDEL', key('schedules:paused'), name)
  local next_ms = schedules.first_tick(name, every_ms, cron_ms)
  if next_ms then
    redis.call('ZADD', key('schedules:next'), string.format('%.0f', next_ms), name)
    timers.publish(next_ms - now_ms)
  end
  return { OK, 1 }
end

-- trigger: enqueues a job of a schedule now; its ticks and counts do not change.
-- KEYS[1]  the queue's base
-- ARGV     KEY, identifier (JSON)
-- Returns  {OK, id}; {NO_QUEUE}; {NO_SCHEDULE}; {EXISTS, 1}: its last job is unfinished; {FULL, max_items}
-- States   (new) -> waiting
function verbs.trigger()
  if not epoch then return { NO_QUEUE } end
  local name, identifier = ARGV[1], ARGV[2]
  local head, data = schedules.read_definition(redis.call('HGET', key('schedules'), name) or '')
  if not head then return { NO_SCHEDULE } end
  local policy = cjson.decode(string.match(head, '\n(.*)$'))
  local id = schedules.run_id(name, policy, string.format('triggered:%.0f', now_us))
  if schedules.is_unfinished(id) then return { EXISTS, 1 } end
  if records.is_full() then return { FULL, option('max_items') } end
  schedules.store_run(id, policy, identifier, data, now_ms)
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  return { OK, id }
end

-- fire: enqueues the jobs of a due tick, counts them and sets the next tick. Only the first call per tick counts.
-- KEYS[1]  the queue's base
-- ARGV     KEY, planned tick (ms), head it was planned from, next tick (ms; '' = none), number of missed ticks, then
--          per tick that makes a job: tick (ms), identifier (JSON), fraction of the jitter (0 to 1)
-- Returns  {OK, 1 fired | 0 tick or definition have changed, ms until promote must be called}; {NO_QUEUE}
-- States   (new) -> waiting | scheduled
function verbs.fire()
  if not epoch then return { NO_QUEUE } end
  local name, planned_ms, planned_head = ARGV[1], tonumber(ARGV[2]), ARGV[3]
  local FIRST, WIDTH = 6, 3
  local newest_ms = #ARGV < FIRST and planned_ms or tonumber(ARGV[#ARGV - WIDTH + 1])
  local next_ms = redis.call('ZSCORE', key('schedules:next'), name)
  local head, data = schedules.read_definition(redis.call('HGET', key('schedules'), name) or '')
  if not next_ms or tonumber(next_ms) ~= planned_ms or head ~= planned_head or newest_ms > now_ms then
    return { OK, 0, timers.next_ms() }
  end

  local counted = redis.call('HGET', key('schedules:runs'), name) or '0 0 0 0'
  local last_run_ms, runs, skipped, missed = string.match(counted, '^(%d+) (%d+) (%d+) (%d+)$')
  runs, skipped, missed = tonumber(runs), tonumber(skipped), tonumber(missed) + tonumber(ARGV[5])

  local policy = cjson.decode(string.match(head, '\n(.*)$'))
  for at = FIRST, #ARGV, WIDTH do
    local tick, identifier, share = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    local id = schedules.run_id(name, policy, tick)
    if schedules.is_unfinished(id) then
      skipped = skipped + 1
    elseif records.is_full() then
      missed = missed + 1
    else
      schedules.store_run(id, policy, identifier, data, tonumber(tick) + math.floor(policy.jitter_ms * share), tick)
      runs, last_run_ms = runs + 1, tick
    end
  end

  redis.call('HSET', key('schedules:runs'), name,
    string.format('%s %.0f %.0f %.0f', last_run_ms, runs, skipped, missed))
  if ARGV[4] == '' then
    redis.call('ZREM', key('schedules:next'), name)
  else
    redis.call('ZADD', key('schedules:next'), ARGV[4], name)
  end
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  return { OK, 1, timers.next_ms() }
end

-- promote: runs everything that is due: scheduled jobs, lapsed leases, expired items and done jobs. Returns the due
-- ticks. Pulse calls it on time.
-- KEYS[1]  the queue's base
-- ARGV     schedules that the caller cannot fire
-- Returns  {OK, ms until the next call (-1: nothing is timed), now (ms), what pulse has to verify (batches.tend), then
--          KEY, tick (ms) and head of each other due schedule}; {NO_QUEUE}
-- States   scheduled -> waiting; active -> waiting (lease lapsed, also stalled); waiting, retry -> dead (item_timeout)
function verbs.promote()
  if not epoch then return { NO_QUEUE } end
  leases.lapse()
  leases.expire_items()
  timers.promote(true)
  limits.wake_if_lifted()
  done.expire(TRIMMED_DONE_PER_CALL)
  flows.continue()
  local to_verify = batches.tend()
  hints.wake_idle(NOTIFY_AWAITERS, WAKE_LIMITED)
  journal.write('-')
  return schedules.add_due({ OK, timers.next_ms(true), now_ms, to_verify }, ARGV)
end
