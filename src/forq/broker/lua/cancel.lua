#!lua flags=allow-oom
-- cancel: takes a job away that waits, is scheduled or is blocked behind an active one. remove: the same; of a running job it only marks that it is to be forgotten:
-- the id stays taken until its owner settles or dies.
--
-- KEYS[1]  the queue's base
-- ARGV     id, whether to mark a running job ('1' | '0')
-- Returns  {OK, 1 taken away | 2 marked | 0 neither}; {NO_QUEUE}
-- States   waiting, scheduled, blocked -> cancelled
--@include base codes journal hints forget_hint records attempts waiters

if not epoch then return { NO_QUEUE } end
local id, mark_active = ARGV[1], ARGV[2] == '1'
local record = redis.call('HGET', key('jobs'), id)
if not record then return { OK, 0 } end

local owner = redis.call('HGET', key('active'), id)
if owner then
  local withdrawn = redis.call('HDEL', key('blocked'), id)
  if withdrawn == 1 then note('withdrawn 0 ' .. id) end
  if mark_active and not string.find(owner, ':removed', 1, true) then
    redis.call('HSET', key('active'), id, owner .. ':removed')
    note('marked ' .. string.match(owner, ':(%d+)') .. ' ' .. id)
  end
  write_journal('-')
  return { OK, mark_active and 2 or withdrawn }
end

redis.call('HDEL', key('jobs'), id)
if mode ~= 'work' then redis.call('ZREM', key('expiries'), id) end
forget_attempts({ id })
local place = place_of(record)
if redis.call('ZREM', key('scheduled'), id) == 0 and place then forget_hint(place, id) end
wake_idle_worker()
note_ids('cancelled', 0, { id })
tell_waiters({ id }, 'cancelled')
write_journal('-')
return { OK, 1 }
