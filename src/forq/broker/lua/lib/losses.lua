-- A job was running when its worker was lost: what that means for it (the outcome), which depends on how it was lost.

-- What the journal says of it.
local function note_loss(lost, fence)
  local verb = lost.outcome == 'suspect' and 'suspected' or lost.outcome
  -- One word: a line is split at its blanks.
  local cause = lost.cause == '' and '-' or string.gsub(lost.cause, '[^!-~]', '_')
  local micros = tonumber(lost.micros) and ' ' .. lost.micros or ''
  note(verb .. ' ' .. fence .. ' ' .. lost.id .. ' ' .. cause .. micros)
end

-- `lost`: outcome ('stalled' | 'timed_out' | 'interrupted' | 'suspect'), cause, micros, stack, peak, silent (nobody saw it).
-- A broken record (no `job`) stays as it is: whoever runs it finds out.
local function count_loss(lost, owner, job)
  local outcome = lost.outcome == 'suspect' and 'interrupted' or lost.outcome
  add_attempt(lost.id, outcome, lost.cause, lost.micros, nil, lost.stack, lost.peak)
  note_loss(lost, fence_of(owner))
  if not job then return end
  if lost.outcome == 'stalled' then job.stalls = job.stalls + 1 end
  if lost.outcome == 'timed_out' then job.timeouts = job.timeouts + 1 end
  -- In the retry lane and in the fail queue it runs alone anyway.
  if lost.outcome == 'suspect' and job.lane == 0 and not parent then job.lane = SUSPECT end
  -- A copy: what was blocked behind it may begin its counts anew.
  lost.counted = { retries = job.retries, stalls = job.stalls, timeouts = job.timeouts, lane = job.lane }
end
