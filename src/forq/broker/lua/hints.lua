-- Waiting jobs are found through hints: ids in the pending lists. A hint may outlive what it points to (cancel and the
-- like never search a list); `stale` counts, per list and id, the hints to ignore. An empty id in `pending` is a wake
-- token: it wakes a worker for work that is in another list. While a list is swept (hints.sweep), its first hints
-- are in LIST:swept. The field `swept` of `stale` counts those of all lists, so that they are looked for only if there
-- are any. Those of priority 5 count as hints of other lists: nobody blocks on them.

-- What hints.wake_idle may be asked for.
local NOTIFY_AWAITERS, WAKE_LIMITED = true, true

function hints.has_stale()
  if may_be_stale == nil then may_be_stale = redis.call('EXISTS', key('stale')) == 1 end
  return may_be_stale
end

-- True if this hint is to be ignored; it is then used up.
function hints.consume_stale(place, id)
  if not hints.has_stale() then return false end
  local field = place .. ':' .. id
  local left = tonumber(redis.call('HGET', key('stale'), field) or 0)
  if left == 0 then return false end
  if left == 1 then redis.call('HDEL', key('stale'), field) else redis.call('HINCRBY', key('stale'), field, -1) end
  return true
end

-- A hint to a job whose record is not there.
function hints.drop(id)
  redis.call('HINCRBY', key('counts'), 'dropped', 1)
  journal.note('dropped 0 ' .. (string.find(id, '^[!-~]+$') and id or '?'))
end

function hints.count(place, number)
  if place == RETRY_PLACE then in_lane = in_lane + number
  elseif place == SUSPECTS_PLACE then suspect_hints = suspect_hints + number
  elseif place ~= '5' then other_hints = other_hints + number end
end

function hints.swept_key(place)
  return pending_key(place) .. ':swept'
end

function hints.count_swept(place, number)
  if place == '5' then other_hints = other_hints + number end
  swept_hints = redis.call('HINCRBY', key('stale'), 'swept', number)
  if swept_hints == 0 then redis.call('HDEL', key('stale'), 'swept') end
  may_be_stale = nil
end

-- The list that has the first hints of a place, and whether that is the one of those that were swept.
function hints.first_list(place)
  if (place == '5' and other_hints == 0) or not hints.has_stale() then return pending_key(place), false end
  swept_hints = swept_hints or tonumber(redis.call('HGET', key('stale'), 'swept') or 0)
  if swept_hints > 0 and redis.call('EXISTS', hints.swept_key(place)) == 1 then return hints.swept_key(place), true end
  return pending_key(place), false
end

-- Takes the first hints of a place out, `number` at most; nil if there is none.
function hints.pop(place, number)
  local list, swept = hints.first_list(place)
  local ids = redis.call('LPOP', list, number)
  if not ids then return nil end
  if place ~= RETRY_PLACE then hints.count(place, -#ids) end
  if swept then hints.count_swept(place, -#ids) end
  return ids
end

function hints.note_ready(ids)
  if not on_request then return end
  for _, id in ipairs(ids) do ready_ids[#ready_ids + 1] = id end
end

-- The score of what comes last among those of the same ms in a zset that is ordered by time.
function hints.next_score(zset, ms)
  local last = redis.call('ZREVRANGEBYSCORE', zset, '(' .. string.format('%.0f', ms + 1), string.format('%.0f', ms),
    'WITHSCORES', 'LIMIT', 0, 1)
  -- What a double leaves below a millisecond, less from 2039 on; beyond that many of one ms, ties go by id.
  local steps = ms < 2 ^ 41 and 4096 or 1024
  local step = last[2] and math.min((tonumber(last[2]) - ms) * steps + 1, steps - 1) or 0
  return ms + step / steps
end

-- `by_age`: in the order in which they were enqueued; else they come after all that are there.
function hints.add_suspects(ids, by_age)
  local packed = by_age and redis.call('HMGET', key('jobs'), unpack(ids)) or {}
  for i, id in ipairs(ids) do
    local enqueued_ms = packed[i] and tonumber(string.match(packed[i], '^.%d (%d+)'))
    local score = hints.next_score(key('suspects'), enqueued_ms or now_ms)
    hints.count(SUSPECTS_PLACE, redis.call('ZADD', key('suspects'), score, id))
  end
end

function hints.push_back(place, ids)
  if place == SUSPECTS_PLACE then return hints.add_suspects(ids, false) end
  redis.call('RPUSH', pending_key(place), unpack(ids))
  hints.count(place, #ids)
  hints.note_ready(ids)
end

-- Puts ids, in their order, before everything that waits; suspects where they belong by their age.
function hints.push_front(by_place)
  for place, ids in pairs(by_place) do
    if place == SUSPECTS_PLACE then
      hints.add_suspects(ids, true)
    else
      local reversed = {}
      for i = #ids, 1, -1 do reversed[#reversed + 1] = ids[i] end
      local list, swept = hints.first_list(place)
      redis.call('LPUSH', list, unpack(reversed))
      hints.count(place, #ids)
      if swept then hints.count_swept(place, #ids) end
      hints.note_ready(ids)
    end
  end
end

-- Jobs that wait for nothing but a worker, suspects too; what is scheduled, active or in the retry lane does not count.
function hints.main_waiting()
  return redis.call('HLEN', key('jobs')) - redis.call('HLEN', key('active')) - redis.call('ZCARD', key('scheduled'))
    - in_lane
end

-- The retry child of a queue blocks on `failed` alone: a token there tells it to look at suspects, its lane and its
-- fail jobs.
function hints.wake_retry_process(failed_list)
  if redis.call('EXISTS', failed_list) == 0 then redis.call('RPUSH', failed_list, '') end
end

-- The end of every call that may leave claimable work: an idle worker blocks on one list alone, so work in others needs
-- a token there. A list with anything in it wakes somebody anyway: at most one token exists. Each verb decides:
-- `rings`       RING_AWAITERS: awaiters are rung, of a queue whose items leave on request.
-- `makes_room`  WAKE_LIMITED: a job may have ended, or tokens have come in, so workers that the limits held up are
--               woken.
function hints.wake_idle(notifies, makes_room)
  if other_hints ~= other_hints_before or in_lane ~= in_lane_before or suspect_hints ~= suspect_hints_before then
    journal.set_count('other_hints', other_hints)
    journal.set_count('lane', in_lane)
    journal.set_count('suspect_hints', suspect_hints)
    other_hints_before, in_lane_before, suspect_hints_before = other_hints, in_lane, suspect_hints
  end
  if paused then return end
  local limited_too = makes_room and has_limits
  if on_request then
    -- Nobody blocks on the list: it needs no token. Who may not have anything now would only ask again and again.
    if limited_too and not limits.wake() then
      if hints.main_waiting() + in_lane > 0 then limits.publish_refill() end
    elseif notifies then
      awaiters.notify_ready()
    end
    return
  end
  if parent then
    local waiting = redis.call('EXISTS', key('pending')) == 1 or other_hints > 0
    if waiting then hints.wake_retry_process(parent .. ':failed') end
    return
  end
  if other_hints > 0 and redis.call('EXISTS', key('pending')) == 0 then redis.call('RPUSH', key('pending'), '') end
  local free = not limited_too or limits.wake()
  if suspect_hints > 0 or (in_lane > 0 and hints.main_waiting() == 0) then
    -- It has no other work: it is woken when it may begin, and not before; but it has to ask once for a suspect.
    if not free then limits.publish_refill() end
    local must_ask = suspect_hints > 0 and limits.reserved_for_suspects() == 0
    if free or must_ask then hints.wake_retry_process(key('failed')) end
  end
end

-- A hint is given up without being searched for.

local TRIMMED_PER_CALL = 100
-- A list is swept once it has more hints than twice the number of waiting jobs, and these.
local SPARE_HINTS, SWEPT_PER_CALL = 1000, 4

-- Stale hints at the end go at once: however often the last job comes and is cancelled, the list does not grow.
function hints.trim(place, id)
  local list = pending_key(place)
  for _ = 1, TRIMMED_PER_CALL do
    local last = redis.call('LINDEX', list, -1)
    if not last then return end
    -- The hints of other jobs keep their places; this one has no more place here, even if it waits elsewhere.
    if last ~= id and redis.call('HEXISTS', key('jobs'), last) == 1 then return end
    if not hints.consume_stale(place, last) then return end
    redis.call('RPOP', list)
    if place ~= RETRY_PLACE then hints.count(place, -1) end
  end
end

-- Takes stale hints out of a list that has many of them, from its head on, some per call; the others go to LIST:swept,
-- which is what comes first until nothing is left of the list. Each stale hint brings a call that looks at four: so a
-- list has at most 2.5 hints per waiting job, and 1,250.
function hints.sweep(place)
  local list, swept = pending_key(place), hints.swept_key(place)
  local _, sweeping = hints.first_list(place)
  if not sweeping then
    local length = redis.call('LLEN', list)
    if length <= SPARE_HINTS or length <= 2 * (hints.main_waiting() + in_lane) + SPARE_HINTS then return end
  end
  local kept = {}
  for _, id in ipairs(redis.call('LPOP', list, SWEPT_PER_CALL) or {}) do
    if id ~= '' and not hints.consume_stale(place, id) then
      kept[#kept + 1] = id
    elseif place ~= RETRY_PLACE then
      hints.count(place, -1)
    end
  end
  if #kept > 0 then
    redis.call('RPUSH', swept, unpack(kept))
    hints.count_swept(place, #kept)
  end
  if redis.call('EXISTS', list) == 0 and redis.call('EXISTS', swept) == 1 then
    -- Whoever is blocked on the list is woken by this.
    redis.call('RENAME', swept, list)
    hints.count_swept(place, -redis.call('LLEN', list))
  end
end

-- The waiting job `id` (its record is gone by now, or it waits elsewhere) leaves its list without being claimed.
function hints.remove(place, id)
  if place == SUSPECTS_PLACE then return hints.count(SUSPECTS_PLACE, -redis.call('ZREM', key('suspects'), id)) end
  redis.call('HINCRBY', key('stale'), place .. ':' .. id, 1)
  may_be_stale = true
  if place == RETRY_PLACE then in_lane = in_lane - 1 end
  hints.trim(place, id)
  hints.sweep(place)
end
