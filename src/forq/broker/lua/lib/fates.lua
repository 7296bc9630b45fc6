-- What follows an attempt that failed, or that was lost with its process. Whoever logs the attempt says so:
-- {how, in how many ms the job is tried again, the number of the attempt, how many there are if all of them end like this one}.
-- how: 'retried'; 'lane' (in the retry lane); 'returned' (it waits again at once); 'suspect' (the same, and runs alone);
-- 'interrupted' (the same, and nothing was counted); 'dead' (also if the next claim buries it); 'removed'; 'refused' (the job was not
-- this worker's any more).

local function fate(how, due_ms, attempt, left)
  return { how, math.max(0, due_ms - now_ms), attempt, attempt + left }
end

-- How many attempts are counted.
local function attempts_of(job)
  return job.retries + job.stalls + job.timeouts
end

-- How many attempts a job has left after one that fails now and is not counted yet.
local function retries_left(job)
  if job.lane > 0 then return math.max(0, option('retry_lane_retries') - job.lane) end
  return math.max(0, option('max_retries') - job.retries) + option('retry_lane_retries')
end

-- `count`: how many attempts were lost in this way, this one too; `most`: after how many the job is still tried again.
local function fate_of_loss(due_ms, attempt, count, most)
  local left = math.max(0, most + 1 - count)
  return fate(left == 0 and 'dead' or 'returned', due_ms, attempt, left)
end

-- `lost`: a job that was running when its worker was lost (losses.lua), and was counted.
local function fate_of_lost(lost)
  local job, due_ms = lost.counted, lost.run_at_ms
  if lost.outcome == 'stalled' then
    return fate_of_loss(due_ms, attempts_of(job), job.stalls, tonumber(options.max_stalls or 3))
  elseif lost.outcome == 'timed_out' then
    return fate_of_loss(due_ms, attempts_of(job), job.timeouts, tonumber(options.max_timeouts or 3))
  end
  return fate(job.lane == SUSPECT and 'suspect' or 'interrupted', due_ms, attempts_of(job) + 1, 0)
end
