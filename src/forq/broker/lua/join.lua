#!lua flags=allow-oom
-- join: a worker registers, so that its processing list is known to everybody who may have to recover it.
--
-- KEYS[1]  the queue's base
-- ARGV     protocol, processor, worker, how long the processor may stay silent (ms)
-- Returns  {OK, epoch}; {NO_QUEUE}; {OTHER_PROTOCOL, its number}; {FENCED} if the processor has been evicted, or the worker
--          removed
--@include base codes

if not epoch then return { NO_QUEUE } end
if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end
local processor, worker, expiry_ms = ARGV[2], ARGV[3], tonumber(ARGV[4])
local removed = redis.call('ZMSCORE', key('graves'), processor, processor .. ' ' .. worker)
if removed[1] or removed[2] then return { FENCED } end
-- One that arrives late must not take back the number of a turn.
redis.call('HSETNX', workers_key(processor), worker, '0')
redis.call('ZADD', key('processors'), 'NX', now_ms + expiry_ms, processor)
return { OK, epoch }
