-- Items that are older than `item_timeout` are given up: each is dead, and has a line in the failed log.

local EXPIRED_PER_CALL = 200

local function expire()
  local due = redis.call('ZRANGEBYSCORE', key('expiries'), '-inf', string.format('%.0f', now_ms), 'LIMIT', 0, math.max(1, readable(EXPIRED_PER_CALL, READ_BYTES)))
  if #due == 0 then return end

  -- The oldest are mostly at the head of their list: such hints go at once. `heads`: place -> the first ones, and how many of
  -- them go. The others are given up after that: to give up a hint may change the heads.
  local heads, others = {}, {}
  local function forget_first_hint(place, id)
    heads[place] = heads[place] or { ids = redis.call('LRANGE', (first_list(place)), 0, EXPIRED_PER_CALL - 1), going = 0 }
    local first = heads[place]
    if first.ids[first.going + 1] == id then first.going = first.going + 1 else others[#others + 1] = { place, id } end
  end

  local records = redis.call('HMGET', key('jobs'), unpack(due))
  local owners = redis.call('HMGET', key('active'), unpack(due))
  local scheduled = redis.call('ZMSCORE', key('scheduled'), unpack(due))
  local error = string.format('{"name":"ItemTimeout","message":"nobody took it within item_timeout = %s s","kind":"permanent","traceback":null}',
    tostring(option('item_timeout_ms') / 1000))
  local fence, old, bytes = nil, {}, 0
  for i, id in ipairs(due) do
    local record = records[i]
    if not record then
      redis.call('ZREM', key('expiries'), id)
    elseif owners[i] then
      -- It is in somebody's hands: it is looked at again when it comes back. The half tells that it was too old before.
      local lapses = redis.call('ZSCORE', key('leases'), id) or now_ms
      redis.call('ZADD', key('expiries'), string.format('%.1f', tonumber(lapses) + 0.5), id)
    elseif bytes < READ_BYTES then
      local job = read_record(record)
      if scheduled[i] then
        redis.call('ZREM', key('scheduled'), id)
        -- Between two tries: nothing that is scheduled can be claimed.
        note('updated 0 ' .. id)
      else
        forget_first_hint(job and place_for(job) or '5', id)
      end
      fence = fence or next_fence()
      note('claimed ' .. fence .. ' ' .. attempt_number(job) .. ' ' .. id)
      old[#old + 1] = { id = id, fence = fence, micros = '-', record = record, error = error, brief = error }
      bytes = bytes + #record
    end
  end
  for place, first in pairs(heads) do
    if first.going > 0 then
      pop_hints(place, first.going)
      if place == LANE then count_hints(LANE, -first.going) end
    end
  end
  for _, other in ipairs(others) do forget_hint(other[1], other[2]) end
  if #old > 0 then bury_jobs(old) end
end
