#!lua flags=allow-oom
-- delete: ends the queue in one step, whatever its size. Every later call with its epoch is refused; the records
-- and unwritten lines are kept as trash until they have been written to the failed log (purge).
--
-- KEYS[1]  the queue's base
-- ARGV     epoch (a call that arrives late must not delete the next queue of this name; of a fail queue '': it goes if its queue
--          is gone), whether jobs may be dropped ('1' | '0')
-- Returns  {OK, jobs dropped}; {NOT_EMPTY, how many}; {NO_QUEUE}, also if its epoch is another one
-- States   every state -> gone
--@include base codes journal hints awaiters ringing waiters

if not epoch or not parent and epoch ~= ARGV[1] then return { NO_QUEUE } end
if parent and redis.call('EXISTS', parent .. ':options') == 1 then return { OK, 0 } end
local jobs = redis.call('HLEN', key('jobs')) + redis.call('HLEN', key('blocked')) + redis.call('ZCARD', key('dead'))
  + redis.call('HLEN', base .. ':fail:jobs')
if jobs > 0 and ARGV[2] ~= '1' then return { NOT_EMPTY, jobs } end

-- The name may be used again at once, and a worker of the old queue may still be served by a BLMOVE on the new one's
-- list: the old workers stay in `graves`, which outlives the queue.
local GRAVE_MS, WORKER_GRAVE_MS = 24 * 3600 * 1000, 3600 * 1000
local processors = redis.call('ZRANGE', key('processors'), 0, -1)
for _, half_evicted in ipairs(redis.call('HKEYS', key('evicting'))) do processors[#processors + 1] = half_evicted end
for _, processor in ipairs(processors) do
  for _, worker in ipairs(redis.call('HKEYS', workers_key(processor))) do
    redis.call('UNLINK', worker_key(processor, worker, 'processing'), worker_key(processor, worker, 'wake'))
    redis.call('ZADD', key('graves'), now_ms + WORKER_GRAVE_MS, processor .. ' ' .. worker)
  end
  while redis.call('LMOVE', key_of('outbox', processor), key('outbox'), 'RIGHT', 'LEFT') do end
  redis.call('UNLINK', workers_key(processor), key_of('processor', processor .. ':positions'))
end
redis.call('PEXPIRE', key('graves'), GRAVE_MS)

-- What is blocked is a job too; its id is that of an active one, so that it gets a name of its own in the trash.
for _, id in ipairs(redis.call('HKEYS', key('blocked'))) do
  local entry = redis.call('HGET', key('blocked'), id)
  local priority, body = string.match(entry, '^%d %d (%d) [^\n]*\n(.*)$')
  if body then
    redis.call('HSET', key('jobs'), id .. ' blocked', string.format('p%s %.0f\n', priority, now_ms) .. body)
  end
end
-- The jobs of a fail queue are copies of what is in the failed log already.
if not parent then redis.call('SADD', key('trash'), epoch) end
-- Tells other supervisors of this queue that it was deleted, and not lost with the server's data.
redis.call('SET', key('deleted'), epoch, 'PX', GRAVE_MS)
for _, kept in ipairs({ 'jobs', 'dead:jobs', 'outbox' }) do
  if parent then
    redis.call('UNLINK', key(kept))
  elseif redis.call('EXISTS', key(kept)) == 1 then
    redis.call('RENAME', key(kept), key_of('trash', epoch .. ':' .. kept))
  end
end
-- The journal is there to be read for a while, and the next queue of this name goes on in it: how large it is stays known.
local JOURNAL_MS = 7 * 24 * 3600 * 1000
note('deleted 0 ' .. jobs)
-- They ask again, and hear that it is gone.
if mode ~= 'work' then ring_all() end
for _, id in ipairs(redis.call('HKEYS', key('waiters'))) do tell_waiters({ id }, 'deleted') end
write_journal('-')
local journal_bytes = redis.call('HGET', key('counts'), 'journal_bytes')
redis.call('PEXPIRE', key('events'), JOURNAL_MS)
redis.call('PEXPIRE', key('journal:watermarks'), JOURNAL_MS)
for priority = 0, 9 do redis.call('UNLINK', pending_key(tostring(priority)), swept_key(tostring(priority))) end
redis.call('UNLINK', swept_key(LANE))
redis.call('UNLINK', key('awaiters'), key('awaiting'), key('leases'), key('expiries'), key('accepted'), key('workers'))
-- Done jobs need no line in the failed log: they have not failed.
redis.call('UNLINK', key('done'), key('done:jobs'), key('waiters'))
redis.call('UNLINK', key('schedules'), key('schedules:next'), key('schedules:runs'))
redis.call('UNLINK', key('active'), key('progress'), key('scheduled'), key('attempts'), key('blocked'), key('retry'),
  key('suspects'), key('stale'), key('evicting'), key('failed'), key('dead'), key('processors'), key('limited'), key('options'), key('counts'), key('processed:count'),
  key('failed:count'))
if redis.call('EXISTS', key('events')) == 1 then
  redis.call('HSET', key('counts'), 'journal_bytes', journal_bytes or 0)
  redis.call('PEXPIRE', key('counts'), JOURNAL_MS)
end
return { OK, jobs }
