-- Times besides that of `scheduled`: `schedules:next` (the next ticks of periodic jobs), `leases` (items that are handed over,
-- by the time their lease lapses) and `expiries` (items by the time they are too old). Whoever changes the head of one of them tells pulse, as for `scheduled`.

local function head_ms(name)
  local head = redis.call('ZRANGE', key(name), 0, 0, 'WITHSCORES')
  return head[2] and math.floor(tonumber(head[2]))
end

local function set_timer(name, id, at_ms)
  local head = head_ms(name)
  redis.call('ZADD', key(name), string.format('%.0f', at_ms), id)
  if not head or at_ms < head then
    redis.call('PUBLISH', channel('due'), string.format('%.0f', at_ms - now_ms))
  end
end

-- In how many ms something is to be done; -1: there is nothing. `told`: ticks that are due are known to the caller. (One that
-- cannot be fired stays due: it must not bring the caller back at once, again and again.)
local function next_timer_ms(told)
  local next_ms
  local function consider(at_ms)
    if at_ms and (not next_ms or at_ms < next_ms) then next_ms = at_ms end
  end
  for _, name in ipairs(mode == 'work' and { 'scheduled' } or { 'scheduled', 'leases', 'expiries' }) do
    consider(head_ms(name))
  end
  local least = told and '(' .. string.format('%.0f', now_ms) or '-inf'
  consider(tonumber(redis.call('ZRANGEBYSCORE', key('schedules:next'), least, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]))
  -- The limits have been lifted, and not all are woken yet.
  if rate_count + max_active == 0 and redis.call('EXISTS', key('limited')) == 1 then consider(now_ms) end
  if rate_count > 0 and (redis.call('EXISTS', key('limited')) == 1 or suspect_hints + in_lane > 0
    or (on_request and main_waiting() > 0)) then
    local wait_ms = refill_ms()
    consider(wait_ms and now_ms + wait_ms)
  end
  return next_ms and math.max(0, next_ms - now_ms) or -1
end
