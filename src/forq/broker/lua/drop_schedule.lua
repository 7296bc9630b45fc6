#!lua flags=allow-oom
-- drop_schedule: ends a schedule. The jobs that it has made stay.
--
-- KEYS[1]  the queue's base
-- ARGV     KEY, its definition ('': whatever it is)
-- Returns  {OK, 1 dropped | 0 there is none, or it is another}; {NO_QUEUE}
--@include base codes

if not epoch then return { NO_QUEUE } end
local name, expected = ARGV[1], ARGV[2]
if expected ~= '' and redis.call('HGET', key('schedules'), name) ~= expected then return { OK, 0 } end
local dropped = redis.call('HDEL', key('schedules'), name)
redis.call('ZREM', key('schedules:next'), name)
redis.call('HDEL', key('schedules:runs'), name)
return { OK, dropped }
