-- An item is handed over: it is active, owned by an awaiter under a fence, until that acknowledges it or its lease lapses.
-- `awaiter:A`: what A was handed, one entry FENCE ' ' ID ' ' LEASE_MS '\n' RECORD; '' if A was rung; 'acked ' FENCE afterwards.

local LAPSED_PER_CALL = 200
local MAX_SKIPS = 1000
-- Whether there were more hints to skip than that: then the call is to be repeated.
local skipped_enough = false

local function hand_key(awaiter)
  return key('awaiter:' .. awaiter)
end

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
    local id = redis.call('LPOP', pending_key(place))
    if not id then return nil end
    if place ~= LANE then count_hints(place, -1) end
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

-- `to`: the awaiter's name, and by which clerk it is told ('-': it reads its list).
local function hand_over(id, record, to, via, lease_ms)
  local fence = next_fence()
  redis.call('HSET', key('active'), id, to .. ':' .. fence)
  note('claimed ' .. fence .. ' ' .. attempt_number(read_record(record)) .. ' ' .. id)
  set_timer('leases', id, now_ms + lease_ms)
  local hand = fence .. ' ' .. id .. string.format(' %.0f\n', lease_ms) .. record
  redis.call('RPUSH', hand_key(to), hand)
  redis.call('PEXPIRE', hand_key(to), string.format('%.0f', lease_ms))
  if via ~= '-' then redis.call('PUBLISH', key('handed:' .. via), to) end
  forget_awaiter(to)
  return hand
end

-- What was not acknowledged in time goes back to the front, in its order.
local function lapse()
  local due = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', string.format('%.0f', now_ms), 'LIMIT', 0, LAPSED_PER_CALL)
  for i = #due, 1, -1 do
    local id = due[i]
    local owner = redis.call('HGET', key('active'), id)
    redis.call('ZREM', key('leases'), id)
    -- What is in the awaiter's list ends at the same time, and counts for nothing by now (is_held).
    if owner then hand_back(string.match(owner, '^([^:]+):'), { id }) end
  end
end
