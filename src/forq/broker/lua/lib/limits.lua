-- Limits of the queue as a whole: how many jobs may begin (rate: a token bucket) and be active at the same time (max_active).
-- `bucket_us` in `counts` is the time at which the bucket is full again.

-- What the bucket holds unless `burst` says it, and how much must have come in before a limited worker is woken.
local BURST_US, WAKE_US = 100000, 20000

local has_limits = rate_count > 0 or max_active > 0
-- nil if the queue has no limits.
local room, take_tokens, store_overdrawn, refill_ms

if has_limits then
  local bucket

  local function read_bucket()
    if bucket then return bucket end
    -- Halves of a µs are exact in a double until 2112: no error adds up, and it is never more than the rate.
    local interval, burst = math.ceil(option('rate_ms') * 2000 / rate_count) / 2, option('burst')
    if burst == 0 then burst = math.max(1, math.floor(BURST_US / interval)) end
    local stored_us = tonumber(redis.call('HGET', key('counts'), 'bucket_us') or 0)
    -- The clock was set back, or the rate was changed: it is never emptier than empty. That has to be stored: as long as it
    -- is only read so, it stays empty.
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
  room = function()
    local left = math.huge
    if max_active > 0 then left = math.max(0, max_active - redis.call('HLEN', key('active'))) end
    if rate_count > 0 then
      local it = read_bucket()
      left = math.min(left, math.floor((it.empty_us - it.full_us) / it.interval))
    end
    return left
  end

  take_tokens = function(number)
    if rate_count == 0 or number == 0 then return end
    local it = read_bucket()
    it.full_us = it.full_us + number * it.interval
    remember('bucket_us', string.format('%.1f', it.full_us))
  end

  store_overdrawn = function()
    if bucket and bucket.overdrawn then remember('bucket_us', string.format('%.1f', bucket.full_us)) end
  end

  -- In how many ms enough tokens will have come in to wake somebody; nil if it is not they that are short.
  refill_ms = function()
    if rate_count == 0 then return nil end
    local it = read_bucket()
    local enough = math.min(it.burst, math.max(1, math.floor(WAKE_US / it.interval)))
    local wait_us = it.full_us + enough * it.interval - it.empty_us
    return wait_us > 0 and math.ceil(wait_us / 1000) or nil
  end
end
