#!lua flags=allow-oom
-- promote: what is due becomes waiting; leases lapse, and items that are too old are given up, done jobs forgotten. It tells of ticks that are
-- due. Pulse calls it on time.
--
-- KEYS[1]  the queue's base
-- ARGV     schedules that the caller cannot fire
-- Returns  {OK, ms until it is to be called again (-1: nothing has a time), now (ms), then KEY, tick (ms) and head of each
--          other schedule that is due}; {NO_QUEUE}
-- States   scheduled -> waiting; active -> waiting (its lease lapsed, also stalled); waiting, retry -> dead (item_timeout)
--@include base codes journal hints limits limited forget_hint records schedule attempts awaiters ringing timers item_ages blocked progress waiters holdings done_jobs forgetting losses fences bury_job hands handing expiring ticks

if not epoch then return { NO_QUEUE } end
lapse()
expire()
promote()
wake_unlimited()
forget_done_in_time(FORGOTTEN_DONE_PER_CALL)
wake_idle_worker()
write_journal('-')
return tell_due_ticks({ OK, next_timer_ms(true), now_ms }, ARGV)
