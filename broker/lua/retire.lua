#!lua flags=allow-oom
-- retire: marks a queue that has been deleted, so that its name is not used again before its jobs are logged; and
-- remembers the name for those who read its journal, which outlives it. Or takes the mark back.
--
-- KEYS[1]  the registry
-- ARGV     name, the mark ('deleting') or the mode of the queue that has the name again
-- Returns  {OK, 1 marked | 0 it is not in the registry}
--@include codes

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return { OK, 0 } end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[2] == 'deleting' then
  -- A day more than delete.lua keeps a journal.
  local KEPT_MS = 8 * 24 * 3600 * 1000
  local deleted = KEYS[1] .. ':deleted'
  local now_ms = tonumber(redis.call('TIME')[1]) * 1000
  redis.call('ZADD', deleted, string.format('%.0f', now_ms), ARGV[1])
  redis.call('ZREMRANGEBYSCORE', deleted, '-inf', string.format('%.0f', now_ms - KEPT_MS))
  redis.call('PEXPIRE', deleted, string.format('%.0f', KEPT_MS))
end
return { OK, 1 }
