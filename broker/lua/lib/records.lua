-- A record: FLAG PRIORITY ' ' ENQUEUED_MS [' ' RETRIES ' ' STALLS ' ' TIMEOUTS] '\n' BODY (record.py).
-- FLAG 'p' (plain): all counts are 0. FLAG 'c': the counts follow. Scripts never decode BODY.

-- nil if the record is broken: then nobody can say in which list its hint is.
local function priority_of(record)
  return string.match(record, '^.(%d) ')
end

-- The parts of a record; nil if it is broken.
local function read_record(record)
  local priority, enqueued, retries, stalls, timeouts, body =
    string.match(record, '^.(%d) (%d+) ?(%d*) ?(%d*) ?(%d*)\n(.*)$')
  if not body then return nil end
  return {
    priority = priority,
    enqueued_ms = enqueued,
    retries = tonumber(retries) or 0,
    stalls = tonumber(stalls) or 0,
    timeouts = tonumber(timeouts) or 0,
    body = body,
  }
end

local function write_record(job)
  if job.retries + job.stalls + job.timeouts == 0 then
    return 'p' .. job.priority .. ' ' .. job.enqueued_ms .. '\n' .. job.body
  end
  return string.format('c%s %s %d %d %d\n', job.priority, job.enqueued_ms, job.retries, job.stalls, job.timeouts)
    .. job.body
end

-- A broken record stays as it is: whoever runs it finds out.
local function count_stall(record)
  local job = read_record(record)
  if not job then return record end
  job.stalls = job.stalls + 1
  return write_record(job)
end
