-- Limits of the whole queue: job starts per time (rate: a token bucket) and active jobs (max_active). `bucket_us` in
-- `counts` is the time at which the bucket is full again.

-- The default bucket size, and the tokens that must arrive before a limited worker is woken; both as time at this rate.
local DEFAULT_BURST_US, WAKE_US = 100000, 20000

function limits.read_bucket()
  if bucket then return bucket end
  -- Half microseconds are exact in a double until 2112, so no error accumulates. Rounded up: never above the rate.
  local interval_us, burst = math.ceil(option('rate_ms') * 2000 / rate_count) / 2, option('burst')
  if burst == 0 then burst = math.max(1, math.floor(DEFAULT_BURST_US / interval_us)) end
  local stored_us = tonumber(redis.call('HGET', key('counts'), 'bucket_us') or 0)
  -- After a clock step back or a rate change the bucket is at most empty. Must be stored, or it stays empty.
  local empty_us = now_us + burst * interval_us
  bucket = {
    interval_us = interval_us,
    burst = burst,
    empty_us = empty_us,
    full_us = math.min(math.max(now_us, stored_us), empty_us),
    overdrawn = stored_us > empty_us,
  }
  return bucket
end

-- How many jobs may start now.
function limits.room()
  local left = math.huge
  if max_active > 0 then left = math.max(0, max_active - redis.call('HLEN', key('active'))) end
  if rate_count > 0 then
    local tokens = limits.read_bucket()
    left = math.min(left, math.floor((tokens.empty_us - tokens.full_us) / tokens.interval_us))
  end
  return left
end

function limits.take_tokens(number)
  if rate_count == 0 or number == 0 then return end
  local tokens = limits.read_bucket()
  tokens.full_us = tokens.full_us + number * tokens.interval_us
  journal.set_count('bucket_us', string.format('%.1f', tokens.full_us))
end

function limits.store_overdrawn()
  if bucket and bucket.overdrawn then journal.set_count('bucket_us', string.format('%.1f', bucket.full_us)) end
end

-- Milliseconds until enough tokens have arrived to wake a worker; nil if there are enough.
function limits.refill_ms()
  if rate_count == 0 then return nil end
  local tokens = limits.read_bucket()
  local enough = math.min(tokens.burst, math.max(1, math.floor(WAKE_US / tokens.interval_us)))
  local wait_us = tokens.full_us + enough * tokens.interval_us - tokens.empty_us
  return wait_us > 0 and math.ceil(wait_us / 1000) or nil
end

-- Workers that may not claim although jobs wait: `limited`, 'PROCESSOR WORKER' by arrival time (µs). Each blocks on a
-- wake list of its own.

local WOKEN_PER_CALL = 100
-- How long one unit stays reserved for suspects after the retry process found no free one.
local RESERVED_MS = 30000

function limits.remove_worker(processor, worker)
  redis.call('ZREM', key('limited'), processor .. ' ' .. worker)
end

function limits.wake_first(number)
  local first = redis.call('ZPOPMIN', key('limited'), number)
  for at = 1, #first, 2 do
    local processor, worker = string.match(first[at], '^(%S+) (%S+)$')
    local wake = worker_key(processor, worker, 'wake')
    redis.call('RPUSH', wake, '')
    redis.call('EXPIRE', wake, 60)
  end
end

-- Without limits no turn wakes limited workers any more.
function limits.wake_if_lifted()
  if not has_limits then limits.wake_first(WOKEN_PER_CALL) end
end

function limits.add_worker(processor, worker)
  redis.call('ZADD', key('limited'), string.format('%.0f', now_us), processor .. ' ' .. worker)
end

function limits.publish_refill()
  local wait_ms = limits.refill_ms()
  if wait_ms then timers.publish(wait_ms) end
end

-- Call it after tokens were taken or missing.
function limits.publish_refill_if_limited()
  if redis.call('EXISTS', key('limited')) == 1 then limits.publish_refill() end
end

-- A worker settles and claims in the same call, so the retry process would never get a free unit for a suspect. One
-- unit is reserved once it has asked; not earlier, since it may be busy or gone.
function limits.reserve_for_suspects(for_ms)
  reserved_until_ms = now_ms + for_ms
  journal.set_count('left_until_ms', string.format('%.0f', reserved_until_ms))
end

function limits.reserved_for_suspects()
  if suspect_hints == 0 then return 0 end
  reserved_until_ms = reserved_until_ms or tonumber(redis.call('HGET', key('counts'), 'left_until_ms') or 0)
  return reserved_until_ms > now_ms and 1 or 0
end

-- Wakes the first limited worker if a job may start; its turn wakes the next one. Returns whether a job may start.
function limits.wake()
  local room = limits.room()
  limits.store_overdrawn()
  if room > limits.reserved_for_suspects() then limits.wake_first(1) end
  return room > 0
end
