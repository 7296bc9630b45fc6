#!lua flags=allow-oom
-- release: one try to release the item at the head of the line (mode auto_release), if the gate is open.
--
-- KEYS[1]  the queue's base
-- ARGV     epoch, processor, worker, lane ('main' | 'retry')
-- Returns  {OK, 1 handed over | 0 nobody awaited it | -1 no try was made, µs until the gate opens (0: nothing is in line)};
--          {PAUSED}; {NO_QUEUE}; {FENCED} if the worker is not registered
-- States   waiting, retry -> active; waiting -> scheduled | retry; waiting, retry -> dead; active -> waiting (its lease lapsed)
--@include base codes journal hints forget_hint records schedule attempts awaiters timers item_ages blocked progress waiters holdings losses fences bury_job hands handing expiring

local processor, worker, lane = ARGV[2], ARGV[3], ARGV[4]
if epoch ~= ARGV[1] then return { NO_QUEUE } end
if not redis.call('HGET', workers_key(processor), worker) then return { FENCED } end

-- Nobody awaited it: it is tried again later, behind the others; then while nothing else waits; then never.
local function put_off(id, record)
  local job = read_record(record)
  local fence = next_fence()
  note('claimed ' .. fence .. ' ' .. attempt_number(job) .. ' ' .. id)
  local in_main = job and job.lane == 0 and job.retries < option('release_retries')
  if not in_main and not (job and job.lane < option('retry_lane_retries')) then
    local error = string.format('{"name":"NotAwaited","message":"nobody awaited it in %d tries","kind":"permanent","traceback":null}',
      attempt_number(job))
    return bury_jobs({ { id = id, fence = fence, micros = '-', record = record, error = error, brief = error } })
  end
  job.retries = job.retries + 1
  if not in_main then job.lane = job.lane + 1 end
  redis.call('HSET', key('jobs'), id, write_record(job))
  note('retried ' .. fence .. ' ' .. id .. ' - NotAwaited')
  make_ready(id, place_for(job), in_main and now_ms + option('retry_interval_ms') or 0)
end

-- What there is to try; in the retry lane only while nothing else waits.
local function in_line()
  if lane == 'retry' then return in_lane > 0 and main_waiting() == 0 end
  return main_waiting() > 0
end

local function try()
  local gate_us = tonumber(redis.call('HGET', key('counts'), 'gate_us') or 0)
  local interval_us = option('release_interval_ms') * 1000
  local function close_gate()
    remember('gate_us', string.format('%.0f', now_us + interval_us))
  end
  if not in_line() then return -1, 0 end
  if gate_us > now_us + interval_us then
    -- The clock was set back: the gate is not closed for longer than it ever is.
    close_gate()
    return -1, interval_us
  end
  if gate_us > now_us then return -1, gate_us - now_us end
  local id, record
  if lane == 'retry' then id, record = take_from(LANE) else id, record = take_next() end
  if not id then return -1, 0 end
  local to = first_awaiter(id) or first_awaiter('')
  if not to and forgot_enough then
    -- Nobody knows yet whether somebody awaits it: that is no try.
    push_front({ [place_of(record) or '5'] = { id } })
    return -1, 0
  end
  close_gate()
  if to then
    hand_over(id, record, to.name, to.via, option('lease_ms'))
  else
    put_off(id, record)
  end
  return to and 1 or 0, interval_us
end

local processing = worker_key(processor, worker, 'processing')
local moved = redis.call('LRANGE', processing, 0, -1)
if #moved > 0 then
  hand_back(worker, moved)
  redis.call('DEL', processing)
end
lapse()
expire()
promote()
local outcome, wait_us = -1, 0
if not paused then outcome, wait_us = try() end
wake_idle_worker()
write_journal(worker)
if paused then return { PAUSED } end
return { OK, outcome, wait_us }
