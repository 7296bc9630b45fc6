#!lua flags=allow-oom
-- retire: marks a queue that has been deleted, so that its name is not used again before its jobs are logged. Or takes the
-- mark back.
--
-- KEYS[1]  the registry
-- ARGV     name, the mark ('deleting') or the mode of the queue that has the name again
-- Returns  {OK, 1 marked | 0 it is not in the registry}
--@include codes

if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return { OK, 0 } end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return { OK, 1 }
