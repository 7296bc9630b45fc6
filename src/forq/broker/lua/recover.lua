#!lua flags=allow-oom
-- recover: takes a worker that is gone out of the queue; nothing that it held is lost. Also how a worker leaves.
-- Safe to repeat: a later call finds nothing left, or what reached the list meanwhile.
--
-- KEYS[1]  the queue's base
-- ARGV     processor, worker, its last position: turn number, index, running ('1' | '0'); what that means for the
--          running job ('stalled' | 'timed_out' | 'interrupted' | 'suspect' | 'cancelled'), cause,
--          micros it ran ('' = unknown), stack as JSON ('' = none), the most memory it was seen with ('' = unknown)
-- Returns  {OK, length of its list before}, then of the job that was running, if it goes back: its id and its fate (lib/fates.lua);
--          {NO_QUEUE}
-- States   active -> done (it ran), active -> waiting (returned, stalled, timed out, suspected), active -> cancelled
--@include base codes journal hints limits limited records schedule attempts blocked progress waiters holdings done_jobs positions fates losses graves

if not epoch then return { NO_QUEUE } end
local processor, worker, turn, index = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local lost = { outcome = ARGV[6], cause = ARGV[7], micros = ARGV[8], stack = ARGV[9] ~= '' and ARGV[9], peak = tonumber(ARGV[10]) }
local length = redis.call('LLEN', worker_key(processor, worker, 'processing'))
remove_worker(processor, worker, turn, index, ARGV[5] == '1', lost)
wake_idle_worker()
write_journal(worker)
if not lost.counted then return { OK, length } end
return { OK, length, lost.id, unpack(fate_of_lost(lost)) }
