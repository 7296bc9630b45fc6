-- A record: FLAG PRIORITY ' ' ENQUEUED_MS [' ' RETRIES ' ' STALLS ' ' TIMEOUTS ' ' LANE] '\n' BODY (record.py).
-- FLAG 'p' (plain): all counts are 0. FLAG 'd' (delayed): the same, but the job had a time ahead. FLAG 'c': the counts
-- follow. LANE: 0 in the main lane; the number of the attempt that the job is waiting for in the retry lane; -1 if it is a
-- suspect. Scripts never decode BODY.

local SUSPECT = -1

-- The parts of a record; nil if it is broken.
local function read_record(record)
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

local function write_record(job)
  if job.retries + job.stalls + job.timeouts == 0 and job.lane == 0 then
    return (job.delayed and 'd' or 'p') .. job.priority .. ' ' .. job.enqueued_ms .. '\n' .. job.body
  end
  return string.format('c%s %s %d %d %d %d\n', job.priority, job.enqueued_ms, job.retries, job.stalls, job.timeouts,
    job.lane) .. job.body
end

local function reset_counts(job)
  job.retries, job.stalls, job.timeouts, job.lane = 0, 0, 0, 0
end

-- The list that a waiting job's hint is in: that of its priority, the retry lane, or that of the suspects.
local function place_for(job)
  if job.lane == 0 then return job.priority end
  return job.lane > 0 and LANE or SUSPECTS
end

-- The same, of a packed record; nil if that is broken: then nobody can say where its hint is.
local function place_of(record)
  if string.sub(record, 1, 1) == 'p' then return string.match(record, '^.(%d) ') end
  local job = read_record(record)
  return job and place_for(job)
end
