-- How a dispatch comes to be blocked (blocked.lua says what is stored).

local FAR = 9007199254740991  -- no run_at is later

-- The bounds after one more dispatch: first those that were, then what this one does.
local function fold_bounds(lo, hi, how, run_at)
  if how == 'true' then return run_at, run_at end
  if how == 'if_later' then return math.max(lo, run_at), math.max(hi, run_at) end
  if how == 'if_earlier' then return math.min(lo, run_at), math.min(hi, run_at) end
  return lo, hi
end

local function block(id, dispatch)
  local before = read_blocked(id)
  local entry = before or {
    update = false, reset = false, priority = dispatch.priority, own = dispatch.run_at, lo = 0, hi = FAR,
    body = dispatch.body,
  }
  entry.update = entry.update or dispatch.update_data
  entry.reset = entry.reset or dispatch.reset
  if dispatch.update_data then entry.body, entry.priority = dispatch.body, dispatch.priority end
  if before then
    local lo, hi = fold_bounds(0, FAR, dispatch.update_run_at, dispatch.run_at)
    entry.own = clamp(entry.own, lo, hi)
  end
  entry.lo, entry.hi = fold_bounds(entry.lo, entry.hi, dispatch.update_run_at, dispatch.run_at)
  redis.call('HSET', key('blocked'), id, string.format('%d %d %s %.0f %.0f %.0f\n', entry.update and 1 or 0,
    entry.reset and 1 or 0, entry.priority, entry.own, entry.lo, entry.hi) .. entry.body)
  return before == nil
end
