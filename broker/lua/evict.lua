#!lua flags=allow-oom
-- evict: a whole processor whose processes are proven gone (an earlier run of a supervisor) is taken out at once.
--
-- KEYS[1]  the queue's base
-- ARGV     processor, cause
-- Returns  {OK, how many workers it had}; {NO_QUEUE}
-- States   active -> done, waiting
--@include base codes journal hints records schedule attempts blocked holdings graves eviction

if not epoch then return { NO_QUEUE } end
local workers = redis.call('HLEN', workers_key(ARGV[1]))
evict(ARGV[1], ARGV[2])
wake_idle_worker()
write_journal(ARGV[1])
return { OK, workers }
