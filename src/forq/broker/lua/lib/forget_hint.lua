-- A hint is given up without being searched for.

local TRIMMED_PER_CALL = 100
-- A list is swept once it has more hints than twice the number of waiting jobs, and these.
local SPARE_HINTS, SWEPT_PER_CALL = 1000, 4

-- Stale hints at the end go at once: however often the last job comes and is cancelled, the list does not grow.
local function trim_hints(place, id)
  local list = pending_key(place)
  for _ = 1, TRIMMED_PER_CALL do
    local last = redis.call('LINDEX', list, -1)
    if not last then return end
    -- The hints of other jobs keep their places; this one has no more place here, even if it waits elsewhere.
    if last ~= id and redis.call('HEXISTS', key('jobs'), last) == 1 then return end
    if not ignore_hint(place, last) then return end
    redis.call('RPOP', list)
    if place ~= LANE then count_hints(place, -1) end
  end
end

-- Takes stale hints out of a list that has many of them, from its head on, some per call; the others go to LIST:swept, which
-- is what comes first until nothing is left of the list. Each stale hint brings a call that looks at four: so a list has at most
-- 2.5 hints per waiting job, and 1,250.
local function sweep_hints(place)
  local list, swept = pending_key(place), swept_key(place)
  local _, under_way = first_list(place)
  if not under_way then
    local length = redis.call('LLEN', list)
    if length <= SPARE_HINTS or length <= 2 * (main_waiting() + in_lane) + SPARE_HINTS then return end
  end
  local kept = {}
  for _, id in ipairs(redis.call('LPOP', list, SWEPT_PER_CALL) or {}) do
    if id ~= '' and not ignore_hint(place, id) then
      kept[#kept + 1] = id
    elseif place ~= LANE then
      count_hints(place, -1)
    end
  end
  if #kept > 0 then
    redis.call('RPUSH', swept, unpack(kept))
    count_swept(place, #kept)
  end
  if redis.call('EXISTS', list) == 0 and redis.call('EXISTS', swept) == 1 then
    -- Whoever is blocked on the list is woken by this.
    redis.call('RENAME', swept, list)
    count_swept(place, -redis.call('LLEN', list))
  end
end

-- The waiting job `id` (its record is gone by now, or it waits elsewhere) leaves its list without being claimed.
local function forget_hint(place, id)
  if place == SUSPECTS then return count_hints(SUSPECTS, -redis.call('ZREM', key('suspects'), id)) end
  redis.call('HINCRBY', key('stale'), place .. ':' .. id, 1)
  may_be_stale = true
  if place == LANE then in_lane = in_lane - 1 end
  trim_hints(place, id)
  sweep_hints(place)
end
