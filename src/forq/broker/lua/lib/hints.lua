-- Waiting jobs are found through hints: ids in the pending lists. A hint may outlive what it points to
-- (cancel and the like never search a list); `stale` counts, per list and id, the hints to ignore.
-- An empty id in `pending` is a wake token: it wakes a worker for work that is in another list.
-- While a list is swept (forget_hint.lua), its first hints are in LIST:swept. The field `swept` of `stale` counts those of all lists,
-- so that they are looked for only if there are any. Those of priority 5 count as hints of other lists: nobody blocks on them.

-- The retry lane is a list like the others, for jobs that get a second chance once nothing else waits.
local LANE = 'r'
-- The suspects: jobs of which one may have killed its process. Each runs alone, the oldest first: they are in a zset, by the
-- time (ms) at which they were enqueued. Their hints never go stale: one that goes is taken out.
local SUSPECTS = 's'

-- How many hints sit in the lists of the priorities other than 5: while it is 0 a claim looks at one list only.
-- How many jobs wait in the retry lane (hints that are not stale). How many hints of suspects there are.
local other_hints, in_lane = tonumber(remembered[5] or 0), tonumber(remembered[6] or 0)
local suspect_hints = tonumber(remembered[7] or 0)
local other_hints_before, in_lane_before, suspect_hints_before = other_hints, in_lane, suspect_hints
local may_be_stale, swept_hints = nil, nil

-- For the modes whose items leave on request only, and nil in scripts that do not include ringing.lua and item_ages.lua.
local ring_awaiters, set_expiry
-- nil if the queue has no limits, and in scripts that do not include limited.lua: they make no room for anybody.
local wake_limited, wake_at_refill, left_to_suspects
-- Whether items leave when somebody asks for them: then nobody blocks on a list, and awaiters are rung.
local on_request = mode == 'on_request' or mode == 'external'
-- Ids that have become ready in this call, of such a queue.
local made_ready = {}

local function has_stale()
  if may_be_stale == nil then may_be_stale = redis.call('EXISTS', key('stale')) == 1 end
  return may_be_stale
end

-- True if this hint is to be ignored; it is then used up.
local function ignore_hint(priority, id)
  if not has_stale() then return false end
  local field = priority .. ':' .. id
  local left = tonumber(redis.call('HGET', key('stale'), field) or 0)
  if left == 0 then return false end
  if left == 1 then redis.call('HDEL', key('stale'), field) else redis.call('HINCRBY', key('stale'), field, -1) end
  return true
end

-- A hint to a job whose record is not there.
local function drop(id)
  redis.call('HINCRBY', key('counts'), 'dropped', 1)
  note('dropped 0 ' .. (string.find(id, '^[!-~]+$') and id or '?'))
end

local function count_hints(place, number)
  if place == LANE then in_lane = in_lane + number
  elseif place == SUSPECTS then suspect_hints = suspect_hints + number
  elseif place ~= '5' then other_hints = other_hints + number end
end

local function swept_key(place)
  return pending_key(place) .. ':swept'
end

local function count_swept(place, number)
  if place == '5' then other_hints = other_hints + number end
  swept_hints = redis.call('HINCRBY', key('stale'), 'swept', number)
  if swept_hints == 0 then redis.call('HDEL', key('stale'), 'swept') end
  may_be_stale = nil
end

-- The list that has the first hints of a place, and whether that is the one of those that were swept.
local function first_list(place)
  if (place == '5' and other_hints == 0) or not has_stale() then return pending_key(place), false end
  swept_hints = swept_hints or tonumber(redis.call('HGET', key('stale'), 'swept') or 0)
  if swept_hints > 0 and redis.call('EXISTS', swept_key(place)) == 1 then return swept_key(place), true end
  return pending_key(place), false
end

-- Takes the first hints of a place out, `number` at most; nil if there is none.
local function pop_hints(place, number)
  local list, swept = first_list(place)
  local ids = redis.call('LPOP', list, number)
  if not ids then return nil end
  if place ~= LANE then count_hints(place, -#ids) end
  if swept then count_swept(place, -#ids) end
  return ids
end

local function note_ready(ids)
  if not on_request then return end
  for _, id in ipairs(ids) do made_ready[#made_ready + 1] = id end
end

-- The score of what comes last among those of the same ms in a zset that is ordered by time.
local function last_of_its_ms(zset, ms)
  local last = redis.call('ZREVRANGEBYSCORE', zset, '(' .. string.format('%.0f', ms + 1), string.format('%.0f', ms),
    'WITHSCORES', 'LIMIT', 0, 1)
  -- What a double leaves below a millisecond, less from 2039 on; beyond that many of one ms, ties go by id.
  local steps = ms < 2 ^ 41 and 4096 or 1024
  local step = last[2] and math.min((tonumber(last[2]) - ms) * steps + 1, steps - 1) or 0
  return ms + step / steps
end

-- `by_age`: in the order in which they were enqueued; else they come after all that are there.
local function add_suspects(ids, by_age)
  local records = by_age and redis.call('HMGET', key('jobs'), unpack(ids)) or {}
  for i, id in ipairs(ids) do
    local enqueued_ms = records[i] and tonumber(string.match(records[i], '^.%d (%d+)'))
    local score = last_of_its_ms(key('suspects'), enqueued_ms or now_ms)
    count_hints(SUSPECTS, redis.call('ZADD', key('suspects'), score, id))
  end
end

local function push_back(priority, ids)
  if priority == SUSPECTS then return add_suspects(ids, false) end
  redis.call('RPUSH', pending_key(priority), unpack(ids))
  count_hints(priority, #ids)
  note_ready(ids)
end

-- Puts ids, in their order, before everything that waits; suspects where they belong by their age.
local function push_front(by_priority)
  for priority, ids in pairs(by_priority) do
    if priority == SUSPECTS then
      add_suspects(ids, true)
    else
      local reversed = {}
      for i = #ids, 1, -1 do reversed[#reversed + 1] = ids[i] end
      local list, swept = first_list(priority)
      redis.call('LPUSH', list, unpack(reversed))
      count_hints(priority, #ids)
      if swept then count_swept(priority, #ids) end
      note_ready(ids)
    end
  end
end

-- Jobs that wait for nothing but a worker, suspects too; what is scheduled, active or in the retry lane does not count.
local function main_waiting()
  return redis.call('HLEN', key('jobs')) - redis.call('HLEN', key('active')) - redis.call('ZCARD', key('scheduled')) - in_lane
end

-- The retry child of a queue blocks on `failed` alone: a token there tells it to look at suspects, its lane and its fail jobs.
local function wake_retry_child(failed_list)
  if redis.call('EXISTS', failed_list) == 0 then redis.call('RPUSH', failed_list, '') end
end

-- The end of every script that may leave claimable work: an idle worker blocks on one list alone, so work in others
-- needs a token there. A list with anything in it wakes somebody anyway: at most one token exists.
local function wake_idle_worker()
  if other_hints ~= other_hints_before or in_lane ~= in_lane_before or suspect_hints ~= suspect_hints_before then
    remember('other_hints', other_hints)
    remember('lane', in_lane)
    remember('suspect_hints', suspect_hints)
    other_hints_before, in_lane_before, suspect_hints_before = other_hints, in_lane, suspect_hints
  end
  if paused then return end
  if on_request then
    -- Nobody blocks on the list: it needs no token. Who may not have anything now would only ask again and again.
    if wake_limited and not wake_limited() then
      if main_waiting() + in_lane > 0 then wake_at_refill() end
    elseif ring_awaiters then
      ring_awaiters()
    end
    return
  end
  if parent then
    if redis.call('EXISTS', key('pending')) == 1 or other_hints > 0 then wake_retry_child(parent .. ':failed') end
    return
  end
  if other_hints > 0 and redis.call('EXISTS', key('pending')) == 0 then redis.call('RPUSH', key('pending'), '') end
  local free = not wake_limited or wake_limited()
  if suspect_hints > 0 or (in_lane > 0 and main_waiting() == 0) then
    -- It has no other work: it is woken when it may begin, and not before; but it has to ask once for a suspect.
    if not free then wake_at_refill() end
    if free or suspect_hints > 0 and left_to_suspects() == 0 then wake_retry_child(key('failed')) end
  end
end
