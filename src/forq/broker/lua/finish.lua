#!lua flags=allow-oom
-- finish: a worker of a queue of mode external is done with its job, or has failed. Repeating it is harmless for a minute, until
-- the worker is given another one.
--
-- KEYS[1]  the queue's base
-- ARGV     worker, id, fence, outcome ('done' | 'failed'), then of success: result (JSON; '!' and why there is none),
--          of a failure: error, brief error (JSON),
--          kind, retry at (ms or ''), chance (0 to 1)
-- Returns  {OK}; {LAPSED} if the worker does not hold that job; {NO_QUEUE}; {WRONG_MODE, its mode}
-- States   active -> done | scheduled (retried) | dead | cancelled; blocked -> waiting | scheduled
--@include base codes journal hints limits limited records schedule attempts awaiters ringing timers item_ages blocked progress waiters holdings done_jobs fences bury_job fates failing hands

local ENDED_MS = 60000
local worker, id, fence, outcome = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not epoch then return { NO_QUEUE } end
if mode ~= 'external' then return { WRONG_MODE, mode } end
local ended = 'ended ' .. outcome .. ' ' .. id
local owner = redis.call('HGET', key('active'), id)
if not is_owner(worker, owner) or fence_of(owner) ~= fence then
  return { redis.call('LINDEX', hand_key(worker), 0) == ended and OK or LAPSED }
end

fence = fence_of(owner)
-- A fence is the time of its claim, unless the clock was set back.
local micros = string.format('%.0f', math.max(0, now_us - tonumber(fence)))
redis.call('ZREM', key('leases'), id)
redis.call('ZREM', key('accepted'), id)
put_in_hand(worker, ended, ENDED_MS)
see_worker(worker)
if outcome == 'done' then
  settle_done({ id }, { [fence] = { id .. ' ' .. micros } }, { [id] = { micros = micros, result = ARGV[5] or '' } })
else
  local settled = settle_failure({
    id = id,
    owner = worker .. ':' .. fence,
    micros = micros,
    error = ARGV[5],
    brief = ARGV[6],
    kind = ARGV[7],
    retry_at_ms = tonumber(ARGV[8]),
    chance = tonumber(ARGV[9]),
  })
  -- Its record is gone.
  if not settled then hand_back(worker, { id }) end
end
wake_idle_worker()
write_journal(worker)
return { OK }
