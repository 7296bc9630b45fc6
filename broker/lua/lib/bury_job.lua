-- A job that failed for good: its record moves to `dead` under id@fence, apart from live jobs, followed by its error and
-- its attempts. Few calls bury anything, and each call of a script defines its functions anew: those that only serve
-- here are defined inside.

local DEAD_EXPIRED_PER_CALL = 100
-- What is done once per call, however many jobs it buries.
local outbox_told, old_forgotten = false, false
local LONGEST_CAUSE = 64

-- The journal's word for why an attempt failed: the name that an error, as JSON, begins with. A line is split at its
-- blanks, and what JSON has escaped is no name worth decoding.
local function cause_of(error)
  local name = string.sub(string.match(error, '"name":"([^"]*)') or '', 1, LONGEST_CAUSE)
  return name == '' and '-' or (string.gsub(name, '[\\%c \128-\255]', '_'))
end

local function bury_job(id, fence, micros, record, error, brief)
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
    redis.call('RPUSH', base .. ':fail:pending', fail_id)
    wake_retry_child(key('failed'))
    note('failing ' .. fence .. ' ' .. id)
  end

  -- A line for the failed log; whoever writes it there is told.
  local function add_to_outbox(id, fence, job, error)
    local line = string.format('{"id":%s,"fence":%s,"died_ms":%.0f,"priority":%s,"enqueued_ms":%s,"counts":[%d,%d,%d],"body":',
      quoted(id), fence, now_ms, job.priority, job.enqueued_ms, job.retries, job.stalls, job.timeouts)
    redis.call('RPUSH', key('outbox'), line .. job.body .. ',"error":' .. error .. '}')
    if not outbox_told then redis.call('PUBLISH', key('outbox'), string.match(base, '{(.*)}')) end
    outbox_told = true
  end

  redis.call('HDEL', key('jobs'), id)
  local was_active = redis.call('HDEL', key('active'), id) == 1
  if mode ~= 'work' then redis.call('ZREM', key('expiries'), id) end
  local member = id .. '@' .. fence
  local tried = redis.call('EXISTS', key('attempts')) == 1 and redis.call('HGET', key('attempts'), id)
  local attempts = string.gsub(tried or '', '\n', ',')
  redis.call('HSET', key('dead:jobs'), member, record .. '\n' .. error .. '\n[' .. attempts .. ']')
  if tried then forget_attempts({ id }) end
  redis.call('ZADD', key('dead'), now_ms, member)
  redis.call('INCR', key('failed:count'))
  local has_fail_job = not parent and option('fail_handler') == 1
  note('dead ' .. fence .. ' ' .. id .. ' ' .. micros .. ' ' .. (has_fail_job and 1 or 0) .. ' ' .. cause_of(error))
  -- Of a broken record nothing but its id is known; that is told all the same.
  local job = read_record(record) or {
    priority = '5', enqueued_ms = string.format('%.0f', now_ms), retries = 0, stalls = 0, timeouts = 0, lane = 0,
    body = '[null,null,null]',
  }
  if not parent then add_to_outbox(id, fence, job, error) end
  if has_fail_job then add_fail_job(id, fence, job, brief) end
  if was_active then unblock({ id }) end
  local excess = redis.call('ZCARD', key('dead')) - option('dead_max')
  if excess > 0 then forget_dead(redis.call('ZRANGE', key('dead'), 0, math.min(excess, DEAD_EXPIRED_PER_CALL) - 1)) end
  if old_forgotten then return end
  old_forgotten = true
  forget_dead(redis.call('ZRANGEBYSCORE', key('dead'), '-inf', now_ms - option('dead_ttl_ms'),
    'LIMIT', 0, DEAD_EXPIRED_PER_CALL))
end
