#!lua flags=allow-oom
-- ack: the awaiter has the item that it was handed: it is released, and gone.
--
-- KEYS[1]  the queue's base
-- ARGV     awaiter, id, fence
-- Returns  {OK}, also when it is repeated within a minute; {LAPSED} if the item has gone back; {WRONG_MODE, its mode}; {NO_QUEUE}
-- States   active -> released; blocked -> waiting | scheduled
--@include base codes journal hints records schedule attempts awaiters ringing timers item_ages blocked progress waiters holdings

local ACKED_MS = 60000
local awaiter, id, fence = ARGV[1], ARGV[2], ARGV[3]
if not epoch then return { NO_QUEUE } end
if mode == 'external' then return { WRONG_MODE, mode } end
local list = key_of('awaiter', awaiter)
if redis.call('LINDEX', list, 0) == 'acked ' .. fence then return { OK } end
local owner = redis.call('HGET', key('active'), id)
if owner ~= awaiter .. ':' .. fence and owner ~= awaiter .. ':' .. fence .. REMOVED then return { LAPSED } end

redis.call('HDEL', key('jobs'), id)
redis.call('HDEL', key('active'), id)
forget_progress({ id })
redis.call('ZREM', key('leases'), id)
redis.call('ZREM', key('expiries'), id)
redis.call('INCR', key('processed:count'))
-- A fence is the time of its claim, unless the clock was set back.
note('released ' .. fence .. ' ' .. id .. string.format(' %.0f', math.max(0, now_us - tonumber(fence))))
redis.call('DEL', list)
redis.call('RPUSH', list, 'acked ' .. fence)
redis.call('PEXPIRE', list, ACKED_MS)
unblock({ id })
wake_idle_worker()
write_journal(awaiter)
return { OK }
