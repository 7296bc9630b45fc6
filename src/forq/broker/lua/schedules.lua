-- Times: jobs that are scheduled, the timers that pulse keeps, and schedules that make jobs again and again.

-- Jobs that wait for a time: `scheduled`, ids by due time (ms), with a sequence in the fraction so that equal times
-- keep their order. Whoever changes the head tells pulse, which keeps the timers: on the channel `due`, in how many ms
-- it is.

-- As many as an enqueue stores in one call: the server is held up for about 1.5 ms.
local PROMOTED_PER_CALL = 500

function timers.note_scheduled(id, due_ms)
  journal.note(string.format('scheduled 0 %s %.0f', id, due_ms))
end

-- The caller has noted what makes the job ready; a job of which nothing more is noted waits.
function timers.schedule(id, due_ms)
  local head = timers.head_ms('scheduled')
  redis.call('ZREM', key('scheduled'), id)
  redis.call('ZADD', key('scheduled'), hints.next_score(key('scheduled'), due_ms), id)
  timers.note_scheduled(id, due_ms)
  if not head or due_ms < head then
    redis.call('PUBLISH', channel('due'), string.format('%.0f', math.max(0, due_ms - now_ms)))
  end
end

-- Makes a stored job waiting in its place, or scheduled if its time is ahead.
function timers.make_ready(id, place, run_at_ms)
  if run_at_ms > now_ms then timers.schedule(id, run_at_ms) else hints.push_back(place, { id }) end
end

-- What is due becomes waiting, in order.
function timers.promote()
  local due = redis.call('ZRANGEBYSCORE', key('scheduled'), '-inf', '(' .. string.format('%d', now_ms + 1),
    'LIMIT', 0, math.max(1, records.readable(PROMOTED_PER_CALL, READ_BYTES)))
  if #due == 0 then return end
  redis.call('ZREM', key('scheduled'), unpack(due))
  local packed = redis.call('HMGET', key('jobs'), unpack(due))
  -- One push per list: a command costs more than what it moves.
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
  -- Nothing else waits: whatever waits from now on has not waited for longer, however long ago it was enqueued
  -- (counts).
  if hints.main_waiting() + in_lane == #promoted then
    journal.set_count('idle_until_ms', string.format('%.0f', now_ms))
  end
  journal.note_ids('promoted', 0, promoted)
end

-- Times besides that of `scheduled`: `schedules:next` (the next ticks of periodic jobs), `leases` (items that are
-- handed over, by the time their lease lapses) and `expiries` (items by the time they are too old). Whoever changes the
-- head of one of them tells pulse, as for `scheduled`.

function timers.head_ms(name)
  local head = redis.call('ZRANGE', key(name), 0, 0, 'WITHSCORES')
  return head[2] and math.floor(tonumber(head[2]))
end

function timers.set(name, id, at_ms)
  local head = timers.head_ms(name)
  redis.call('ZADD', key(name), string.format('%.0f', at_ms), id)
  if not head or at_ms < head then
    redis.call('PUBLISH', channel('due'), string.format('%.0f', at_ms - now_ms))
  end
end

-- In how many ms something is to be done; -1: there is nothing. `told`: ticks that are due are known to the caller.
-- (One that cannot be fired stays due: it must not bring the caller back at once, again and again.)
function timers.next_ms(ticks_known)
  local next_ms
  local function consider(at_ms)
    if at_ms and (not next_ms or at_ms < next_ms) then next_ms = at_ms end
  end
  for _, name in ipairs(mode == 'work' and { 'scheduled' } or { 'scheduled', 'leases', 'expiries' }) do
    consider(timers.head_ms(name))
  end
  local least = ticks_known and '(' .. string.format('%.0f', now_ms) or '-inf'
  consider(tonumber(redis.call('ZRANGEBYSCORE', key('schedules:next'), least, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]))
  -- The limits have been lifted, and not all are woken yet.
  if rate_count + max_active == 0 and redis.call('EXISTS', key('limited')) == 1 then consider(now_ms) end
  if rate_count > 0 and (redis.call('EXISTS', key('limited')) == 1 or suspect_hints + in_lane > 0
    or (on_request and hints.main_waiting() > 0)) then
    local wait_ms = limits.refill_ms()
    consider(wait_ms and now_ms + wait_ms)
  end
  return next_ms and math.max(0, next_ms - now_ms) or -1
end

-- `item_timeout` of the release modes. `expiries`: items by the time (ms) at which they are too old.

-- `if_earlier`: only if that is earlier than what was set before.
function timers.set_expiry(id, from_ms, if_earlier)
  local timeout_ms = option('item_timeout_ms')
  if timeout_ms == 0 or mode == 'work' then return end
  local expires_ms = math.max(now_ms, from_ms) + timeout_ms
  if if_earlier and expires_ms >= tonumber(redis.call('ZSCORE', key('expiries'), id) or math.huge) then return end
  timers.set('expiries', id, expires_ms)
end

-- Schedules. `schedules`: KEY -> RULE '\n' POLICY '\n' DATA (scheduling.py); `schedules:next`: KEY by its next tick
-- (ms). Ticks are computed in Python, which gets RULE and POLICY, the head; whoever comes back with a plan has to show
-- the same head.

local DUE_PER_CALL = 100

-- The two first lines of a definition, and the rest; nil if it is broken.
function schedules.read_definition(definition)
  return string.match(definition, '^([^\n]*\n[^\n]*)\n(.*)$')
end

-- KEY, tick and head of each tick that is due, behind what `reply` has already; not of those that the caller cannot
-- fire.
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

-- A job of a schedule is stored, as enqueue does it. DATA and IDENTIFIER are JSON that nobody decodes here.

function schedules.run_id(name, policy, suffix)
  return 'schedule:' .. name .. (policy.overlap == 'queue' and ':' .. suffix or '')
end

function schedules.is_unfinished(id)
  return redis.call('HEXISTS', key('jobs'), id) == 1
end

function schedules.store_run(id, policy, identifier, data, run_at_ms)
  local priority = string.format('%d', policy.priority)
  local body = '[' .. identifier .. ',' .. cjson.encode(policy.type) .. ',' .. data .. ']'
  local flag = run_at_ms > now_ms and 'd' or 'p'
  redis.call('HSET', key('jobs'), id, string.format('%s%s %.0f\n', flag, priority, now_ms) .. body)
  records.note_size(#body, base)
  journal.note_ids('enqueued', 0, { id })
  timers.make_ready(id, priority, run_at_ms)
  timers.set_expiry(id, run_at_ms)
end

-- set_schedule: stores a schedule, or changes it. The same rule keeps its next tick, the same definition changes
-- nothing.
-- KEYS[1]  the queue's base
-- ARGV     protocol, KEY, definition, interval in ms ('' for a cron rule), first tick of a cron rule (ms)
-- Returns  {OK, 0 the same | 1 changed | 2 new, its next tick (ms)}; {NO_QUEUE}; {OTHER_PROTOCOL, its number};
--          {TOO_MANY_SCHEDULES, how many there are}; {TOO_LARGE, 1, max_data}
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

  -- An interval is due when it never ran, or one interval after its last run.
  local function first_tick()
    if not every_ms then return tonumber(ARGV[5]) end
    local last_run_ms = tonumber(string.match(redis.call('HGET', key('schedules:runs'), name) or '0', '^%d+'))
    return math.max(now_ms, last_run_ms == 0 and 0 or last_run_ms + every_ms)
  end

  local function rule_of(text)
    return string.match(text, '^[^\n]*')
  end

  redis.call('HSET', key('schedules'), name, definition)
  if not (before and next_ms and rule_of(before) == rule_of(definition)) then
    next_ms = first_tick()
    redis.call('ZADD', key('schedules:next'), string.format('%.0f', next_ms), name)
    -- Pulse sets its timer by it if it has none that is earlier.
    redis.call('PUBLISH', channel('due'), string.format('%.0f', math.max(0, next_ms - now_ms)))
  end
  return { OK, before and 1 or 2, tonumber(next_ms) }
end

-- drop_schedule: ends a schedule. The jobs that it has made stay.
-- KEYS[1]  the queue's base
-- ARGV     KEY, its definition ('': whatever it is)
-- Returns  {OK, 1 dropped | 0 there is none, or it is another}; {NO_QUEUE}
function verbs.drop_schedule()
  if not epoch then return { NO_QUEUE } end
  local name, expected = ARGV[1], ARGV[2]
  if expected ~= '' and redis.call('HGET', key('schedules'), name) ~= expected then return { OK, 0 } end
  local dropped = redis.call('HDEL', key('schedules'), name)
  redis.call('ZREM', key('schedules:next'), name)
  redis.call('HDEL', key('schedules:runs'), name)
  return { OK, dropped }
end

-- trigger: a schedule makes a job now, whatever its ticks are; they and its counts stay as they are.
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

-- fire: carries out what was planned for a tick of a schedule that is due: stores its jobs, counts, moves to the next
-- tick. Of any number of calls for one tick the first does it.
-- KEYS[1]  the queue's base
-- ARGV     KEY, the tick that was planned for (ms), the head it was planned by, the next tick (ms; '': never), how many
--          ticks are missed, then per tick that makes a job: tick (ms), identifier (JSON), share of the jitter (0 to 1)
-- Returns  {OK, 1 done | 0 it is another tick or definition by now, ms until promote is to be called}; {NO_QUEUE}
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
      schedules.store_run(id, policy, identifier, data, tonumber(tick) + math.floor(policy.jitter_ms * share))
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

-- promote: what is due becomes waiting; leases lapse, and items that are too old are given up, done jobs forgotten. It
-- tells of ticks that are due. Pulse calls it on time.
-- KEYS[1]  the queue's base
-- ARGV     schedules that the caller cannot fire
-- Returns  {OK, ms until it is to be called again (-1: nothing has a time), now (ms), then KEY, tick (ms) and head of
--          each other schedule that is due}; {NO_QUEUE}
-- States   scheduled -> waiting; active -> waiting (its lease lapsed, also stalled); waiting, retry -> dead
--          (item_timeout)
function verbs.promote()
  if not epoch then return { NO_QUEUE } end
  leases.lapse()
  leases.expire_items()
  timers.promote()
  limits.wake_if_lifted()
  done.expire(TRIMMED_DONE_PER_CALL)
  hints.wake_idle(NOTIFY_AWAITERS, WAKE_LIMITED)
  journal.write('-')
  return schedules.add_due({ OK, timers.next_ms(true), now_ms }, ARGV)
end
