#!lua flags=allow-oom
-- discard: dead jobs are forgotten.
--
-- KEYS[1]  the queue's base
-- ARGV     id@fence, id@fence ...
-- Returns  {OK, per member: 1 discarded | 0 not there ...}; {NO_QUEUE}
-- States   dead -> discarded
--@include base codes journal

if not epoch then return { NO_QUEUE } end
local reply = { OK }
for i, member in ipairs(ARGV) do
  local gone = redis.call('HDEL', key('dead:jobs'), member) + redis.call('ZREM', key('dead'), member)
  local id, fence = string.match(member, '^(.+)@(%d+)$')
  if gone > 0 and id then note('discarded ' .. fence .. ' ' .. id) end
  reply[i + 1] = gone > 0 and 1 or 0
end
write_journal('-')
return reply
