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
local id = string.match(redis.call('LINDEX', list, 0) or '', '^%d+ (%S+) ')
local held = id and is_owner(awaiter, redis.call('HGET', key('active'), id))
forget_awaiter(awaiter)
redis.call('UNLINK', list)
if held then
  redis.call('ZREM', key('leases'), id)
  hand_back(awaiter, { id })
end
wake_idle_worker()
write_journal(awaiter)
return { OK, held and 1 or 0 }
