#!lua flags=no-writes
-- counts: how many jobs are in which state, exactly and in one look, and how old the oldest waiting one is.
--
-- KEYS[1]  the queue's base
-- Returns  {OK, live jobs, active, dead, done in all, failed in all, in flight, time since when the oldest waiting job waits
--          (ms, 0 = none), now (ms), paused, mode, dropped, journal entries, journal bytes, journal entries trimmed,
--          scheduled, blocked, waiting in the retry lane, fail jobs, journal entries lost, epoch, sequence number and
--          hash of the last journal entry, awaiters, done jobs that are kept, ms until a job or a tick is due (-1: none has a
--          time), rate: count and ms (0: any), max_active (0: any), how many may begin now (-1: any number), workers that wait
--          for that, scheduled jobs that are due};
--          {NO_QUEUE}
--@include base codes records limits

if not epoch then return { NO_QUEUE } end

-- Hints looked at per list; more than that many stale ones at the head only hide the age.
local HEADS, LISTS = 16, 12

local in_flight = 0
local processors = redis.call('ZRANGE', key('processors'), 0, -1)
for _, half_evicted in ipairs(redis.call('HKEYS', key('evicting'))) do processors[#processors + 1] = half_evicted end
for _, processor in ipairs(processors) do
  for _, worker in ipairs(redis.call('HKEYS', workers_key(processor))) do
    in_flight = in_flight + redis.call('LLEN', worker_key(processor, worker, 'processing'))
  end
end

-- Of long records only the first ones.
local function records_of(hints)
  local records, bytes, most = {}, 0, READ_BYTES / LISTS
  if readable(#hints, most) == #hints then return redis.call('HMGET', key('jobs'), unpack(hints)) end
  for i, id in ipairs(hints) do
    records[i] = bytes < most and redis.call('HGET', key('jobs'), id)
    bytes = bytes + (records[i] and #records[i] or 0)
  end
  return records
end

local swept_hints = tonumber(redis.call('HGET', key('stale'), 'swept') or 0)

-- The earliest time at which one of the first jobs of a list was enqueued; nil if none of them waits. Not that of the first
-- alone: what comes back goes to the front, whatever its age. A hint that a claim would skip does not count.
local function oldest_enqueued_ms(place)
  local first, list = 'LRANGE', place ~= 's' and pending_key(place)
  if not list then first, list = 'ZRANGE', key('suspects') end
  local hints = swept_hints > 0 and redis.call('LRANGE', list .. ':swept', 0, HEADS - 1) or {}
  if #hints == 0 then hints = redis.call(first, list, 0, HEADS - 1) end
  if #hints == 0 then return nil end
  local fields, stale, oldest_ms = {}, {}, nil
  for i, id in ipairs(hints) do fields[i] = place .. ':' .. id end
  local counted_stale = redis.call('HMGET', key('stale'), unpack(fields))
  local owners = redis.call('HMGET', key('active'), unpack(hints))
  for i, record in ipairs(records_of(hints)) do
    local id = hints[i]
    stale[id] = stale[id] or tonumber(counted_stale[i] or 0)
    local enqueued_ms = record and tonumber(string.match(record, '^.%d (%d+)'))
    if stale[id] > 0 then
      stale[id] = stale[id] - 1
    elseif enqueued_ms and not owners[i] and (not oldest_ms or enqueued_ms < oldest_ms) then
      oldest_ms = enqueued_ms
    end
  end
  return oldest_ms
end

local counted = redis.call('HMGET', key('counts'), 'dropped', 'journal_bytes', 'journal_trimmed', 'journal_lost',
  'journal_sequence', 'journal_hash', 'lane', 'idle_until_ms')

local scheduled_ms = tonumber(redis.call('ZRANGE', key('scheduled'), 0, 0, 'WITHSCORES')[2])
local tick_ms = tonumber(redis.call('ZRANGE', key('schedules:next'), 0, 0, 'WITHSCORES')[2])
local due_ms = math.min(scheduled_ms or math.huge, tick_ms or math.huge)

-- Every kind of waiting: each priority, the suspects, the retry lane, and what is due and was not promoted yet.
-- A job that had a time ahead did not wait before that.
local oldest = math.huge
for place in string.gmatch('0123456789sr', '.') do oldest = math.min(oldest, oldest_enqueued_ms(place) or math.huge) end
oldest = math.max(oldest, math.min(now_ms, tonumber(counted[8] or 0)))
if scheduled_ms and scheduled_ms <= now_ms then oldest = math.min(oldest, math.floor(scheduled_ms)) end

return {
  OK,
  redis.call('HLEN', key('jobs')),
  redis.call('HLEN', key('active')),
  redis.call('ZCARD', key('dead')),
  tonumber(redis.call('GET', key('processed:count')) or 0),
  tonumber(redis.call('GET', key('failed:count')) or 0),
  in_flight,
  oldest < math.huge and oldest or 0,
  now_ms,
  paused and 1 or 0,
  mode or false,
  tonumber(counted[1] or 0),
  redis.call('XLEN', key('events')),
  tonumber(counted[2] or 0),
  tonumber(counted[3] or 0),
  redis.call('ZCARD', key('scheduled')),
  redis.call('HLEN', key('blocked')),
  tonumber(counted[7] or 0),
  redis.call('HLEN', base .. ':fail:jobs'),
  tonumber(counted[4] or 0),
  tonumber(epoch),
  tonumber(counted[5] or 0),
  counted[6] or '',
  redis.call('HLEN', key('awaiters')),
  redis.call('ZCARD', key('done')),
  due_ms < math.huge and math.max(0, math.floor(due_ms) - now_ms) or -1,
  rate_count,
  option('rate_ms'),
  max_active,
  has_limits and room() or -1,
  redis.call('ZCARD', key('limited')),
  redis.call('ZCOUNT', key('scheduled'), '-inf', string.format('%.0f', now_ms)),
}
