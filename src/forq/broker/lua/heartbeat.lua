#!lua flags=allow-oom
-- heartbeat: a processor says that it lives and where its workers are; it goes on with an eviction that is under way,
-- or sweeps one processor that has fallen silent; drains graves, gives back what late BLMOVEs have parked, forgets done jobs,
-- and repeats the wake token as a backstop.
--
-- KEYS[1]  the queue's base
-- ARGV     processor, how long it may stay silent (ms), then (worker, turn, index, running) per worker
-- Returns  {OK, processors evicted, ms until promote is to be called (-1: nothing has a time), 1 if an eviction is not finished,
--          (worker, number of its last turn) per worker that runs nothing and was at an earlier turn,
--          suspects that may begin; of a fail queue: 1 if jobs wait and none runs, for whom jobs wait (0: nobody, 1: main workers,
--          2: the retry child, 3: both), {the jobs of evicted processors that were running: id and fate (lib/fates.lua) each}};
--          {NO_QUEUE, 1 if it was deleted}; {FENCED} if this processor has been evicted
-- States   active -> done, waiting (of a processor that is evicted)
--@include base codes journal hints limits limited forget_hint records schedule attempts awaiters ringing timers item_ages blocked progress waiters holdings parked done_jobs forgetting positions fates losses graves eviction fences bury_job hands handing expiring

if not epoch then return { NO_QUEUE, redis.call('EXISTS', key('deleted')) } end
local FORGOTTEN_DONE_PER_BEAT = 1000
local processor, expiry_ms = ARGV[1], tonumber(ARGV[2])
local expires_at = redis.call('ZSCORE', key('processors'), processor)
if not expires_at and redis.call('ZSCORE', key('graves'), processor) then return { FENCED } end

-- Whoever takes turns looks at its own list; the others may be busy for long.
local workers, positions, unturned = {}, {}, {}
for at = 3, #ARGV, 4 do
  workers[#workers + 1] = ARGV[at]
  positions[#positions + 1] = ARGV[at]
  positions[#positions + 1] = ARGV[at + 1] .. ' ' .. ARGV[at + 2] .. ' ' .. ARGV[at + 3]
end
local registered = #workers > 0 and redis.call('HMGET', workers_key(processor), unpack(workers)) or {}
local unread = {}
for i, worker in ipairs(workers) do
  local number = registered[i] and number_of(registered[i])
  if number and number > tonumber(ARGV[4 * i]) and ARGV[4 * i + 2] == '0' then
    unread[#unread + 1] = worker
    unread[#unread + 1] = string.format('%.0f', number)
  end
end
local before = #workers > 0 and redis.call('HMGET', positions_key(processor), unpack(workers)) or {}
for i, worker in ipairs(workers) do
  if before[i] and string.match(before[i], '^%S+') == ARGV[4 * i] then unturned[#unturned + 1] = worker end
end
redis.call('ZADD', key('processors'), now_ms + expiry_ms, processor)
redis.call('DEL', positions_key(processor))
if #positions > 0 then redis.call('HSET', positions_key(processor), unpack(positions)) end

-- Who has not been heard may be dead only if he could have been: after a time in which nobody was (a frozen server, a
-- jump of its clock) or the sweeper itself was not, everybody gets one expiry more.
local heard = redis.call('HMGET', key('counts'), 'last_beat_ms', 'sweep_after_ms')
local sweep_after_ms = math.min(tonumber(heard[2] or 0), now_ms + expiry_ms)
local lapsed = expires_at and tonumber(expires_at) < now_ms
if lapsed or now_ms - tonumber(heard[1] or 0) > expiry_ms * 2 / 3 then sweep_after_ms = now_ms + expiry_ms end
redis.call('HSET', key('counts'), 'last_beat_ms', string.format('%.0f', now_ms),
  'sweep_after_ms', string.format('%.0f', sweep_after_ms))

local evicted = {}
if not continue_eviction() and now_ms >= sweep_after_ms then
  evicted = redis.call('ZRANGEBYSCORE', key('processors'), '-inf', '(' .. string.format('%.0f', now_ms), 'LIMIT', 0, 1)
  for _, silent in ipairs(evicted) do evict(silent, 'host_lost') end
end
drain_graves()
for _, worker in ipairs(unturned) do return_parked(processor, worker) end
lapse()
expire()
promote()
wake_unlimited()
forget_done_in_time(FORGOTTEN_DONE_PER_BEAT)
forget_sizes()
wake_idle_worker()
write_journal(processor)
trim_journal(false)

-- How many jobs a process of their own may be started for.
local function needing_helpers()
  if paused then return 0 end
  if parent then return redis.call('HLEN', key('active')) == 0 and main_waiting() > 0 and 1 or 0 end
  return has_limits and math.min(suspect_hints, room()) or suspect_hints
end

-- Whose workers should not rest: if they do, they may not have heard of it.
local function wanted()
  if paused or mode ~= 'work' then return 0 end
  local main = main_waiting() > 0
  local retry = suspect_hints > 0 or (in_lane > 0 and not main)
  return (main and 1 or 0) + (retry and 2 or 0)
end

return { OK, evicted, next_timer_ms(), redis.call('EXISTS', key('evicting')), unread, needing_helpers(), wanted(), lost_jobs }
