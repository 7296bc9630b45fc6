-- Attempts that failed, or were lost with their worker: what follows for the job.

-- What follows an attempt that failed, or that was lost with its process. Whoever logs the attempt says so: {how, in
-- how many ms the job is tried again, the number of the attempt, how many there are if all of them end like this one}.
-- how: 'retried'; 'lane' (in the retry lane); 'returned' (it waits again at once); 'suspect' (the same, and runs
-- alone); 'interrupted' (the same, and nothing was counted); 'dead' (also if the next claim buries it); 'removed';
-- 'refused' (the job was not this worker's any more).

function failures.fate(how, due_ms, attempt, left)
  return { how, math.max(0, due_ms - now_ms), attempt, attempt + left }
end

-- How many attempts a job has left after one that fails now and is not counted yet.
function failures.retries_left(job)
  if job.lane > 0 then return math.max(0, option('retry_lane_retries') - job.lane) end
  return math.max(0, option('max_retries') - job.retries) + option('retry_lane_retries')
end

-- `count`: how many attempts were lost in this way, this one too; `most`: after how many the job is still tried again.
function failures.fate_of_loss(due_ms, attempt, count, most)
  local left = math.max(0, most + 1 - count)
  return failures.fate(left == 0 and 'dead' or 'returned', due_ms, attempt, left)
end

-- `lost`: a job that was running when its worker was lost (failures.lua), and was counted.
function failures.fate_of_lost(lost)
  local job, due_ms = lost.counted, lost.run_at_ms
  if lost.outcome == 'stalled' then
    return failures.fate_of_loss(due_ms, attempts.count(job), job.stalls, tonumber(options.max_stalls or 3))
  elseif lost.outcome == 'timed_out' then
    return failures.fate_of_loss(due_ms, attempts.count(job), job.timeouts, tonumber(options.max_timeouts or 3))
  end
  return failures.fate(job.lane == SUSPECT and 'suspect' or 'interrupted', due_ms, attempts.count(job) + 1, 0)
end

-- An attempt failed: the job is tried again later, or is dead. Options are read here and now, so that a change of them
-- applies to everything that is in the queue.

-- `failure`: id, owner (WORKER:FENCE), micros, error and brief error (JSON), kind, retry_at_ms (or nil), chance (0 to
-- 1). Returns what follows (failures.lua); nil if the job is not that owner's.
function failures.settle(failure)
  local id, micros, brief, kind = failure.id, failure.micros, failure.brief, failure.kind
  local fence = holdings.fence_of(failure.owner)
  local owner = redis.call('HGET', key('active'), id)
  local record = redis.call('HGET', key('jobs'), id)

  local function come_back(job, due, event)
    due = blocked.update(id, job, due)
    redis.call('HSET', key('jobs'), id, records.write(job))
    redis.call('HDEL', key('active'), id)
    progress.forget({ id })
    journal.note(event)
    timers.make_ready(id, records.place_for(job), due)
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
    local left = failures.retries_left(job)
    job.retries, job.lane = job.retries + 1, lane_number
    -- What was blocked behind it may begin its counts anew.
    local attempt = attempts.count(job)
    due = come_back(job, due, 'retried ' .. fence .. ' ' .. id .. ' ' .. micros .. ' ' .. dead.cause_of(brief))
    return failures.fate(lane_number > 0 and 'lane' or 'retried', due, attempt, left)
  end

  local function settle()
    local timed_out = kind == 'timeout'
    attempts.add(id, timed_out and 'timed_out' or 'failed', timed_out and 'timeout' or 'exception', micros, brief)
    local job = records.read(record)
    if job and timed_out then
      -- It waits again at once, behind the others.
      job.timeouts = job.timeouts + 1
      journal.note('timed_out ' .. fence .. ' ' .. id .. ' timeout ' .. micros)
      local attempt, count = attempts.count(job), job.timeouts
      local due = come_back(job, 0, 'returned 0 ' .. id)
      return failures.fate_of_loss(due, attempt, count, tonumber(options.max_timeouts or 3))
    end
    -- Its handler came back, so it did not kill its process: it is no suspect any more.
    if job and job.lane == SUSPECT then job.lane = 0 end
    if job and kind ~= 'permanent' and job.lane == 0 and job.retries < option('max_retries') then
      return retry_job(job, 0)
    elseif job and kind ~= 'permanent' and job.lane < option('retry_lane_retries') then
      return retry_job(job, job.lane + 1)
    end
    local left = job and failures.retries_left(job) or 0
    dead.bury({ { id = id, fence = fence, micros = micros, record = record, error = failure.error, brief = brief } })
    return failures.fate('dead', 0, job and attempts.count(job) + 1 or 1, left)
  end

  if owner == failure.owner and record then
    return settle()
  elseif owner == failure.owner .. REMOVED then
    redis.call('HDEL', key('jobs'), id)
    redis.call('HDEL', key('active'), id)
    progress.forget({ id })
    attempts.forget({ id })
    journal.note('cancelled ' .. fence .. ' ' .. id)
    blocked.unblock({ id })
    waiters.tell({ id }, 'cancelled')
    return failures.fate('removed', 0, 0, 0)
  end
end

-- A job was running when its worker was lost: what that means for it (the outcome), which depends on how it was lost.

-- What the journal says of it.
function failures.note_loss(lost, fence)
  local verb = lost.outcome == 'suspect' and 'suspected' or lost.outcome
  -- One word: a line is split at its blanks.
  local cause = lost.cause == '' and '-' or string.gsub(lost.cause, '[^!-~]', '_')
  local micros = tonumber(lost.micros) and ' ' .. lost.micros or ''
  journal.note(verb .. ' ' .. fence .. ' ' .. lost.id .. ' ' .. cause .. micros)
end

-- `lost`: outcome ('stalled' | 'timed_out' | 'interrupted' | 'suspect'), cause, micros, stack, peak, silent (nobody saw
-- it). A broken record (no `job`) stays as it is: whoever runs it finds out.
function failures.count_loss(lost, owner, job)
  local outcome = lost.outcome == 'suspect' and 'interrupted' or lost.outcome
  attempts.add(lost.id, outcome, lost.cause, lost.micros, nil, lost.stack, lost.peak)
  failures.note_loss(lost, holdings.fence_of(owner))
  if not job then return end
  if lost.outcome == 'stalled' then job.stalls = job.stalls + 1 end
  if lost.outcome == 'timed_out' then job.timeouts = job.timeouts + 1 end
  -- In the retry lane and in the fail queue it runs alone anyway.
  if lost.outcome == 'suspect' and job.lane == 0 and not parent then job.lane = SUSPECT end
  -- A copy: what was blocked behind it may begin its counts anew.
  lost.counted = { retries = job.retries, stalls = job.stalls, timeouts = job.timeouts, lane = job.lane }
end

-- A job that was lost with its worker too often is not run again; looked at when it is claimed, with the limits of that
-- moment.

-- Why it is not, as an error in JSON; nil if it is.
function failures.used_up(job, max_stalls, max_timeouts)
  local text = '{"name":"%s","message":"the number of attempts that %s is %d, and %s is %d",'
    .. '"kind":"stall","traceback":null}'
  if job.stalls > max_stalls then
    return string.format(text, 'StallError', 'died with their process', job.stalls, 'max_stalls', max_stalls)
  elseif job.timeouts > max_timeouts then
    return string.format(text, 'TimeoutError', 'timed out', job.timeouts, 'max_timeouts', max_timeouts)
  end
end
