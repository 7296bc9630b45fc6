-- Jobs that wait for a time: `scheduled`, ids by due time (ms), with a sequence in the fraction so that equal times
-- keep their order. Whoever changes the head tells pulse, which keeps the timers: on the channel `due`, in how many ms it is.

-- As many as an enqueue stores in one call: the server is held up for about 1.5 ms.
local PROMOTED_PER_CALL = 500

local function next_due_ms()
  local head = redis.call('ZRANGE', key('scheduled'), 0, 0, 'WITHSCORES')
  return head[2] and math.floor(tonumber(head[2]))
end

local function note_scheduled(id, due_ms)
  note(string.format('scheduled 0 %s %.0f', id, due_ms))
end

-- The caller has noted what makes the job ready; a job of which nothing more is noted waits.
local function schedule(id, due_ms)
  local head = next_due_ms()
  redis.call('ZREM', key('scheduled'), id)
  redis.call('ZADD', key('scheduled'), last_of_its_ms(key('scheduled'), due_ms), id)
  note_scheduled(id, due_ms)
  if not head or due_ms < head then
    redis.call('PUBLISH', channel('due'), string.format('%.0f', math.max(0, due_ms - now_ms)))
  end
end

-- Makes a stored job waiting in its place, or scheduled if its time is ahead.
local function make_ready(id, place, run_at_ms)
  if run_at_ms > now_ms then schedule(id, run_at_ms) else push_back(place, { id }) end
end

-- What is due becomes waiting, in order.
local function promote()
  local due = redis.call('ZRANGEBYSCORE', key('scheduled'), '-inf', '(' .. string.format('%d', now_ms + 1),
    'LIMIT', 0, math.max(1, readable(PROMOTED_PER_CALL, READ_BYTES)))
  if #due == 0 then return end
  redis.call('ZREM', key('scheduled'), unpack(due))
  local records = redis.call('HMGET', key('jobs'), unpack(due))
  -- One push per list: a command costs more than what it moves.
  local promoted, by_place = {}, {}
  for i, id in ipairs(due) do
    if records[i] then
      local place = place_of(records[i]) or '5'
      local ids = by_place[place] or {}
      by_place[place] = ids
      ids[#ids + 1] = id
      promoted[#promoted + 1] = id
    else
      drop(id)
    end
  end
  for place, ids in pairs(by_place) do push_back(place, ids) end
  -- Nothing else waits: whatever waits from now on has not waited for longer, however long ago it was enqueued (counts.lua).
  if main_waiting() + in_lane == #promoted then remember('idle_until_ms', string.format('%.0f', now_ms)) end
  note_ids('promoted', 0, promoted)
end
