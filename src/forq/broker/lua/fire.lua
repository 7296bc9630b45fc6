#!lua
-- fire: carries out what was planned for a tick of a schedule that is due: stores its jobs, counts, moves to the next
-- tick. Of any number of calls for one tick the first does it.
--
-- KEYS[1]  the queue's base
-- ARGV     KEY, the tick that was planned for (ms), the head it was planned by, the next tick (ms; '': never), how many
--          ticks are missed, then per tick that makes a job: tick (ms), identifier (JSON), share of the jitter (0 to 1)
-- Returns  {OK, 1 done | 0 it is another tick or definition by now, ms until promote is to be called}; {NO_QUEUE}
-- States   (new) -> waiting | scheduled
--@include base codes journal hints limits records schedule awaiters ringing timers item_ages ticks runs

if not epoch then return { NO_QUEUE } end
local name, planned_ms, planned_head = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local FIRST, WIDTH = 6, 3
local newest_ms = #ARGV < FIRST and planned_ms or tonumber(ARGV[#ARGV - WIDTH + 1])
local next_ms = redis.call('ZSCORE', key('schedules:next'), name)
local head, data = read_definition(redis.call('HGET', key('schedules'), name) or '')
if not next_ms or tonumber(next_ms) ~= planned_ms or head ~= planned_head or newest_ms > now_ms then
  return { OK, 0, next_timer_ms() }
end

local counted = redis.call('HGET', key('schedules:runs'), name) or '0 0 0 0'
local last_run_ms, runs, skipped, missed = string.match(counted, '^(%d+) (%d+) (%d+) (%d+)$')
runs, skipped, missed = tonumber(runs), tonumber(skipped), tonumber(missed) + tonumber(ARGV[5])

local policy = cjson.decode(string.match(head, '\n(.*)$'))
for at = FIRST, #ARGV, WIDTH do
  local tick, identifier, share = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local id = run_id(name, policy, tick)
  if is_unfinished(id) then
    skipped = skipped + 1
  elseif is_full() then
    missed = missed + 1
  else
    store_run(id, policy, identifier, data, tonumber(tick) + math.floor(policy.jitter_ms * share))
    runs, last_run_ms = runs + 1, tick
  end
end

redis.call('HSET', key('schedules:runs'), name, string.format('%s %.0f %.0f %.0f', last_run_ms, runs, skipped, missed))
if ARGV[4] == '' then
  redis.call('ZREM', key('schedules:next'), name)
else
  redis.call('ZADD', key('schedules:next'), ARGV[4], name)
end
wake_idle_worker()
write_journal('-')
return { OK, 1, next_timer_ms() }
