#!lua
-- progress: a worker says how far a job is that it runs.
--
-- KEYS[1]  the queue's base
-- ARGV     worker, id, fence, fraction (0 to 1), text
-- Returns  {OK, 1 stored | 0 it does not run that job (any more)}; {NO_QUEUE}
--@include base codes progress

if not epoch then return { NO_QUEUE } end
local worker, id, fence = ARGV[1], ARGV[2], ARGV[3]
local owner, own = redis.call('HGET', key('active'), id), worker .. ':' .. fence
if owner ~= own and owner ~= own .. ':removed' then return { OK, 0 } end
set_progress(id, ARGV[4], ARGV[5])
return { OK, 1 }
