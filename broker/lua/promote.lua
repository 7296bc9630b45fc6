#!lua flags=allow-oom
-- promote: what is due becomes waiting; pulse calls it on time.
--
-- KEYS[1]  the queue's base
-- Returns  {OK, ms until the next scheduled job is due (-1: none)}; {NO_QUEUE}
-- States   scheduled -> waiting
--@include base codes journal hints records schedule

if not epoch then return { NO_QUEUE } end
promote()
wake_idle_worker()
write_journal('-')
local due = next_due_ms()
return { OK, due and math.max(0, due - now_ms) or -1 }
