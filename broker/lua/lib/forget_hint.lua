-- A hint is given up without being searched for.

local TRIMMED_PER_CALL = 100

-- The waiting job `id` (its record is gone by now, or it waits elsewhere) leaves its list without being claimed.
local function forget_hint(priority, id)
  if priority == SUSPECTS then return count_hints(SUSPECTS, -redis.call('ZREM', key('suspects'), id)) end
  local list = pending_key(priority)
  redis.call('HINCRBY', key('stale'), priority .. ':' .. id, 1)
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
