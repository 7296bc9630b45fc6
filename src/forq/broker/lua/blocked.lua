-- A dispatch of an id that is active waits behind it: `blocked`, id -> what it asks for. Several dispatches fold into
-- one entry: UPDATE RESET PRIORITY OWN LO HI '\n' BODY.
--   UPDATE, RESET   whether data is replaced and counts are reset if the active job comes back
--   OWN             run_at (ms) of the blocked job if the active one ends and it becomes a job of its own
--   LO, HI          what happens to the active job's run_at if it comes back: min(max(run_at, LO), HI).
--                   Setting, "if later" and "if earlier" are all of this form, and so is any sequence of them.

function blocked.clamp(run_at, lo, hi)
  return math.min(math.max(run_at, lo), hi)
end

function blocked.read(id)
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
function blocked.unblock(ids)
  if #ids == 0 or redis.call('EXISTS', key('blocked')) == 0 then return end
  local unblocked, entries = {}, {}
  for _, id in ipairs(ids) do
    local entry = blocked.read(id)
    if entry then
      redis.call('HDEL', key('blocked'), id)
      local flag = entry.own > now_ms and 'd' or 'p'
      redis.call('HSET', key('jobs'), id, string.format('%s%s %.0f\n', flag, entry.priority, now_ms) .. entry.body)
      unblocked[#unblocked + 1] = id
      entries[#entries + 1] = entry
    end
  end
  journal.note_ids('unblocked', 0, unblocked)
  for i, entry in ipairs(entries) do
    timers.make_ready(unblocked[i], entry.priority, entry.own)
    timers.set_expiry(unblocked[i], entry.own)
  end
end

-- The active job comes back to run again at `run_at`: what is blocked behind it updates it. Returns its run_at.
function blocked.update(id, job, run_at)
  if redis.call('EXISTS', key('blocked')) == 0 then return run_at end
  local entry = blocked.read(id)
  if not entry then return run_at end
  redis.call('HDEL', key('blocked'), id)
  if entry.update then job.body, job.priority = entry.body, entry.priority end
  if entry.reset then
    records.reset_counts(job)
    attempts.forget({ id })
  end
  journal.note('merged 0 ' .. id)
  run_at = blocked.clamp(run_at, entry.lo, entry.hi)
  job.delayed = job.delayed or run_at > now_ms
  return run_at
end

-- How a dispatch comes to be blocked.

local FAR = 9007199254740991  -- no run_at is later

-- The bounds after one more dispatch: first those that were, then what this one does.
function blocked.fold_bounds(lo, hi, how, run_at)
  if how == 'true' then return run_at, run_at end
  if how == 'if_later' then return math.max(lo, run_at), math.max(hi, run_at) end
  if how == 'if_earlier' then return math.min(lo, run_at), math.min(hi, run_at) end
  return lo, hi
end

function blocked.add(id, dispatch)
  local before = blocked.read(id)
  local entry = before or {
    update = false, reset = false, priority = dispatch.priority, own = dispatch.run_at, lo = 0, hi = FAR,
    body = dispatch.body,
  }
  entry.update = entry.update or dispatch.update_data
  entry.reset = entry.reset or dispatch.reset
  if dispatch.update_data then entry.body, entry.priority = dispatch.body, dispatch.priority end
  if before then
    local lo, hi = blocked.fold_bounds(0, FAR, dispatch.update_run_at, dispatch.run_at)
    entry.own = blocked.clamp(entry.own, lo, hi)
  end
  entry.lo, entry.hi = blocked.fold_bounds(entry.lo, entry.hi, dispatch.update_run_at, dispatch.run_at)
  redis.call('HSET', key('blocked'), id, string.format('%d %d %s %.0f %.0f %.0f\n', entry.update and 1 or 0,
    entry.reset and 1 or 0, entry.priority, entry.own, entry.lo, entry.hi) .. entry.body)
end
