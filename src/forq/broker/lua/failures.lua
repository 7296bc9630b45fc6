-- Failed and lost attempts, dead jobs and the outbox.

-- The fate of a job after a failed or lost attempt: {how, ms until it is retried, number of the attempt, number of
-- attempts if all end like this one}. how: 'retried'; 'lane' (in the retry lane); 'snoozed' (runs again later, not
-- counted); 'returned' (waits again at once);
-- 'suspect' (the same, and runs alone); 'interrupted' (the same, not counted); 'dead' (also if the next claim moves it
-- to dead); 'removed'; 'refused' (the worker no longer owns the job).

function failures.fate(how, due_ms, attempt, left)
  return { how, math.max(0, due_ms - now_ms), attempt, attempt + left }
end

-- A snooze is not counted as an attempt, but a job that always snoozes must end.
local MAX_SNOOZES = 1000
local TOO_MANY_SNOOZES = '{"name":"TooManySnoozes","message":"it was snoozed ' .. MAX_SNOOZES
  .. ' times","kind":"permanent","traceback":null}'

-- The options of a job are the strongest, then those of its task, then those of the queue.
function failures.max_retries(job, task_options)
  return records.own(job.options, 'r') or records.own(task_options, 'r') or option('max_retries')
end

-- Attempts left after one that fails now and is not counted yet.
function failures.retries_left(job, task_options)
  if job.lane > 0 then return math.max(0, option('retry_lane_retries') - job.lane) end
  return math.max(0, failures.max_retries(job, task_options) - job.retries) + option('retry_lane_retries')
end

-- `count`: attempts lost in this way, this one included. The job is dead above `max`.
function failures.fate_by_count(due_ms, attempt, count, max)
  local left = math.max(0, max + 1 - count)
  return failures.fate(left == 0 and 'dead' or 'returned', due_ms, attempt, left)
end

-- `lost`: the job after failures.count_loss.
function failures.fate_of_lost_job(lost)
  local job, due_ms = lost.counted, lost.run_at_ms
  if lost.outcome == 'stalled' then
    return failures.fate_by_count(due_ms, attempts.count(job), job.stalls, tonumber(options.max_stalls or 3))
  elseif lost.outcome == 'timed_out' then
    return failures.fate_by_count(due_ms, attempts.count(job), job.timeouts, tonumber(options.max_timeouts or 3))
  end
  return failures.fate(job.lane == LANE_OF_SUSPECT and 'suspect' or 'interrupted', due_ms, attempts.count(job) + 1, 0)
end

-- Five values from ARGV[at] on: error, brief error (JSON), kind, retry at (ms, '+ms' from now, or ''), chance (0 to 1),
-- followed by ' ' OPTIONS if its task has some.
function failures.read(at)
  local from_now, ms = string.match(ARGV[at + 3], '^(%+?)(%d+)$')
  local chance, task_options = string.match(ARGV[at + 4], '^(%S+) ?(%S*)$')
  return {
    error = ARGV[at],
    brief = ARGV[at + 1],
    kind = ARGV[at + 2],
    retry_at_ms = ms and tonumber(ms) + (from_now == '+' and now_ms or 0),
    chance = tonumber(chance),
    task_options = task_options,
  }
end

-- Retries a failed job later, or moves it to dead. `settler`: the WORKER:FENCE that settles it. Returns the fate; nil
-- if the settler no longer owns the job. The options are read now, so changes apply to jobs already in the queue.
function failures.settle(id, settler, micros, failure)
  local brief, kind, fence = failure.brief, failure.kind, claims.fence_of(settler)
  local owner = redis.call('HGET', key('active'), id)
  local record = redis.call('HGET', key('jobs'), id)

  local function requeue(job, due, event)
    due = blocked.update(id, job, due)
    redis.call('HSET', key('jobs'), id, records.write(job))
    redis.call('HDEL', key('active'), id)
    progress.delete({ id })
    journal.note(event)
    timers.make_ready(id, records.place_for(job), due)
    return due
  end

  -- Backs off exponentially unless the handler gave a time. In the retry lane, `lane` counts the attempts there.
  local function retry_job(job, lane_number)
    local due = failure.retry_at_ms
    if not due then
      local wait = records.own_backoff_ms(job.options, job.retries + 1)
        or records.own_backoff_ms(failure.task_options, job.retries + 1)
        or math.min(option('max_backoff_ms'), option('min_backoff_ms') * 2 ^ math.min(job.retries, 40))
      due = now_ms + math.floor(wait * (1 + option('jitter') / 100 * (2 * failure.chance - 1)))
    end
    local left = failures.retries_left(job, failure.task_options)
    job.retries, job.lane = job.retries + 1, lane_number
    -- requeue may reset the counts (blocked.update).
    local attempt = attempts.count(job)
    due = requeue(job, due, 'retried ' .. fence .. ' ' .. id .. ' ' .. micros .. ' ' .. dead.cause_of(brief))
    return failures.fate(lane_number > 0 and 'lane' or 'retried', due, attempt, left)
  end

  local function snooze(job)
    -- Its handler returned: no longer a suspect.
    if job.lane == LANE_OF_SUSPECT then job.lane = 0 end
    job.snoozes = job.snoozes + 1
    local attempt = attempts.number(job)
    local due = requeue(job, failure.retry_at_ms or 0, 'snoozed ' .. fence .. ' ' .. id .. ' ' .. micros)
    return failures.fate('snoozed', due, attempt, 0)
  end

  local function settle_owned()
    if kind == 'snooze' then
      local job = records.read(record)
      if job and job.snoozes < MAX_SNOOZES then return snooze(job) end
      kind, brief, failure.error = 'permanent', TOO_MANY_SNOOZES, TOO_MANY_SNOOZES
    end
    local timed_out = kind == 'timeout'
    attempts.add(id, timed_out and 'timed_out' or 'failed', timed_out and 'timeout' or 'exception', micros, brief)
    local job = records.read(record)
    if job and timed_out then
      -- It waits again at once, behind the others.
      job.timeouts = job.timeouts + 1
      journal.note('timed_out ' .. fence .. ' ' .. id .. ' timeout ' .. micros)
      local attempt, count = attempts.count(job), job.timeouts
      local due = requeue(job, 0, 'returned 0 ' .. id)
      return failures.fate_by_count(due, attempt, count, tonumber(options.max_timeouts or 3))
    end
    -- Its handler returned, so the job did not crash its process: no longer a suspect.
    if job and job.lane == LANE_OF_SUSPECT then job.lane = 0 end
    local max_retries = job and failures.max_retries(job, failure.task_options)
    if job and kind ~= 'permanent' and job.lane == 0 and job.retries < max_retries then
      return retry_job(job, 0)
    elseif job and kind ~= 'permanent' and job.lane < option('retry_lane_retries') then
      return retry_job(job, job.lane + 1)
    end
    local left = job and failures.retries_left(job, failure.task_options) or 0
    dead.bury({ { id = id, fence = fence, micros = micros, record = record, error = failure.error, brief = brief } })
    return failures.fate('dead', 0, job and attempts.count(job) + 1 or 1, left)
  end

  if owner == settler and record then
    return settle_owned()
  elseif owner == settler .. REMOVED then
    redis.call('HDEL', key('jobs'), id)
    redis.call('HDEL', key('active'), id)
    progress.delete({ id })
    attempts.delete({ id })
    journal.note('cancelled ' .. fence .. ' ' .. id)
    flows.end_jobs({ id }, 'cancelled')
    return failures.fate('removed', 0, 0, 0)
  end
end

function failures.note_loss(lost, fence)
  local verb = lost.outcome == 'suspect' and 'suspected' or lost.outcome
  -- A single word: journal lines are split at spaces.
  local cause = lost.cause == '' and '-' or string.gsub(lost.cause, '[^!-~]', '_')
  local micros = tonumber(lost.micros) and ' ' .. lost.micros or ''
  journal.note(verb .. ' ' .. fence .. ' ' .. lost.id .. ' ' .. cause .. micros)
end

-- Settles a job of this worker whose coroutine was cancelled, by a user or because its process stops, and has ended:
-- 'interrupted' returns it to the front of its place, uncounted; 'cancelled' removes it. Returns the fate. `failure`
-- has the stack (JSON) and the cause in place of error and brief error.
function failures.settle_interrupted(worker, id, micros, failure)
  local lost = { id = id, outcome = failure.kind, cause = failure.brief, micros = micros, stack = failure.error }
  claims.return_jobs(worker, { id }, lost)
  return lost.counted and failures.fate_of_lost_job(lost) or failures.fate('removed', 0, 0, 0)
end

-- Counts an attempt that was lost with its worker, or interrupted. `lost`: id, outcome ('stalled' | 'timed_out' |
-- 'interrupted' | 'suspect'), cause, micros, stack, peak. Sets lost.counted. A broken record (`job` is nil) stays
-- unchanged.
function failures.count_loss(lost, owner, job)
  local outcome = lost.outcome == 'suspect' and 'interrupted' or lost.outcome
  attempts.add(lost.id, outcome, lost.cause, lost.micros, nil, lost.stack, lost.peak)
  failures.note_loss(lost, claims.fence_of(owner))
  if not job then return end
  if lost.outcome == 'stalled' then job.stalls = job.stalls + 1 end
  if lost.outcome == 'timed_out' then job.timeouts = job.timeouts + 1 end
  -- In the retry lane and in the fail queue it runs alone anyway.
  if lost.outcome == 'suspect' and job.lane == 0 and not parent then job.lane = LANE_OF_SUSPECT end
  -- A copy, because blocked.update may reset the counts.
  lost.counted = { retries = job.retries, stalls = job.stalls, timeouts = job.timeouts, lane = job.lane }
end

-- The error (JSON) of a job that stalled or timed out too often; nil if it may run. Checked when it is claimed.
function failures.exhausted_error(job, max_stalls, max_timeouts)
  local text = '{"name":"%s","message":"attempts that %s: %d; %s is %d","kind":"stall","traceback":null}'
  if job.stalls > max_stalls then
    return string.format(text, 'StallError', 'crashed their process', job.stalls, 'max_stalls', max_stalls)
  elseif job.timeouts > max_timeouts then
    return string.format(text, 'TimeoutError', 'timed out', job.timeouts, 'max_timeouts', max_timeouts)
  end
end

-- Dead jobs: the record moves to `dead:jobs` under id@fence, followed by its error and its attempts.

local DEAD_EXPIRED_PER_CALL = 100
local LONGEST_CAUSE = 64

-- The exception name from an error in JSON, as a single word for the journal. Escapes in it are not decoded.
function dead.cause_of(error)
  local name = string.sub(string.match(error, '"name":"([^"]*)') or '', 1, LONGEST_CAUSE)
  return name == '' and '-' or (string.gsub(name, '[\\%c \128-\255]', '_'))
end

-- Moves jobs to dead. Each has id, fence, micros, record, error and brief error (JSON); a job that never
-- ran also no_fail_job, and perhaps ends_as: what those that wait for it are told.
function dead.bury(jobs)
  local function delete_dead(members)
    if #members == 0 then return end
    redis.call('ZREM', key('dead'), unpack(members))
    redis.call('HDEL', key('dead:jobs'), unpack(members))
    for _, member in ipairs(members) do
      flows.discard_archive(member)
      local gone, ended = string.match(member, '^(.+)@(%d+)$')
      if gone then journal.note('forgotten ' .. ended .. ' ' .. gone) end
    end
  end

  -- JSON string; ids contain nothing else that needs an escape.
  local function quoted(text)
    return '"' .. string.gsub(text, '[\\"]', '\\%0') .. '"'
  end

  -- The fail handler gets [[identifier, type, data], job, error].
  local function add_fail_job(id, fence, job, brief)
    local about = string.format(
      '{"id":%s,"priority":%s,"enqueued_at":%.6f,"retry_count":%d,"stall_count":%d,"timeout_count":%d,"fence":%s}',
      quoted(id), job.priority, tonumber(job.enqueued_us) / 1000000, job.retries, job.stalls, job.timeouts, fence)
    local record = 'p5 ' .. now_text() .. '\n[null,null,[' .. job.body .. ',' .. about .. ',' .. brief .. ']]'
    local fail_id = id .. ':' .. fence
    redis.call('HSET', base .. ':fail:jobs', fail_id, record)
    records.note_size(#record, base .. ':fail')
    redis.call('RPUSH', base .. ':fail:pending', fail_id)
    hints.wake_retry_process(key('failed'))
    journal.note('failing ' .. fence .. ' ' .. id)
  end

  local function outbox_line(id, fence, job, error)
    local line = string.format(
      '{"id":%s,"fence":%s,"died_ms":%.0f,"priority":%s,"enqueued_us":%s,"counts":[%d,%d,%d],"body":',
      quoted(id), fence, now_ms, job.priority, job.enqueued_us, job.retries, job.stalls, job.timeouts)
    if job.options ~= '' then line = string.gsub(line, '"body":$', '"options":"' .. job.options .. '",%0') end
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
    flows.archive_inputs(id, member)
    local attempts_json = string.gsub(tried[i] or '', '\n', ',')
    archived[2 * i - 1], archived[2 * i] = member, job.record .. '\n' .. job.error .. '\n[' .. attempts_json .. ']'
    died[2 * i - 1], died[2 * i] = now_ms, member
    local fails = has_fail_job and not job.no_fail_job
    journal.note('dead ' .. fence .. ' ' .. id .. ' ' .. job.micros .. ' ' .. (fails and 1 or 0) .. ' '
      .. dead.cause_of(job.error))
    -- A broken record is logged with its id only.
    local parsed = records.read(job.record) or records.new('5', now_text(), 0, '', '[null,null,null]')
    if not parent then lines[i] = outbox_line(id, fence, parsed, job.error) end
    if fails then add_fail_job(id, fence, parsed, job.brief) end
    if owners[i] then ended[#ended + 1] = id end
  end
  -- The retry process may be busy for long; pulse checks that and starts a helper.
  if has_fail_job then redis.call('PUBLISH', channel('due'), 'fail') end
  redis.call('HSET', key('dead:jobs'), unpack(archived))
  redis.call('ZADD', key('dead'), unpack(died))
  redis.call('INCRBY', key('failed:count'), #jobs)
  if #lines > 0 then
    redis.call('RPUSH', key('outbox'), unpack(lines))
    redis.call('PUBLISH', channel('outbox'), string.match(base, '{(.*)}'))
  end
  attempts.delete(ids)
  progress.delete(ended)
  flows.end_jobs(ids, jobs[1].ends_as or 'dead', fences)
  local excess = redis.call('ZCARD', key('dead')) - option('dead_max')
  local most = math.max(DEAD_EXPIRED_PER_CALL, 2 * #jobs)
  if excess > 0 then delete_dead(redis.call('ZRANGE', key('dead'), 0, math.min(excess, most) - 1)) end
  delete_dead(redis.call('ZRANGEBYSCORE', key('dead'), '-inf', now_ms - option('dead_ttl_ms'),
    'LIMIT', 0, DEAD_EXPIRED_PER_CALL))
end

-- revive: moves dead jobs to the end of their priority's list, with all counts 0 and without their expiry. One that is
-- dead because of a dependency waits for it again.
-- KEYS[1]  the queue's base
-- ARGV     id@fence, id@fence ...
-- Returns  {OK, per member: 1 revived | 0 not found | EXISTS a live job has its id | FULL | BROKEN | UNMET what it
--          waits for is neither live nor done ...}, with fewer members than given if the byte limit of one call was
--          reached; {NO_QUEUE}
-- States   dead -> waiting | held
function verbs.revive()
  if not epoch then return { NO_QUEUE } end

  -- A dead entry is HEAD '\n' BODY '\n' ERROR ['\n' ATTEMPTS]; ERROR is an object, ATTEMPTS a list (dead.py).
  local function read_dead(entry)
    local dead_job = records.read(entry)
    if not dead_job then return nil end
    local before = string.match(dead_job.body, '^(.*)\n%[[^\n]*$') or dead_job.body
    local body = string.match(before, '^(.*)\n{[^\n]*$')
    return body and records.new(dead_job.priority, now_text(), 0, records.drop_expiry(dead_job.options), body)
  end

  local function revive_one(member, entry)
    if not entry then
      redis.call('ZREM', key('dead'), member)
      return 0
    end
    local id, fence = string.match(member, '^(.+)@(%d+)$')
    local job = read_dead(entry)
    if not id or not job then return BROKEN end
    if redis.call('HEXISTS', key('jobs'), id) == 1 or flows.is_held(id) then return EXISTS end
    if records.is_full() then return FULL end
    local after = flows.read_archive(member)
    if after == false then return UNMET end
    records.note_size(#job.body, base)
    redis.call('HDEL', key('dead:jobs'), member)
    redis.call('ZREM', key('dead'), member)
    journal.note('revived ' .. fence .. ' ' .. id)
    records.note_options(id, job.options)
    if after then
      flows.revive_hold(id, member, records.write(job), job.enqueued_us, after)
      flows.connect(id, after, job.enqueued_us)
      return 1
    end
    redis.call('HSET', key('jobs'), id, records.write(job))
    hints.push_back(job.priority, { id })
    if mode ~= 'work' then timers.set_expiry(id, 0) end
    flows.revive_inputs(id, member)
    return 1
  end

  local reply, moved, unmet = { OK }, 0, {}
  local function revive(i)
    local entry = redis.call('HGET', key('dead:jobs'), ARGV[i])
    moved = moved + (entry and #entry or 0)
    reply[i + 1] = revive_one(ARGV[i], entry)
    return reply[i + 1] == UNMET
  end

  for i = 1, #ARGV do
    if moved > READ_BYTES then break end
    if revive(i) then unmet[#unmet + 1] = i end
  end
  -- What they wait for may have been revived in this call.
  local before = #ARGV + 1
  while #unmet > 0 and #unmet < before and moved <= READ_BYTES do
    local rest = {}
    for _, i in ipairs(unmet) do
      if revive(i) then rest[#rest + 1] = i end
    end
    before, unmet = #unmet, rest
  end
  flows.resolve()
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  return reply
end

-- discard: deletes dead jobs.
-- KEYS[1]  the queue's base
-- ARGV     id@fence, id@fence ...
-- Returns  {OK, per member: 1 discarded | 0 not found ...}; {NO_QUEUE}
-- States   dead -> discarded
function verbs.discard()
  if not epoch then return { NO_QUEUE } end
  local reply = { OK }
  for i, member in ipairs(ARGV) do
    local gone = redis.call('HDEL', key('dead:jobs'), member) + redis.call('ZREM', key('dead'), member)
    flows.discard_archive(member)
    local id, fence = string.match(member, '^(.+)@(%d+)$')
    if gone > 0 and id then journal.note('discarded ' .. fence .. ' ' .. id) end
    reply[i + 1] = gone > 0 and 1 or 0
  end
  journal.write('-')
  return reply
end

-- collect: moves lines for the failed log from the outbox to a scribe's own list. If that list is not empty (the scribe
-- died, or a reply was lost), it returns only these lines again. So each line belongs to one scribe until it is
-- forgotten or the processor is evicted.
-- KEYS[1]  the queue's base
-- ARGV     processor, ms until it counts as silent, maximum number of lines, bytes after which no more are taken
-- Returns  {OK, line, line ...}; {NO_QUEUE}; {FENCED} if the processor has been evicted
-- States   unchanged
function verbs.collect()
  if not epoch then return { NO_QUEUE } end
  local processor, expiry_ms, max_lines, max_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
  if redis.call('ZSCORE', key('graves'), processor) then return { FENCED } end

  local own_list, bytes = key_of('outbox', processor), 0
  local reply = { OK, unpack(redis.call('LRANGE', own_list, 0, -1)) }
  if #reply > 1 then return reply end
  while #reply <= max_lines and bytes < max_bytes do
    local line = redis.call('LMOVE', key('outbox'), own_list, 'LEFT', 'RIGHT')
    if not line then break end
    reply[#reply + 1] = line
    bytes = bytes + #line
  end
  -- Makes the processor known, so that it can be evicted even if it never sends a heartbeat.
  if #reply > 1 then redis.call('ZADD', key('processors'), 'NX', now_ms + expiry_ms, processor) end
  return reply
end

-- forget: removes lines that are on disk from the list they were read from, if they are still at its head. So repeating
-- it is harmless. Also for lines of a deleted queue.
-- KEYS[1]  the queue's base
-- ARGV     the list ('outbox:P', 'trash:EPOCH:outbox' or 'reports:QUEUE'), number of lines, SHA-1 of the lines joined
--          by newlines
-- Returns  {OK, 1 removed | 0 not found}
-- States   unchanged
function verbs.forget()
  local list, count = key(ARGV[1]), tonumber(ARGV[2])
  local lines = redis.call('LRANGE', list, 0, count - 1)
  if #lines < count or redis.sha1hex(table.concat(lines, '\n')) ~= ARGV[3] then return { OK, 0 } end
  redis.call('LTRIM', list, count, -1)
  local queue = string.match(ARGV[1], '^reports:(.*)$')
  if queue and redis.call('EXISTS', list) == 0 then redis.call('HDEL', key('reports'), queue) end
  return { OK, 1 }
end
