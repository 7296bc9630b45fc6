#!lua flags=allow-oom
-- revive: dead jobs wait again, each at the end of its priority's line, with all counts 0.
--
-- KEYS[1]  the queue's base
-- ARGV     id@fence, id@fence ...
-- Returns  {OK, per member: 1 revived | 0 not there | EXISTS a live job has its id | FULL | BROKEN ...}, shorter than what
--          was asked when enough has been moved for one call; {NO_QUEUE}
-- States   dead -> waiting
--@include base codes journal hints records awaiters ringing timers item_ages

if not epoch then return { NO_QUEUE } end
local max_items = option('max_items')

-- Priority and body of HEAD '\n' BODY '\n' ERROR ['\n' ATTEMPTS]; error is an object, attempts a list (dead.py).
local function read_dead(packed)
  local priority, rest = string.match(packed, '^.(%d) %d+[^\n]*\n(.*)$')
  if not priority then return nil end
  local before = string.match(rest, '^(.*)\n%[[^\n]*$') or rest
  return priority, string.match(before, '^(.*)\n{[^\n]*$')
end

local function revive(member, packed)
  if not packed then
    redis.call('ZREM', key('dead'), member)
    return 0
  end
  local id, fence = string.match(member, '^(.+)@(%d+)$')
  local priority, body = read_dead(packed)
  if not id or not body then return BROKEN end
  if redis.call('HEXISTS', key('jobs'), id) == 1 then return EXISTS end
  if max_items > 0 and redis.call('HLEN', key('jobs')) + redis.call('HLEN', key('blocked')) >= max_items then
    return FULL
  end
  redis.call('HSET', key('jobs'), id, 'p' .. priority .. string.format(' %.0f\n', now_ms) .. body)
  note_size(#body, base)
  push_back(priority, { id })
  if mode ~= 'work' then set_expiry(id, 0) end
  redis.call('HDEL', key('dead:jobs'), member)
  redis.call('ZREM', key('dead'), member)
  note('revived ' .. fence .. ' ' .. id)
  return 1
end

local reply, moved = { OK }, 0
for i, member in ipairs(ARGV) do
  if moved > READ_BYTES then break end
  local packed = redis.call('HGET', key('dead:jobs'), member)
  moved = moved + (packed and #packed or 0)
  reply[i + 1] = revive(member, packed)
end
wake_idle_worker()
write_journal('-')
return reply
