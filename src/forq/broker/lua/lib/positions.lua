-- What a worker has done of its batch, when others have to say it: its position tells which jobs it ran.

-- A worker's registration holds the number of its last turn and, after a rescue, how many entries have left the head
-- of its processing list since: TURN or TURN:SHIFT. Its position in that list, or nil if it does not belong to this turn.
local function position(processor, worker, turn, index)
  local registered = redis.call('HGET', workers_key(processor), worker)
  if not registered then return nil end
  local last, shift = string.match(registered, '^(%d+):?(%d*)$')
  if last ~= turn then return nil end
  return index - (tonumber(shift) or 0)
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
