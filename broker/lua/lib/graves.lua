-- A worker that has been removed may still be served by a BLMOVE that was under way: its list is drained again
-- and again until this long after. `graves`: 'PROCESSOR WORKER' or 'PROCESSOR' (evicted) -> when it is forgotten.

local GRAVE_MS = 24 * 3600 * 1000
local GRAVES_PER_CALL = 200

local function bury(processor, worker)
  redis.call('HDEL', workers_key(processor), worker)
  redis.call('UNLINK', worker_key(processor, worker, 'wake'))
  unlimit_worker(processor, worker)
  if has_limits and left_to_suspects() > 0 then leave_place(0) end
  redis.call('ZADD', key('graves'), now_ms + GRAVE_MS, processor .. ' ' .. worker)
end

local function drain_grave(processor, worker)
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  hand_back(worker, list)
  redis.call('DEL', processing)
end

local function drain_graves()
  if redis.call('EXISTS', key('graves')) == 0 then return end
  redis.call('ZREMRANGEBYSCORE', key('graves'), '-inf', now_ms)
  for _, grave in ipairs(redis.call('ZRANDMEMBER', key('graves'), GRAVES_PER_CALL)) do
    local processor, worker = string.match(grave, '^(%S+) (%S+)$')
    if worker and redis.call('EXISTS', worker_key(processor, worker, 'processing')) == 1 then
      drain_grave(processor, worker)
    end
  end
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
