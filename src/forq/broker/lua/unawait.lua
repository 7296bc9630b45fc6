#!lua flags=allow-oom
-- unawait: an awaiter leaves; what it was handed and has not acknowledged goes back to the front. A worker of a queue of mode
-- external leaves with its bridge, unless it has spoken to another one since; what it has accepted stays with it.
--
-- KEYS[1]  the queue's base
-- ARGV     awaiter, the bridge ('': it is no worker)
-- Returns  {OK, 1 an item went back | 0}; {NO_QUEUE}
-- States   active -> waiting (returned)
--@include base codes journal hints limits limited records schedule attempts awaiters ringing timers item_ages blocked progress waiters holdings losses fences bury_job hands handing

if not epoch then return { NO_QUEUE } end
local awaiter, bridge = ARGV[1], ARGV[2]
local id, _, told = in_hand(awaiter)
local known = read_awaiter(awaiter)
if mode == 'external' then
  -- What it has accepted names no bridge.
  if (told or known and known.via) ~= bridge then return { OK, 0 } end
  redis.call('ZREM', key('workers'), awaiter)
end
local owner = id and redis.call('HGET', key('active'), id)
local held = is_owner(awaiter, owner)
-- It may have been rung for an item that others await too.
if known and redis.call('HEXISTS', key('jobs'), known.id) == 1 then note_ready({ known.id }) end
forget_awaiter(awaiter)
if held then
  take_back(awaiter, owner, id, '-')
  local expires = redis.call('ZSCORE', key('expiries'), id)
  -- It was too old before (expiring.lua): it need not wait until its lease would have lapsed.
  if expires and tonumber(expires) % 1 > 0 then set_timer('expiries', id, now_ms) end
end
-- An acknowledgement may still be repeated.
if string.sub(redis.call('LINDEX', hand_key(awaiter), 0) or '', 1, 6) ~= 'acked ' then redis.call('UNLINK', hand_key(awaiter)) end
wake_idle_worker()
write_journal(awaiter)
return { OK, held and 1 or 0 }
