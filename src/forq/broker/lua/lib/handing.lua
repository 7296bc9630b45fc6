-- An item is handed over: it is active, owned by an awaiter under a fence, until that acknowledges it or its lease lapses.
-- In mode external that is a worker, which accepts it and then says again and again that it is alive.

local LAPSED_PER_CALL = 200
local MAX_SKIPS = 1000
-- Whether there were more hints to skip than that: then the call is to be repeated.
local skipped_enough = false

-- Whether this is what the awaiter was handed and still holds, and not what it had of an item that has gone back, or of
-- an earlier queue of this name.
local function is_held(awaiter, hand)
  local id = string.match(hand, '^%d+ (%S+) ')
  return id and is_owner(awaiter, redis.call('HGET', key('active'), id))
end

-- The number of the attempt at a job that begins now.
local function attempt_number(job)
  return job and job.retries + job.stalls + job.timeouts + 1 or 1
end

-- The next job of a list and its record; its hint is taken out. nil if there is none.
local function take_from(place)
  for _ = 1, MAX_SKIPS do
    local ids = pop_hints(place, 1)
    if not ids then return nil end
    local id = ids[1]
    if id ~= '' and not ignore_hint(place, id) then
      if place == LANE then count_hints(place, -1) end
      local record = redis.call('HGET', key('jobs'), id)
      if not record then
        drop(id)
      elseif redis.call('HEXISTS', key('active'), id) == 0 then
        return id, record
      end
    end
  end
  skipped_enough = true
end

local function take_next()
  if other_hints == 0 then return take_from('5') end
  for priority = 0, 9 do
    local id, record = take_from(tostring(priority))
    if id or skipped_enough then return id, record end
  end
end

-- `to`: the awaiter's name, and by which clerk it is told ('-': it reads its list); of a worker, by which bridge it is.
local function hand_over(id, record, to, via, lease_ms)
  local fence = next_fence()
  redis.call('HSET', key('active'), id, to .. ':' .. fence)
  note('claimed ' .. fence .. ' ' .. attempt_number(read_record(record)) .. ' ' .. id)
  set_timer('leases', id, now_ms + lease_ms)
  local external = mode == 'external'
  local hand = fence .. ' ' .. id .. string.format(' %.0f', lease_ms) .. (external and ' ' .. via or '') .. '\n' .. record
  put_in_hand(to, hand, lease_ms)
  -- Of a worker it is its bridge that asked.
  if via ~= '-' and not external then redis.call('PUBLISH', channel('handed:' .. via), to) end
  forget_awaiter(to)
  return hand
end

-- Goes back to the front, uncounted; what a worker had accepted has stalled.
local function take_back(awaiter, owner, id, cause)
  local lost
  redis.call('ZREM', key('leases'), id)
  if redis.call('ZREM', key('accepted'), id) == 1 then
    local micros = string.format('%.0f', math.max(0, now_us - tonumber(fence_of(owner))))
    lost = { id = id, outcome = 'stalled', cause = cause, micros = micros, count = count_loss }
  end
  -- It may have been handed something else meanwhile.
  if in_hand(awaiter) == id then redis.call('UNLINK', hand_key(awaiter)) end
  hand_back(awaiter, { id }, lost)
end

-- What was not acknowledged in time goes back, in its order; what was accepted, if its worker was silent for so long.
local function lapse()
  local due = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', string.format('%.0f', now_ms), 'LIMIT', 0, LAPSED_PER_CALL)
  for i = #due, 1, -1 do
    if returned_bytes > READ_BYTES then break end
    local id = due[i]
    local owner = redis.call('HGET', key('active'), id)
    if owner then
      take_back(string.match(owner, '^([^:]+):'), owner, id, 'silent')
    else
      redis.call('ZREM', key('leases'), id)
    end
  end
  if mode == 'external' then forget_silent_workers() end
end
