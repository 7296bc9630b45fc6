#!lua flags=allow-oom
-- configure: sets options of a queue that exists; they apply from the next call on, whatever is waiting.
--
-- KEYS[1]  the queue's base
-- ARGV     (name, value) per option
-- Returns  {OK, version of the options}; {NO_QUEUE}
--@include base codes

if not epoch then return { NO_QUEUE } end
for at = 1, #ARGV, 2 do redis.call('HSET', key('options'), ARGV[at], ARGV[at + 1]) end
if not journal_on and redis.call('HGET', key('options'), 'journal') == '1' then
  -- Nobody wrote down what happened meanwhile: a number is left out.
  redis.call('HINCRBY', key('counts'), 'journal_sequence', 1)
end
-- Who is held up by the limits that were is told by promote.
if rate_count > 0 or max_active > 0 then redis.call('PUBLISH', channel('due'), '0') end
return { OK, redis.call('HINCRBY', key('options'), 'version', 1) }
