-- `item_timeout` of the release modes. `expiries`: items by the time (ms) at which they are too old.

-- `if_earlier`: only if that is earlier than what was set before.
set_expiry = function(id, from_ms, if_earlier)
  local timeout_ms = option('item_timeout_ms')
  if timeout_ms == 0 or mode == 'work' then return end
  local expires_ms = math.max(now_ms, from_ms) + timeout_ms
  if if_earlier and expires_ms >= tonumber(redis.call('ZSCORE', key('expiries'), id) or math.huge) then return end
  set_timer('expiries', id, expires_ms)
end
