-- A record: FLAG PRIORITY ' ' ENQUEUED_US [' ' RETRIES ' ' STALLS ' ' TIMEOUTS ' ' LANE [' ' SNOOZES ' ' OPTIONS]] '\n'
-- BODY (record.py).
--   FLAG         'p' (plain): all counts are 0; 'd' (delayed): the same, and the job was scheduled or blocked, so that
--                its age is not its waiting time; 'c': counts follow; 'o': counts and options follow; 'O': the same,
--                delayed
--   ENQUEUED_US  identifies the job among all jobs with its id: it never changes, and no other one has it. Between two
--                enqueues the first job must end, by a call of its own, which takes longer than 1 µs. A clock that was
--                set back can repeat a time only if a call falls into the same µs.
--   LANE         0: main lane; above 0: number of the next attempt in the retry lane; -1: suspect
--   OPTIONS      the job's own options as one word ('-': none), such as 't=30000,r=5' (job_options.py)
-- Scripts never decode BODY.

local LANE_OF_SUSPECT = -1
-- A place is where a job's hint waits: the list of its priority ('0' to '9'), the retry lane or the suspects. The retry
-- lane is a list for jobs that are retried only while no other job waits.
local RETRY_PLACE = 'r'
-- Suspects are jobs whose process crashed while several jobs ran. Each is retried alone, oldest first: they are in a
-- zset by enqueue time (ms). Their hints never become stale, since they can be removed.
local SUSPECTS_PLACE = 's'

-- Limit of record bytes read per call (a single longer record is still read): the server is blocked meanwhile.
local READ_BYTES = 4 * 1024 * 1024
-- The option `largest_record` is an upper limit for the length of any record of the queue, counts included. It is a
-- power of two, at least SMALL_RECORD. It is an option because options are cached: small records need no measuring.
local SMALL_RECORD, HEAD_BYTES = 8192, 8192 - SMALL_BODY

-- All that max_items counts.
function records.items()
  return redis.call('HLEN', key('jobs')) + redis.call('HLEN', key('blocked'))
    + (flows_on and redis.call('HLEN', key('held')) or 0)
end

function records.is_full()
  local max_items = option('max_items')
  return max_items > 0 and records.items() >= max_items
end

function records.largest()
  local largest = option('largest_record')
  -- The queue was created by a release without this option.
  return largest > 0 and largest or math.max(SMALL_RECORD, option('max_data') + SMALL_RECORD)
end

-- The number of records, at most `wanted`, that certainly fit into `bytes`.
function records.readable(wanted, bytes)
  return math.min(wanted, math.floor(bytes / records.largest()))
end

-- Call it before storing a body of this length. `of`: the base of this queue or of its fail queue.
function records.note_size(bytes, of)
  local size = SMALL_RECORD
  if bytes + HEAD_BYTES <= size then return end
  local known = tonumber(redis.call('HGET', of .. ':options', 'largest_record') or 0)
  if known == 0 or bytes + HEAD_BYTES <= known then return end
  while size < bytes + HEAD_BYTES do size = 2 * size end
  redis.call('HSET', of .. ':options', 'largest_record', string.format('%.0f', size))
  summary.next_version(of)
end

-- Resets the limit of an empty queue. Only heartbeats do it: changing options with every job would defeat the cache.
function records.reset_largest()
  if records.largest() == SMALL_RECORD or redis.call('HLEN', key('jobs')) > 0 then return end
  if flows_on and redis.call('EXISTS', key('held')) == 1 then return end
  redis.call('HSET', key('options'), 'largest_record', SMALL_RECORD)
  summary.next_version(base)
end

-- A job without counts. `enqueued_us`: text. `own_options`: packed, '' for none.
function records.new(priority, enqueued_us, run_at_ms, own_options, body)
  return {
    priority = priority,
    enqueued_us = enqueued_us,
    retries = 0,
    stalls = 0,
    timeouts = 0,
    lane = 0,
    snoozes = 0,
    options = own_options,
    body = body,
    delayed = run_at_ms > now_ms,
  }
end

-- Returns nil if the record is broken.
function records.read(record)
  local priority, enqueued, retries, stalls, timeouts, lane, snoozes, stored, body =
    string.match(record, '^.(%d) (%d+) ?(%d*) ?(%d*) ?(%d*) ?(%-?%d*) ?(%d*) ?(%S*)\n(.*)$')
  if not body then return nil end
  return {
    priority = priority,
    enqueued_us = enqueued,
    retries = tonumber(retries) or 0,
    stalls = tonumber(stalls) or 0,
    timeouts = tonumber(timeouts) or 0,
    lane = tonumber(lane) or 0,
    snoozes = tonumber(snoozes) or 0,
    options = stored == '-' and '' or stored,
    body = body,
    delayed = string.find(record, '^[dO]') ~= nil,
  }
end

function records.write(job)
  if job.options ~= '' or job.snoozes > 0 then
    local stored = job.options == '' and '-' or job.options
    return string.format('%s%s %s %d %d %d %d %d %s\n', job.delayed and 'O' or 'o', job.priority, job.enqueued_us,
      job.retries, job.stalls, job.timeouts, job.lane, job.snoozes, stored) .. job.body
  end
  if job.retries + job.stalls + job.timeouts == 0 and job.lane == 0 then
    return (job.delayed and 'd' or 'p') .. job.priority .. ' ' .. job.enqueued_us .. '\n' .. job.body
  end
  return string.format('c%s %s %d %d %d %d\n', job.priority, job.enqueued_us, job.retries, job.stalls, job.timeouts,
    job.lane) .. job.body
end

function records.reset_counts(job)
  job.retries, job.stalls, job.timeouts, job.lane, job.snoozes = 0, 0, 0, 0, 0
end

function records.place_for(job)
  if job.lane == 0 then return job.priority end
  return job.lane > 0 and RETRY_PLACE or SUSPECTS_PLACE
end

-- The place of a packed record; nil if the record is broken.
function records.place_of(record)
  if string.sub(record, 1, 1) == 'p' then return string.match(record, '^.(%d) ') end
  local job = records.read(record)
  return job and records.place_for(job)
end

-- The enqueue time in a packed record, as text; nil if the record is broken.
function records.enqueued_us_of(record)
  return string.match(record, '^.%d (%d+)')
end

-- The same in ms, as a number.
function records.enqueued_ms_of(record)
  return tonumber(string.match(record, '^.%d (%d+)%d%d%d'))
end

-- Whether a job is the one that is meant: '' (any), or FENCE ' ' ENQUEUED_US [' ' AHEAD_US] from the reply to its
-- enqueue. `fence`: of the last attempt of a job that has ended; nil: it is live.
function records.is_meant(meant, enqueued_us, fence)
  -- A broken record has no time.
  if meant == '' or not enqueued_us then return true end
  local least_fence, own_us, ahead_us = string.match(meant, '^(%d+) (%d+) ?(%d*)$')
  if enqueued_us == own_us then return true end
  -- The job that it was blocked behind took its changes if it returned, and then was claimed again.
  return enqueued_us == ahead_us and (not fence or tonumber(fence) > tonumber(least_fence))
end

-- The job's own options: OPTION '=' VALUE, separated by commas. Each option is one letter that no value contains, so a
-- plain search finds it.

-- The job's own options in a packed record; '' for none.
function records.options_of(record)
  return string.match(record, '^[oO][^\n]* (%S+)\n') or ''
end

-- A numeric option; nil if it is not set.
function records.own(stored, letter)
  local value = string.match(stored, letter .. '=(%d+)')
  return value and tonumber(value)
end

-- The delay before retry number `retry`, from 1; the last one repeats. nil if the job has none of its own.
function records.own_backoff_ms(stored, retry)
  local delays, delay, number = string.match(stored, 'b=([%d:]+)'), nil, 0
  for each in string.gmatch(delays or '', '%d+') do
    delay, number = each, number + 1
    if number == retry then break end
  end
  return delay and tonumber(delay)
end

-- Options as an enqueue gives them: 'x=' is followed by ms, which count from run_at, or else from now.
function records.start_expiry(given, run_at_ms)
  return (string.gsub(given, 'x=(%d+)', function(ms)
    return string.format('x=%.0f', math.max(now_ms, run_at_ms) + ms)
  end))
end

function records.drop_expiry(stored)
  return (string.gsub(string.gsub(stored, ',?x=%d+', ''), '^,', ''))
end

-- Notes the options of a job in the journal, after the event that set them. `changed`: even if there are none any more.
function records.note_options(id, stored, changed)
  if stored ~= '' then
    journal.note('options 0 ' .. id .. ' ' .. stored)
  elseif changed then
    journal.note('options 0 ' .. id .. ' -')
  end
end

-- The error (JSON) of a job that expired before it could start; nil if it has not expired.
function records.expired_error(job)
  local expires_ms = records.own(job.options, 'x')
  if not expires_ms or expires_ms > now_ms then return nil end
  return string.format('{"name":"Expired","message":"it expired %.3f seconds before a worker could start it",'
    .. '"kind":"expired","traceback":null}', (now_ms - expires_ms) / 1000)
end

-- The latest unsuccessful attempts at each job: `attempts`, id -> JSON objects, one per line, oldest first.

local ATTEMPTS_KEPT = 10

function attempts.count(job)
  return job.retries + job.stalls + job.timeouts
end

-- The number of the attempt that starts now.
function attempts.number(job)
  return job and attempts.count(job) + 1 or 1
end

-- `micros`: duration, if known. `error` and `stack` are JSON. `peak`: highest memory use seen, in bytes.
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
  may_be_rare = true
end

function attempts.delete(ids)
  if #ids > 0 and redis.call('EXISTS', key('attempts')) == 1 then redis.call('HDEL', key('attempts'), unpack(ids)) end
end
