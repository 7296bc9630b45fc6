#!lua flags=allow-oom
-- unawait: an awaiter leaves; what it was handed and has not acknowledged goes back to the front. A worker of a queue of mode
-- external leaves with its bridge, unless it has spoken to another one since; what it has accepted stays with it.
--
-- KEYS[1]  the queue's base
-- ARGV     awaiter, the bridge ('': it is no worker)
-- Returns  {OK, 1 an item went back | 0}; {NO_QUEUE}
-- States   active -> waiting (returned)
--@include base codes journal hints records schedule attempts awaiters ringing timers item_ages blocked holdings losses fences bury_job progress hands handing

if not epoch then return { NO_QUEUE } end
local awaiter, bridge = ARGV[1], ARGV[2]
local id, _, told = in_hand(awaiter)
if mode == 'external' then
  local known = read_awaiter(awaiter)
  -- What it has accepted names no bridge.
  if (told or known and known.via) ~= bridge then return { OK, 0 } end
  redis.call('ZREM', key('workers'), awaiter)
end
local owner = id and redis.call('HGET', key('active'), id)
local held = is_owner(awaiter, owner)
forget_awaiter(awaiter)
if held then take_back(awaiter, owner, id, '-') end
redis.call('UNLINK', hand_key(awaiter))
wake_idle_worker()
write_journal(awaiter)
return { OK, held and 1 or 0 }
