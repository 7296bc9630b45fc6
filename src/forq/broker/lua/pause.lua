#!lua flags=allow-oom
-- pause: no job of the queue is begun until it is resumed; what runs goes on. resume wakes every worker.
--
-- KEYS[1]  the queue's base
-- ARGV     '1' to pause, '0' to resume
-- Returns  {OK}; {NO_QUEUE}
--@include base codes journal hints awaiters ringing

if not epoch then return { NO_QUEUE } end
local was_paused = paused
paused = ARGV[1] == '1'
if paused == was_paused then return { OK } end
redis.call('HSET', key('options'), 'paused', ARGV[1])
if not paused then
  for _, processor in ipairs(redis.call('ZRANGE', key('processors'), 0, -1)) do
    for _, worker in ipairs(redis.call('HKEYS', workers_key(processor))) do
      redis.call('RPUSH', worker_key(processor, worker, 'wake'), '')
      redis.call('EXPIRE', worker_key(processor, worker, 'wake'), 60)
    end
  end
  wake_idle_worker()
  if on_request then ring_all() end
end
note(paused and 'paused 0' or 'resumed 0')
write_journal('-')
return { OK }
