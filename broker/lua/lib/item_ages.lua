-- `item_timeout` of the release modes. `expiries`: items by the time (ms) at which they are too old.

set_expiry = function(id, from_ms)
  local timeout_ms = option('item_timeout_ms')
  if timeout_ms > 0 then set_timer('expiries', id, math.max(now_ms, from_ms) + timeout_ms) end
end
