-- Limits of the queue as a whole: how many jobs may begin (rate: a token bucket) and be active at the same time
-- (max_active). `bucket_us` in `counts` is the time at which the bucket is full again.

-- What the bucket holds unless `burst` says it, and how much must have come in before a limited worker is woken.
local BURST_US, WAKE_US = 100000, 20000

function limits.read_bucket()
  if bucket then return bucket end
  -- Halves of a µs are exact in a double until 2112: no error adds up, and it is never more than the rate.
  local interval, burst = math.ceil(option('rate_ms') * 2000 / rate_count) / 2, option('burst')
  if burst == 0 then burst = math.max(1, math.floor(BURST_US / interval)) end
  local stored_us = tonumber(redis.call('HGET', key('counts'), 'bucket_us') or 0)
  -- The clock was set back, or the rate was changed: it is never emptier than empty. That has to be stored: as long as
  -- it is only read so, it stays empty.
  local empty_us = now_us + burst * interval
  bucket = {
    interval = interval,
    burst = burst,
    empty_us = empty_us,
    full_us = math.min(math.max(now_us, stored_us), empty_us),
    overdrawn = stored_us > empty_us,
  }
  return bucket
end

-- How many jobs may begin now.
function limits.room()
  local left = math.huge
  if max_active > 0 then left = math.max(0, max_active - redis.call('HLEN', key('active'))) end
  if rate_count > 0 then
    local it = limits.read_bucket()
    left = math.min(left, math.floor((it.empty_us - it.full_us) / it.interval))
  end
  return left
end

function limits.take_tokens(number)
  if rate_count == 0 or number == 0 then return end
  local it = limits.read_bucket()
  it.full_us = it.full_us + number * it.interval
  journal.remember('bucket_us', string.format('%.1f', it.full_us))
end

function limits.store_overdrawn()
  if bucket and bucket.overdrawn then journal.remember('bucket_us', string.format('%.1f', bucket.full_us)) end
end

-- In how many ms enough tokens will have come in to wake somebody; nil if it is not they that are short.
function limits.refill_ms()
  if rate_count == 0 then return nil end
  local it = limits.read_bucket()
  local enough = math.min(it.burst, math.max(1, math.floor(WAKE_US / it.interval)))
  local wait_us = it.full_us + enough * it.interval - it.empty_us
  return wait_us > 0 and math.ceil(wait_us / 1000) or nil
end

-- Workers that may not claim although something waits. `limited`: 'PROCESSOR WORKER' by the time (µs) they came. Each
-- blocks on its own wake list.

local WOKEN_PER_CALL = 100
-- How long one place is left to the suspects after the retry child has found none for them.
local LEFT_MS = 30000

function limits.release(processor, worker)
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

-- The limits have been lifted: nobody's turn looks for limited workers any more.
function limits.wake_unlimited()
  if not has_limits then limits.wake_first(WOKEN_PER_CALL) end
end

function limits.hold(processor, worker)
  redis.call('ZADD', key('limited'), string.format('%.0f', now_us), processor .. ' ' .. worker)
end

function limits.wake_at_refill()
  local wait_ms = limits.refill_ms()
  if wait_ms then redis.call('PUBLISH', channel('due'), string.format('%.0f', wait_ms)) end
end

-- Tokens were taken, or were short: who is limited is woken when there are enough again.
function limits.tell_refill()
  if redis.call('EXISTS', key('limited')) == 1 then limits.wake_at_refill() end
end

-- A worker that ends a job begins the next one in the same call: the retry child would always be too late for a
-- suspect. So one place is left to it once it has asked; not before, since it may be busy, or gone.
function limits.leave_place(for_ms)
  left_until_ms = now_ms + for_ms
  journal.remember('left_until_ms', string.format('%.0f', left_until_ms))
end

function limits.left_to_suspects()
  if suspect_hints == 0 then return 0 end
  left_until_ms = left_until_ms or tonumber(redis.call('HGET', key('counts'), 'left_until_ms') or 0)
  return left_until_ms > now_ms and 1 or 0
end

-- Wakes the first limited worker if something may begin now; its turn wakes the next one. Whether something may begin.
function limits.wake()
  local free = limits.room()
  limits.store_overdrawn()
  if free > limits.left_to_suspects() then limits.wake_first(1) end
  return free > 0
end
