-- Times besides that of `scheduled`: `leases` (items that are handed over, by the time their lease lapses) and `expiries`
-- (items by the time they are too old). Whoever changes the head of one of them tells pulse, as for `scheduled`.

local function head_ms(name)
  local head = redis.call('ZRANGE', key(name), 0, 0, 'WITHSCORES')
  return head[2] and math.floor(tonumber(head[2]))
end

local function set_timer(name, id, at_ms)
  local head = head_ms(name)
  redis.call('ZADD', key(name), string.format('%.0f', at_ms), id)
  if not head or at_ms < head then
    redis.call('PUBLISH', key('due'), string.format('%.0f', at_ms - now_ms))
  end
end

-- In how many ms something is to be done; -1: there is nothing.
local function next_timer_ms()
  local next_ms
  for _, name in ipairs(mode == 'work' and { 'scheduled' } or { 'scheduled', 'leases', 'expiries' }) do
    local due = head_ms(name)
    if due and (not next_ms or due < next_ms) then next_ms = due end
  end
  return next_ms and math.max(0, next_ms - now_ms) or -1
end
