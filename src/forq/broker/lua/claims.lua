-- Claims: fences, owners, and how claimed jobs return to the queue.

-- The fence of all claims of one call: max(last + 1, server time). It never decreases, not even after a failover to a
-- server whose clock is behind. No id is claimed twice in one call.

function claims.next_fence()
  if not call_fence then
    -- For most claims, text is compared: two times of the same length.
    if #last_fence == #now_text() and last_fence < now_text() then call_fence = now_text()
    else call_fence = string.format('%d', math.max(last_fence + 1, now_us)) end
    last_fence = call_fence
  end
  return call_fence
end

-- A worker holds the ids of its processing list. `active` holds id -> OWNER for claimed ones. OWNER is WORKER:FENCE,
-- followed by ':removed' if the running job is marked for removal.

local REMOVED = ':removed'

function claims.is_removed(owner)
  return string.sub(owner, -#REMOVED) == REMOVED
end

function claims.is_owner(worker, owner)
  return owner and string.sub(owner, 1, #worker + 1) == worker .. ':'
end

-- Whether `worker` claimed the job with this fence and still owns it.
function claims.is_claim(owner, worker, fence)
  local claim = worker .. ':' .. fence
  return owner == claim or owner == claim .. REMOVED
end

function claims.fence_of(owner)
  return string.match(owner, ':(%d+)')
end

-- The age of a claim: its fence is its time, unless the clock was set back.
function claims.micros_since(fence)
  return string.format('%.0f', math.max(0, now_us - tonumber(fence)))
end

-- Returns the ids of `list`, in order, before all waiting jobs. Owned ids lose their owner. Ids that BLMOVE moved here
-- but no turn claimed are hints of priority 5. The caller empties the processing list.
--   lost  (or nil) the job that was running when its worker was lost, or that was interrupted: id, outcome, cause
--         (failures.count_loss). After a timeout it goes to the back of its place; if it was killed, it is cancelled.
--   kept  (or nil) ids (as keys) that stay with the worker; an entry of `list` with such an id is a stray hint.
function claims.return_jobs(worker, list, lost, kept)
  if #list == 0 then return end
  local owners = redis.call('HMGET', key('active'), unpack(list))
  local packed = redis.call('HMGET', key('jobs'), unpack(list))
  local front, back, later, freed, removed, returned, seen = {}, nil, {}, {}, {}, {}, {}
  -- Ids taken by BLMOVE come after the swept hints.
  local _, swept = hints.first_list('5')
  local unstarted = {}
  for i, id in ipairs(list) do
    local owner, record = owners[i], packed[i]
    returned_bytes = returned_bytes + (record and #record or 0)
    local owned = claims.is_owner(worker, owner) and not seen[id] and not (kept and kept[id])
    if owned then
      seen[id] = true
      freed[#freed + 1] = id
    end
    -- A removed hint always consumes its stale count. Otherwise it would hide the hint of the id's next job.
    local stale = not owned and id ~= '' and hints.consume_stale('5', id)
    local running = owned and lost and id == lost.id
    if owned and (claims.is_removed(owner) or not record or (running and lost.outcome == 'cancelled')) then
      removed[#removed + 1] = id
      journal.note('cancelled ' .. claims.fence_of(owner) .. ' ' .. id)
    elseif owned or (id ~= '' and not stale and record and not owner) then
      local job = owned and records.read(record)
      if running then failures.count_loss(lost, owner, job) end
      local run_at = job and blocked.update(id, job, 0) or 0
      if running then lost.run_at_ms = run_at end
      if job then
        local updated = records.write(job)
        if updated ~= record then redis.call('HSET', key('jobs'), id, updated) end
      end
      local place = job and records.place_for(job) or records.place_of(record) or '5'
      if run_at > now_ms then
        later[#later + 1] = { id, run_at }
      elseif running and lost.outcome == 'timed_out' then
        back = place
      elseif swept and not owned then
        table.insert(unstarted, 1, id)
      else
        front[place] = front[place] or {}
        table.insert(front[place], id)
      end
      if owned then returned[#returned + 1] = id end
    elseif id ~= '' and not stale and not owner then
      hints.drop(id)
    end
  end
  if #freed > 0 then redis.call('HDEL', key('active'), unpack(freed)) end
  progress.delete(freed)
  if #removed > 0 then
    redis.call('HDEL', key('jobs'), unpack(removed))
    if mode ~= 'work' then redis.call('ZREM', key('expiries'), unpack(removed)) end
    attempts.delete(removed)
    flows.end_jobs(removed, 'cancelled')
  end
  journal.note_ids('returned', 0, returned)
  for _, job in ipairs(later) do
    timers.schedule(job[1], job[2])
    timers.set_expiry(job[1], job[2])
  end
  if #unstarted > 0 then redis.call('LPUSH', key('pending'), unpack(unstarted)) end
  hints.push_front(front)
  if back then hints.push_back(back, { lost.id }) end
end

-- A BLMOVE on an abandoned connection cannot be refused. It parks an id in the worker's list, behind the running jobs,
-- where no other worker sees it.

-- The last turn number of a registration, TURN or TURN:SHIFT (claims.position).
function claims.last_turn(registered)
  return tonumber(registered) or tonumber(string.match(registered, '^%d+'))
end

-- Returns ids in a worker's list that the worker does not own. Owned ids keep their order: positions depend on it.
function claims.return_parked(processor, worker)
  local processing = worker_key(processor, worker, 'processing')
  local list = redis.call('LRANGE', processing, 0, -1)
  if #list == 0 then return end
  local owners = redis.call('HMGET', key('active'), unpack(list))
  local own, parked, kept = {}, {}, {}
  for i, id in ipairs(list) do
    -- Only once: a second entry of the same id is a hint.
    if claims.is_owner(worker, owners[i]) and not kept[id] then
      kept[id] = true
      own[#own + 1] = id
    else
      parked[#parked + 1] = id
    end
  end
  if #parked == 0 then return end
  claims.return_jobs(worker, parked, nil, kept)
  redis.call('DEL', processing)
  if #own > 0 then redis.call('RPUSH', processing, unpack(own)) end
end

-- A worker's registration is the number of its last turn and, after a rescue, how many entries have left the head of
-- its processing list since: TURN or TURN:SHIFT. Returns the position in the list; nil if it is of another turn.
function claims.position(processor, worker, turn, index)
  local registered = redis.call('HGET', workers_key(processor), worker)
  if not registered then return nil end
  local last, shift = string.match(registered, '^(%d+):?(%d*)$')
  if last ~= turn then return nil end
  return index - (tonumber(shift) or 0)
end

-- Settles the ids of `list` that `worker` owns as done: it ran them but died before reporting. Returns the other ids.
function claims.settle_finished(worker, list)
  if #list == 0 then return {} end
  local owners = redis.call('HMGET', key('active'), unpack(list))
  local groups = flows.has_sources() and redis.call('HMGET', key('sources'), unpack(list)) or {}
  local ids, notes, others, seen = {}, {}, {}, {}
  for i, id in ipairs(list) do
    local owner = owners[i]
    -- A result that another job waits for is lost with the worker: the job runs again.
    if seen[id] or not claims.is_owner(worker, owner) or flows.is_used(groups[i]) then
      others[#others + 1] = id
    else
      seen[id] = true
      ids[#ids + 1] = id
      local fence = claims.fence_of(owner)
      notes[fence] = notes[fence] or {}
      table.insert(notes[fence], id .. ' -')
    end
  end
  done.settle(ids, notes)
  return others
end
