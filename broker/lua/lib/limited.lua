-- Workers that may not claim although something waits. `limited`: 'PROCESSOR WORKER' by the time (µs) they came. Each blocks on
-- its own wake list.

local WOKEN_PER_CALL = 100

wake_at_refill = function()
  local wait_ms = refill_ms()
  if wait_ms then redis.call('PUBLISH', key('due'), string.format('%.0f', wait_ms)) end
end

local function limit_worker(processor, worker)
  redis.call('ZADD', key('limited'), string.format('%.0f', now_us), processor .. ' ' .. worker)
  wake_at_refill()
end

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

-- Wakes the first limited worker if something may begin now; its turn wakes the next one. Whether something may begin.
wake_limited = function()
  if not has_limits then return true end
  if room() < 1 then return false end
  wake_first_limited(1)
  return true
end

-- The limits have been lifted: nobody's turn looks for limited workers any more.
local function wake_unlimited()
  if not has_limits then wake_first_limited(WOKEN_PER_CALL) end
end
