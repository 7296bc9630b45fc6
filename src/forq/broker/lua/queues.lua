-- Whole queues: registry, options, pause, delete, counts.

-- reserve: adds a queue to the registry, within the limit; an existing one is joined.
-- KEYS[1]  the registry
-- ARGV     name, mode, max_queues
-- Returns  {OK}; {TOO_MANY}; {OTHER_MODE, its mode}; {DELETING} while an earlier queue of that name is being deleted
-- States   unchanged
function verbs.reserve()
  local entry = redis.call('HGET', KEYS[1], ARGV[1])
  if entry and string.sub(entry, 1, 8) == 'deleting' then return { DELETING } end
  if entry and entry ~= ARGV[2] then return { OTHER_MODE, entry } end
  if entry then return { OK } end
  if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return { TOO_MANY } end
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  return { OK }
end

-- retire: changes a queue's registry entry if it is still the expected one. A deleted queue is marked first, so that
-- its name is not reused before its jobs are logged; then the entry is removed, or the mark is undone.
-- KEYS[1]  the registry
-- ARGV     name, expected entry, new entry: 'deleting EPOCH', a mode, or '' (none)
-- Returns  {OK, 1 changed | 0 the entry is another one}
-- States   unchanged
function verbs.retire()
  if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return { OK, 0 } end
  if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
  return { OK, 1 }
end

-- remember: keeps the name of a deleted queue for readers of its journal, which outlives it. Separate from retire,
-- because a script may access only one cluster slot.
-- KEYS[1]  the names of deleted queues
-- ARGV     name
-- Returns  {OK}
-- States   unchanged
function verbs.remember()
  -- A day longer than delete keeps the journal.
  local KEPT_MS = 8 * 24 * 3600 * 1000
  local today_ms = tonumber(redis.call('TIME')[1]) * 1000
  redis.call('ZADD', KEYS[1], string.format('%.0f', today_ms), ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', today_ms - KEPT_MS))
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', KEPT_MS))
  return { OK }
end

-- free: call it before the entry of a deleted queue leaves the registry. A client that has seen the entry and is about
-- to create a queue of this name must start again. One script cannot do both: the registry is in another cluster slot.
-- KEYS[1]  the queue's base
-- Returns  {OK, ''}; {OK, its mode} if there is a queue of this name again
-- States   unchanged
function verbs.free()
  local FREED_MS = 24 * 3600 * 1000
  if epoch then return { OK, mode } end
  redis.call('SET', key('freed'), string.format('%.0f', now_us), 'PX', FREED_MS)
  return { OK, '' }
end

local function options_changed()
  if not journal_on and redis.call('HGET', key('options'), 'journal') == '1' then
    -- Events since then were not recorded: leave a gap in the sequence.
    sequence = sequence + 1
    summary.save()
  end
  -- promote wakes the workers held back by the old limits.
  if has_limits then redis.call('PUBLISH', channel('due'), '0') end
end

-- create: creates the queue, or joins it if it exists with the same mode and protocol; then sets the given options.
-- Fixed options are set at creation; a queue with another value is not joined.
-- KEYS[1]  the queue's base
-- ARGV     protocol, mode, number of default options, number of fixed options, contents of `deleted` and `freed` before
--          the caller read the registry (separated by a space), then (name, value) per default, per fixed option, and
--          per other given option
-- Returns  {OK, 1 created | 0 joined, epoch}; {OTHER_MODE, its mode}; {OTHER_PROTOCOL, its number}; {OTHER_OPTION,
--          name, its value}; {CHANGED} if a queue of this name was deleted or freed since then: its registry entry may
--          be gone; {NO_QUEUE}: a fail queue whose queue does not exist
-- States   unchanged
function verbs.create()
  -- Not from the cache: the options may have been lost.
  read_options()
  if epoch and protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end
  if epoch and mode ~= ARGV[2] then return { OTHER_MODE, mode } end

  local created = not epoch
  if parent and redis.call('EXISTS', parent .. ':options') == 0 then return { NO_QUEUE } end
  if created and not parent then
    local deleted, freed = redis.call('GET', key('deleted')) or '', redis.call('GET', key('freed')) or ''
    if deleted .. ' ' .. freed ~= ARGV[5] then return { CHANGED } end
  end
  local first_default = 6
  local first_fixed = first_default + 2 * tonumber(ARGV[3])
  local first_given = first_fixed + 2 * tonumber(ARGV[4])
  for at = first_fixed, first_given - 1, 2 do
    local value = redis.call('HGET', key('options'), ARGV[at])
    if epoch and value ~= ARGV[at + 1] then return { OTHER_OPTION, ARGV[at], value or '' } end
  end
  if created then
    redis.call('DEL', key('deleted'))
    epoch = string.format('%.0f', now_us)
    -- Fields that every script reads come first: Redis searches a small hash from its start.
    redis.call('HSET', key('options'), 'epoch', epoch, 'version', '0', 'protocol', ARGV[1], 'mode', ARGV[2],
      'paused', '0', 'journal', '0',
      'journal_max', '0', 'rate_count', '0', 'max_active', '0', 'largest_record', '8192')
    for at = first_default, first_given - 1, 2 do redis.call('HSET', key('options'), ARGV[at], ARGV[at + 1]) end
    -- Only at creation: later, pause keeps both queues in step.
    if parent then
      redis.call('HSET', key('options'), 'paused', redis.call('HGET', parent .. ':options', 'paused') or '0')
    end
  end
  for at = first_given, #ARGV, 2 do redis.call('HSET', key('options'), ARGV[at], ARGV[at + 1]) end
  summary.next_version(base)
  options.db = redis.call('HGET', key('options'), 'db') or '0'
  if created then
    -- The graves of the last queue of this name outlive its deletion; from now on each has its own expiry.
    redis.call('PERSIST', key('graves'))
    local given = redis.call('HMGET', key('options'), 'journal', 'journal_max')
    journal_on, journal_max = given[1] == '1', tonumber(given[2] or 0)
    -- The journal continues in the stream of the last queue of this name.
    redis.call('PERSIST', key('events'))
    redis.call('PERSIST', key('journal:watermarks'))
    sequence, last_hash = 0, '-'
    journal_bytes = tonumber(redis.call('HGET', key('counts'), 'journal_bytes') or journal_bytes)
    redis.call('HDEL', key('counts'), 'journal_bytes')
    journal.note('created 0 ' .. epoch)
    -- The fail queue of a paused queue starts paused.
    if redis.call('HGET', key('options'), 'paused') == '1' then journal.note('paused 0') end
    journal.write('-')
    -- Every supervisor serves such queues. A queue of mode work needs code that only its own supervisor has.
    if ARGV[2] == 'auto_release' or ARGV[2] == 'on_request' or ARGV[2] == 'external' then
      redis.call('PUBLISH', channel('due'), 'new')
    end
  end
  options_changed()
  return { OK, created and 1 or 0, epoch }
end

-- configure: sets options of an existing queue; they apply from the next call on, also to waiting jobs.
-- KEYS[1]  the queue's base
-- ARGV     (name, value) per option
-- Returns  {OK, version of the options}; {NO_QUEUE}
-- States   unchanged
function verbs.configure()
  if not epoch then return { NO_QUEUE } end
  for at = 1, #ARGV, 2 do redis.call('HSET', key('options'), ARGV[at], ARGV[at + 1]) end
  options_changed()
  return { OK, summary.next_version(base) }
end

-- pause: pauses or resumes a queue. A paused queue starts no jobs; running jobs continue. Resuming wakes every worker.
-- KEYS[1]  the queue's base
-- ARGV     '1' to pause, '0' to resume
-- Returns  {OK}; {NO_QUEUE}
-- States   unchanged
function verbs.pause()
  if not epoch then return { NO_QUEUE } end
  local was_paused = paused
  paused = ARGV[1] == '1'
  if paused == was_paused then return { OK } end
  redis.call('HSET', key('options'), 'paused', ARGV[1])
  summary.next_version(base)
  if not paused then
    for _, processor in ipairs(redis.call('ZRANGE', key('processors'), 0, -1)) do
      for _, worker in ipairs(redis.call('HKEYS', workers_key(processor))) do
        redis.call('RPUSH', worker_key(processor, worker, 'wake'), '')
        redis.call('EXPIRE', worker_key(processor, worker, 'wake'), 60)
      end
    end
    hints.wake_idle(NOTIFY_AWAITERS)
    if on_request then awaiters.notify_all() end
  end
  journal.note(paused and 'paused 0' or 'resumed 0')
  journal.write('-')
  return { OK }
end

-- delete: deletes the queue in one step, whatever its size. Every later call with its epoch is refused. Records and
-- unwritten outbox lines are kept as trash until they are in the failed log (purge).
-- KEYS[1]  the queue's base
-- ARGV     epoch (a delayed call must not delete the next queue of this name; '' for a fail queue, which is deleted if
--          its queue is gone), whether jobs may be dropped ('1' | '0')
-- Returns  {OK, jobs dropped}; {NOT_EMPTY, number of jobs}; {NO_QUEUE}, also for another epoch
-- States   every state -> gone
function verbs.delete()
  if not epoch or not parent and epoch ~= ARGV[1] then return { NO_QUEUE } end
  if parent and redis.call('EXISTS', parent .. ':options') == 1 then return { OK, 0 } end
  local jobs = redis.call('HLEN', key('jobs')) + redis.call('HLEN', key('blocked')) + redis.call('HLEN', key('held'))
    + redis.call('ZCARD', key('dead')) + redis.call('HLEN', base .. ':fail:jobs')
  if jobs > 0 and ARGV[2] ~= '1' then return { NOT_EMPTY, jobs } end

  -- The name may be reused at once, and a BLMOVE of an old worker may take an id from the new queue's list. So the old
  -- workers stay in `graves`, which outlives the queue.
  for _, processor in ipairs(recovery.processors()) do
    for _, worker in ipairs(redis.call('HKEYS', workers_key(processor))) do
      redis.call('UNLINK', worker_key(processor, worker, 'processing'), worker_key(processor, worker, 'wake'))
      redis.call('ZADD', key('graves'), now_ms + WORKER_GRAVE_MS, processor .. ' ' .. worker)
    end
    while redis.call('LMOVE', key_of('outbox', processor), key('outbox'), 'RIGHT', 'LEFT') do end
    redis.call('UNLINK', workers_key(processor), key_of('processor', processor .. ':positions'))
  end
  redis.call('PEXPIRE', key('graves'), GRAVE_MS)

  -- A blocked entry is a job too; in the trash it needs another id than the active job.
  for _, id in ipairs(redis.call('HKEYS', key('blocked'))) do
    local entry = redis.call('HGET', key('blocked'), id)
    local priority, enqueued, body = string.match(entry, '^%d %d (%d) %d+ %d+ %d+ (%d+)[^\n]*\n(.*)$')
    if body then
      redis.call('HSET', key('jobs'), id .. ' blocked', 'p' .. priority .. ' ' .. enqueued .. '\n' .. body)
    end
  end
  for _, id in ipairs(redis.call('HKEYS', key('held:jobs'))) do
    redis.call('HSET', key('jobs'), id, redis.call('HGET', key('held:jobs'), id))
  end
  -- Fail jobs are copies of jobs that are in the failed log already.
  if not parent then redis.call('SADD', key('trash'), epoch) end
  -- Lets other supervisors distinguish a deleted queue from one lost with the server's data.
  redis.call('SET', key('deleted'), epoch, 'PX', GRAVE_MS)
  for _, kept in ipairs({ 'jobs', 'dead:jobs', 'outbox' }) do
    if parent then
      redis.call('UNLINK', key(kept))
    elseif redis.call('EXISTS', key(kept)) == 1 then
      redis.call('RENAME', key(kept), key_of('trash', epoch .. ':' .. kept))
    end
  end
  -- The journal stays readable for a while, and the next queue of this name continues it, so its size stays known.
  local JOURNAL_MS = 7 * 24 * 3600 * 1000
  journal.note('deleted 0 ' .. jobs)
  -- They ask again and get NO_QUEUE.
  if mode ~= 'work' then awaiters.notify_all() end
  for _, id in ipairs(redis.call('HKEYS', key('waiters'))) do waiters.notify({ id }, 'deleted') end
  journal.write('-')
  redis.call('PEXPIRE', key('events'), JOURNAL_MS)
  redis.call('PEXPIRE', key('journal:watermarks'), JOURNAL_MS)
  for priority = 0, 9 do redis.call('UNLINK', pending_key(tostring(priority)), hints.swept_key(tostring(priority))) end
  redis.call('UNLINK', hints.swept_key(RETRY_PLACE))
  redis.call('UNLINK', key('awaiters'), key('awaiting'), key('leases'), key('expiries'), key('accepted'),
    key('workers'))
  redis.call('UNLINK', key('done'), key('done:own'), key('done:jobs'), key('waiters'))
  redis.call('UNLINK', key('schedules'), key('schedules:next'), key('schedules:runs'), key('schedules:paused'))
  redis.call('UNLINK', key('held'), key('held:jobs'), key('held:open'), key('inputs'), key('sources'), key('edges'),
    key('resolving'), key('ends'), key('ends:old'), key('dead:holds'), key('dead:inputs'))
  for _, queue in ipairs(redis.call('HKEYS', key('reports'))) do redis.call('UNLINK', key_of('reports', queue)) end
  redis.call('UNLINK', key('reports'), key('batches'), key('batch:members'), key('batch:results'),
    key('batch:children'), key('checks'))
  redis.call('UNLINK', key('active'), key('progress'), key('scheduled'), key('attempts'), key('blocked'), key('retry'),
    key('suspects'), key('stale'), key('evicting'), key('failed'), key('dead'), key('processors'), key('limited'),
    key('options'), key('counts'), key('processed:count'),
    key('failed:count'))
  summary.forget()
  if redis.call('EXISTS', key('events')) == 1 then
    redis.call('HSET', key('counts'), 'journal_bytes', journal_bytes)
    redis.call('PEXPIRE', key('counts'), JOURNAL_MS)
  end
  return { OK, jobs }
end

-- counts: the number of jobs in each state, consistent at one instant, and the age of the oldest waiting job.
-- KEYS[1]  the queue's base
-- Returns  {OK, live jobs, active, dead, done in total, failed in total, in flight, time since which the oldest waiting
--          job waits (ms, 0 = none), now (ms), paused, mode, dropped, journal entries, journal bytes, journal entries
--          trimmed, scheduled, blocked, waiting in the retry lane, fail jobs, journal entries lost, epoch, sequence
--          number and hash of the last journal entry, awaiters, kept done jobs, ms until a job or a tick is due (-1:
--          nothing is timed), rate: count and ms (0: no limit), max_active (0: no limit), jobs that may start now (-1:
--          no limit), workers waiting for that, scheduled jobs that are due, held jobs}; {NO_QUEUE}
-- States   unchanged
function verbs.counts()
  if not epoch then return { NO_QUEUE } end

  -- Hints read per list. If more stale ones are at the head, only the age is missing.
  local HINTS_PER_LIST, LISTS = 16, 12

  local in_flight = 0
  for _, processor in ipairs(recovery.processors()) do
    for _, worker in ipairs(redis.call('HKEYS', workers_key(processor))) do
      in_flight = in_flight + redis.call('LLEN', worker_key(processor, worker, 'processing'))
    end
  end

  -- Long records are read only up to the byte limit.
  local function records_of(head_ids)
    local packed, bytes, most = {}, 0, READ_BYTES / LISTS
    if records.readable(#head_ids, most) == #head_ids then
      return redis.call('HMGET', key('jobs'), unpack(head_ids))
    end
    for i, id in ipairs(head_ids) do
      packed[i] = bytes < most and redis.call('HGET', key('jobs'), id)
      bytes = bytes + (packed[i] and #packed[i] or 0)
    end
    return packed
  end

  local swept_total = tonumber(redis.call('HGET', key('stale'), 'swept') or 0)

  -- The earliest enqueue time among the first jobs of a list; nil if none waits. The first job alone is not enough:
  -- returned jobs go to the front, whatever their age. Stale hints do not count.
  local function oldest_enqueued_ms(place)
    local command, list = 'LRANGE', place ~= 's' and pending_key(place)
    if not list then command, list = 'ZRANGE', key('suspects') end
    local head_ids = swept_total > 0 and redis.call('LRANGE', list .. ':swept', 0, HINTS_PER_LIST - 1) or {}
    if #head_ids == 0 then head_ids = redis.call(command, list, 0, HINTS_PER_LIST - 1) end
    if #head_ids == 0 then return nil end
    local fields, stale, oldest_ms = {}, {}, nil
    for i, id in ipairs(head_ids) do fields[i] = place .. ':' .. id end
    local counted_stale = redis.call('HMGET', key('stale'), unpack(fields))
    local owners = redis.call('HMGET', key('active'), unpack(head_ids))
    for i, record in ipairs(records_of(head_ids)) do
      local id = head_ids[i]
      stale[id] = stale[id] or tonumber(counted_stale[i] or 0)
      local enqueued_ms = record and records.enqueued_ms_of(record)
      if stale[id] > 0 then
        stale[id] = stale[id] - 1
      elseif enqueued_ms and not owners[i] and (not oldest_ms or enqueued_ms < oldest_ms) then
        oldest_ms = enqueued_ms
      end
    end
    return oldest_ms
  end

  local counted = redis.call('HMGET', key('counts'), 'dropped', 'journal_trimmed', 'journal_lost', 'idle_until_ms')

  local scheduled_ms = tonumber(redis.call('ZRANGE', key('scheduled'), 0, 0, 'WITHSCORES')[2])
  local tick_ms = tonumber(redis.call('ZRANGE', key('schedules:next'), 0, 0, 'WITHSCORES')[2])
  local due_ms = math.min(scheduled_ms or math.huge, tick_ms or math.huge)

  -- All waiting jobs: each priority, suspects, retry lane, and jobs due but not promoted. Waiting starts at
  -- the scheduled time.
  local oldest = math.huge
  for place in string.gmatch('0123456789sr', '.') do
    oldest = math.min(oldest, oldest_enqueued_ms(place) or math.huge)
  end
  oldest = math.max(oldest, math.min(now_ms, tonumber(counted[4] or 0)))
  if scheduled_ms and scheduled_ms <= now_ms then oldest = math.min(oldest, math.floor(scheduled_ms)) end

  return {
    OK,
    redis.call('HLEN', key('jobs')),
    redis.call('HLEN', key('active')),
    redis.call('ZCARD', key('dead')),
    tonumber(redis.call('GET', key('processed:count')) or 0),
    tonumber(redis.call('GET', key('failed:count')) or 0),
    in_flight,
    oldest < math.huge and oldest or 0,
    now_ms,
    paused and 1 or 0,
    mode or false,
    tonumber(counted[1] or 0),
    redis.call('XLEN', key('events')),
    journal_bytes,
    tonumber(counted[2] or 0),
    redis.call('ZCARD', key('scheduled')),
    redis.call('HLEN', key('blocked')),
    in_lane,
    redis.call('HLEN', base .. ':fail:jobs'),
    tonumber(counted[3] or 0),
    tonumber(epoch),
    sequence,
    last_hash == '-' and '' or last_hash,
    redis.call('HLEN', key('awaiters')),
    redis.call('ZCARD', key('done')) + redis.call('ZCARD', key('done:own')),
    due_ms < math.huge and math.max(0, math.floor(due_ms) - now_ms) or -1,
    rate_count,
    option('rate_ms'),
    max_active,
    has_limits and limits.room() or -1,
    redis.call('ZCARD', key('limited')),
    redis.call('ZCOUNT', key('scheduled'), '-inf', string.format('%.0f', now_ms)),
    redis.call('HLEN', key('held')),
  }
end
