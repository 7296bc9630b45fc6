-- Hints: ids in the pending lists, one for each waiting job. A hint may outlive its job, because no verb searches a
-- list; `stale` counts, per list and id, the hints to skip. An empty id in `pending` is a wake token: it wakes a worker
-- for a job in another list. While a list is swept (hints.sweep), its first hints are in LIST:swept. The field `swept`
-- of `stale` counts these for all lists, so that they are read only if there are any. Those of priority 5 count as
-- other_hints, since no worker blocks on LIST:swept.

-- Arguments of hints.wake_idle.
local NOTIFY_AWAITERS, WAKE_LIMITED = true, true

function hints.has_stale()
  if may_be_stale and not stale_known then
    may_be_stale, stale_known = redis.call('EXISTS', key('stale')) == 1, true
  end
  return may_be_stale
end

-- True if this hint must be skipped; decrements its stale count.
function hints.consume_stale(place, id)
  if not hints.has_stale() then return false end
  local field = place .. ':' .. id
  local left = tonumber(redis.call('HGET', key('stale'), field) or 0)
  if left == 0 then return false end
  if left == 1 then redis.call('HDEL', key('stale'), field) else redis.call('HINCRBY', key('stale'), field, -1) end
  return true
end

-- Counts a hint without a record.
function hints.drop(id)
  redis.call('HINCRBY', key('counts'), 'dropped', 1)
  journal.note('dropped 0 ' .. (string.find(id, '^[!-~]+$') and id or '?'))
  -- A held job with this id is a later one.
  if not flows_on or flows.is_held(id) then return end
  flows.forget_inputs({ id })
  flows.detach({ id }, 'dropped')
  flows.resolve()
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
end

-- The list with the first hints of a place, and whether it is the swept one.
function hints.first_list(place)
  if (place == '5' and other_hints == 0) or not hints.has_stale() then return pending_key(place), false end
  swept_hints = swept_hints or tonumber(redis.call('HGET', key('stale'), 'swept') or 0)
  if swept_hints > 0 and redis.call('EXISTS', hints.swept_key(place)) == 1 then return hints.swept_key(place), true end
  return pending_key(place), false
end

-- Removes and returns up to `number` first hints of a place; nil if there are none.
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

-- The score that sorts after all members with the same ms in a zset ordered by time.
function hints.next_score(zset, ms)
  local last = redis.call('ZREVRANGEBYSCORE', zset, '(' .. string.format('%.0f', ms + 1), string.format('%.0f', ms),
    'WITHSCORES', 'LIMIT', 0, 1)
  -- A double has this many steps per ms, fewer from 2039 on. Beyond that number, ties are ordered by id.
  local steps = ms < 2 ^ 41 and 4096 or 1024
  local step = last[2] and math.min((tonumber(last[2]) - ms) * steps + 1, steps - 1) or 0
  return ms + step / steps
end

-- `by_age`: sorted by enqueue time; otherwise after all others.
function hints.add_suspects(ids, by_age)
  local packed = by_age and redis.call('HMGET', key('jobs'), unpack(ids)) or {}
  for i, id in ipairs(ids) do
    local enqueued_ms = packed[i] and records.enqueued_ms_of(packed[i])
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

-- Puts ids, in their order, before all waiting jobs; suspects are sorted by age.
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

-- Jobs that wait only for a worker, suspects included; not scheduled, active or retry lane jobs.
function hints.main_waiting()
  return redis.call('HLEN', key('jobs')) - redis.call('HLEN', key('active')) - redis.call('ZCARD', key('scheduled'))
    - in_lane
end

-- The retry process blocks on `failed` only. A token there makes it check suspects, retry lane and fail jobs.
function hints.wake_retry_process(failed_list)
  if redis.call('EXISTS', failed_list) == 0 then redis.call('RPUSH', failed_list, '') end
end

-- Ends every call that may leave claimable jobs. An idle worker blocks on one list, so jobs in other lists need a wake
-- token there. A list that is not empty wakes a worker anyway, so one token is enough.
--   notifies    NOTIFY_AWAITERS: notifies awaiters (on_request only).
--   makes_room  WAKE_LIMITED: a job may have ended or tokens arrived, so workers held back by the limits are woken.
function hints.wake_idle(notifies, makes_room)
  -- A unit that was reserved for the last suspect is free.
  if suspect_hints == 0 and suspect_hints_before > 0 then makes_room = true end
  if paused then return end
  local limited_too = makes_room and has_limits
  if on_request then
    -- No worker blocks on the list, so it needs no token. Awaiters that may not get an item now would only poll.
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
    -- Without other work the retry process is woken only when it may start a job. But for a suspect it must ask once,
    -- so that a unit is reserved.
    if not free then limits.publish_refill() end
    local wake = free or suspect_hints > 0 and limits.reserved_for_suspects() == 0
    if wake then hints.wake_retry_process(key('failed')) end
  end
end

local TRIMMED_PER_CALL = 100
-- A list is swept when it has more than 2 * waiting jobs + SPARE_HINTS hints.
local SPARE_HINTS, SWEPT_PER_CALL = 1000, 4

-- Removes stale hints at the end of a list at once, so that enqueuing and cancelling the last job does not grow it.
function hints.trim(place, id)
  local list = pending_key(place)
  for _ = 1, TRIMMED_PER_CALL do
    local last = redis.call('LINDEX', list, -1)
    if not last then return end
    -- Hints of other live jobs stay. This job's hint goes, even if the job waits elsewhere.
    if last ~= id and redis.call('HEXISTS', key('jobs'), last) == 1 then return end
    if not hints.consume_stale(place, last) then return end
    redis.call('RPOP', list)
    if place ~= RETRY_PLACE then hints.count(place, -1) end
  end
end

-- Removes stale hints from the head of a list that has many, a few per call. The others move to LIST:swept, which is
-- read first until the list is empty. Each new stale hint triggers a call that checks four, so a list has at most 2.5
-- hints per waiting job, plus 1,250.
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
    -- This wakes workers blocked on the list.
    redis.call('RENAME', swept, list)
    hints.count_swept(place, -redis.call('LLEN', list))
  end
end

-- Removes the hint of a job that was cancelled or moved. Lists are not searched; the hint becomes stale.
function hints.remove(place, id)
  if place == SUSPECTS_PLACE then return hints.count(SUSPECTS_PLACE, -redis.call('ZREM', key('suspects'), id)) end
  redis.call('HINCRBY', key('stale'), place .. ':' .. id, 1)
  may_be_stale, stale_known = true, true
  if place == RETRY_PLACE then in_lane = in_lane - 1 end
  hints.trim(place, id)
  hints.sweep(place)
end
