#!lua flags=allow-oom
-- forget: lines that are on disk leave the list they were read from. Only if they are still at its head: repeating it,
-- or doing it after somebody else did, changes nothing. A deleted queue's lines are forgotten too.
--
-- KEYS[1]  the queue's base
-- ARGV     the list ('outbox:P' or 'trash:EPOCH:outbox'), how many lines, the SHA-1 of all of them, joined by newlines
-- Returns  {OK, 1 forgotten | 0 they are not there}
--@include base codes

local list, count = key(ARGV[1]), tonumber(ARGV[2])
local lines = redis.call('LRANGE', list, 0, count - 1)
if #lines < count or redis.sha1hex(table.concat(lines, '\n')) ~= ARGV[3] then return { OK, 0 } end
redis.call('LTRIM', list, count, -1)
return { OK, 1 }
