#!lua flags=no-writes
-- counts: how many jobs are in which state, exactly and in one look, and how old the oldest waiting one is.
--
-- KEYS[1]  the queue's base
-- Returns  {OK, live jobs, active, dead, done in all, failed in all, in flight, oldest waiting job's enqueue time
--          (ms, 0 = none), now (ms), paused, mode, dropped, journal entries, journal bytes, journal entries trimmed,
--          scheduled, blocked, waiting in the retry lane, fail jobs, journal entries lost, epoch, sequence number and
--          hash of the last journal entry, awaiters, done jobs that are kept, ms until a job or a tick is due (-1: none has a
--          time), rate: count and ms (0: any), max_active (0: any), how many may begin now (-1: any number), workers that wait
--          for that};
--          {NO_QUEUE}
--@include base codes records limits

if not epoch then return { NO_QUEUE } end

local HEADS = 16  -- hints looked at per list; more than that many stale ones at the head only hide the age

local in_flight = 0
local processors = redis.call('ZRANGE', key('processors'), 0, -1)
for _, half_evicted in ipairs(redis.call('HKEYS', key('evicting'))) do processors[#processors + 1] = half_evicted end
for _, processor in ipairs(processors) do
  for _, worker in ipairs(redis.call('HKEYS', workers_key(processor))) do
    in_flight = in_flight + redis.call('LLEN', worker_key(processor, worker, 'processing'))
  end
end

local function head_enqueued_ms(place)
  local hints = redis.call('LRANGE', pending_key(place), 0, HEADS - 1)
  if #hints == 0 then return nil end
  for _, record in ipairs(redis.call('HMGET', key('jobs'), unpack(hints))) do
    local enqueued = record and string.match(record, '^.%d (%d+)')
    if enqueued then return tonumber(enqueued) end
  end
  return nil
end

local oldest = 0
for place in string.gmatch('0123456789s', '.') do
  local enqueued = head_enqueued_ms(place)
  if enqueued and (oldest == 0 or enqueued < oldest) then oldest = enqueued end
end

local due_ms
for _, name in ipairs({ 'scheduled', 'schedules:next' }) do
  local at_ms = tonumber(redis.call('ZRANGE', key(name), 0, 0, 'WITHSCORES')[2])
  if at_ms and (not due_ms or at_ms < due_ms) then due_ms = at_ms end
end

local counted = redis.call('HMGET', key('counts'), 'dropped', 'journal_bytes', 'journal_trimmed', 'journal_lost',
  'journal_sequence', 'journal_hash')
return {
  OK,
  redis.call('HLEN', key('jobs')),
  redis.call('HLEN', key('active')),
  redis.call('ZCARD', key('dead')),
  tonumber(redis.call('GET', key('processed:count')) or 0),
  tonumber(redis.call('GET', key('failed:count')) or 0),
  in_flight,
  oldest,
  now_ms,
  paused and 1 or 0,
  mode or false,
  tonumber(counted[1] or 0),
  redis.call('XLEN', key('events')),
  tonumber(counted[2] or 0),
  tonumber(counted[3] or 0),
  redis.call('ZCARD', key('scheduled')),
  redis.call('HLEN', key('blocked')),
  tonumber(redis.call('HGET', key('counts'), 'lane') or 0),
  redis.call('HLEN', base .. ':fail:jobs'),
  tonumber(counted[4] or 0),
  tonumber(epoch),
  tonumber(counted[5] or 0),
  counted[6] or '',
  redis.call('HLEN', key('awaiters')),
  redis.call('ZCARD', key('done')),
  due_ms and math.max(0, math.floor(due_ms) - now_ms) or -1,
  rate_count,
  option('rate_ms'),
  max_active,
  has_limits and room() or -1,
  redis.call('ZCARD', key('limited')),
}
