-- Processors and their workers: they join, send heartbeats, are recovered, rescued and evicted.

-- A worker that has been removed may still be served by a BLMOVE that was under way: its list is drained again
-- and again for an hour. `graves`: 'PROCESSOR WORKER' or 'PROCESSOR' (evicted) -> when it is forgotten (ms).

-- An evicted processor is told that it is fenced when it comes back: it may have slept for long.
local GRAVE_MS = 24 * 3600 * 1000
-- A BLMOVE ends after 30 s, and a network gives up a request after some minutes. Processes that run one job each leave
-- many.
local WORKER_GRAVE_MS, WORKER_GRAVES = 3600 * 1000, 4096
local GRAVES_PER_CALL = 200

-- What reached the list of a removed worker goes back. `grave`: that of a worker; a processor's has no list.
function recovery.drain_grave(grave)
  local processor, worker = string.match(grave, '^(%S+) (%S+)$')
  if not worker then return end
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  if #list == 0 then return end
  claims.return_jobs(worker, list)
  redis.call('DEL', processing)
end

-- Not without a last look: nobody may have looked since the queue was last served.
function recovery.remove_graves(graves)
  for _, grave in ipairs(graves) do
    recovery.drain_grave(grave)
    redis.call('ZREM', key('graves'), grave)
  end
end

-- Only the newest graves of workers stay. In its last hour the grave of a processor is as old as theirs, and stays.
function recovery.trim_graves()
  local latest = string.format('%.0f', now_ms + WORKER_GRAVE_MS)
  local excess = redis.call('ZCOUNT', key('graves'), '-inf', latest) - WORKER_GRAVES
  if excess <= 0 then return end
  local oldest = {}
  for _, grave in ipairs(redis.call('ZRANGE', key('graves'), 0, math.min(excess, GRAVES_PER_CALL) - 1)) do
    if string.find(grave, ' ', 1, true) then oldest[#oldest + 1] = grave end
  end
  recovery.remove_graves(oldest)
end

function recovery.unregister(processor, worker)
  redis.call('HDEL', workers_key(processor), worker)
  redis.call('UNLINK', worker_key(processor, worker, 'wake'))
  limits.remove_worker(processor, worker)
  if has_limits and limits.reserved_for_suspects() > 0 then limits.reserve_for_suspects(0) end
  redis.call('ZADD', key('graves'), now_ms + WORKER_GRAVE_MS, processor .. ' ' .. worker)
  recovery.trim_graves()
end

function recovery.drain_graves()
  if redis.call('EXISTS', key('graves')) == 0 then return end
  recovery.remove_graves(redis.call('ZRANGEBYSCORE', key('graves'), '-inf', now_ms, 'LIMIT', 0, GRAVES_PER_CALL))
  recovery.trim_graves()
  -- In rotation: none waits for more than one round.
  local at = redis.call('HGET', key('counts'), 'graves_at') or '0'
  local found = redis.call('ZSCAN', key('graves'), at, 'COUNT', GRAVES_PER_CALL)
  if found[1] ~= at then journal.set_count('graves_at', found[1]) end
  for i = 1, #found[2], 2 do recovery.drain_grave(found[2][i]) end
end

-- Takes a worker out for good: what it ran is done, what it was running goes back as `lost` says (holdings.hand_back),
-- and so does the rest. The position (turn, index, running) is the last one known; it only counts if no later turn was
-- taken. Of a silent worker it may be too old: if it holds one job only, it was running that one.
function recovery.remove_worker(processor, worker, turn, index, running, lost)
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  local position = claims.position(processor, worker, turn, index)
  local ran = position or 0
  lost.count = failures.count_loss
  if position and running then
    lost.id = list[ran + 1]
  elseif not position and lost.evicted and #list == 1 then
    lost.id = list[1]
  end
  local ran_ids, rest = {}, {}
  for i, id in ipairs(list) do
    if i <= ran then ran_ids[#ran_ids + 1] = id else rest[#rest + 1] = id end
  end
  local others = claims.settle_finished(worker, ran_ids)
  for _, id in ipairs(rest) do others[#others + 1] = id end
  claims.return_jobs(worker, others, lost)
  redis.call('DEL', processing)
  recovery.unregister(processor, worker)
end

-- A processor is taken out with all its workers, some of them per call; what each was running is known from its last
-- heartbeat. It is fenced from the first step on. `evicting`: processor -> cause, while workers of it are left; until
-- its turn comes, each of these may go on taking turns.

local EVICTED_PER_CALL = 16

function recovery.positions_key(of)
  return key_of('processor', of .. ':positions')
end

-- Lines for the failed log that its scribe took and did not live to write: others write them, before all later ones.
function recovery.return_outbox(processor)
  local own_list, any = key_of('outbox', processor), false
  while redis.call('LMOVE', own_list, key('outbox'), 'RIGHT', 'LEFT') do any = true end
  if any then redis.call('PUBLISH', channel('outbox'), string.match(base, '{(.+)}')) end
end

-- The next workers of a processor; how many were taken out, and how many are left.
function recovery.evict_workers(processor, cause)
  local removed = 0
  for _, worker in ipairs(redis.call('HRANDFIELD', workers_key(processor), EVICTED_PER_CALL)) do
    if returned_bytes > READ_BYTES then break end
    removed = removed + 1
    local position = redis.call('HGET', recovery.positions_key(processor), worker) or '- 0 0'
    local turn, index, running = string.match(position, '^(%S+) (%d+) (%d)$')
    local lost = { outcome = 'stalled', cause = cause, evicted = true }
    recovery.remove_worker(processor, worker, turn, tonumber(index), running == '1', lost)
    if lost.counted then
      lost_jobs[#lost_jobs + 1] = lost.id
      for _, value in ipairs(failures.fate_of_lost_job(lost)) do lost_jobs[#lost_jobs + 1] = value end
    end
  end
  local left = redis.call('HLEN', workers_key(processor))
  if left == 0 then
    redis.call('UNLINK', recovery.positions_key(processor))
    redis.call('HDEL', key('evicting'), processor)
  end
  return removed, left
end

-- All that have workers, also those of which some have been taken out already.
function recovery.processors()
  local all = redis.call('ZRANGE', key('processors'), 0, -1)
  for _, processor in ipairs(redis.call('HKEYS', key('evicting'))) do all[#all + 1] = processor end
  return all
end

-- The first step; safe to repeat.
function recovery.evict(processor, cause)
  redis.call('ZREM', key('processors'), processor)
  redis.call('ZADD', key('graves'), now_ms + GRAVE_MS, processor)
  redis.call('HSET', key('evicting'), processor, cause)
  recovery.return_outbox(processor)
  return recovery.evict_workers(processor, cause)
end

-- The next step of an eviction that is under way, whoever began it; false if there is none.
function recovery.continue_eviction()
  local processor = redis.call('HRANDFIELD', key('evicting'))
  if not processor then return false end
  recovery.evict_workers(processor, redis.call('HGET', key('evicting'), processor))
  return true
end

-- join: a worker registers, so that its processing list is known to everybody who may have to recover it.
-- KEYS[1]  the queue's base
-- ARGV     protocol, processor, worker, how long the processor may stay silent (ms)
-- Returns  {OK, epoch}; {NO_QUEUE}; {OTHER_PROTOCOL, its number}; {FENCED} if the processor has been evicted, or the
--          worker removed
function verbs.join()
  if not epoch then return { NO_QUEUE } end
  if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end
  local processor, worker, expiry_ms = ARGV[2], ARGV[3], tonumber(ARGV[4])
  local removed = redis.call('ZMSCORE', key('graves'), processor, processor .. ' ' .. worker)
  if removed[1] or removed[2] then return { FENCED } end
  -- One that arrives late must not take back the number of a turn.
  redis.call('HSETNX', workers_key(processor), worker, '0')
  redis.call('ZADD', key('processors'), 'NX', now_ms + expiry_ms, processor)
  return { OK, epoch }
end

-- heartbeat: a processor says that it lives and where its workers are; it goes on with an eviction that is under way,
-- or sweeps one processor that has fallen silent; drains graves, gives back what late BLMOVEs have parked, forgets done
-- jobs, and repeats the wake token as a backstop.
-- KEYS[1]  the queue's base
-- ARGV     processor, how long it may stay silent (ms), then (worker, turn, index, running) per worker
-- Returns  {OK, processors evicted, ms until promote is to be called (-1: nothing has a time), 1 if an eviction is not
--          finished, (worker, number of its last turn) per worker that runs nothing and was at an earlier turn,
--          suspects that may begin; of a fail queue: 1 if jobs wait and none runs, for whom jobs wait (0: nobody, 1:
--          main workers, 2: the retry child, 3: both), {the jobs of evicted processors that were running: id and fate
--          (failures.lua) each}}; {NO_QUEUE, 1 if it was deleted}; {FENCED} if this processor has been evicted
-- States   active -> done, waiting (of a processor that is evicted)
function verbs.heartbeat()
  if not epoch then return { NO_QUEUE, redis.call('EXISTS', key('deleted')) } end
  local TRIMMED_DONE_PER_BEAT = 1000
  local processor, expiry_ms = ARGV[1], tonumber(ARGV[2])
  local expires_at = redis.call('ZSCORE', key('processors'), processor)
  if not expires_at and redis.call('ZSCORE', key('graves'), processor) then return { FENCED } end

  -- Whoever takes turns looks at its own list; the others may be busy for long.
  local workers, positions, same_turn = {}, {}, {}
  for at = 3, #ARGV, 4 do
    workers[#workers + 1] = ARGV[at]
    positions[#positions + 1] = ARGV[at]
    positions[#positions + 1] = ARGV[at + 1] .. ' ' .. ARGV[at + 2] .. ' ' .. ARGV[at + 3]
  end
  local registered = #workers > 0 and redis.call('HMGET', workers_key(processor), unpack(workers)) or {}
  local unread = {}
  for i, worker in ipairs(workers) do
    local number = registered[i] and claims.last_turn(registered[i])
    if number and number > tonumber(ARGV[4 * i]) and ARGV[4 * i + 2] == '0' then
      unread[#unread + 1] = worker
      unread[#unread + 1] = string.format('%.0f', number)
    end
  end
  local previous = #workers > 0 and redis.call('HMGET', recovery.positions_key(processor), unpack(workers)) or {}
  for i, worker in ipairs(workers) do
    if previous[i] and string.match(previous[i], '^%S+') == ARGV[4 * i] then same_turn[#same_turn + 1] = worker end
  end
  redis.call('ZADD', key('processors'), now_ms + expiry_ms, processor)
  redis.call('DEL', recovery.positions_key(processor))
  if #positions > 0 then redis.call('HSET', recovery.positions_key(processor), unpack(positions)) end

  -- Who has not been heard may be dead only if he could have been: after a time in which nobody was (a frozen server, a
  -- jump of its clock) or the sweeper itself was not, everybody gets one expiry more.
  local beats = redis.call('HMGET', key('counts'), 'last_beat_ms', 'sweep_after_ms')
  local sweep_after_ms = math.min(tonumber(beats[2] or 0), now_ms + expiry_ms)
  local self_late = expires_at and tonumber(expires_at) < now_ms
  if self_late or now_ms - tonumber(beats[1] or 0) > expiry_ms * 2 / 3 then sweep_after_ms = now_ms + expiry_ms end
  redis.call('HSET', key('counts'), 'last_beat_ms', string.format('%.0f', now_ms),
    'sweep_after_ms', string.format('%.0f', sweep_after_ms))

  local evicted = {}
  if not recovery.continue_eviction() and now_ms >= sweep_after_ms then
    evicted = redis.call('ZRANGEBYSCORE', key('processors'), '-inf', '(' .. string.format('%.0f', now_ms),
      'LIMIT', 0, 1)
    for _, expired in ipairs(evicted) do recovery.evict(expired, 'host_lost') end
  end
  recovery.drain_graves()
  for _, worker in ipairs(same_turn) do claims.return_parked(processor, worker) end
  leases.lapse()
  leases.expire_items()
  timers.promote()
  limits.wake_if_lifted()
  done.expire(TRIMMED_DONE_PER_BEAT)
  records.reset_largest()
  hints.wake_idle(NOTIFY_AWAITERS, WAKE_LIMITED)
  journal.write(processor)
  journal.trim(false)

  -- How many jobs a process of their own may be started for.
  local function helpers_needed()
    if paused then return 0 end
    if parent then return redis.call('HLEN', key('active')) == 0 and hints.main_waiting() > 0 and 1 or 0 end
    return has_limits and math.min(suspect_hints, limits.room()) or suspect_hints
  end

  -- Whose workers should not rest: if they do, they may not have heard of it.
  local function idle_wanted()
    if paused or mode ~= 'work' then return 0 end
    local main = hints.main_waiting() > 0
    local retry = suspect_hints > 0 or (in_lane > 0 and not main)
    return (main and 1 or 0) + (retry and 2 or 0)
  end

  local evicting = redis.call('EXISTS', key('evicting'))
  return { OK, evicted, timers.next_ms(), evicting, unread, helpers_needed(), idle_wanted(), lost_jobs }
end

-- recover: takes a worker that is gone out of the queue; nothing that it held is lost. Also how a worker leaves. Safe
-- to repeat: a later call finds nothing left, or what reached the list meanwhile.
-- KEYS[1]  the queue's base
-- ARGV     processor, worker, its last position: turn number, index, running ('1' | '0'); what that means for the
--          running job ('stalled' | 'timed_out' | 'interrupted' | 'suspect' | 'cancelled'), cause, micros it ran ('' =
--          unknown), stack as JSON ('' = none), the most memory it was seen with ('' = unknown)
-- Returns  {OK, length of its list before}, then of the job that was running, if it goes back: its id and its fate
--          (failures.lua); {NO_QUEUE}
-- States   active -> done (it ran), active -> waiting (returned, stalled, timed out, suspected), active -> cancelled
function verbs.recover()
  if not epoch then return { NO_QUEUE } end
  local processor, worker, turn, index = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
  local lost = {
    outcome = ARGV[6],
    cause = ARGV[7],
    micros = ARGV[8],
    stack = ARGV[9] ~= '' and ARGV[9],
    peak = tonumber(ARGV[10]),
  }
  local length = redis.call('LLEN', worker_key(processor, worker, 'processing'))
  recovery.remove_worker(processor, worker, turn, index, ARGV[5] == '1', lost)
  hints.wake_idle(nil, WAKE_LIMITED)
  journal.write(worker)
  if not lost.counted then return { OK, length } end
  return { OK, length, lost.id, unpack(failures.fate_of_lost_job(lost)) }
end

-- rescue: a worker is held up by one job of its batch. What it ran before is settled, what it has not started goes back
-- to be run elsewhere; only the running job stays with it, and in a queue that keeps results what it ran. Or the worker
-- has not begun what its last turn gave it, since its process does not answer: then all of it goes back.
-- KEYS[1]  the queue's base
-- ARGV     processor, worker, its position: turn number, index of the running job, running ('1' | '0': it has begun
--          nothing)
-- Returns  {OK, how many jobs went back}; {OK, 0} if the worker has moved on; {NO_QUEUE}
-- States   active -> done, active -> waiting (returned)
function verbs.rescue()
  if not epoch then return { NO_QUEUE } end
  local processor, worker, turn, index = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
  local at = claims.position(processor, worker, turn, index)
  if not at then return { OK, 0 } end
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  local not_started = ARGV[5] == '0'
  if not_started and at ~= 0 then return { OK, 0 } end
  local ran, unstarted = {}, not_started and list or {}
  for i, id in ipairs(not_started and {} or list) do
    if i <= at then ran[#ran + 1] = id elseif i > at + 1 then unstarted[#unstarted + 1] = id end
  end
  local current = list[at + 1]
  if #unstarted == 0 or not current then return { OK, 0 } end

  if not_started then
    claims.return_jobs(worker, unstarted)
    redis.call('UNLINK', processing)
  elseif option('keep_done_ms') > 0 then
    -- Only the worker has the results of what it ran: that stays with it, in its place, until it takes its turn.
    local kept = { [current] = true }
    for _, id in ipairs(ran) do kept[id] = true end
    claims.return_jobs(worker, unstarted, nil, kept)
    redis.call('LTRIM', processing, 0, at)
  else
    local others = claims.settle_finished(worker, ran)
    for _, id in ipairs(unstarted) do others[#others + 1] = id end
    claims.return_jobs(worker, others, nil, { [current] = true })
    redis.call('DEL', processing)
    redis.call('RPUSH', processing, current)
    redis.call('HSET', workers_key(processor), worker, turn .. ':' .. ARGV[4])
  end
  hints.wake_idle(nil, WAKE_LIMITED)
  journal.write(worker)
  return { OK, #unstarted }
end

-- evict: a whole processor whose processes are proven gone (an earlier run of a supervisor) is taken out, some of its
-- workers per call: to be repeated until none is left.
-- KEYS[1]  the queue's base
-- ARGV     processor, cause
-- Returns  {OK, workers left, workers taken out, {the jobs that were running: id and fate (failures.lua) each}};
--          {NO_QUEUE}
-- States   active -> done, waiting
function verbs.evict()
  if not epoch then return { NO_QUEUE } end
  local removed, left = recovery.evict(ARGV[1], ARGV[2])
  hints.wake_idle(nil, WAKE_LIMITED)
  journal.write(ARGV[1])
  return { OK, left, removed, lost_jobs }
end
