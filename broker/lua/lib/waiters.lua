-- Who waits for the end of a job: `waiters`, id -> until when (ms) somebody does. Whatever ends a job tells them, on the channel
-- `ended:ID`: how it ended and, of done and dead, the fence of its last attempt. One that died without a word is forgotten by chance.

local WAITERS_SEEN_BY_CHANCE = 2

-- `fences` (or nil): of the last attempts, in the order of the ids. Nobody else can wait for what has ended: whoever is told is
-- written down no more.
local function tell_waiters(ids, how, fences)
  if redis.call('EXISTS', key('waiters')) == 0 then return end
  for i, waits_until in ipairs(redis.call('HMGET', key('waiters'), unpack(ids))) do
    if waits_until then
      redis.call('HDEL', key('waiters'), ids[i])
      redis.call('PUBLISH', key('ended:' .. ids[i]), how .. ' ' .. (fences and fences[i] or 0))
    end
  end
end

local function tell_all_waiters(how)
  tell_waiters(redis.call('HKEYS', key('waiters')), how)
end

-- Several may wait for one job: the last to go counts.
local function write_waiter_down(id, valid_ms)
  local waits_until = math.max(now_ms + valid_ms, tonumber(redis.call('HGET', key('waiters'), id) or 0))
  redis.call('HSET', key('waiters'), id, string.format('%.0f', waits_until))
  -- When all are dead, nothing is left of them.
  redis.call('PEXPIRE', key('waiters'), string.format('%.0f', 2 * valid_ms))
  for _, other in ipairs(redis.call('HRANDFIELD', key('waiters'), WAITERS_SEEN_BY_CHANCE)) do
    if tonumber(redis.call('HGET', key('waiters'), other)) <= now_ms then redis.call('HDEL', key('waiters'), other) end
  end
end
