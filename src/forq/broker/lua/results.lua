-- Progress of running jobs, waiting for a job to end, and results of done jobs.

-- `progress`: id -> FRACTION ' ' MS ' ' TEXT, for active jobs only. The channel `progress` gets the ids whose progress
-- changed or ended, separated by spaces.

-- The caller has checked `fraction` (0 to 1), `text` (one line) and the owner.
function progress.set(id, fraction, text)
  redis.call('HSET', key('progress'), id, string.format('%.6g %.0f ', fraction, now_ms) .. text)
  redis.call('PUBLISH', channel('progress'), id)
  has_progress, may_be_rare = true, true
end

-- Call it whenever ids leave `active`.
function progress.delete(ids)
  if #ids == 0 then return end
  if has_progress == nil then has_progress = redis.call('EXISTS', key('progress')) == 1 end
  if has_progress and redis.call('HDEL', key('progress'), unpack(ids)) > 0 then
    redis.call('PUBLISH', channel('progress'), table.concat(ids, ' '))
  end
end

-- `waiters`: id -> UNTIL_MS ' ' MARK: clients wait for the end of this job until then; the mark identifies the job (see
-- wait). When the job ends, the channel `ended:ID` gets OUTCOME ' ' FENCE ' ' MARK (FENCE of its last attempt; 0:
-- none). `told:MARK:ID` holds the outcome, fence and done entry for a while, because the next job of this id may be
-- done before the clients read it.

-- Subscribers read within milliseconds, so the copy of a result, which may be long, expires sooner. After that it is
-- found in `done:jobs` while that keeps it.
local OUTCOME_MS, RESULT_MS = 60000, 10000

-- `fences` (or nil): of the last attempts, in the order of the ids. Removes the waiters: an ended job has no new ones.
function waiters.notify(ids, outcome, fences)
  if redis.call('EXISTS', key('waiters')) == 0 then return end
  for i, entry in ipairs(redis.call('HMGET', key('waiters'), unpack(ids))) do
    if entry then
      local id, mark, fence = ids[i], string.match(entry, ' (%S+)$') or '-', fences and fences[i] or '0'
      local kept = outcome == 'done' and redis.call('HGET', key('done:jobs'), id)
      -- The done entry may belong to an earlier job of this id.
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

-- Done jobs, kept for `keep_done`: `done`, id by end time (ms); `done:own`, jobs with a keep_done of their own, id by
-- the time (ms) until which they are kept. An id is in one of them. `done:jobs`, id -> ENDED_MS ' ' FENCE ' ' MICROS
-- '\n' RESULT '\n' RECORD '\n' ATTEMPTS. RESULT is JSON, '' (lost with its worker) or '!' and the reason why there is
-- none. ATTEMPTS is a JSON array of the earlier attempts.

local TRIMMED_DONE_PER_CALL = 100
-- The queue was created by a release without this option.
local DONE_MAX = 10000

-- Removes at most `most` excess and `most` expired entries of each set.
function done.trim(most)
  local excess = redis.call('ZCARD', key('done')) + redis.call('ZCARD', key('done:own'))
    - tonumber(options.done_max or DONE_MAX)
  local function forget(name, ids)
    if #ids == 0 then return end
    redis.call('ZREM', key(name), unpack(ids))
    redis.call('HDEL', key('done:jobs'), unpack(ids))
    excess = excess - #ids
  end
  local function forget_expired(name, until_ms)
    forget(name, redis.call('ZRANGEBYSCORE', key(name), '-inf', string.format('%.0f', until_ms), 'LIMIT', 0, most))
  end
  forget_expired('done', now_ms - option('keep_done_ms'))
  forget_expired('done:own', now_ms)
  -- Those that the queue's option keeps go first.
  if excess > 0 then forget('done', redis.call('ZRANGE', key('done'), 0, math.min(excess, most) - 1)) end
  if excess > 0 then forget('done:own', redis.call('ZRANGE', key('done:own'), 0, math.min(excess, most) - 1)) end
end

-- Call it while the ids are active. `reported`: id -> micros, result and keep_ms (nil: as the queue says), as far as
-- the worker reported them.
function done.keep(ids, owners, reported)
  local packed = redis.call('HMGET', key('jobs'), unpack(ids))
  local tried = redis.call('EXISTS', key('attempts')) == 1 and redis.call('HMGET', key('attempts'), unpack(ids)) or {}
  local kept, ended, ended_ids, own, own_ids = {}, {}, {}, {}, {}
  local ms, max_data, queue_keep_ms = string.format('%.0f', now_ms), option('max_data'), option('keep_done_ms')
  for i, id in ipairs(ids) do
    local micros, result, own_keep_ms, report = '-', '', nil, reported[id]
    if report then
      micros, result, own_keep_ms = report.micros, report.result, report.keep_ms
    elseif packed[i] then
      own_keep_ms = records.own(records.options_of(packed[i]), 'k')
    end
    -- A job marked for removal leaves no result.
    if packed[i] and (own_keep_ms or queue_keep_ms) > 0 and not claims.is_removed(owners[i]) then
      if #result > max_data and string.sub(result, 1, 1) ~= '!' then
        result = string.format('!it is longer than max_data = %.0f bytes', max_data)
      end
      kept[#kept + 1] = id
      kept[#kept + 1] = ms .. ' ' .. claims.fence_of(owners[i]) .. ' ' .. micros .. '\n' .. result .. '\n'
        .. packed[i] .. '\n[' .. string.gsub(tried[i] or '', '\n', ',') .. ']'
      if own_keep_ms then
        own[#own + 1] = string.format('%.0f', now_ms + own_keep_ms)
        own[#own + 1] = id
        own_ids[#own_ids + 1] = id
      else
        ended[#ended + 1] = ms
        ended[#ended + 1] = id
        ended_ids[#ended_ids + 1] = id
      end
    end
  end
  if #kept == 0 then return end
  redis.call('HSET', key('done:jobs'), unpack(kept))
  if #own > 0 then
    redis.call('ZREM', key('done'), unpack(own_ids))
    redis.call('ZADD', key('done:own'), unpack(own))
  end
  if #ended > 0 then
    redis.call('ZREM', key('done:own'), unpack(ended_ids))
    redis.call('ZADD', key('done'), unpack(ended))
  end
  done.trim(math.max(TRIMMED_DONE_PER_CALL, 2 * #ids))
end

-- Settles ids whose owner has been checked. `notes`: journal entries by fence. `reported` (or nil): see done.keep.
function done.settle(ids, notes, reported)
  if #ids == 0 then return end
  -- Without a report of the worker, each record has to be checked.
  local keeps = option('keep_done_ms') > 0 or not reported or next(reported) ~= nil
  -- Most queues have none of these, so one check is the whole cost.
  local some = summary.has_rare() or (flows_on and redis.call('EXISTS', key('sources'), key('inputs')) > 0)
  local owners = (keeps or some) and redis.call('HMGET', key('active'), unpack(ids))
  if keeps then done.keep(ids, owners, reported or {}) end
  redis.call('HDEL', key('jobs'), unpack(ids))
  redis.call('HDEL', key('active'), unpack(ids))
  redis.call('INCRBY', key('processed:count'), #ids)
  for fence, entries in pairs(notes) do
    if #entries > 0 then journal.note('done ' .. fence .. ' ' .. table.concat(entries, ' ')) end
  end
  if not some then return flows.remember(ids, 'done') end
  progress.delete(ids)
  attempts.delete(ids)
  local fences = {}
  for i, owner in ipairs(owners) do fences[i] = claims.fence_of(owner) end
  flows.end_jobs(ids, 'done', fences, reported)
end

-- Turns trim done jobs only when others are done; this also expires them in a quiet queue.
function done.expire(most)
  if redis.call('EXISTS', key('done'), key('done:own')) == 0 then return end
  if option('keep_done_ms') == 0 and redis.call('EXISTS', key('done:own')) == 0 then
    redis.call('UNLINK', key('done'), key('done:jobs'))
  else
    done.trim(most)
  end
end

-- progress: stores the progress of a running job.
-- KEYS[1]  the queue's base
-- ARGV     worker, id, fence, fraction (0 to 1), text
-- Returns  {OK, 1 stored | 0 the worker does not run that job}; {NO_QUEUE}
-- States   unchanged
function verbs.progress()
  if not epoch then return { NO_QUEUE } end
  local worker, id, fence = ARGV[1], ARGV[2], ARGV[3]
  if not claims.is_claim(redis.call('HGET', key('active'), id), worker, fence) then return { OK, 0 } end
  progress.set(id, ARGV[4], ARGV[5])
  summary.save()
  return { OK, 1 }
end

-- wait: returns whether a job has ended; if not, registers a waiter. The caller repeats it before the registration
-- expires, and after it may have missed a message.
-- KEYS[1]  the queue's base
-- ARGV     id, epoch, mark (both '' in the first call, then from the last reply), ms to stay registered, whether the
--          caller knows that the job's result is kept ('1' | '0'), and which job of this id is meant (records.is_meant)
-- Returns  {OK, 'live', epoch, mark of the job}; {OK, 'done', epoch, mark, fence, done entry (if kept)}; {OK, 'dead',
--          epoch, mark, fence}; {OK, 'cancelled', epoch, mark}; {OK, 'gone', epoch, mark} if the job is neither live
--          nor kept; {KEEPS_NOTHING}; {NO_QUEUE}. The mark is '' if the job was not live in the first call
-- States   unchanged
function verbs.wait()
  -- Expired waiters are removed by random sampling.
  local SAMPLED_WAITERS = 2

  -- A mark is MICROSECONDS '-' ENQUEUED_US: the time of the first registration for this job. Every end of the id
  -- removes the entry, so an unchanged mark means the same job. '' if there is none.
  local function mark_of(id)
    return string.match(redis.call('HGET', key('waiters'), id) or '', ' (%S+)$') or ''
  end

  -- 0 without waiters.
  local function waits_until_ms(id)
    return tonumber(string.match(redis.call('HGET', key('waiters'), id) or '', '^%d+') or 0)
  end

  -- One entry per job, valid until the last waiter expires.
  local function register_waiter(id, mark, valid_ms)
    local until_ms = math.max(now_ms + valid_ms, waits_until_ms(id))
    redis.call('HSET', key('waiters'), id, string.format('%.0f ', until_ms) .. mark)
    may_be_rare = true
    summary.save()
    redis.call('PEXPIRE', key('waiters'), string.format('%.0f', 2 * valid_ms))
    for _, other in ipairs(redis.call('HRANDFIELD', key('waiters'), SAMPLED_WAITERS)) do
      if waits_until_ms(other) <= now_ms then redis.call('HDEL', key('waiters'), other) end
    end
  end

  local id, mark, valid_ms, meant = ARGV[1], ARGV[3], tonumber(ARGV[4]), ARGV[6]

  local function keeps_result(record)
    if options.done_max == '0' then return false end
    if ARGV[5] == '1' or option('keep_done_ms') > 0 then return true end
    return record and (records.own(records.options_of(record), 'k') or 0) > 0
  end
  if not epoch or ARGV[2] ~= '' and ARGV[2] ~= epoch then return { NO_QUEUE } end

  local function live_reply(new_mark)
    register_waiter(id, new_mark, valid_ms)
    return { OK, 'live', epoch, new_mark }
  end

  local function done_reply(kept)
    return { OK, 'done', epoch, mark, string.match(kept, '^%d+ (%d+)'), kept }
  end

  local function first_call()
    local record, kept = flows.live_record(id), redis.call('HGET', key('done:jobs'), id)
    if not kept and not keeps_result(record) then return { KEEPS_NOTHING } end
    local live_us = record and records.enqueued_us_of(record)
    if record and records.is_meant(meant, live_us) then
      local stored_mark = mark_of(id)
      return live_reply(stored_mark ~= '' and stored_mark or now_text() .. '-' .. (live_us or '0'))
    end
    local fence, enqueued_us = string.match(kept or '', '^%d+ (%d+)[^\n]*\n[^\n]*\n.%d (%d+)')
    return fence and records.is_meant(meant, enqueued_us, fence) and done_reply(kept) or { OK, 'gone', epoch, '' }
  end

  local function later_call()
    local stored_mark = mark_of(id)
    if stored_mark == mark and flows.live_record(id) then return live_reply(mark) end
    local stored = redis.call('GET', key_of('told', mark .. ':' .. id))
    if stored then
      local outcome, fence, kept = string.match(stored, '^(%a+) (%d+)\n?(.*)$')
      return { OK, outcome, epoch, mark, fence, kept ~= '' and kept or nil }
    end
    -- The waiter was away too long, or a release without marks ended the job: compare the enqueue time.
    local enqueued_us = string.match(mark, '-(%d+)$')
    local record = flows.live_record(id)
    if record and (records.enqueued_us_of(record) or '0') == enqueued_us then
      return live_reply(stored_mark ~= '' and stored_mark or mark)
    end
    local kept = redis.call('HGET', key('done:jobs'), id)
    if kept and string.match(kept, '^[^\n]*\n[^\n]*\n.%d (%d+)') == enqueued_us then return done_reply(kept) end
    return { OK, 'gone', epoch, mark }
  end

  return mark == '' and first_call() or later_call()
end
