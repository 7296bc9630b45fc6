#!lua flags=allow-oom
-- free: before the entry of a deleted queue leaves the registry: whoever is about to make a queue of this name, and has seen
-- that entry, has to begin again. The registry is in another slot of a cluster, so one script cannot do both.
--
-- KEYS[1]  the queue's base
-- Returns  {OK, ''}; {OK, its mode} if there is a queue of this name again
--@include base codes

local FREED_MS = 24 * 3600 * 1000
if epoch then return { OK, mode } end
redis.call('SET', key('freed'), string.format('%.0f', now_us), 'PX', FREED_MS)
return { OK, '' }
