-- Who waits for the end of a job: `waiters`, id -> UNTIL ' ' MARK: until when (ms) somebody does, and which job it is (wait.lua).
-- Whatever ends a job tells them, on the channel `ended:ID`: HOW ' ' FENCE ' ' MARK, FENCE being that of its last attempt (0: it had none).
-- The same, and of a done job what is kept of it, is in `told:MARK:ID` for a while: the next job of that id may be done before they look.

-- Whoever listens looks within milliseconds, so a copy of a result, which may be long, stays for less: later it is found in
-- `done:jobs`, as long as that keeps it.
local TOLD_MS, RESULT_MS = 60000, 10000

-- `fences` (or nil): of the last attempts, in the order of the ids. Nobody else can wait for what has ended: whoever is told is
-- written down no more.
local function tell_waiters(ids, how, fences)
  if redis.call('EXISTS', key('waiters')) == 0 then return end
  for i, entry in ipairs(redis.call('HMGET', key('waiters'), unpack(ids))) do
    if entry then
      local id, mark, fence = ids[i], string.match(entry, ' (%S+)$') or '-', fences and fences[i] or '0'
      local kept = how == 'done' and redis.call('HGET', key('done:jobs'), id)
      -- What is not kept any more, or was not, may have left what is kept of an earlier one.
      if kept and string.match(kept, '^%d+ (%d+)') ~= fence then kept = false end
      redis.call('HDEL', key('waiters'), id)
      if how ~= 'deleted' then
        redis.call('SET', key_of('told', mark .. ':' .. id), how .. ' ' .. fence .. (kept and '\n' .. kept or ''), 'PX', kept and RESULT_MS or TOLD_MS)
      end
      redis.call('PUBLISH', channel('ended:' .. id), how .. ' ' .. fence .. ' ' .. mark)
    end
  end
end
