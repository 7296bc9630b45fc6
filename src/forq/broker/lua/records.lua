-- A record: FLAG PRIORITY ' ' ENQUEUED_MS [' ' RETRIES ' ' STALLS ' ' TIMEOUTS ' ' LANE] '\n' BODY (record.py). FLAG
-- 'p' (plain): all counts are 0. FLAG 'd' (delayed): the same, but the job had a time ahead. FLAG 'c': the counts
-- follow. LANE: 0 in the main lane; the number of the attempt that the job is waiting for in the retry lane; -1 if it
-- is a suspect. Scripts never decode BODY.

local LANE_OF_SUSPECT = -1
-- The retry lane is a list like the others, for jobs that get a second chance once nothing else waits.
local RETRY_PLACE = 'r'
-- The suspects: jobs of which one may have killed its process. Each runs alone, the oldest first: they are in a zset,
-- by the time (ms) at which they were enqueued. Their hints never go stale: one that goes is taken out.
local SUSPECTS_PLACE = 's'

-- No call reads more than so many bytes of records, unless one alone is longer: the server does nothing else meanwhile.
local READ_BYTES = 4 * 1024 * 1024
-- The option `largest_record`: no record of the queue is longer, counts included. It is a power of two, from
-- SMALL_RECORD on, and an option since those are known without being read. So what is small need not be measured.
local SMALL_RECORD, HEAD_BYTES = 8192, 64

function records.is_full()
  local max_items = option('max_items')
  return max_items > 0 and redis.call('HLEN', key('jobs')) + redis.call('HLEN', key('blocked')) >= max_items
end

function records.largest()
  local largest = option('largest_record')
  -- Of a queue made by a release that did not note it.
  return largest > 0 and largest or math.max(SMALL_RECORD, option('max_data') + SMALL_RECORD)
end

-- How many records may be read at once, at most `wanted`, if `bytes` may be.
function records.readable(wanted, bytes)
  return math.min(wanted, math.floor(bytes / records.largest()))
end

-- A record with a body of so many bytes is about to be stored in the queue of `of`, this one or its fail queue.
function records.note_size(bytes, of)
  local size = SMALL_RECORD
  if bytes + HEAD_BYTES <= size then return end
  local known = tonumber(redis.call('HGET', of .. ':options', 'largest_record') or 0)
  if known == 0 or bytes + HEAD_BYTES <= known then return end
  while size < bytes + HEAD_BYTES do size = 2 * size end
  redis.call('HSET', of .. ':options', 'largest_record', string.format('%.0f', size))
  redis.call('HINCRBY', of .. ':options', 'version', 1)
end

-- An empty queue has small records only. For heartbeats: options that change with every job would have to be read with
-- every job.
function records.reset_largest()
  if records.largest() == SMALL_RECORD or redis.call('HLEN', key('jobs')) > 0 then return end
  redis.call('HSET', key('options'), 'largest_record', SMALL_RECORD)
  redis.call('HINCRBY', key('options'), 'version', 1)
end

-- The parts of a record; nil if it is broken.
function records.read(record)
  local priority, enqueued, retries, stalls, timeouts, lane, body =
    string.match(record, '^.(%d) (%d+) ?(%d*) ?(%d*) ?(%d*) ?(%-?%d*)\n(.*)$')
  if not body then return nil end
  return {
    priority = priority,
    enqueued_ms = enqueued,
    retries = tonumber(retries) or 0,
    stalls = tonumber(stalls) or 0,
    timeouts = tonumber(timeouts) or 0,
    lane = tonumber(lane) or 0,
    body = body,
    delayed = string.sub(record, 1, 1) == 'd',
  }
end

function records.write(job)
  if job.retries + job.stalls + job.timeouts == 0 and job.lane == 0 then
    return (job.delayed and 'd' or 'p') .. job.priority .. ' ' .. job.enqueued_ms .. '\n' .. job.body
  end
  return string.format('c%s %s %d %d %d %d\n', job.priority, job.enqueued_ms, job.retries, job.stalls, job.timeouts,
    job.lane) .. job.body
end

function records.reset_counts(job)
  job.retries, job.stalls, job.timeouts, job.lane = 0, 0, 0, 0
end

-- The list that a waiting job's hint is in: that of its priority, the retry lane, or that of the suspects.
function records.place_for(job)
  if job.lane == 0 then return job.priority end
  return job.lane > 0 and RETRY_PLACE or SUSPECTS_PLACE
end

-- The same, of a packed record; nil if that is broken: then nobody can say where its hint is.
function records.place_of(record)
  if string.sub(record, 1, 1) == 'p' then return string.match(record, '^.(%d) ') end
  local job = records.read(record)
  return job and records.place_for(job)
end

-- The last attempts at a job that did not succeed: `attempts`, id -> JSON objects, one per line, the oldest first.

local ATTEMPTS_KEPT = 10

-- How many attempts are counted.
function attempts.count(job)
  return job.retries + job.stalls + job.timeouts
end

-- The number of the attempt at a job that begins now.
function attempts.number(job)
  return job and attempts.count(job) + 1 or 1
end

-- `micros`: how long it took, if that is known. `error` and `stack` are JSON; without a stack, or a `peak`
-- (the bytes of memory it was seen with), the entry has none.
function attempts.add(id, outcome, cause, micros, error, stack, peak)
  local lines = {}
  for line in string.gmatch(redis.call('HGET', key('attempts'), id) or '', '[^\n]+') do lines[#lines + 1] = line end
  local started = tonumber(micros) and string.format('%.3f', (now_ms - tonumber(micros) / 1000) / 1000) or 'null'
  lines[#lines + 1] = string.format(
    '{"started_at":%s,"ended_at":%.3f,"outcome":"%s","cause":"%s","error":%s%s%s}',
    started, now_ms / 1000, outcome, cause, error or 'null', stack and ',"stack":' .. stack or '',
    peak and string.format(',"peak_memory":%.0f', peak) or '')
  local first = math.max(1, #lines - ATTEMPTS_KEPT + 1)
  redis.call('HSET', key('attempts'), id, table.concat(lines, '\n', first))
end

function attempts.delete(ids)
  if #ids > 0 and redis.call('EXISTS', key('attempts')) == 1 then redis.call('HDEL', key('attempts'), unpack(ids)) end
end
