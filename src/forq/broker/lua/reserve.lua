#!lua flags=allow-oom
-- reserve: enters a queue in the registry, within the limit; one that is there is joined.
--
-- KEYS[1]  the registry
-- ARGV     name, mode, max_queues
-- Returns  {OK}; {TOO_MANY}; {OTHER_MODE, its mode}; {DELETING} while an earlier queue of that name is taken away
--@include codes

local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and string.sub(entry, 1, 8) == 'deleting' then return { DELETING } end
if entry and entry ~= ARGV[2] then return { OTHER_MODE, entry } end
if entry then return { OK } end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return { TOO_MANY } end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return { OK }
