-- A dispatch of an id that is active waits behind it: `blocked`, id -> what it asks for. Several dispatches fold into
-- one entry: UPDATE RESET PRIORITY OWN LO HI '\n' BODY.
--   UPDATE, RESET   whether data is replaced and counts are reset if the active job comes back
--   OWN             run_at (ms) of the blocked job if the active one ends and it becomes a job of its own
--   LO, HI          what happens to the active job's run_at if it comes back: min(max(run_at, LO), HI).
--                   Setting, "if later" and "if earlier" are all of this form, and so is any sequence of them.

local function clamp(run_at, lo, hi)
  return math.min(math.max(run_at, lo), hi)
end

local function read_blocked(id)
  local entry = redis.call('HGET', key('blocked'), id)
  if not entry then return nil end
  local update, reset, priority, own, lo, hi, body = string.match(entry, '^(%d) (%d) (%d) (%d+) (%d+) (%d+)\n(.*)$')
  return {
    update = update == '1',
    reset = reset == '1',
    priority = priority,
    own = tonumber(own),
    lo = tonumber(lo),
    hi = tonumber(hi),
    body = body,
  }
end

-- The active jobs `ids` have ended: what is blocked behind them becomes a job of its own.
local function unblock(ids)
  if #ids == 0 or redis.call('EXISTS', key('blocked')) == 0 then return end
  local unblocked, entries = {}, {}
  for _, id in ipairs(ids) do
    local entry = read_blocked(id)
    if entry then
      redis.call('HDEL', key('blocked'), id)
      redis.call('HSET', key('jobs'), id, string.format('%s%s %.0f\n', entry.own > now_ms and 'd' or 'p', entry.priority, now_ms)
        .. entry.body)
      unblocked[#unblocked + 1] = id
      entries[#entries + 1] = entry
    end
  end
  note_ids('unblocked', 0, unblocked)
  for i, entry in ipairs(entries) do
    make_ready(unblocked[i], entry.priority, entry.own)
    if set_expiry then set_expiry(unblocked[i], entry.own) end
  end
end

-- The active job comes back to run again at `run_at`: what is blocked behind it updates it. Returns its run_at.
local function update_from_blocked(id, job, run_at)
  if redis.call('EXISTS', key('blocked')) == 0 then return run_at end
  local entry = read_blocked(id)
  if not entry then return run_at end
  redis.call('HDEL', key('blocked'), id)
  if entry.update then job.body, job.priority = entry.body, entry.priority end
  if entry.reset then
    reset_counts(job)
    forget_attempts({ id })
  end
  note('merged 0 ' .. id)
  run_at = clamp(run_at, entry.lo, entry.hi)
  job.delayed = job.delayed or run_at > now_ms
  return run_at
end
