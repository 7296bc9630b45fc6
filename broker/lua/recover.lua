#!lua flags=allow-oom
-- recover: takes a worker that is gone out of the queue; nothing that it held is lost. Also how a worker leaves.
-- Safe to repeat: a later call finds nothing left, or what reached the list meanwhile.
--
-- KEYS[1]  the queue's base
-- ARGV     processor, worker, its last position: turn number, index, running ('1' | '0'); whether the running job's
--          stall count grows ('1' | '0'), cause
-- Returns  {OK, length of its list before}; {NO_QUEUE}
-- States   active -> done (it ran), active -> waiting (returned, stalled), active -> cancelled (marked)
--@include base codes journal hints records schedule attempts blocked holdings graves

if not epoch then return { NO_QUEUE } end
local processor, worker, turn, index = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local running, count, cause = ARGV[5] == '1', ARGV[6] == '1', ARGV[7]
local length = redis.call('LLEN', worker_key(processor, worker, 'processing'))
remove_worker(processor, worker, turn, index, running, count, cause)
wake_idle_worker()
write_journal(worker)
return { OK, length }
