#!lua flags=allow-oom
-- await: somebody asks for an item, this one or any; to be repeated under the same name until it gets one. Of a queue of mode
-- on_request it takes what is there; else, or if nothing is there, it is registered for some time. A worker of a queue of mode
-- external asks so for jobs, again and again under the same name.
--
-- KEYS[1]  the queue's base
-- ARGV     awaiter, id ('' = any), the mode that it expects, the lease (ms; '' = the queue's), whether to wait ('1' | '0'; 'rung':
--          the bridge asks for a worker that it told of work; that is no sign of life),
--          the clerk that is to be told ('-': the awaiter blocks on its own list), or the bridge
-- Returns  {OK, for how long it is registered (ms; 0: ask again at once), what it was handed: FENCE ' ' ID ' ' LEASE_MS '\n' RECORD (if anything)};
--          {NO_QUEUE}; {WRONG_MODE, its mode}; {LAPSED} if this awaiter has acknowledged an item already
-- States   waiting, retry -> active; waiting, retry -> dead (it stalled too often); active -> waiting (its lease lapsed; its worker says that it is idle)
--@include base codes journal hints limits limited forget_hint records schedule attempts awaiters ringing timers item_ages blocked progress waiters holdings losses fences bury_job hands handing expiring used_up

local awaiter, wanted, via = ARGV[1], ARGV[2], ARGV[6]
if not epoch then return { NO_QUEUE } end
if mode ~= ARGV[3] then return { WRONG_MODE, mode } end

local BURIED_PER_CALL = 100
local external, rung = mode == 'external', ARGV[5] == 'rung'
local valid_ms = external and option('lease_ms') or 10000

local function take_wanted()
  local record = redis.call('HGET', key('jobs'), wanted)
  if not record or redis.call('HEXISTS', key('active'), wanted) == 1 then return nil end
  if redis.call('ZSCORE', key('scheduled'), wanted) then return nil end
  forget_hint(place_of(record) or '5', wanted)
  return wanted, record
end

-- The next job of a worker: one that has stalled too often is dead instead, and the retry lane comes when nothing else waits.
local function take_job()
  for _ = 1, BURIED_PER_CALL do
    local id, record = take_next()
    if not id and not skipped_enough and in_lane > 0 and main_waiting() == 0 then id, record = take_from(LANE) end
    local job = id and read_record(record)
    local error = job and used_up(job, option('max_stalls'), math.huge)
    if not error then return id, record end
    local fence = next_fence()
    note('claimed ' .. fence .. ' ' .. attempt_number(job) .. ' ' .. id)
    bury_jobs({ { id = id, fence = fence, micros = '-', record = record, error = error, brief = error } })
  end
  skipped_enough = true
end

local function take()
  local id, record
  if external then
    if has_limits and room() < 1 then return nil end
    id, record = take_job()
  elseif wanted == '' then
    id, record = take_next()
  else
    id, record = take_wanted()
  end
  if not id then return nil end
  if has_limits then take_tokens(1) end
  return hand_over(id, record, awaiter, external and via or '-', tonumber(ARGV[4]) or option('lease_ms'))
end

-- A worker that says it is idle is given again what it has not accepted; what it has accepted it has lost.
local function worker_asks()
  local id, accepted, told = in_hand(awaiter)
  local known = rung and read_awaiter(awaiter)
  if rung and (accepted or not id and not (known and known.expires_ms > now_ms)) then return false end
  if not rung then see_worker(awaiter) end
  if not id then return true end
  local owner = redis.call('HGET', key('active'), id)
  if not is_owner(awaiter, owner) then
    redis.call('UNLINK', hand_key(awaiter))
  elseif accepted then
    take_back(awaiter, owner, id, 'idle')
  elseif told ~= via then
    local hand = redis.call('LINDEX', hand_key(awaiter), 0)
    local left_ms = math.max(1, redis.call('PTTL', hand_key(awaiter)))
    put_in_hand(awaiter, (string.gsub(hand, '^(%d+ %S+ %d+) %S+', '%1 ' .. via, 1)), left_ms)
  end
  return true
end

local hand
if external then
  lapse()
  if not worker_asks() then
    wake_idle_worker()
    write_journal(awaiter)
    return { OK, valid_ms }
  end
  hand = in_hand(awaiter) and redis.call('LINDEX', hand_key(awaiter), 0)
else
  hand = redis.call('LINDEX', hand_key(awaiter), 0)
  if hand and string.sub(hand, 1, 6) == 'acked ' then return { LAPSED } end
  if hand and is_held(awaiter, hand) then return { OK, valid_ms, hand } end
  if hand then redis.call('DEL', hand_key(awaiter)) end
  hand = nil
  lapse()
end

expire()
promote()
hand = hand or on_request and not paused and take() or nil
if not hand and rung then
  redis.call('ZADD', key('awaiting'), 0, read_awaiter(awaiter).member)
elseif not hand and ARGV[5] == '1' then
  register_awaiter(awaiter, wanted, via, valid_ms)
elseif not hand then
  forget_awaiter(awaiter)
end
wake_idle_worker()
write_journal(awaiter)
return { OK, not hand and skipped_enough and 0 or valid_ms, hand }
