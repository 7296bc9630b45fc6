-- Waiting jobs are found through hints: ids in the pending lists. A hint may outlive what it points to
-- (cancel and the like never search a list); `stale` counts, per list and id, the hints to ignore.
-- An empty id in `pending` is a wake token: it wakes a worker for work that is in another list.

-- The retry lane is a list like the others, for jobs that get a second chance once nothing else waits.
local LANE = 'r'

-- How many hints sit in the lists of the priorities other than 5: while it is 0 a claim looks at one list only.
-- How many jobs wait in the retry lane (hints that are not stale).
local remembered = redis.call('HMGET', key('counts'), 'other_hints', 'lane')
local other_hints, in_lane = tonumber(remembered[1] or 0), tonumber(remembered[2] or 0)
local other_hints_before, in_lane_before = other_hints, in_lane
local may_be_stale = nil
local TRIMMED_PER_CALL = 100

local function stale_field(priority, id)
  return priority .. ':' .. id
end

-- True if this hint is to be ignored; it is then used up.
local function ignore_hint(priority, id)
  if may_be_stale == nil then may_be_stale = redis.call('EXISTS', key('stale')) == 1 end
  if not may_be_stale then return false end
  local field = stale_field(priority, id)
  local left = tonumber(redis.call('HGET', key('stale'), field) or 0)
  if left == 0 then return false end
  if left == 1 then redis.call('HDEL', key('stale'), field) else redis.call('HINCRBY', key('stale'), field, -1) end
  return true
end

local function count_hints(place, number)
  if place == LANE then in_lane = in_lane + number elseif place ~= '5' then other_hints = other_hints + number end
end

-- The waiting job `id` (its record is gone by now, or it waits elsewhere) leaves its list without being claimed.
local function forget_hint(priority, id)
  local list = pending_key(priority)
  redis.call('HINCRBY', key('stale'), stale_field(priority, id), 1)
  may_be_stale = true
  if priority == LANE then in_lane = in_lane - 1 end
  -- Stale hints at the end go at once: however often jobs come and are cancelled, the list does not grow.
  for _ = 1, TRIMMED_PER_CALL do
    local last = redis.call('LINDEX', list, -1)
    if not last then return end
    -- The hints of other jobs keep their places; this one has no more place here, even if it waits elsewhere.
    if last ~= id and redis.call('HEXISTS', key('jobs'), last) == 1 then return end
    if not ignore_hint(priority, last) then return end
    redis.call('RPOP', list)
    if priority ~= LANE then count_hints(priority, -1) end
  end
end

local function push_back(priority, ids)
  redis.call('RPUSH', pending_key(priority), unpack(ids))
  count_hints(priority, #ids)
end

-- Puts ids, in their order, before everything that waits.
local function push_front(by_priority)
  for priority, ids in pairs(by_priority) do
    local reversed = {}
    for i = #ids, 1, -1 do reversed[#reversed + 1] = ids[i] end
    redis.call('LPUSH', pending_key(priority), unpack(reversed))
    count_hints(priority, #ids)
  end
end

-- Jobs that wait for nothing but a worker; what is scheduled, active or in the retry lane does not count.
local function main_waiting()
  return redis.call('HLEN', key('jobs')) - redis.call('HLEN', key('active')) - redis.call('ZCARD', key('scheduled')) - in_lane
end

-- The retry child of a queue blocks on `failed` alone: a token there tells it to look at its lane and its fail jobs.
local function wake_retry_child(failed_list)
  if redis.call('EXISTS', failed_list) == 0 then redis.call('RPUSH', failed_list, '') end
end

-- The end of every script that may leave claimable work: an idle worker blocks on one list alone, so work in others
-- needs a token there. A list with anything in it wakes somebody anyway: at most one token exists.
local function wake_idle_worker()
  if other_hints ~= other_hints_before or in_lane ~= in_lane_before then
    redis.call('HSET', key('counts'), 'other_hints', other_hints, 'lane', in_lane)
    other_hints_before, in_lane_before = other_hints, in_lane
  end
  if paused then return end
  if parent then
    if redis.call('EXISTS', key('pending')) == 1 or other_hints > 0 then wake_retry_child(parent .. ':failed') end
    return
  end
  if other_hints > 0 and redis.call('EXISTS', key('pending')) == 0 then redis.call('RPUSH', key('pending'), '') end
  if in_lane > 0 and main_waiting() == 0 then wake_retry_child(key('failed')) end
end
