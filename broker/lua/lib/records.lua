-- A record: FLAG PRIORITY ' ' ENQUEUED_MS [' ' RETRIES ' ' STALLS ' ' TIMEOUTS ' ' LANE] '\n' BODY (record.py).
-- FLAG 'p' (plain): all counts are 0. FLAG 'c': the counts follow. LANE: 0 in the main lane, else the number of the
-- attempt that the job is waiting for in the retry lane. Scripts never decode BODY.

-- nil if the record is broken: then nobody can say in which list its hint is.
local function priority_of(record)
  return string.match(record, '^.(%d) ')
end

-- The parts of a record; nil if it is broken.
local function read_record(record)
  local priority, enqueued, retries, stalls, timeouts, lane, body =
    string.match(record, '^.(%d) (%d+) ?(%d*) ?(%d*) ?(%d*) ?(%d*)\n(.*)$')
  if not body then return nil end
  return {
    priority = priority,
    enqueued_ms = enqueued,
    retries = tonumber(retries) or 0,
    stalls = tonumber(stalls) or 0,
    timeouts = tonumber(timeouts) or 0,
    lane = tonumber(lane) or 0,
    body = body,
  }
end

local function write_record(job)
  if job.retries + job.stalls + job.timeouts + job.lane == 0 then
    return 'p' .. job.priority .. ' ' .. job.enqueued_ms .. '\n' .. job.body
  end
  return string.format('c%s %s %d %d %d %d\n', job.priority, job.enqueued_ms, job.retries, job.stalls, job.timeouts,
    job.lane) .. job.body
end

local function reset_counts(job)
  job.retries, job.stalls, job.timeouts, job.lane = 0, 0, 0, 0
end

-- The list that a waiting job's hint is in: that of its priority, or the retry lane. nil if the record is broken.
local function place_of(record)
  if string.sub(record, 1, 1) == 'p' then return priority_of(record) end
  local job = read_record(record)
  return job and (job.lane > 0 and LANE or job.priority)
end

-- A broken record stays as it is: whoever runs it finds out.
local function count_stall(record)
  local job = read_record(record)
  if not job then return record end
  job.stalls = job.stalls + 1
  return write_record(job)
end
