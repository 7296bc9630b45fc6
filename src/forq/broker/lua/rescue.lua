#!lua flags=allow-oom
-- rescue: a worker is held up by one job of its batch. What it ran before is settled, what it has not started goes
-- back to be run elsewhere; only the running job stays with it, and in a queue that keeps results what it ran.
-- Or the worker has not begun what its last turn gave it, since its process does not answer: then all of it goes back.
--
-- KEYS[1]  the queue's base
-- ARGV     processor, worker, its position: turn number, index of the running job, running ('1' | '0': it has begun nothing)
-- Returns  {OK, how many jobs went back}; {OK, 0} if the worker has moved on; {NO_QUEUE}
-- States   active -> done, active -> waiting (returned)
--@include base codes journal hints limits limited records schedule attempts blocked progress waiters holdings done_jobs positions

if not epoch then return { NO_QUEUE } end
local processor, worker, turn, index = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local at = position(processor, worker, turn, index)
if not at then return { OK, 0 } end
local processing = worker_key(processor, worker, 'processing')
local list = redis.call('LRANGE', processing, 0, -1)
local begun_nothing = ARGV[5] == '0'
if begun_nothing and at ~= 0 then return { OK, 0 } end
local ran, unstarted = {}, begun_nothing and list or {}
for i, id in ipairs(begun_nothing and {} or list) do
  if i <= at then ran[#ran + 1] = id elseif i > at + 1 then unstarted[#unstarted + 1] = id end
end
local current = list[at + 1]
if #unstarted == 0 or not current then return { OK, 0 } end

if begun_nothing then
  hand_back(worker, unstarted)
  redis.call('UNLINK', processing)
elseif option('keep_done_ms') > 0 then
  -- Only the worker has the results of what it ran: that stays with it, in its place, until it takes its turn.
  local kept = { [current] = true }
  for _, id in ipairs(ran) do kept[id] = true end
  hand_back(worker, unstarted, nil, kept)
  redis.call('LTRIM', processing, 0, at)
else
  local others = settle_ran(worker, ran)
  for _, id in ipairs(unstarted) do others[#others + 1] = id end
  hand_back(worker, others, nil, { [current] = true })
  redis.call('DEL', processing)
  redis.call('RPUSH', processing, current)
  redis.call('HSET', workers_key(processor), worker, turn .. ':' .. ARGV[4])
end
wake_idle_worker()
write_journal(worker)
return { OK, #unstarted }
