-- What a worker holds: its processing list (ids) and its entries in `active` (id -> OWNER, OWNER = WORKER:FENCE,
-- followed by ':removed' once somebody asked to remove the running job).

local REMOVED = ':removed'
-- What was read of the records of jobs that this call has given back: a call for many owners ends when that is much.
local returned_bytes = 0

local function is_removed(owner)
  return string.sub(owner, -#REMOVED) == REMOVED
end

local function is_owner(worker, owner)
  return owner and string.sub(owner, 1, #worker + 1) == worker .. ':'
end

local function fence_of(owner)
  return string.match(owner, ':(%d+)')
end

-- Gives the ids of `list` back, in order, before all that waits. Owned ids lose their owner; ids that were moved
-- here but never begun are hints of priority 5 and are treated as such. The caller empties the processing list.
-- `lost` (or nil): the job that was running when its worker was lost: its id, its outcome, and what counts it (losses.lua).
-- One that timed out goes to the back of its place, one that was killed is cancelled.
-- `kept` (or nil): ids (as keys) that stay with the worker; one that is in `list` too is a hint there.
local function hand_back(worker, list, lost, kept)
  if #list == 0 then return end
  local owners = redis.call('HMGET', key('active'), unpack(list))
  local records = redis.call('HMGET', key('jobs'), unpack(list))
  local front, back, later, freed, removed, returned, seen = {}, nil, {}, {}, {}, {}, {}
  -- What BLMOVE took comes after the hints that were swept.
  local _, swept = first_list('5')
  local unbegun = {}
  for i, id in ipairs(list) do
    local owner, record = owners[i], records[i]
    returned_bytes = returned_bytes + (record and #record or 0)
    local owned = is_owner(worker, owner) and not seen[id] and not (kept and kept[id])
    if owned then
      seen[id] = true
      freed[#freed + 1] = id
    end
    -- A hint that goes uses up its stale count whatever became of the job: a count that outlived its hint would
    -- swallow the hint of the next job of that id.
    local stale = not owned and id ~= '' and ignore_hint('5', id)
    local running = owned and lost and id == lost.id
    if owned and (is_removed(owner) or not record or (running and lost.outcome == 'cancelled')) then
      removed[#removed + 1] = id
      note('cancelled ' .. fence_of(owner) .. ' ' .. id)
    elseif owned or (id ~= '' and not stale and record and not owner) then
      local job = owned and read_record(record)
      if running then lost.count(lost, owner, job) end
      local run_at = job and update_from_blocked(id, job, 0) or 0
      if running then lost.run_at_ms = run_at end
      if job then
        local updated = write_record(job)
        if updated ~= record then redis.call('HSET', key('jobs'), id, updated) end
      end
      local place = job and place_for(job) or place_of(record) or '5'
      if run_at > now_ms then
        later[#later + 1] = { id, run_at }
      elseif running and lost.outcome == 'timed_out' then
        back = place
      elseif swept and not owned then
        table.insert(unbegun, 1, id)
      else
        front[place] = front[place] or {}
        table.insert(front[place], id)
      end
      if owned then returned[#returned + 1] = id end
    elseif id ~= '' and not stale and not owner then
      drop(id)
    end
  end
  if #freed > 0 then redis.call('HDEL', key('active'), unpack(freed)) end
  forget_progress(freed)
  if #removed > 0 then
    redis.call('HDEL', key('jobs'), unpack(removed))
    if mode ~= 'work' then redis.call('ZREM', key('expiries'), unpack(removed)) end
    forget_attempts(removed)
    unblock(removed)
    tell_waiters(removed, 'cancelled')
  end
  note_ids('returned', 0, returned)
  for _, job in ipairs(later) do
    schedule(job[1], job[2])
    if set_expiry then set_expiry(job[1], job[2]) end
  end
  if #unbegun > 0 then redis.call('LPUSH', key('pending'), unpack(unbegun)) end
  push_front(front)
  if back then push_back(back, { lost.id }) end
end
