-- A record: FLAG PRIORITY ' ' ENQUEUED_MS [' ' RETRIES ' ' STALLS ' ' TIMEOUTS] '\n' BODY (record.py).
-- FLAG 'p' (plain): all counts are 0. FLAG 'c': the counts follow. Scripts never decode BODY.

-- nil if the record is broken: then nobody can say in which list its hint is.
local function priority_of(record)
  return string.match(record, '^.(%d) ')
end

-- A broken record stays as it is: whoever runs it finds out.
local function count_stall(record)
  local priority, enqueued, retries, stalls, timeouts, body =
    string.match(record, '^.(%d) (%d+) ?(%d*) ?(%d*) ?(%d*)\n(.*)$')
  if not body then return record end
  return string.format('c%s %s %d %d %d\n', priority, enqueued, tonumber(retries) or 0, (tonumber(stalls) or 0) + 1,
    tonumber(timeouts) or 0) .. body
end
