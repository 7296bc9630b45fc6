#!lua flags=allow-oom
-- accept: a worker of a queue of mode external has got what it was assigned, or says how far it is: it is alive, and its lease
-- begins anew. To be repeated as often as it likes.
--
-- KEYS[1]  the queue's base
-- ARGV     worker, id, fence, progress (0 to 1; '' = nothing is said of it), text
-- Returns  {OK}; {LAPSED} if the worker does not hold that job; {NO_QUEUE}; {WRONG_MODE, its mode}
--@include base codes awaiters progress holdings hands

local worker, id, fence = ARGV[1], ARGV[2], ARGV[3]
if not epoch then return { NO_QUEUE } end
if mode ~= 'external' then return { WRONG_MODE, mode } end
local owner = redis.call('HGET', key('active'), id)
if not is_owner(worker, owner) or fence_of(owner) ~= fence then return { LAPSED } end

local lease_ms = option('lease_ms')
redis.call('ZADD', key('accepted'), string.format('%.0f', now_ms), id)
redis.call('ZADD', key('leases'), string.format('%.0f', now_ms + lease_ms), id)
-- Longer than the lease: what is in hand is there as long as the job is.
put_in_hand(worker, 'accepted ' .. fence_of(owner) .. ' ' .. id, 10 * lease_ms)
see_worker(worker)
if ARGV[4] ~= '' then set_progress(id, ARGV[4], ARGV[5]) end
return { OK }
