#!lua flags=allow-oom
-- remember: keeps the name of a deleted queue for those who read its journal, which outlives it. It is apart from retire, as
-- a script may only touch what is in one slot of a cluster.
--
-- KEYS[1]  the names of deleted queues
-- ARGV     name
-- Returns  {OK}
--@include codes

-- A day more than delete.lua keeps a journal.
local KEPT_MS = 8 * 24 * 3600 * 1000
local now_ms = tonumber(redis.call('TIME')[1]) * 1000
redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now_ms - KEPT_MS))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', KEPT_MS))
return { OK }
