-- An attempt failed: the job is tried again later, or is dead. Options are read here and now, so that a change of them applies
-- to everything that is in the queue.

-- `failure`: id, owner (WORKER:FENCE), micros, error and brief error (JSON), kind, retry_at_ms (or nil), chance (0 to 1).
-- Returns what follows (lib/fates.lua); nil if the job is not that owner's.
local function settle_failure(failure)
  local id, fence, micros, brief, kind = failure.id, fence_of(failure.owner), failure.micros, failure.brief, failure.kind
  local owner = redis.call('HGET', key('active'), id)
  local record = redis.call('HGET', key('jobs'), id)

  local function come_back(job, due, event)
    due = update_from_blocked(id, job, due)
    redis.call('HSET', key('jobs'), id, write_record(job))
    redis.call('HDEL', key('active'), id)
    forget_progress({ id })
    note(event)
    make_ready(id, place_for(job), due)
    return due
  end

  -- The job waits for its next attempt: until the time the handler asked for, else twice as long as the last time.
  -- In the retry lane `lane` counts the attempts there.
  local function retry_job(job, lane_number)
    local due = failure.retry_at_ms
    if not due then
      local wait = math.min(option('max_backoff_ms'), option('min_backoff_ms') * 2 ^ math.min(job.retries, 40))
      due = now_ms + math.floor(wait * (1 + option('jitter') / 100 * (2 * failure.chance - 1)))
    end
    local left = retries_left(job)
    job.retries, job.lane = job.retries + 1, lane_number
    -- What was blocked behind it may begin its counts anew.
    local attempt = attempts_of(job)
    due = come_back(job, due, 'retried ' .. fence .. ' ' .. id .. ' ' .. micros .. ' ' .. cause_of(brief))
    return fate(lane_number > 0 and 'lane' or 'retried', due, attempt, left)
  end

  local function settle()
    local timed_out = kind == 'timeout'
    add_attempt(id, timed_out and 'timed_out' or 'failed', timed_out and 'timeout' or 'exception', micros, brief)
    local job = read_record(record)
    if job and timed_out then
      -- It waits again at once, behind the others.
      job.timeouts = job.timeouts + 1
      note('timed_out ' .. fence .. ' ' .. id .. ' timeout ' .. micros)
      local attempt, count = attempts_of(job), job.timeouts
      local due = come_back(job, 0, 'returned 0 ' .. id)
      return fate_of_loss(due, attempt, count, tonumber(options.max_timeouts or 3))
    end
    -- Its handler came back, so it did not kill its process: it is no suspect any more.
    if job and job.lane == SUSPECT then job.lane = 0 end
    if job and kind ~= 'permanent' and job.lane == 0 and job.retries < option('max_retries') then
      return retry_job(job, 0)
    elseif job and kind ~= 'permanent' and job.lane < option('retry_lane_retries') then
      return retry_job(job, job.lane + 1)
    end
    local left = job and retries_left(job) or 0
    bury_jobs({ { id = id, fence = fence, micros = micros, record = record, error = failure.error, brief = brief } })
    return fate('dead', 0, job and attempts_of(job) + 1 or 1, left)
  end

  if owner == failure.owner and record then
    return settle()
  elseif owner == failure.owner .. REMOVED then
    redis.call('HDEL', key('jobs'), id)
    redis.call('HDEL', key('active'), id)
    forget_progress({ id })
    forget_attempts({ id })
    note('cancelled ' .. fence .. ' ' .. id)
    unblock({ id })
    tell_waiters({ id }, 'cancelled')
    return fate('removed', 0, 0, 0)
  end
end
