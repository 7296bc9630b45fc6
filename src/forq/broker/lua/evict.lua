#!lua flags=allow-oom
-- evict: a whole processor whose processes are proven gone (an earlier run of a supervisor) is taken out, some of its
-- workers per call: to be repeated until none is left.
--
-- KEYS[1]  the queue's base
-- ARGV     processor, cause
-- Returns  {OK, workers left, workers taken out, {the jobs that were running: id and fate (lib/fates.lua) each}}; {NO_QUEUE}
-- States   active -> done, waiting
--@include base codes journal hints limits limited records schedule attempts blocked progress waiters holdings done_jobs positions fates losses graves eviction

if not epoch then return { NO_QUEUE } end
local taken_out, left = evict(ARGV[1], ARGV[2])
wake_idle_worker()
write_journal(ARGV[1])
return { OK, left, taken_out, lost_jobs }
