-- A worker that has been removed may still be served by a BLMOVE that was under way: its list is drained again
-- and again for an hour. `graves`: 'PROCESSOR WORKER' or 'PROCESSOR' (evicted) -> when it is forgotten (ms).

-- An evicted processor is told that it is fenced when it comes back: it may have slept for long.
local GRAVE_MS = 24 * 3600 * 1000
-- A BLMOVE ends after 30 s, and a network gives up a request after some minutes. Processes that run one job each leave many.
local WORKER_GRAVE_MS, WORKER_GRAVES = 3600 * 1000, 4096
local GRAVES_PER_CALL = 200

-- What reached the list of a removed worker goes back. `grave`: that of a worker; a processor's has no list.
local function drain_grave(grave)
  local processor, worker = string.match(grave, '^(%S+) (%S+)$')
  if not worker then return end
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  if #list == 0 then return end
  hand_back(worker, list)
  redis.call('DEL', processing)
end

-- Not without a last look: nobody may have looked since the queue was last served.
local function forget_graves(graves)
  for _, grave in ipairs(graves) do
    drain_grave(grave)
    redis.call('ZREM', key('graves'), grave)
  end
end

-- Only the newest graves of workers stay. In its last hour the grave of a processor is as old as theirs, and stays.
local function forget_oldest_graves()
  local latest = string.format('%.0f', now_ms + WORKER_GRAVE_MS)
  local excess = redis.call('ZCOUNT', key('graves'), '-inf', latest) - WORKER_GRAVES
  if excess <= 0 then return end
  local oldest = {}
  for _, grave in ipairs(redis.call('ZRANGE', key('graves'), 0, math.min(excess, GRAVES_PER_CALL) - 1)) do
    if string.find(grave, ' ', 1, true) then oldest[#oldest + 1] = grave end
  end
  forget_graves(oldest)
end

local function bury(processor, worker)
  redis.call('HDEL', workers_key(processor), worker)
  redis.call('UNLINK', worker_key(processor, worker, 'wake'))
  unlimit_worker(processor, worker)
  if has_limits and left_to_suspects() > 0 then leave_place(0) end
  redis.call('ZADD', key('graves'), now_ms + WORKER_GRAVE_MS, processor .. ' ' .. worker)
  forget_oldest_graves()
end

local function drain_graves()
  if redis.call('EXISTS', key('graves')) == 0 then return end
  forget_graves(redis.call('ZRANGEBYSCORE', key('graves'), '-inf', now_ms, 'LIMIT', 0, GRAVES_PER_CALL))
  forget_oldest_graves()
  -- In rotation: none waits for more than one round.
  local at = redis.call('HGET', key('counts'), 'graves_at') or '0'
  local found = redis.call('ZSCAN', key('graves'), at, 'COUNT', GRAVES_PER_CALL)
  if found[1] ~= at then remember('graves_at', found[1]) end
  for i = 1, #found[2], 2 do drain_grave(found[2][i]) end
end

-- Takes a worker out for good: what it ran is done, what it was running goes back as `lost` says (see hand_back), and
-- so does the rest. The position (turn, index, running) is the last one known; it only counts if no later turn was taken.
-- Of a silent worker it may be too old: if it holds one job only, it was running that one.
local function remove_worker(processor, worker, turn, index, running, lost)
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  local at = position(processor, worker, turn, index)
  local ran = at or 0
  lost.count = count_loss
  if at and running then
    lost.id = list[ran + 1]
  elseif not at and lost.silent and #list == 1 then
    lost.id = list[1]
  end
  local done, rest = {}, {}
  for i, id in ipairs(list) do
    if i <= ran then done[#done + 1] = id else rest[#rest + 1] = id end
  end
  local others = settle_ran(worker, done)
  for _, id in ipairs(rest) do others[#others + 1] = id end
  hand_back(worker, others, lost)
  redis.call('DEL', processing)
  bury(processor, worker)
end
