#!lua flags=allow-oom
-- set_schedule: stores a schedule, or changes it. The same rule keeps its next tick, the same definition changes nothing.
--
-- KEYS[1]  the queue's base
-- ARGV     protocol, KEY, definition, interval in ms ('' for a cron rule), first tick of a cron rule (ms)
-- Returns  {OK, 0 the same | 1 changed | 2 new, its next tick (ms)}; {NO_QUEUE}; {OTHER_PROTOCOL, its number};
--          {TOO_MANY_SCHEDULES, how many there are}; {TOO_LARGE, 1, max_data}
--@include base codes ticks

if not epoch then return { NO_QUEUE } end
if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end

local MAX_SCHEDULES = 1000
local name, definition, every_ms = ARGV[2], ARGV[3], tonumber(ARGV[4])
local before = redis.call('HGET', key('schedules'), name)
local next_ms = redis.call('ZSCORE', key('schedules:next'), name)
if before == definition and next_ms then return { OK, 0, tonumber(next_ms) } end
local count = redis.call('HLEN', key('schedules'))
if not before and count >= MAX_SCHEDULES then return { TOO_MANY_SCHEDULES, count } end
local _, data = read_definition(definition)
if #data > option('max_data') then return { TOO_LARGE, 1, option('max_data') } end

-- An interval is due when it never ran, or one interval after its last run.
local function first_tick()
  if not every_ms then return tonumber(ARGV[5]) end
  local last_run_ms = tonumber(string.match(redis.call('HGET', key('schedules:runs'), name) or '0', '^%d+'))
  return math.max(now_ms, last_run_ms == 0 and 0 or last_run_ms + every_ms)
end

local function rule_of(text)
  return string.match(text, '^[^\n]*')
end

redis.call('HSET', key('schedules'), name, definition)
if not (before and next_ms and rule_of(before) == rule_of(definition)) then
  next_ms = first_tick()
  redis.call('ZADD', key('schedules:next'), string.format('%.0f', next_ms), name)
  -- Pulse sets its timer by it if it has none that is earlier.
  redis.call('PUBLISH', channel('due'), string.format('%.0f', math.max(0, next_ms - now_ms)))
end
return { OK, before and 1 or 2, tonumber(next_ms) }
