-- Workers that may not claim although something waits. `limited`: 'PROCESSOR WORKER' by the time (µs) they came. Each blocks on
-- its own wake list.

local WOKEN_PER_CALL = 100
-- How long one place is left to the suspects after the retry child has found none for them.
local LEFT_MS = 30000
local limit_worker, tell_refill, leave_place

local function unlimit_worker(processor, worker)
  redis.call('ZREM', key('limited'), processor .. ' ' .. worker)
end

local function wake_first_limited(number)
  local first = redis.call('ZPOPMIN', key('limited'), number)
  for at = 1, #first, 2 do
    local processor, worker = string.match(first[at], '^(%S+) (%S+)$')
    local wake = worker_key(processor, worker, 'wake')
    redis.call('RPUSH', wake, '')
    redis.call('EXPIRE', wake, 60)
  end
end

-- The limits have been lifted: nobody's turn looks for limited workers any more.
local function wake_unlimited()
  if not has_limits then wake_first_limited(WOKEN_PER_CALL) end
end

if has_limits then
  local left_until_ms

  limit_worker = function(processor, worker)
    redis.call('ZADD', key('limited'), string.format('%.0f', now_us), processor .. ' ' .. worker)
  end

  wake_at_refill = function()
    local wait_ms = refill_ms()
    if wait_ms then redis.call('PUBLISH', channel('due'), string.format('%.0f', wait_ms)) end
  end

  -- Tokens were taken, or were short: who is limited is woken when there are enough again.
  tell_refill = function()
    if redis.call('EXISTS', key('limited')) == 1 then wake_at_refill() end
  end

  -- A worker that ends a job begins the next one in the same call: the retry child would always be too late for a suspect. So
  -- one place is left to it once it has asked; not before, since it may be busy, or gone.
  leave_place = function(for_ms)
    left_until_ms = now_ms + for_ms
    remember('left_until_ms', string.format('%.0f', left_until_ms))
  end

  left_to_suspects = function()
    if suspect_hints == 0 then return 0 end
    left_until_ms = left_until_ms or tonumber(redis.call('HGET', key('counts'), 'left_until_ms') or 0)
    return left_until_ms > now_ms and 1 or 0
  end

  -- Wakes the first limited worker if something may begin now; its turn wakes the next one. Whether something may begin.
  wake_limited = function()
    local free = room()
    store_overdrawn()
    if free > left_to_suspects() then wake_first_limited(1) end
    return free > 0
  end
end
