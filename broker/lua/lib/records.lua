-- A record: FLAG PRIORITY ' ' ENQUEUED_MS [' ' RETRIES ' ' STALLS ' ' TIMEOUTS] '\n' BODY (record.py).
-- FLAG 'p' (plain): all counts are 0. FLAG 'c': the counts follow. Scripts never decode BODY.

local function priority_of(record)
  return string.sub(record, 2, 2)
end

local function count_stall(record)
  local priority, enqueued, retries, stalls, timeouts, body =
    string.match(record, '^.(%d) (%d+) ?(%d*) ?(%d*) ?(%d*)\n(.*)$')
  return string.format('c%s %s %d %d %d\n', priority, enqueued, tonumber(retries) or 0, (tonumber(stalls) or 0) + 1,
    tonumber(timeouts) or 0) .. body
end
