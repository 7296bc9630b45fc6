-- Who waits for the end of a job: `waiters`, id -> until when (ms) somebody does (wait.lua). Whatever ends a job tells them, on the
-- channel `ended:ID`: how it ended and, of done and dead, the fence of its last attempt.

-- `fences` (or nil): of the last attempts, in the order of the ids. Nobody else can wait for what has ended: whoever is told is
-- written down no more.
local function tell_waiters(ids, how, fences)
  if redis.call('EXISTS', key('waiters')) == 0 then return end
  for i, waits_until in ipairs(redis.call('HMGET', key('waiters'), unpack(ids))) do
    if waits_until then
      redis.call('HDEL', key('waiters'), ids[i])
      redis.call('PUBLISH', key_of('ended', ids[i]), how .. ' ' .. (fences and fences[i] or 0))
    end
  end
end
