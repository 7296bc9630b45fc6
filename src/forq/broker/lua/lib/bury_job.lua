-- Jobs that failed for good: the record of each moves to `dead` under id@fence, apart from live jobs, followed by its error
-- and its attempts.

local DEAD_EXPIRED_PER_CALL = 100
local LONGEST_CAUSE = 64

-- The journal's word for why an attempt failed: the name that an error, as JSON, begins with. A line is split at its
-- blanks, and what JSON has escaped is no name worth decoding.
local function cause_of(error)
  local name = string.sub(string.match(error, '"name":"([^"]*)') or '', 1, LONGEST_CAUSE)
  return name == '' and '-' or (string.gsub(name, '[\\%c \128-\255]', '_'))
end

-- Each of `jobs`: id, fence, micros, record, error and brief error (JSON).
local function bury_jobs(jobs)
  local function forget_dead(members)
    if #members == 0 then return end
    redis.call('ZREM', key('dead'), unpack(members))
    redis.call('HDEL', key('dead:jobs'), unpack(members))
    for _, member in ipairs(members) do
      local gone, ended = string.match(member, '^(.+)@(%d+)$')
      if gone then note('forgotten ' .. ended .. ' ' .. gone) end
    end
  end

  -- Text in JSON; ids hold nothing else that needs an escape.
  local function quoted(text)
    return '"' .. string.gsub(text, '[\\"]', '\\%0') .. '"'
  end

  -- What the fail handler gets is written by the step that fails the job: [[identifier, type, data], job, error].
  local function add_fail_job(id, fence, job, brief)
    local about = string.format(
      '{"id":%s,"priority":%s,"enqueued_at":%.3f,"retry_count":%d,"stall_count":%d,"timeout_count":%d,"fence":%s}',
      quoted(id), job.priority, tonumber(job.enqueued_ms) / 1000, job.retries, job.stalls, job.timeouts, fence)
    local record = string.format('p5 %.0f\n[null,null,[', now_ms) .. job.body .. ',' .. about .. ',' .. brief .. ']]'
    local fail_id = id .. ':' .. fence
    redis.call('HSET', base .. ':fail:jobs', fail_id, record)
    note_size(#record, base .. ':fail')
    redis.call('RPUSH', base .. ':fail:pending', fail_id)
    wake_retry_child(key('failed'))
    note('failing ' .. fence .. ' ' .. id)
  end

  -- A line for the failed log.
  local function outbox_line(id, fence, job, error)
    local line = string.format('{"id":%s,"fence":%s,"died_ms":%.0f,"priority":%s,"enqueued_ms":%s,"counts":[%d,%d,%d],"body":',
      quoted(id), fence, now_ms, job.priority, job.enqueued_ms, job.retries, job.stalls, job.timeouts)
    return line .. job.body .. ',"error":' .. error .. '}'
  end

  local ids, fences = {}, {}
  for i, job in ipairs(jobs) do ids[i], fences[i] = job.id, job.fence end
  local owners = redis.call('HMGET', key('active'), unpack(ids))
  local tried = redis.call('EXISTS', key('attempts')) == 1 and redis.call('HMGET', key('attempts'), unpack(ids)) or {}
  redis.call('HDEL', key('jobs'), unpack(ids))
  redis.call('HDEL', key('active'), unpack(ids))
  if mode ~= 'work' then redis.call('ZREM', key('expiries'), unpack(ids)) end
  local has_fail_job = not parent and option('fail_handler') == 1
  local archived, died, lines, ended = {}, {}, {}, {}
  for i, job in ipairs(jobs) do
    local id, fence = job.id, job.fence
    local member = id .. '@' .. fence
    local attempts = string.gsub(tried[i] or '', '\n', ',')
    archived[2 * i - 1], archived[2 * i] = member, job.record .. '\n' .. job.error .. '\n[' .. attempts .. ']'
    died[2 * i - 1], died[2 * i] = now_ms, member
    note('dead ' .. fence .. ' ' .. id .. ' ' .. job.micros .. ' ' .. (has_fail_job and 1 or 0) .. ' ' .. cause_of(job.error))
    -- Of a broken record nothing but its id is known; that is told all the same.
    local read = read_record(job.record) or {
      priority = '5', enqueued_ms = string.format('%.0f', now_ms), retries = 0, stalls = 0, timeouts = 0, lane = 0,
      body = '[null,null,null]',
    }
    if not parent then lines[i] = outbox_line(id, fence, read, job.error) end
    if has_fail_job then add_fail_job(id, fence, read, job.brief) end
    if owners[i] then ended[#ended + 1] = id end
  end
  -- The retry child may be busy for long with something else: pulse finds that out.
  if has_fail_job then redis.call('PUBLISH', channel('due'), 'fail') end
  redis.call('HSET', key('dead:jobs'), unpack(archived))
  redis.call('ZADD', key('dead'), unpack(died))
  redis.call('INCRBY', key('failed:count'), #jobs)
  if #lines > 0 then
    redis.call('RPUSH', key('outbox'), unpack(lines))
    redis.call('PUBLISH', channel('outbox'), string.match(base, '{(.*)}'))
  end
  forget_attempts(ids)
  forget_progress(ended)
  unblock(ended)
  tell_waiters(ids, 'dead', fences)
  local excess = redis.call('ZCARD', key('dead')) - option('dead_max')
  local most = math.max(DEAD_EXPIRED_PER_CALL, 2 * #jobs)
  if excess > 0 then forget_dead(redis.call('ZRANGE', key('dead'), 0, math.min(excess, most) - 1)) end
  forget_dead(redis.call('ZRANGEBYSCORE', key('dead'), '-inf', now_ms - option('dead_ttl_ms'),
    'LIMIT', 0, DEAD_EXPIRED_PER_CALL))
end
