-- Processors and their workers: join, heartbeat, recover, rescue, evict.

-- A removed worker may still receive an id from a BLMOVE under way, so its list is drained repeatedly for an hour.
-- `graves`: 'PROCESSOR WORKER' or 'PROCESSOR' (evicted) by the time (ms) it is forgotten.

-- An evicted processor may return after a long sleep and must find that it is fenced.
local GRAVE_MS = 24 * 3600 * 1000
-- A BLMOVE ends after 30 s; a network drops a request after minutes. Processes that run one job leave many graves.
local WORKER_GRAVE_MS, WORKER_GRAVES = 3600 * 1000, 4096
local GRAVES_PER_CALL = 200

-- Returns ids that reached the list of a removed worker. A processor's grave has no list.
function recovery.drain_grave(grave)
  local processor, worker = string.match(grave, '^(%S+) (%S+)$')
  if not worker then return end
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  if #list == 0 then return end
  claims.return_jobs(worker, list)
  redis.call('DEL', processing)
end

-- Drains each one first: the queue may not have been served for long.
function recovery.remove_graves(graves)
  for _, grave in ipairs(graves) do
    recovery.drain_grave(grave)
    redis.call('ZREM', key('graves'), grave)
  end
end

-- Keeps the newest graves of workers. Graves of processors stay, even in their last hour, when they are as old.
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
  -- In rotation, so that each is drained once per round.
  local at = redis.call('HGET', key('counts'), 'graves_at') or '0'
  local found = redis.call('ZSCAN', key('graves'), at, 'COUNT', GRAVES_PER_CALL)
  if found[1] ~= at then journal.set_count('graves_at', found[1]) end
  for i = 1, #found[2], 2 do recovery.drain_grave(found[2][i]) end
end

-- Removes a worker: settles the jobs it ran, returns the running one as `lost` (claims.return_jobs) and the others. The
-- position (turn, index, running) is ignored if a later turn was taken. The position of an evicted processor's worker
-- may be outdated; if it holds a single job, that one was running.
function recovery.remove_worker(processor, worker, turn, index, running, lost)
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  local position = claims.position(processor, worker, turn, index)
  local ran = position or 0
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

-- A processor is evicted with its workers, some per call; their positions come from its last heartbeat. It is fenced
-- from the first step on. `evicting`: processor -> cause, while it has workers; these can take turns until removed.

local EVICTED_PER_CALL = 16

function recovery.positions_key(of)
  return key_of('processor', of .. ':positions')
end

-- Returns lines for the failed log that the scribe took but did not write; they go before all later ones.
function recovery.return_outbox(processor)
  local own_list, any = key_of('outbox', processor), false
  while redis.call('LMOVE', own_list, key('outbox'), 'RIGHT', 'LEFT') do any = true end
  if any then redis.call('PUBLISH', channel('outbox'), string.match(base, '{(.+)}')) end
end

-- Returns the number of workers removed in this call, and the number left.
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

-- All processors with workers, also those being evicted.
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

-- The next step of an eviction in progress; false if there is none.
function recovery.continue_eviction()
  local processor = redis.call('HRANDFIELD', key('evicting'))
  if not processor then return false end
  recovery.evict_workers(processor, redis.call('HGET', key('evicting'), processor))
  return true
end

-- join: registers a worker, so that its processing list can be found and recovered.
-- KEYS[1]  the queue's base
-- ARGV     protocol, processor, worker, ms until the processor counts as silent
-- Returns  {OK, epoch}; {NO_QUEUE}; {OTHER_PROTOCOL, its number}; {FENCED} if processor or worker were removed
-- States   unchanged
function verbs.join()
  if not epoch then return { NO_QUEUE } end
  if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end
  local processor, worker, expiry_ms = ARGV[2], ARGV[3], tonumber(ARGV[4])
  local removed = redis.call('ZMSCORE', key('graves'), processor, processor .. ' ' .. worker)
  if removed[1] or removed[2] then return { FENCED } end
  -- A delayed join must not reset the turn number.
  redis.call('HSETNX', workers_key(processor), worker, '0')
  redis.call('ZADD', key('processors'), 'NX', now_ms + expiry_ms, processor)
  return { OK, epoch }
end

-- heartbeat: keeps a processor alive and stores the positions of its workers. Also continues an eviction or evicts one
-- silent processor, drains graves, returns parked ids, runs everything that is due, and repeats lost wake tokens.
-- KEYS[1]  the queue's base
-- ARGV     processor, ms until it counts as silent, then (worker, turn, index, running) per worker
-- Returns  {OK, evicted processors, ms until promote must be called (-1: nothing is timed), 1 if an eviction is
--          unfinished, (worker, number of its last turn) per worker that runs nothing and reported an earlier turn,
--          suspects that may start (for a fail queue: 1 if jobs wait and none runs), which idle workers have jobs (0:
--          none, 1: main, 2: retry process, 3: both), {running jobs of evicted processors: id and fate (failures.fate)
--          each}, 1 if there are reports to deliver}; {NO_QUEUE, 1 if it was deleted}; {FENCED} if this processor was
--          evicted
-- States   active -> done, waiting (jobs of an evicted processor)
function verbs.heartbeat()
  if not epoch then return { NO_QUEUE, redis.call('EXISTS', key('deleted')) } end
  local TRIMMED_DONE_PER_BEAT = 1000
  local processor, expiry_ms = ARGV[1], tonumber(ARGV[2])
  local expires_at = redis.call('ZSCORE', key('processors'), processor)
  if not expires_at and redis.call('ZSCORE', key('graves'), processor) then return { FENCED } end

  -- Workers that take turns check their own list; the others may be busy for long.
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

  -- A silent processor may be dead only if heartbeats could arrive. After a time in which none did (a frozen server, a
  -- clock jump), or this processor was late itself, all processors get one more expiry.
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
  summary.check()
  recovery.drain_graves()
  for _, worker in ipairs(same_turn) do claims.return_parked(processor, worker) end
  leases.lapse()
  leases.expire_items()
  timers.promote(true)
  limits.wake_if_lifted()
  done.expire(TRIMMED_DONE_PER_BEAT)
  flows.continue()
  records.reset_largest()
  hints.wake_idle(NOTIFY_AWAITERS, WAKE_LIMITED)
  journal.write(processor)
  journal.trim(false)
  summary.save()

  -- The number of jobs that need a process of their own.
  local function helpers_needed()
    if paused then return 0 end
    if parent then return redis.call('HLEN', key('active')) == 0 and hints.main_waiting() > 0 and 1 or 0 end
    return has_limits and math.min(suspect_hints, limits.room()) or suspect_hints
  end

  -- Whose workers have jobs. If they are idle nevertheless, they may have missed the wake token.
  local function idle_wanted()
    if paused or mode ~= 'work' then return 0 end
    local main = hints.main_waiting() > 0
    local retry = suspect_hints > 0 or (in_lane > 0 and not main)
    return (main and 1 or 0) + (retry and 2 or 0)
  end

  local evicting = redis.call('EXISTS', key('evicting'))
  local reports = flows_on and redis.call('EXISTS', key('reports')) or 0
  return { OK, evicted, timers.next_ms(), evicting, unread, helpers_needed(), idle_wanted(), lost_jobs, reports }
end

-- recover: removes a dead or leaving worker and returns its jobs. Safe to repeat: a later call finds nothing, or ids
-- that arrived meanwhile.
-- KEYS[1]  the queue's base
-- ARGV     processor, worker, its last position: turn number, index, running ('1' | '0'); outcome for the running job
--          ('stalled' | 'timed_out' | 'interrupted' | 'suspect' | 'cancelled'), cause, micros it ran ('' = unknown),
--          stack as JSON ('' = none), peak memory ('' = unknown)
-- Returns  {OK, length of its list before}, then id and fate (failures.fate) of the running job if returned; {NO_QUEUE}
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

-- rescue: takes unstarted jobs from a worker that is busy with one job of its batch. Settles the jobs it ran (unless
-- the worker has results of them) and returns the unstarted ones; the running job stays. If the process hangs before it
-- has started any job of its last turn, all jobs return.
-- KEYS[1]  the queue's base
-- ARGV     processor, worker, its position: turn number, index of the running job, running ('1' | '0': not started),
--          whether it has results to keep ('1' | '0')
-- Returns  {OK, number of returned jobs}; {OK, 0} if the worker has moved on; {NO_QUEUE}
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
  elseif ARGV[6] == '1' or option('keep_done_ms') > 0 then
    -- Only the worker has the results of the jobs it ran: they stay with it, in order, until its next turn.
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

-- evict: removes a processor whose processes are certainly gone (an earlier run of a supervisor), some workers per
-- call. Repeat it until none is left.
-- KEYS[1]  the queue's base
-- ARGV     processor, cause
-- Returns  {OK, workers left, workers removed, {running jobs: id and fate (failures.fate) each}}; {NO_QUEUE}
-- States   active -> done, waiting
function verbs.evict()
  if not epoch then return { NO_QUEUE } end
  local removed, left = recovery.evict(ARGV[1], ARGV[2])
  hints.wake_idle(nil, WAKE_LIMITED)
  journal.write(ARGV[1])
  return { OK, left, removed, lost_jobs }
end
