-- Jobs that failed for good: the record of each moves to `dead` under id@fence, apart from live jobs, followed by its
-- error and its attempts.

local DEAD_EXPIRED_PER_CALL = 100
local LONGEST_CAUSE = 64

-- The journal's word for why an attempt failed: the name that an error, as JSON, begins with. A line is split at its
-- blanks, and what JSON has escaped is no name worth decoding.
function dead.cause_of(error)
  local name = string.sub(string.match(error, '"name":"([^"]*)') or '', 1, LONGEST_CAUSE)
  return name == '' and '-' or (string.gsub(name, '[\\%c \128-\255]', '_'))
end

-- Each of `jobs`: id, fence, micros, record, error and brief error (JSON).
function dead.bury(jobs)
  local function forget_dead(members)
    if #members == 0 then return end
    redis.call('ZREM', key('dead'), unpack(members))
    redis.call('HDEL', key('dead:jobs'), unpack(members))
    for _, member in ipairs(members) do
      local gone, ended = string.match(member, '^(.+)@(%d+)$')
      if gone then journal.note('forgotten ' .. ended .. ' ' .. gone) end
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
    records.note_size(#record, base .. ':fail')
    redis.call('RPUSH', base .. ':fail:pending', fail_id)
    hints.wake_retry_child(key('failed'))
    journal.note('failing ' .. fence .. ' ' .. id)
  end

  -- A line for the failed log.
  local function outbox_line(id, fence, job, error)
    local line = string.format(
      '{"id":%s,"fence":%s,"died_ms":%.0f,"priority":%s,"enqueued_ms":%s,"counts":[%d,%d,%d],"body":',
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
    local tries = string.gsub(tried[i] or '', '\n', ',')
    archived[2 * i - 1], archived[2 * i] = member, job.record .. '\n' .. job.error .. '\n[' .. tries .. ']'
    died[2 * i - 1], died[2 * i] = now_ms, member
    journal.note('dead ' .. fence .. ' ' .. id .. ' ' .. job.micros .. ' ' .. (has_fail_job and 1 or 0) .. ' '
      .. dead.cause_of(job.error))
    -- Of a broken record nothing but its id is known; that is told all the same.
    local read = records.read(job.record) or {
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
  attempts.forget(ids)
  progress.forget(ended)
  blocked.unblock(ended)
  waiters.tell(ids, 'dead', fences)
  local excess = redis.call('ZCARD', key('dead')) - option('dead_max')
  local most = math.max(DEAD_EXPIRED_PER_CALL, 2 * #jobs)
  if excess > 0 then forget_dead(redis.call('ZRANGE', key('dead'), 0, math.min(excess, most) - 1)) end
  forget_dead(redis.call('ZRANGEBYSCORE', key('dead'), '-inf', now_ms - option('dead_ttl_ms'),
    'LIMIT', 0, DEAD_EXPIRED_PER_CALL))
end

-- revive: dead jobs wait again, each at the end of its priority's line, with all counts 0.
-- KEYS[1]  the queue's base
-- ARGV     id@fence, id@fence ...
-- Returns  {OK, per member: 1 revived | 0 not there | EXISTS a live job has its id | FULL | BROKEN ...}, shorter than
--          what was asked when enough has been moved for one call; {NO_QUEUE}
-- States   dead -> waiting
function verbs.revive()
  if not epoch then return { NO_QUEUE } end

  -- Priority and body of HEAD '\n' BODY '\n' ERROR ['\n' ATTEMPTS]; error is an object, attempts a list (dead.py).
  local function read_dead(buried)
    local priority, rest = string.match(buried, '^.(%d) %d+[^\n]*\n(.*)$')
    if not priority then return nil end
    local before = string.match(rest, '^(.*)\n%[[^\n]*$') or rest
    return priority, string.match(before, '^(.*)\n{[^\n]*$')
  end

  local function revive_one(member, buried)
    if not buried then
      redis.call('ZREM', key('dead'), member)
      return 0
    end
    local id, fence = string.match(member, '^(.+)@(%d+)$')
    local priority, body = read_dead(buried)
    if not id or not body then return BROKEN end
    if redis.call('HEXISTS', key('jobs'), id) == 1 then return EXISTS end
    if records.is_full() then return FULL end
    redis.call('HSET', key('jobs'), id, 'p' .. priority .. string.format(' %.0f\n', now_ms) .. body)
    records.note_size(#body, base)
    hints.push_back(priority, { id })
    if mode ~= 'work' then timers.set_expiry(id, 0) end
    redis.call('HDEL', key('dead:jobs'), member)
    redis.call('ZREM', key('dead'), member)
    journal.note('revived ' .. fence .. ' ' .. id)
    return 1
  end

  local reply, moved = { OK }, 0
  for i, member in ipairs(ARGV) do
    if moved > READ_BYTES then break end
    local buried = redis.call('HGET', key('dead:jobs'), member)
    moved = moved + (buried and #buried or 0)
    reply[i + 1] = revive_one(member, buried)
  end
  hints.wake_idle(RING_AWAITERS)
  journal.write('-')
  return reply
end

-- discard: dead jobs are forgotten.
-- KEYS[1]  the queue's base
-- ARGV     id@fence, id@fence ...
-- Returns  {OK, per member: 1 discarded | 0 not there ...}; {NO_QUEUE}
-- States   dead -> discarded
function verbs.discard()
  if not epoch then return { NO_QUEUE } end
  local reply = { OK }
  for i, member in ipairs(ARGV) do
    local gone = redis.call('HDEL', key('dead:jobs'), member) + redis.call('ZREM', key('dead'), member)
    local id, fence = string.match(member, '^(.+)@(%d+)$')
    if gone > 0 and id then journal.note('discarded ' .. fence .. ' ' .. id) end
    reply[i + 1] = gone > 0 and 1 or 0
  end
  journal.write('-')
  return reply
end

-- collect: a scribe takes lines for the failed log in hand. What it has in hand already (it died, or the reply was
-- lost) it gets again, and nothing else: each line is in exactly one hand until it is forgotten or the processor is
-- evicted.
-- KEYS[1]  the queue's base
-- ARGV     processor, how long it may stay silent (ms), how many lines at most, bytes after which no more are taken
-- Returns  {OK, line, line ...}; {NO_QUEUE}; {FENCED} if the processor has been evicted
function verbs.collect()
  if not epoch then return { NO_QUEUE } end
  local processor, expiry_ms, max_lines, max_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
  if redis.call('ZSCORE', key('graves'), processor) then return { FENCED } end

  local hand, bytes = key_of('outbox', processor), 0
  local reply = { OK, unpack(redis.call('LRANGE', hand, 0, -1)) }
  if #reply > 1 then return reply end
  while #reply <= max_lines and bytes < max_bytes do
    local line = redis.call('LMOVE', key('outbox'), hand, 'LEFT', 'RIGHT')
    if not line then break end
    reply[#reply + 1] = line
    bytes = bytes + #line
  end
  -- Whoever has lines in hand can be evicted: its silence is noticed even if it never sends a heartbeat.
  if #reply > 1 then redis.call('ZADD', key('processors'), 'NX', now_ms + expiry_ms, processor) end
  return reply
end

-- forget: lines that are on disk leave the list they were read from. Only if they are still at its head: repeating it,
-- or doing it after somebody else did, changes nothing. A deleted queue's lines are forgotten too.
-- KEYS[1]  the queue's base
-- ARGV     the list ('outbox:P' or 'trash:EPOCH:outbox'), how many lines, the SHA-1 of all of them, joined by newlines
-- Returns  {OK, 1 forgotten | 0 they are not there}
function verbs.forget()
  local list, count = key(ARGV[1]), tonumber(ARGV[2])
  local lines = redis.call('LRANGE', list, 0, count - 1)
  if #lines < count or redis.sha1hex(table.concat(lines, '\n')) ~= ARGV[3] then return { OK, 0 } end
  redis.call('LTRIM', list, count, -1)
  return { OK, 1 }
end
