-- Results: the progress of running jobs, waiting for the end of a job, and done jobs that are kept.

-- How far running jobs are: `progress`, id -> FRACTION ' ' MS ' ' TEXT, of active jobs only. `progress` is also the
-- channel that names the jobs whose progress has changed or is over, with a blank between them.

-- `fraction` (0 to 1) and `text` (one line) were checked by who calls; so was who owns the job.
function progress.set(id, fraction, text)
  redis.call('HSET', key('progress'), id, string.format('%.6g %.0f ', fraction, now_ms) .. text)
  redis.call('PUBLISH', channel('progress'), id)
  has_progress = true
end

-- To be called wherever ids leave `active`.
function progress.delete(ids)
  if #ids == 0 then return end
  if has_progress == nil then has_progress = redis.call('EXISTS', key('progress')) == 1 end
  if has_progress and redis.call('HDEL', key('progress'), unpack(ids)) > 0 then
    redis.call('PUBLISH', channel('progress'), table.concat(ids, ' '))
  end
end

-- Who waits for the end of a job: `waiters`, id -> UNTIL ' ' MARK: until when (ms) somebody does, and which job it is
-- (wait). Whatever ends a job tells them, on the channel `ended:ID`: HOW ' ' FENCE ' ' MARK, FENCE being that of
-- its last attempt (0: it had none). The same, and of a done job what is kept of it, is in `told:MARK:ID` for a while:
-- the next job of that id may be done before they look.

-- Whoever listens looks within milliseconds, so a copy of a result, which may be long, stays for less: later it is
-- found in `done:jobs`, as long as that keeps it.
local OUTCOME_MS, RESULT_MS = 60000, 10000

-- `fences` (or nil): of the last attempts, in the order of the ids. Nobody else can wait for what has ended: whoever is
-- told is written down no more.
function waiters.notify(ids, outcome, fences)
  if redis.call('EXISTS', key('waiters')) == 0 then return end
  for i, entry in ipairs(redis.call('HMGET', key('waiters'), unpack(ids))) do
    if entry then
      local id, mark, fence = ids[i], string.match(entry, ' (%S+)$') or '-', fences and fences[i] or '0'
      local kept = outcome == 'done' and redis.call('HGET', key('done:jobs'), id)
      -- What is not kept any more, or was not, may have left what is kept of an earlier one.
      if kept and string.match(kept, '^%d+ (%d+)') ~= fence then kept = false end
      redis.call('HDEL', key('waiters'), id)
      if outcome ~= 'deleted' then
        redis.call('SET', key_of('told', mark .. ':' .. id), outcome .. ' ' .. fence .. (kept and '\n' .. kept or ''),
          'PX', kept and RESULT_MS or OUTCOME_MS)
      end
      redis.call('PUBLISH', channel('ended:' .. id), outcome .. ' ' .. fence .. ' ' .. mark)
    end
  end
end

-- Jobs that succeeded. With `keep_done` each is kept for that long: `done`, id by the time it ended (ms); `done:jobs`,
-- id -> ENDED_MS ' ' FENCE ' ' MICROS '\n' RESULT '\n' RECORD '\n' ATTEMPTS. RESULT is JSON, '' (it was lost with its
-- worker) or '!' and why there is none; ATTEMPTS a JSON array of the attempts before.

local TRIMMED_DONE_PER_CALL = 100
-- Of a queue made by a release that had no such option.
local DONE_MAX = 10000

-- Those that are too many or too old, at most `most` of each.
function done.trim(most)
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
function done.keep(ids, owners, reported)
  local packed = redis.call('HMGET', key('jobs'), unpack(ids))
  local tried = redis.call('EXISTS', key('attempts')) == 1 and redis.call('HMGET', key('attempts'), unpack(ids)) or {}
  local kept, ended, ms, max_data = {}, {}, string.format('%.0f', now_ms), option('max_data')
  for i, id in ipairs(ids) do
    -- What somebody asked to remove is to be forgotten whatever its outcome.
    if packed[i] and not claims.is_removed(owners[i]) then
      local micros, result = '-', ''
      if reported[id] then micros, result = reported[id].micros, reported[id].result end
      if #result > max_data and string.sub(result, 1, 1) ~= '!' then
        result = string.format('!it is longer than max_data = %.0f bytes', max_data)
      end
      kept[#kept + 1] = id
      kept[#kept + 1] = ms .. ' ' .. claims.fence_of(owners[i]) .. ' ' .. micros .. '\n' .. result .. '\n'
        .. packed[i] .. '\n[' .. string.gsub(tried[i] or '', '\n', ',') .. ']'
      ended[#ended + 1] = ms
      ended[#ended + 1] = id
    end
  end
  if #kept == 0 then return end
  redis.call('HSET', key('done:jobs'), unpack(kept))
  redis.call('ZADD', key('done'), unpack(ended))
  done.trim(math.max(TRIMMED_DONE_PER_CALL, 2 * #ids))
end

-- Success of ids whose ownership has been checked. `notes`: what the journal says of them, by fence. `told` (or nil):
-- see above.
function done.settle(ids, notes, reported)
  if #ids == 0 then return end
  local keeps = option('keep_done_ms') > 0
  -- Most queues have none of these: then one question is all that they cost.
  local some = redis.call('EXISTS', key('blocked'), key('progress'), key('attempts'), key('waiters'), key('stale')) > 0
  if not some then may_be_stale = false end
  local owners = (keeps or some) and redis.call('HMGET', key('active'), unpack(ids))
  if keeps then done.keep(ids, owners, reported or {}) end
  redis.call('HDEL', key('jobs'), unpack(ids))
  redis.call('HDEL', key('active'), unpack(ids))
  redis.call('INCRBY', key('processed:count'), #ids)
  for fence, entries in pairs(notes) do
    if #entries > 0 then journal.note('done ' .. fence .. ' ' .. table.concat(entries, ' ')) end
  end
  if not some then return end
  progress.delete(ids)
  attempts.delete(ids)
  blocked.unblock(ids)
  local fences = {}
  for i, owner in ipairs(owners) do fences[i] = claims.fence_of(owner) end
  waiters.notify(ids, 'done', fences)
end

-- Done jobs are forgotten when others are done; and from time to time, while none is.

-- A queue that keeps nothing any more forgets all at once.
function done.expire(most)
  if redis.call('EXISTS', key('done')) == 0 then return end
  if option('keep_done_ms') == 0 then
    redis.call('UNLINK', key('done'), key('done:jobs'))
  else
    done.trim(most)
  end
end

-- progress: a worker says how far a job is that it runs.
-- KEYS[1]  the queue's base
-- ARGV     worker, id, fence, fraction (0 to 1), text
-- Returns  {OK, 1 stored | 0 it does not run that job (any more)}; {NO_QUEUE}
function verbs.progress()
  if not epoch then return { NO_QUEUE } end
  local worker, id, fence = ARGV[1], ARGV[2], ARGV[3]
  local owner, own = redis.call('HGET', key('active'), id), worker .. ':' .. fence
  if owner ~= own and owner ~= own .. ':removed' then return { OK, 0 } end
  progress.set(id, ARGV[4], ARGV[5])
  return { OK, 1 }
end

-- wait: somebody waits for the end of a job: whether it has ended by now; if not, he is written down, to be told. To be
-- repeated before that lapses, and whenever he may have missed something.
-- KEYS[1]  the queue's base
-- ARGV     id, epoch, mark ('' and '' the first time, then those of the last answer), for how long he is written down
--          (ms)
-- Returns  {OK, 'live', epoch, mark of the job}; {OK, 'done', epoch, mark, fence, what is kept of it (if anything)};
--          {OK, 'dead', epoch, mark, fence}; {OK, 'cancelled', epoch, mark}; {OK, 'gone', epoch, mark} if it is neither
--          live nor kept; {KEEPS_NOTHING}; {NO_QUEUE}. Of a job that was not live the first time the mark is ''
function verbs.wait()
  -- One that died without a word is forgotten by chance.
  local SAMPLED_WAITERS = 2

  -- A mark is MICROSECONDS '-' ENQUEUED_MS of the job: when somebody was first written down for it. Every end of the id
  -- takes the entry out, so as long as the mark is there the job is the same. '' if there is none.
  local function mark_of(id)
    return string.match(redis.call('HGET', key('waiters'), id) or '', ' (%S+)$') or ''
  end

  -- Until when (ms) somebody waits; 0 if nobody does.
  local function waits_until_ms(id)
    return tonumber(string.match(redis.call('HGET', key('waiters'), id) or '', '^%d+') or 0)
  end

  -- Several may wait for one job: the last to go counts.
  local function register_waiter(id, mark, valid_ms)
    local until_ms = math.max(now_ms + valid_ms, waits_until_ms(id))
    redis.call('HSET', key('waiters'), id, string.format('%.0f ', until_ms) .. mark)
    -- When all are dead, nothing is left of them.
    redis.call('PEXPIRE', key('waiters'), string.format('%.0f', 2 * valid_ms))
    for _, other in ipairs(redis.call('HRANDFIELD', key('waiters'), SAMPLED_WAITERS)) do
      if waits_until_ms(other) <= now_ms then redis.call('HDEL', key('waiters'), other) end
    end
  end

  -- When the live job of that id was enqueued; nil if there is none.
  local function live_enqueued_ms(id)
    local record = redis.call('HGET', key('jobs'), id)
    return record and (string.match(record, '^.%d (%d+)') or '0')
  end

  local id, mark, valid_ms = ARGV[1], ARGV[3], tonumber(ARGV[4])
  if not epoch or ARGV[2] ~= '' and ARGV[2] ~= epoch then return { NO_QUEUE } end

  local function live_reply(new_mark)
    register_waiter(id, new_mark, valid_ms)
    return { OK, 'live', epoch, new_mark }
  end

  local function done_reply(kept)
    return { OK, 'done', epoch, mark, string.match(kept, '^%d+ (%d+)'), kept }
  end

  local function first_call()
    if option('keep_done_ms') == 0 or options.done_max == '0' then return { KEEPS_NOTHING } end
    local enqueued_ms = live_enqueued_ms(id)
    if enqueued_ms then
      local stored_mark = mark_of(id)
      return live_reply(stored_mark ~= '' and stored_mark or string.format('%.0f-', now_us) .. enqueued_ms)
    end
    local kept = redis.call('HGET', key('done:jobs'), id)
    return kept and done_reply(kept) or { OK, 'gone', epoch, '' }
  end

  local function later_call()
    local stored_mark = mark_of(id)
    if stored_mark == mark and redis.call('HEXISTS', key('jobs'), id) == 1 then return live_reply(mark) end
    local stored = redis.call('GET', key_of('told', mark .. ':' .. id))
    if stored then
      local outcome, fence, kept = string.match(stored, '^(%a+) (%d+)\n?(.*)$')
      return { OK, outcome, epoch, mark, fence, kept ~= '' and kept or nil }
    end
    -- He was away for long, or what ended it did not know of marks: the job is known by the time it was enqueued.
    local enqueued_ms = string.match(mark, '-(%d+)$')
    if live_enqueued_ms(id) == enqueued_ms then return live_reply(stored_mark ~= '' and stored_mark or mark) end
    local kept = redis.call('HGET', key('done:jobs'), id)
    if kept and string.match(kept, '^[^\n]*\n[^\n]*\n.%d (%d+)') == enqueued_ms then return done_reply(kept) end
    return { OK, 'gone', epoch, mark }
  end

  return mark == '' and first_call() or later_call()
end
