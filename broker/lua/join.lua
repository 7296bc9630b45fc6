#!lua flags=allow-oom
-- join: a worker registers, so that its processing list is known to everybody who may have to recover it.
--
-- KEYS[1]  the queue's base
-- ARGV     protocol, processor, worker, how long the processor may stay silent (ms)
-- Returns  {OK, epoch}; {NO_QUEUE}; {OTHER_PROTOCOL, its number}; {FENCED} if the processor has been evicted
--@include base codes

if not epoch then return { NO_QUEUE } end
if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end
local processor, worker, expiry_ms = ARGV[2], ARGV[3], tonumber(ARGV[4])
if redis.call('ZSCORE', key('graves'), processor) then return { FENCED } end
redis.call('HSET', workers_key(processor), worker, '0')
redis.call('ZADD', key('processors'), 'NX', now_ms + expiry_ms, processor)
return { OK, epoch }
