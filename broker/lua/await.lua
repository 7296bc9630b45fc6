#!lua flags=allow-oom
-- await: somebody asks for an item, this one or any; to be repeated under the same name until it gets one. Of a queue of mode
-- on_request it takes what is there; else, or if nothing is there, it is registered for some time.
--
-- KEYS[1]  the queue's base
-- ARGV     awaiter, id ('' = any), the mode that it expects, the lease (ms; '' = the queue's), whether to wait ('1' | '0'),
--          the clerk that is to be told ('-': the awaiter blocks on its own list)
-- Returns  {OK, for how long it is registered (ms; 0: ask again at once), what it was handed: FENCE ' ' ID ' ' LEASE_MS '\n' RECORD (if anything)};
--          {NO_QUEUE}; {WRONG_MODE, its mode}; {LAPSED} if this awaiter has acknowledged an item already
-- States   waiting -> active; active -> waiting (its lease lapsed)
--@include base codes journal hints forget_hint records schedule attempts awaiters ringing timers item_ages blocked progress holdings fences bury_job handing expiring

local awaiter, wanted, via = ARGV[1], ARGV[2], ARGV[6]
if not epoch then return { NO_QUEUE } end
if mode ~= ARGV[3] then return { WRONG_MODE, mode } end

local function take_wanted()
  local record = redis.call('HGET', key('jobs'), wanted)
  if not record or redis.call('HEXISTS', key('active'), wanted) == 1 then return nil end
  if redis.call('ZSCORE', key('scheduled'), wanted) then return nil end
  forget_hint(place_of(record) or '5', wanted)
  return wanted, record
end

local function take()
  local id, record
  if wanted == '' then id, record = take_next() else id, record = take_wanted() end
  if not id then return nil end
  return hand_over(id, record, awaiter, '-', tonumber(ARGV[4]) or option('lease_ms'))
end

local VALID_MS = 10000
local hand = redis.call('LINDEX', hand_key(awaiter), 0)
if hand and string.sub(hand, 1, 6) == 'acked ' then return { LAPSED } end
if hand and is_held(awaiter, hand) then return { OK, VALID_MS, hand } end
if hand then redis.call('DEL', hand_key(awaiter)) end

lapse()
expire()
promote()
hand = mode == 'on_request' and not paused and take() or nil
if not hand and ARGV[5] == '1' then
  register_awaiter(awaiter, wanted, via, VALID_MS)
elseif not hand then
  forget_awaiter(awaiter)
end
wake_idle_worker()
write_journal(awaiter)
return { OK, not hand and skipped_enough and 0 or VALID_MS, hand }
