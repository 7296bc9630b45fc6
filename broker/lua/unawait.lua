#!lua flags=allow-oom
-- unawait: an awaiter leaves; what it was handed and has not acknowledged goes back to the front.
--
-- KEYS[1]  the queue's base
-- ARGV     awaiter
-- Returns  {OK, 1 an item went back | 0}; {NO_QUEUE}
-- States   active -> waiting (returned)
--@include base codes journal hints records schedule attempts awaiters ringing timers item_ages blocked progress holdings

if not epoch then return { NO_QUEUE } end
local awaiter = ARGV[1]
local list = key('awaiter:' .. awaiter)
local hand = redis.call('LINDEX', list, 0) or ''
local id = string.match(hand, '^%d+ (%S+) ')
local held = id and is_owner(awaiter, redis.call('HGET', key('active'), id))
-- It may have been rung for an item that others await too.
local known = read_awaiter(awaiter)
if known and redis.call('HEXISTS', key('jobs'), known.id) == 1 then note_ready({ known.id }) end
forget_awaiter(awaiter)
-- An acknowledgement may still be repeated.
if string.sub(hand, 1, 6) ~= 'acked ' then redis.call('UNLINK', list) end
if held then
  redis.call('ZREM', key('leases'), id)
  hand_back(awaiter, { id })
  local expires = redis.call('ZSCORE', key('expiries'), id)
  -- It was too old before (expiring.lua): it need not wait until its lease would have lapsed.
  if expires and tonumber(expires) % 1 > 0 then set_timer('expiries', id, now_ms) end
end
wake_idle_worker()
write_journal(awaiter)
return { OK, held and 1 or 0 }
