-- Jobs that succeeded. With `keep_done` each is kept for that long: `done`, id by the time it ended (ms); `done:jobs`, id -> ENDED_MS
-- ' ' FENCE ' ' MICROS '\n' RESULT '\n' RECORD '\n' ATTEMPTS. RESULT is JSON, '' (it was lost with its worker) or '!' and why there
-- is none; ATTEMPTS a JSON array of the attempts before.

local FORGOTTEN_DONE_PER_CALL = 100
-- Of a queue made by a release that had no such option.
local DONE_MAX = 10000

-- Those that are too many or too old, at most `most` of each.
local function forget_done(most)
  local function forget(ids)
    if #ids == 0 then return end
    redis.call('ZREM', key('done'), unpack(ids))
    redis.call('HDEL', key('done:jobs'), unpack(ids))
  end
  local excess = redis.call('ZCARD', key('done')) - tonumber(options.done_max or DONE_MAX)
  if excess > 0 then forget(redis.call('ZRANGE', key('done'), 0, math.min(excess, most) - 1)) end
  forget(redis.call('ZRANGEBYSCORE', key('done'), '-inf', string.format('%.0f', now_ms - option('keep_done_ms')),
    'LIMIT', 0, most))
end

-- While they are still active. `told`: id -> its micros and its result, as far as its worker has said so.
local function keep_done(ids, owners, told)
  local records = redis.call('HMGET', key('jobs'), unpack(ids))
  local tried = redis.call('EXISTS', key('attempts')) == 1 and redis.call('HMGET', key('attempts'), unpack(ids)) or {}
  local kept, ended, ms, max_data = {}, {}, string.format('%.0f', now_ms), option('max_data')
  for i, id in ipairs(ids) do
    -- What somebody asked to remove is to be forgotten whatever its outcome.
    if records[i] and not is_removed(owners[i]) then
      local micros, result = '-', ''
      if told[id] then micros, result = told[id].micros, told[id].result end
      if #result > max_data and string.sub(result, 1, 1) ~= '!' then
        result = string.format('!it is longer than max_data = %.0f bytes', max_data)
      end
      kept[#kept + 1] = id
      kept[#kept + 1] = ms .. ' ' .. fence_of(owners[i]) .. ' ' .. micros .. '\n' .. result .. '\n' .. records[i]
        .. '\n[' .. string.gsub(tried[i] or '', '\n', ',') .. ']'
      ended[#ended + 1] = ms
      ended[#ended + 1] = id
    end
  end
  if #kept == 0 then return end
  redis.call('HSET', key('done:jobs'), unpack(kept))
  redis.call('ZADD', key('done'), unpack(ended))
  forget_done(math.max(FORGOTTEN_DONE_PER_CALL, 2 * #ids))
end

-- Success of ids whose ownership has been checked. `notes`: what the journal says of them, by fence. `told` (or nil): see above.
local function settle_done(ids, notes, told)
  if #ids == 0 then return end
  local keeps = option('keep_done_ms') > 0
  -- Most queues have none of these: then one question is all that they cost.
  local some = redis.call('EXISTS', key('blocked'), key('progress'), key('attempts'), key('waiters'), key('stale')) > 0
  if not some then may_be_stale = false end
  local owners = (keeps or some) and redis.call('HMGET', key('active'), unpack(ids))
  if keeps then keep_done(ids, owners, told or {}) end
  redis.call('HDEL', key('jobs'), unpack(ids))
  redis.call('HDEL', key('active'), unpack(ids))
  redis.call('INCRBY', key('processed:count'), #ids)
  for fence, entries in pairs(notes) do
    if #entries > 0 then note('done ' .. fence .. ' ' .. table.concat(entries, ' ')) end
  end
  if not some then return end
  forget_progress(ids)
  forget_attempts(ids)
  unblock(ids)
  local fences = {}
  for i, owner in ipairs(owners) do fences[i] = fence_of(owner) end
  tell_waiters(ids, 'done', fences)
end
