-- Verbs of queues whose items are leased to awaiters (auto_release, on_request) or to external workers (external).

-- await: requests one item, or any; the awaiter repeats it under the same name. In mode on_request it leases a waiting
-- item at once. Otherwise, or if none waits, it registers the awaiter for some time. External workers request their
-- jobs with it, always under the same name.
-- KEYS[1]  the queue's base
-- ARGV     awaiter, id ('' = any), expected mode, lease (ms; '' = the queue's), whether to register ('1' | '0'; 'rung':
--          the bridge asks for a worker that it has notified; that is no sign of life), clerk to notify ('-': the
--          awaiter blocks on its own list), or the bridge
-- Returns  {OK, ms it is registered for (0: repeat at once), its leased item: FENCE ' ' ID ' ' LEASE_MS '\n' RECORD (if
--          any)}; {NO_QUEUE}; {WRONG_MODE, its mode}; {LAPSED} if this awaiter has acknowledged an item already
-- States   waiting, retry -> active; waiting, retry -> dead (stalled too often); active -> waiting (lease lapsed, or
--          its worker reports itself idle)
function verbs.await()
  local awaiter, wanted_id, via = ARGV[1], ARGV[2], ARGV[6]
  if not epoch then return { NO_QUEUE } end
  if mode ~= ARGV[3] then return { WRONG_MODE, mode } end

  local BURIED_PER_CALL = 100
  local external, notified = mode == 'external', ARGV[5] == 'rung'
  local valid_ms = external and option('lease_ms') or 10000

  local function take_wanted()
    local record = redis.call('HGET', key('jobs'), wanted_id)
    if not record or redis.call('HEXISTS', key('active'), wanted_id) == 1 then return nil end
    if redis.call('ZSCORE', key('scheduled'), wanted_id) then return nil end
    hints.remove(records.place_of(record) or '5', wanted_id)
    return wanted_id, record
  end

  -- A job that stalled too often is moved to dead instead. The retry lane follows when no other job waits.
  local function take_job()
    for _ = 1, BURIED_PER_CALL do
      local id, record = leases.take_next()
      if not id and not too_many_skipped and in_lane > 0 and hints.main_waiting() == 0 then
        id, record = leases.take_from(RETRY_PLACE)
      end
      local job = id and records.read(record)
      local error = job and failures.exhausted_error(job, option('max_stalls'), math.huge)
      if not error then return id, record end
      local fence = claims.next_fence()
      journal.note('claimed ' .. fence .. ' ' .. attempts.number(job) .. ' ' .. id)
      dead.bury({ { id = id, fence = fence, micros = '-', record = record, error = error, brief = error } })
    end
    too_many_skipped = true
  end

  local function take()
    local id, record
    if external then
      if limits.room() < 1 then return nil end
      id, record = take_job()
    elseif wanted_id == '' then
      id, record = leases.take_next()
    else
      id, record = take_wanted()
    end
    if not id then return nil end
    limits.take_tokens(1)
    return leases.start(id, record, awaiter, external and via or '-', tonumber(ARGV[4]) or option('lease_ms'))
  end

  -- A worker that asks is idle: it gets an unaccepted job again, and has lost an accepted one. False: no job for it.
  local function worker_may_lease()
    local id, accepted, bridge = leases.read_entry(awaiter)
    local registration = notified and awaiters.read(awaiter)
    local registered = registration and registration.expires_ms > now_ms
    if notified and (accepted or not id and not registered) then return false end
    if not notified then leases.touch_worker(awaiter) end
    if not id then return true end
    local owner = redis.call('HGET', key('active'), id)
    if not claims.is_owner(awaiter, owner) then
      redis.call('UNLINK', leases.entry_key(awaiter))
    elseif accepted then
      leases.revoke(awaiter, owner, id, 'idle')
    elseif bridge ~= via then
      local entry = redis.call('LINDEX', leases.entry_key(awaiter), 0)
      local left_ms = math.max(1, redis.call('PTTL', leases.entry_key(awaiter)))
      leases.write_entry(awaiter, (string.gsub(entry, '^(%d+ %S+ %d+) %S+', '%1 ' .. via, 1)), left_ms)
    end
    return true
  end

  local entry
  if external then
    leases.lapse()
    if not worker_may_lease() then
      hints.wake_idle(NOTIFY_AWAITERS, WAKE_LIMITED)
      journal.write(awaiter)
      return { OK, valid_ms }
    end
    entry = leases.read_entry(awaiter) and redis.call('LINDEX', leases.entry_key(awaiter), 0)
  else
    entry = redis.call('LINDEX', leases.entry_key(awaiter), 0)
    if entry and string.sub(entry, 1, 6) == 'acked ' then return { LAPSED } end
    if entry and leases.is_held(awaiter, entry) then return { OK, valid_ms, entry } end
    if entry then redis.call('DEL', leases.entry_key(awaiter)) end
    entry = nil
    leases.lapse()
  end

  leases.expire_items()
  timers.promote()
  entry = entry or on_request and not paused and take() or nil
  if not entry and notified then
    redis.call('ZADD', key('awaiting'), 0, awaiters.read(awaiter).member)
  elseif not entry and ARGV[5] == '1' then
    awaiters.register(awaiter, wanted_id, via, valid_ms)
  elseif not entry then
    awaiters.remove(awaiter)
  end
  hints.wake_idle(NOTIFY_AWAITERS, WAKE_LIMITED)
  journal.write(awaiter)
  return { OK, not entry and too_many_skipped and 0 or valid_ms, entry }
end

-- unawait: removes an awaiter; its unacknowledged item returns to the front. An external worker leaves with its bridge,
-- unless it has used another one since; it keeps an accepted job.
-- KEYS[1]  the queue's base
-- ARGV     awaiter, bridge ('': not an external worker)
-- Returns  {OK, 1 an item was returned | 0}; {NO_QUEUE}
-- States   active -> waiting (returned)
function verbs.unawait()
  if not epoch then return { NO_QUEUE } end
  local awaiter, bridge = ARGV[1], ARGV[2]
  local id, _, entry_bridge = leases.read_entry(awaiter)
  local registration = awaiters.read(awaiter)
  if mode == 'external' then
    -- The entry of an accepted job has no bridge.
    if (entry_bridge or registration and registration.via) ~= bridge then return { OK, 0 } end
    redis.call('ZREM', key('workers'), awaiter)
  end
  local owner = id and redis.call('HGET', key('active'), id)
  local held = claims.is_owner(awaiter, owner)
  -- It may have been notified of an item that others await too.
  local exists = registration and redis.call('HEXISTS', key('jobs'), registration.id) == 1
  if exists then hints.note_ready({ registration.id }) end
  awaiters.remove(awaiter)
  if held then
    leases.revoke(awaiter, owner, id, '-')
    local expires = redis.call('ZSCORE', key('expiries'), id)
    -- It had expired while leased (leases.expire_items), so it need not wait until the lease would have lapsed.
    if expires and tonumber(expires) % 1 > 0 then timers.set('expiries', id, now_ms) end
  end
  -- Keeps an acknowledgement, which may be repeated.
  if string.sub(redis.call('LINDEX', leases.entry_key(awaiter), 0) or '', 1, 6) ~= 'acked ' then
    redis.call('UNLINK', leases.entry_key(awaiter))
  end
  hints.wake_idle(NOTIFY_AWAITERS, WAKE_LIMITED)
  journal.write(awaiter)
  return { OK, held and 1 or 0 }
end

-- ack: acknowledges a leased item: it is released and deleted.
-- KEYS[1]  the queue's base
-- ARGV     awaiter, id, fence
-- Returns  {OK}, also if repeated within a minute; {LAPSED} if it was returned; {WRONG_MODE, its mode}; {NO_QUEUE}
-- States   active -> released; blocked -> waiting | scheduled
function verbs.ack()
  local ACKED_MS = 60000
  local awaiter, id, fence = ARGV[1], ARGV[2], ARGV[3]
  if not epoch then return { NO_QUEUE } end
  if mode == 'external' then return { WRONG_MODE, mode } end
  if redis.call('LINDEX', leases.entry_key(awaiter), 0) == 'acked ' .. fence then return { OK } end
  local owner = redis.call('HGET', key('active'), id)
  if not claims.is_claim(owner, awaiter, fence) then return { LAPSED } end

  redis.call('HDEL', key('jobs'), id)
  redis.call('HDEL', key('active'), id)
  progress.delete({ id })
  redis.call('ZREM', key('leases'), id)
  redis.call('ZREM', key('expiries'), id)
  redis.call('INCR', key('processed:count'))
  journal.note('released ' .. fence .. ' ' .. id .. ' ' .. claims.micros_since(fence))
  leases.write_entry(awaiter, 'acked ' .. fence, ACKED_MS)
  flows.end_jobs({ id }, 'released')
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write(awaiter)
  return { OK }
end

-- release: tries to release the first item (mode auto_release) if the gate is open.
-- KEYS[1]  the queue's base
-- ARGV     epoch, processor, worker, lane ('main' | 'retry')
-- Returns  {OK, 1 leased | 0 not awaited | -1 not tried, µs until the gate opens (0: no item)}; {PAUSED}; {NO_QUEUE};
--          {FENCED} if the worker is not registered
-- States   waiting, retry -> active; waiting -> scheduled | retry; waiting, retry -> dead; active -> waiting (lapsed)
function verbs.release()
  local processor, worker, lane = ARGV[2], ARGV[3], ARGV[4]
  if epoch ~= ARGV[1] then return { NO_QUEUE } end
  if not redis.call('HGET', workers_key(processor), worker) then return { FENCED } end

  -- Not awaited: retried later, then in the retry lane, then dead.
  local function postpone(id, record)
    local job = records.read(record)
    local fence = claims.next_fence()
    journal.note('claimed ' .. fence .. ' ' .. attempts.number(job) .. ' ' .. id)
    local in_main = job and job.lane == 0 and job.retries < option('release_retries')
    if not in_main and not (job and job.lane < option('retry_lane_retries')) then
      local error = string.format(
        '{"name":"NotAwaited","message":"not awaited in %d attempts","kind":"permanent","traceback":null}',
        attempts.number(job))
      return dead.bury({ { id = id, fence = fence, micros = '-', record = record, error = error, brief = error } })
    end
    job.retries = job.retries + 1
    if not in_main then job.lane = job.lane + 1 end
    redis.call('HSET', key('jobs'), id, records.write(job))
    journal.note('retried ' .. fence .. ' ' .. id .. ' - NotAwaited')
    timers.make_ready(id, records.place_for(job), in_main and now_ms + option('retry_interval_ms') or 0)
  end

  local function has_items()
    if lane == 'retry' then return in_lane > 0 and hints.main_waiting() == 0 end
    return hints.main_waiting() > 0
  end

  local function try_release()
    local gate_us = tonumber(redis.call('HGET', key('counts'), 'gate_us') or 0)
    local interval_us = option('release_interval_ms') * 1000
    local function close_gate()
      journal.set_count('gate_us', string.format('%.0f', now_us + interval_us))
    end
    if not has_items() then return -1, 0 end
    if gate_us > now_us + interval_us then
      -- The clock was set back: the gate is never closed longer than one interval.
      close_gate()
      return -1, interval_us
    end
    if gate_us > now_us then return -1, gate_us - now_us end
    local id, record
    if lane == 'retry' then id, record = leases.take_from(RETRY_PLACE) else id, record = leases.take_next() end
    if not id then return -1, 0 end
    local awaiter = awaiters.first(id) or awaiters.first('')
    if not awaiter and too_many_expired then
      -- Whether it is awaited is not known yet, so this is not an attempt.
      hints.push_front({ [records.place_of(record) or '5'] = { id } })
      return -1, 0
    end
    close_gate()
    if awaiter then
      leases.start(id, record, awaiter.name, awaiter.via, option('lease_ms'))
    else
      postpone(id, record)
    end
    return awaiter and 1 or 0, interval_us
  end

  local processing = worker_key(processor, worker, 'processing')
  local moved = redis.call('LRANGE', processing, 0, -1)
  if #moved > 0 then
    claims.return_jobs(worker, moved)
    redis.call('DEL', processing)
  end
  leases.lapse()
  leases.expire_items()
  timers.promote()
  local outcome, wait_us = -1, 0
  if not paused then outcome, wait_us = try_release() end
  hints.wake_idle()
  journal.write(worker)
  if paused then return { PAUSED } end
  return { OK, outcome, wait_us }
end

-- accept: an external worker has received its job, or reports progress: renews its lease. May be repeated.
-- KEYS[1]  the queue's base
-- ARGV     worker, id, fence, progress (0 to 1; '' = unchanged), text
-- Returns  {OK}; {LAPSED} if the worker does not hold that job; {NO_QUEUE}; {WRONG_MODE, its mode}
-- States   unchanged
function verbs.accept()
  local worker, id, fence = ARGV[1], ARGV[2], ARGV[3]
  if not epoch then return { NO_QUEUE } end
  if mode ~= 'external' then return { WRONG_MODE, mode } end
  local owner = redis.call('HGET', key('active'), id)
  if not claims.is_claim(owner, worker, fence) then return { LAPSED } end

  local lease_ms = option('lease_ms')
  redis.call('ZADD', key('accepted'), string.format('%.0f', now_ms), id)
  redis.call('ZADD', key('leases'), string.format('%.0f', now_ms + lease_ms), id)
  -- Longer than the lease: the entry must last as long as the job is held.
  leases.write_entry(worker, 'accepted ' .. fence .. ' ' .. id, 10 * lease_ms)
  leases.touch_worker(worker)
  if ARGV[4] ~= '' then progress.set(id, ARGV[4], ARGV[5]) end
  summary.save()
  return { OK }
end

-- finish: settles the job of an external worker. Repeatable for a minute, until the worker gets another job.
-- KEYS[1]  the queue's base
-- ARGV     worker, id, fence, outcome ('done' | 'failed'), then if done: result (JSON; '!' and the reason why there is
--          none), if failed: error, brief error (JSON), kind, retry at (ms or ''), chance (0 to 1)
-- Returns  {OK}; {LAPSED} if the worker does not hold that job; {NO_QUEUE}; {WRONG_MODE, its mode}
-- States   active -> done | scheduled (retried) | dead | cancelled; blocked -> waiting | scheduled
function verbs.finish()
  local ENDED_MS = 60000
  local worker, id, fence, outcome = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
  if not epoch then return { NO_QUEUE } end
  if mode ~= 'external' then return { WRONG_MODE, mode } end
  local ended = 'ended ' .. outcome .. ' ' .. id
  local owner = redis.call('HGET', key('active'), id)
  if not claims.is_claim(owner, worker, fence) then
    return { redis.call('LINDEX', leases.entry_key(worker), 0) == ended and OK or LAPSED }
  end

  local micros = claims.micros_since(fence)
  redis.call('ZREM', key('leases'), id)
  redis.call('ZREM', key('accepted'), id)
  leases.write_entry(worker, ended, ENDED_MS)
  leases.touch_worker(worker)
  if outcome == 'done' then
    done.settle({ id }, { [fence] = { id .. ' ' .. micros } }, { [id] = { micros = micros, result = ARGV[5] or '' } })
  else
    local fate = failures.settle(id, worker .. ':' .. fence, micros, failures.read(5))
    -- Its record is gone.
    if not fate then claims.return_jobs(worker, { id }) end
  end
  hints.wake_idle(NOTIFY_AWAITERS, WAKE_LIMITED)
  journal.write(worker)
  return { OK }
end
