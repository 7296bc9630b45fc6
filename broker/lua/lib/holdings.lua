-- What a worker holds: its processing list (ids) and its entries in `active` (id -> OWNER, OWNER = WORKER:FENCE,
-- followed by ':removed' once somebody asked to remove the running job).

local REMOVED = ':removed'

local function is_removed(owner)
  return string.sub(owner, -#REMOVED) == REMOVED
end

local function is_owner(worker, owner)
  return owner and string.sub(owner, 1, #worker + 1) == worker .. ':'
end

local function fence_of(owner)
  return string.match(owner, ':(%d+)')
end

-- A worker's registration holds the number of its last turn and, after a rescue, how many entries have left the head
-- of its processing list since: TURN or TURN:SHIFT. Its position in that list, or nil if it does not belong to this turn.
local function position(processor, worker, turn, index)
  local registered = redis.call('HGET', workers_key(processor), worker)
  if not registered then return nil end
  local last, shift = string.match(registered, '^(%d+):?(%d*)$')
  if last ~= turn then return nil end
  return index - (tonumber(shift) or 0)
end

-- Success of ids whose ownership has been checked. `notes`: what the journal says of them, by fence.
local function settle_done(ids, notes)
  if #ids == 0 then return end
  redis.call('HDEL', key('jobs'), unpack(ids))
  redis.call('HDEL', key('active'), unpack(ids))
  forget_attempts(ids)
  redis.call('INCRBY', key('processed:count'), #ids)
  for fence, entries in pairs(notes) do
    if #entries > 0 then note('done ' .. fence .. ' ' .. table.concat(entries, ' ')) end
  end
  unblock(ids)
end

-- The ids of `list` that `worker` owns count as done: it ran them, but did not live to say so. Returns the others.
local function settle_ran(worker, list)
  if #list == 0 then return {} end
  local owners = redis.call('HMGET', key('active'), unpack(list))
  local ids, notes, others, seen = {}, {}, {}, {}
  for i, id in ipairs(list) do
    local owner = owners[i]
    if seen[id] or not is_owner(worker, owner) then
      others[#others + 1] = id
    else
      seen[id] = true
      ids[#ids + 1] = id
      local fence = fence_of(owner)
      notes[fence] = notes[fence] or {}
      table.insert(notes[fence], id .. ' -')
    end
  end
  settle_done(ids, notes)
  return others
end

-- Gives the ids of `list` back, in order, before all that waits. Owned ids lose their owner; ids that were moved
-- here but never begun are hints of priority 5 and are treated as such. The caller empties the processing list.
-- `running` (or nil): the id that was running when its worker died, why it did, and whether its stall count grows.
-- `kept` (or nil): an id that the worker goes on running; if it is in `list` too, that is a hint.
local function hand_back(worker, list, running, cause, counted, kept)
  if #list == 0 then return end
  local owners = redis.call('HMGET', key('active'), unpack(list))
  local records = redis.call('HMGET', key('jobs'), unpack(list))
  local front, freed, removed, returned, seen = {}, {}, {}, {}, {}
  for i, id in ipairs(list) do
    local owner, record = owners[i], records[i]
    local owned = is_owner(worker, owner) and not seen[id] and id ~= kept
    if owned then
      seen[id] = true
      freed[#freed + 1] = id
    end
    -- A hint that goes uses up its stale count whatever became of the job: a count that outlived its hint would
    -- swallow the hint of the next job of that id.
    local stale = not owned and id ~= '' and ignore_hint('5', id)
    if owned and (is_removed(owner) or not record) then
      removed[#removed + 1] = id
      note('cancelled ' .. fence_of(owner) .. ' ' .. id)
    elseif owned or (id ~= '' and not stale and record and not owner) then
      if owned and id == running then
        add_attempt(id, counted and 'stalled' or 'interrupted', cause)
        if counted then
          record = count_stall(record)
          redis.call('HSET', key('jobs'), id, record)
          note('stalled ' .. fence_of(owner) .. ' ' .. id .. ' ' .. cause)
        end
      end
      local job = owned and read_record(record)
      local run_at = job and update_from_blocked(id, job, 0) or 0
      if job then
        local updated = write_record(job)
        if updated ~= record then redis.call('HSET', key('jobs'), id, updated) end
      end
      local place = job and (job.lane > 0 and LANE or job.priority) or place_of(record) or '5'
      if run_at > now_ms then
        schedule(id, run_at)
      else
        front[place] = front[place] or {}
        table.insert(front[place], id)
      end
      if owned then returned[#returned + 1] = id end
    end
  end
  if #freed > 0 then redis.call('HDEL', key('active'), unpack(freed)) end
  if #removed > 0 then
    redis.call('HDEL', key('jobs'), unpack(removed))
    forget_attempts(removed)
    unblock(removed)
  end
  note_ids('returned', 0, returned)
  push_front(front)
end
