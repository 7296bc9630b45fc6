-- The last attempts at a job that did not succeed: `attempts`, id -> JSON objects, one per line, the oldest first.

local ATTEMPTS_KEPT = 10

-- `micros`: how long it took, if that is known. `error` and `stack` are JSON; without a stack, or a `peak`
-- (the bytes of memory it was seen with), the entry has none.
local function add_attempt(id, outcome, cause, micros, error, stack, peak)
  local lines = {}
  for line in string.gmatch(redis.call('HGET', key('attempts'), id) or '', '[^\n]+') do lines[#lines + 1] = line end
  local started = tonumber(micros) and string.format('%.3f', (now_ms - tonumber(micros) / 1000) / 1000) or 'null'
  lines[#lines + 1] = string.format('{"started_at":%s,"ended_at":%.3f,"outcome":"%s","cause":"%s","error":%s%s%s}', started,
    now_ms / 1000, outcome, cause, error or 'null', stack and ',"stack":' .. stack or '',
    peak and string.format(',"peak_memory":%.0f', peak) or '')
  local first = math.max(1, #lines - ATTEMPTS_KEPT + 1)
  redis.call('HSET', key('attempts'), id, table.concat(lines, '\n', first))
end

local function forget_attempts(ids)
  if #ids > 0 and redis.call('EXISTS', key('attempts')) == 1 then redis.call('HDEL', key('attempts'), unpack(ids)) end
end
