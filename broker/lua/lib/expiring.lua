-- Items that are older than `item_timeout` are given up: each is dead, and has a line in the failed log.

local EXPIRED_PER_CALL = 200

-- The oldest are mostly at the head of their list: such a hint goes at once.
local function forget_first_hint(place, id)
  if redis.call('LINDEX', pending_key(place), 0) ~= id then return forget_hint(place, id) end
  redis.call('LPOP', pending_key(place))
  count_hints(place, -1)
end

local function expire()
  local due = redis.call('ZRANGEBYSCORE', key('expiries'), '-inf', string.format('%.0f', now_ms), 'LIMIT', 0, EXPIRED_PER_CALL)
  if #due == 0 then return end
  local records = redis.call('HMGET', key('jobs'), unpack(due))
  local owners = redis.call('HMGET', key('active'), unpack(due))
  local fence = next_fence()
  local error = string.format('{"name":"ItemTimeout","message":"nobody took it within item_timeout = %s s","kind":"permanent","traceback":null}',
    tostring(option('item_timeout_ms') / 1000))
  for i, id in ipairs(due) do
    local record = records[i]
    if not record then
      redis.call('ZREM', key('expiries'), id)
    elseif owners[i] then
      -- It is in somebody's hands: it is looked at again when it comes back. The half tells that it was too old before.
      local lapses = redis.call('ZSCORE', key('leases'), id) or now_ms
      redis.call('ZADD', key('expiries'), string.format('%.1f', tonumber(lapses) + 0.5), id)
    else
      local job = read_record(record)
      if redis.call('ZREM', key('scheduled'), id) == 1 then
        -- Between two tries: nothing that is scheduled can be claimed.
        note('updated 0 ' .. id)
      else
        forget_first_hint(job and place_for(job) or '5', id)
      end
      note('claimed ' .. fence .. ' ' .. attempt_number(job) .. ' ' .. id)
      bury_job(id, fence, '-', record, error, error)
    end
  end
end
