#!lua flags=allow-oom
-- retire: changes the entry of a queue in the registry, if it still is what the caller has seen. A queue that was deleted is
-- marked, so that its name is not used again before its jobs are logged; then its entry is removed, or the mark is taken back.
--
-- KEYS[1]  the registry
-- ARGV     name, the entry as it was seen, the entry as it is to be: 'deleting EPOCH', a mode, or '' (none)
-- Returns  {OK, 1 changed | 0 it is another one by now}
--@include codes

if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return { OK, 0 } end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
return { OK, 1 }
