-- A BLMOVE over a connection that its worker has given up cannot be refused: it parks an id in the worker's list, behind what
-- the worker runs, and nobody else sees it there.

-- The number of the last turn in a registration, NUMBER or NUMBER:SHIFT (positions.lua).
local function number_of(registered)
  return tonumber(registered) or tonumber(string.match(registered, '^%d+'))
end

-- Gives back what is in the list of a worker and is not its own. What it owns keeps its place there: positions count on it.
local function return_parked(processor, worker)
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  if #list == 0 then return end
  local owners = redis.call('HMGET', key('active'), unpack(list))
  local own, parked, kept = {}, {}, {}
  for i, id in ipairs(list) do
    -- Only once: if the id is there twice, the second one is a hint.
    if is_owner(worker, owners[i]) and not kept[id] then
      kept[id] = true
      own[#own + 1] = id
    else
      parked[#parked + 1] = id
    end
  end
  if #parked == 0 then return end
  hand_back(worker, parked, nil, kept)
  redis.call('DEL', processing)
  if #own > 0 then redis.call('RPUSH', processing, unpack(own)) end
end
