-- A worker's turn: settles finished jobs, keeps or returns the jobs it holds, claims the next ones.

local SKIPS_PER_TURN = 1000
local MANY = 8
-- Moving an exhausted job to dead costs about as much as skipping this many hints.
local SKIPS_PER_BURIAL = 10
-- Stored for a job that started before its queue kept results.
local NO_RESULT = '!it ran before its queue kept results'
-- Minimum interval between two messages to pulse about claims of workers that may be unable to read them.
local CLAIM_NOTICE_MS = 2000
-- By the first byte of a record: 'c', 'o' and 'O' have counts.
local HAS_COUNTS = { [99] = true, [111] = true, [79] = true }
-- Redis keeps a hash of up to 512 short values as a list, and searches it from its start. One longer value turns it
-- into a table: `active` would be slow with more entries than this.
local LISTED, NOT_LISTED = 16, '~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~'
local PRIORITIES = { '0', '1', '2', '3', '4', '5', '6', '7', '8', '9' }

-- State of the turn, set by verbs.turn.
local processor, worker, turn, want, keep, lane, done_count, failed_count
local max_stalls, max_timeouts, processing
-- settled, refused: ids. interrupted: settled after the others. limited: the limits held the worker back. fates: of the
-- failed jobs.
local settled, refused, interrupted, limited, fates
-- Ids that BLMOVE moved, if a claim would find them first anyway: then they can be claimed directly.
local moved
-- taken: claimed ids. exhausted: jobs that move to dead. attempt_of: attempt number by id, for records with counts.
local taken, reply, exhausted, attempt_of
-- Remaining record bytes; only counted (check_bytes) if the wanted number of records may exceed the limit.
local bytes_left, check_bytes

-- Registers the turn; returns a reply code if it must be refused.
function turns.register()
  local registrations = workers_key(processor)
  local registered = redis.call('HGET', registrations, worker)
  if not registered then return FENCED end
  if tonumber(turn) > claims.last_turn(registered) then
    redis.call('HSET', registrations, worker, turn)
    return nil
  end
  -- The worker has taken a later turn: this one would return its running jobs. But a BLMOVE sent with this turn could
  -- not be refused, so its id is returned.
  claims.return_parked(processor, worker)
  hints.wake_idle(nil, WAKE_LIMITED)
  journal.write(worker)
  return STALE
end

-- Jobs that succeeded come in groups of one claim: fence, number, 'ID MICROS ID MICROS ...', ids. Returns the index of
-- the argument behind the last group.
function turns.behind_groups(at)
  local left = done_count
  while left > 0 do
    local number = tonumber(ARGV[at + 1])
    at, left = at + 3 + number, left - number
  end
  return at
end

-- Settles the groups that begin at ARGV[at]. `first_result`: where results begin (verbs.turn).
function turns.settle_successes(at, first_result)
  local results, keep_ms, keeps_results = {}, {}, option('keep_done_ms') > 0
  for at_result = first_result, #ARGV, 2 do
    local number, own_ms = tonumber(ARGV[at_result]), nil
    if not number then
      number, own_ms = string.match(ARGV[at_result], '^(%d+) (%d+)$')
      number, own_ms = tonumber(number), tonumber(own_ms)
    end
    results[number], keep_ms[number] = ARGV[at_result + 1], own_ms
  end
  local before = 0
  while before < done_count do
    local fence, number, entries = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
    local ids = { unpack(ARGV, at + 3, at + 2 + number) }
    local all_owned, reported = turns.owns_claim(ids, fence), {}
    if not all_owned or keeps_results or first_result <= #ARGV then
      local owned, texts, index = {}, {}, 0
      for id, micros in string.gmatch(entries, '(%S+) (%S+)') do
        index = index + 1
        if all_owned or claims.is_claim(redis.call('HGET', key('active'), id), worker, fence) then
          owned[#owned + 1] = id
          texts[#texts + 1] = id .. ' ' .. micros
          local result, own_ms = results[before + index], keep_ms[before + index]
          if keeps_results or result then
            reported[id] = { micros = micros, result = result or NO_RESULT, keep_ms = own_ms }
          end
        else
          refused[#refused + 1] = id
        end
      end
      ids, entries = owned, table.concat(texts, ' ')
    end
    if #settled == 0 then settled = ids else for _, id in ipairs(ids) do settled[#settled + 1] = id end end
    done.settle(ids, { [fence] = { entries } }, reported)
    at, before = at + 3 + number, before + number
  end
end

-- A list may have two hints of a job. take_plain leaves it to the number of new owners to notice that.
function turns.drop_repeated()
  local first, seen = #reply - 2 * #taken, {}
  local packed, unique = { unpack(reply, first + 1) }, {}
  for at = first + 1, #reply do reply[at] = nil end
  for i, id in ipairs(taken) do
    if not seen[id] then
      seen[id] = true
      unique[#unique + 1] = id
      reply[#reply + 1], reply[#reply + 2] = id, packed[2 * i]
    end
  end
  taken = unique
end

-- Whether the worker owns all these jobs by this claim, and none of them is marked for removal.
function turns.owns_claim(ids, fence)
  local owner = worker .. ':' .. fence
  for _, stored in ipairs(redis.call('HMGET', key('active'), unpack(ids))) do
    if stored ~= owner then return false end
  end
  return true
end

function turns.settle_failures(first)
  for i = 0, failed_count - 1 do
    local at = first + 8 * i
    local id, kind, fence = ARGV[at], ARGV[at + 5], ARGV[at + 1]
    local fate, ends
    if kind == 'interrupted' or kind == 'cancelled' then
      ends = claims.is_claim(redis.call('HGET', key('active'), id), worker, fence)
      if ends then interrupted[#interrupted + 1] = { at = at, first_fate = 4 * i } end
    else
      fate = failures.settle(id, worker .. ':' .. fence, ARGV[at + 2], failures.read(at + 3))
      ends = fate
    end
    if ends then settled[#settled + 1] = id else refused[#refused + 1] = id end
    for n, value in ipairs(fate or { 'refused', 0, 0, 0 }) do fates[4 * i + n] = value end
  end
end

-- After the rest of the batch has returned: the interrupted job was ahead of it.
function turns.settle_interrupted()
  for _, job in ipairs(interrupted) do
    local fate = failures.settle_interrupted(worker, ARGV[job.at], ARGV[job.at + 2], failures.read(job.at + 3))
    for n, value in ipairs(fate) do fates[job.first_fate + n] = value end
  end
end

-- Counting is not enough: a late hint in the list may stand in for a job that another worker got.
function turns.owns_all(ids)
  if #ids == 0 then return true end
  for _, owner in ipairs(redis.call('HMGET', key('active'), unpack(ids))) do
    if not claims.is_owner(worker, owner) then return false end
  end
  return true
end

function turns.can_claim_moved(ids)
  if #ids == 0 or lane ~= 'main' or #ids > want or other_hints > 0 or paused or has_limits then return false end
  if #ids > 1 and records.readable(#ids, READ_BYTES) < #ids then return false end
  for _, owner in ipairs(redis.call('HMGET', key('active'), unpack(ids))) do
    if owner then return false end
  end
  return true
end

-- Keeps the jobs in the processing list that the worker still holds, returns the others. True if the worker holds
-- exactly the jobs it expects.
function turns.keep_or_return()
  local ended = done_count + failed_count
  if keep == 0 and #refused == 0 and redis.call('LLEN', processing) == ended then
    -- A worker's list contains all ids it owns, so with this length it holds nothing else.
    if ended > 0 then redis.call('DEL', processing) end
    return true
  end
  local list = redis.call('LRANGE', processing, 0, -1)
  local rest, settled_ids = {}, {}
  for _, id in ipairs(settled) do settled_ids[id] = true end
  for _, id in ipairs(list) do
    -- Only once: a second entry of the same id is a hint.
    if settled_ids[id] then settled_ids[id] = nil else rest[#rest + 1] = id end
  end
  local held = #rest == keep and turns.owns_all(rest)
  if #rest == #list and held then return true end
  if #list > 0 then redis.call('DEL', processing) end
  if not held and turns.can_claim_moved(rest) then
    moved = rest
  elseif not held then
    claims.return_jobs(worker, rest)
  elseif keep > 0 then
    redis.call('RPUSH', processing, unpack(rest))
  end
  return held
end

-- The common claim: plain records only, of jobs that nobody owns. False if there is another one: nothing has changed.
-- Never in the retry lane, where bytes are checked.
function turns.take_plain(ids)
  if #ids <= 1 or #taken > 0 or check_bytes or hints.has_stale() or redis.call('HLEN', key('active')) > 0 then
    return false
  end
  local packed = redis.call('HMGET', key('jobs'), unpack(ids))
  for i = 1, #ids do
    -- No other flag sorts behind that of plain records. An absent record may belong to a wake token.
    if not packed[i] or packed[i] < 'p' then return false end
  end
  local at = #reply
  for i = 1, #ids do
    reply[at + 1], reply[at + 2] = ids[i], packed[i]
    at = at + 2
  end
  taken = ids
  return true
end

function turns.take(place, ids)
  -- For many ids one HLEN is cheaper.
  local free = ids == moved or (#ids > MANY and redis.call('HLEN', key('active')) == 0)
  local owners = free and {} or redis.call('HMGET', key('active'), unpack(ids))
  local packed = redis.call('HMGET', key('jobs'), unpack(ids))
  if check_bytes then
    for i = 1, #ids do bytes_left = bytes_left - (packed[i] and #packed[i] or 0) end
  end
  for i = 1, #ids do
    local id = ids[i]
    local claimable = id ~= '' and not hints.consume_stale(place, id)
    if claimable and place == RETRY_PLACE then in_lane = in_lane - 1 end
    if claimable and not packed[i] then
      hints.drop(id)
    elseif claimable and not owners[i] and not taken[id] then
      taken[id] = true
      local job = HAS_COUNTS[string.byte(packed[i])] and records.read(packed[i])
      local error = job and (failures.exhausted_error(job, max_stalls, max_timeouts) or records.expired_error(job))
      if job then attempt_of[id] = attempts.number(job) end
      if error then
        exhausted[#exhausted + 1] = { id = id, record = packed[i], error = error }
      else
        taken[#taken + 1] = id
        reply[#reply + 1] = id
        reply[#reply + 1] = packed[i]
      end
    end
  end
end

-- How many hints to pop next so that their records fit; 0 if even the next one does not.
function turns.claimable_hints(place)
  local count = records.readable(want - #taken, bytes_left)
  if count > 0 then return count end
  -- It may be shorter than largest_record.
  local next_id = bytes_left < READ_BYTES and redis.call('LINDEX', (hints.first_list(place)), 0)
  return next_id and redis.call('HSTRLEN', key('jobs'), next_id) > bytes_left and 0 or 1
end

-- Claims from one place. Returns the remaining skips; 0 if the bytes are used up, so that no later list goes first.
function turns.claim_from(place, skips)
  while #taken < want and skips > 0 do
    local count = check_bytes and turns.claimable_hints(place) or want - #taken
    if count == 0 then return 0 end
    local ids = hints.pop(place, count)
    if not ids then return skips end
    local before, exhausted_before = #taken, #exhausted
    if not turns.take_plain(ids) then turns.take(place, ids) end
    skips = skips - (#ids - (#taken - before)) - SKIPS_PER_BURIAL * (#exhausted - exhausted_before)
  end
  return skips
end

function turns.claim_suspect()
  local skips = SKIPS_PER_TURN
  while #taken == 0 and skips > 0 and bytes_left > 0 do
    local id = redis.call('ZPOPMIN', key('suspects'))[1]
    if not id then return end
    hints.count(SUSPECTS_PLACE, -1)
    local exhausted_before = #exhausted
    turns.take(SUSPECTS_PLACE, { id })
    skips = skips - (#exhausted > exhausted_before and SKIPS_PER_BURIAL or 1)
  end
end

-- A turn sent before there was a job may come from a process that has been stopped since: pulse checks it.
-- `queue`: its entry in the cache.
function turns.publish_claim(queue, ms, of_worker, number)
  -- The time is only in this server's memory; losing it costs one more message.
  if math.abs(ms - (queue.claim_published_ms or 0)) < CLAIM_NOTICE_MS then return end
  queue.claim_published_ms = ms
  redis.call('PUBLISH', queue.due_channel, 'look ' .. of_worker .. ' ' .. number)
end

function turns.claim()
  check_bytes = records.readable(want, READ_BYTES) < want
  if lane ~= 'main' and not parent then
    -- One job at a time, so that a crash identifies it. Many exhausted jobs may come first, so count the bytes.
    want, check_bytes = 1, true
    if suspect_hints > 0 then turns.claim_suspect() end
    -- The retry lane runs only while no other job waits.
    local lane_open = lane == 'retry' and in_lane > 0 and hints.main_waiting() == 0
    if lane_open then turns.claim_from(RETRY_PLACE, SKIPS_PER_TURN) end
  elseif other_hints == 0 then
    if #moved > 0 then turns.take('5', moved) end
    turns.claim_from('5', SKIPS_PER_TURN)
  else
    local skips = SKIPS_PER_TURN
    for _, priority in ipairs(PRIORITIES) do skips = turns.claim_from(priority, skips) end
  end
  if #taken + #exhausted == 0 then return '' end
  local fence = claims.next_fence()
  -- Exhausted jobs are claimed and move to dead without a call of their handler.
  for _, job in ipairs(exhausted) do
    journal.note('claimed ' .. fence .. ' ' .. attempt_of[job.id] .. ' ' .. job.id)
    job.fence, job.micros, job.brief = fence, '-', job.error
  end
  if #exhausted > 0 then dead.bury(exhausted) end
  limits.take_tokens(#taken)
  if #taken == 0 then return '' end
  local owner = worker .. ':' .. fence
  local pairs_to_set = {}
  for i = 1, #taken do
    pairs_to_set[2 * i - 1] = taken[i]
    pairs_to_set[2 * i] = owner
  end
  if #taken > LISTED then
    pairs_to_set[#pairs_to_set + 1] = NOT_LISTED
    pairs_to_set[#pairs_to_set + 1] = NOT_LISTED
  end
  local added = redis.call('HSET', key('active'), unpack(pairs_to_set))
  if #taken > LISTED then added = added - redis.call('HDEL', key('active'), NOT_LISTED) end
  if added < #taken then turns.drop_repeated() end
  redis.call('RPUSH', processing, unpack(taken, 1, #taken))
  if next(attempt_of) == nil then
    journal.note_ids('claimed', fence .. ' 1', taken)
  else
    -- One line per run of neighbours with the same attempt number, in claim order.
    local same_attempt, attempt = {}, 1
    for _, id in ipairs(taken) do
      if (attempt_of[id] or 1) ~= attempt then
        journal.note_ids('claimed', fence .. ' ' .. attempt, same_attempt)
        same_attempt, attempt = {}, attempt_of[id] or 1
      end
      same_attempt[#same_attempt + 1] = id
    end
    journal.note_ids('claimed', fence .. ' ' .. attempt, same_attempt)
  end
  if flows_on then flows.mark_claimed(taken, reply, fates and 11 or 10) end
  if ARGV[7] == 'waiting' then turns.publish_claim(cached, now_ms, worker, turn) end
  return fence
end

-- How many jobs the worker may claim, at most `want`. With max_active only one: jobs claimed ahead would use up units
-- that other workers need.
function turns.within_limits()
  local left = limits.room()
  if lane == 'main' then left = left - limits.reserved_for_suspects() end
  if max_active > 0 then left = math.min(left, 1) end
  if left > 0 then
    if lane ~= 'main' and limits.reserved_for_suspects() > 0 then limits.reserve_for_suspects(0) end
    return math.min(want, left)
  end
  if lane == 'main' then
    -- Stale hints alone also bring workers here; if held back for them, they would come again and again.
    limited = hints.main_waiting() > 0 or other_hints > 0
    if limited then limits.add_worker(processor, worker) end
  elseif lane == 'retry' and suspect_hints > 0 then
    -- The retry process is woken when it may start. A process for suspects alone exits instead, so it needs no unit.
    limits.reserve_for_suspects(RESERVED_MS + (limits.refill_ms() or 0))
  end
  return 0
end

-- turn: settles the jobs a worker ran, checks what it still holds, and claims the next ones. A turn also claims the ids
-- that BLMOVE moved to the worker, and resynchronizes it after a lost reply: ids in its processing list that it neither
-- settles nor keeps return to the front first.
-- KEYS[1]  the queue's base
-- ARGV     epoch, processor, worker, turn number (up to 53 bits, growing), want, keep (number of unstarted jobs of
--          earlier turns that it expects to hold), lane to claim from ('main' | 'waiting' (main, sent together with the
--          BLMOVE that waits for a job) | 'retry' | 'suspects'), number done, number failed, then the groups of done
--          jobs (turns.settle_successes), per failed job (id, fence, micros, error, brief error, kind, retry at (ms,
--          '+ms' from now, or ''), chance (0 to 1), followed by ' ' OPTIONS if its task has some (records.lua)); a
--          failed job of kind 'interrupted' or 'cancelled' was ended on request, and has its stack (JSON) and the
--          cause in place of error and brief error; per done job whose result is kept (its number in this turn, from 1,
--          followed by ' ' KEEP_MS if that is not the queue's keep_done; result, or '!' and the reason why there is
--          none)
-- Returns  {OK, PAUSED or LIMITED (jobs wait but may not start now; the worker will be woken), held (0: the kept jobs
--          went to other workers), ids whose settling was refused, fence, timeout_ms, size, priority, maximum length of
--          a result (bytes; negative: only jobs with their own keep_done keep one), max_retries, retry_lane_retries,
--          fates of the failed jobs (4 values each, failures.fate; absent if none failed), id, record, id, record ...};
--          {NO_QUEUE}; {FENCED} if the worker is not registered; {STALE} if the turn number is not above the last one:
--          the turn was delayed, and a later one has been taken
-- States   active -> done | scheduled (retried) | dead | cancelled; active -> waiting (returned, timed out,
--          interrupted); blocked -> waiting | scheduled; scheduled -> waiting (promoted); waiting -> active; waiting ->
--          dead (expired; stalled or timed out too often)
function verbs.turn()
  if epoch ~= ARGV[1] then return { NO_QUEUE } end
  processor, worker, turn = ARGV[2], ARGV[3], ARGV[4]
  want, keep, lane = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == 'waiting' and 'main' or ARGV[7]
  done_count, failed_count = tonumber(ARGV[8]), tonumber(ARGV[9])
  -- Queues created by an earlier release lack some of them.
  max_stalls, max_timeouts = tonumber(options.max_stalls or 3), tonumber(options.max_timeouts or 3)
  processing = worker_key(processor, worker, 'processing')
  settled, refused, interrupted, limited, moved = {}, {}, {}, false, {}
  fates = failed_count > 0 and {} or nil
  taken, reply, exhausted, attempt_of = {}, { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }, {}, {}
  if fates then reply[11] = fates end
  bytes_left, check_bytes = READ_BYTES, false

  local refusal = turns.register()
  if refusal then return { refusal } end

  if has_limits then limits.remove_worker(processor, worker) end
  local first_failed = turns.behind_groups(10)
  turns.settle_successes(10, first_failed + 8 * failed_count)
  turns.settle_failures(first_failed)
  timers.promote()
  local held = turns.keep_or_return()
  turns.settle_interrupted()
  local fence = ''
  if has_limits and want > 0 and not paused then want = turns.within_limits() end
  if want > 0 and not paused then fence = turns.claim() end
  if rate_count > 0 and (limited or fence ~= '') then limits.publish_refill_if_limited() end
  hints.wake_idle(nil, WAKE_LIMITED)
  journal.write(worker)

  reply[1] = paused and PAUSED or limited and LIMITED or OK
  reply[2], reply[3], reply[4] = held and 1 or 0, refused, fence
  for i, limit in ipairs(cached.limits) do reply[4 + i] = limit end
  return reply
end

-- Removes the settled ids from the head of the worker's list. Other ids stay, for the worker's next turn.
function turns.drop_settled(list)
  local gone, others = {}, {}
  for _, id in ipairs(settled) do gone[id] = true end
  for _, id in ipairs(redis.call('LPOP', list, #settled) or {}) do
    if gone[id] then gone[id] = nil else table.insert(others, 1, id) end
  end
  if #others > 0 then redis.call('LPUSH', list, unpack(others)) end
end

-- settle: settles jobs that succeeded, for a worker that waits for its next job. It is no turn: it may arrive late or
-- twice, since only the owner of a claim settles it.
-- KEYS[1]  the queue's base
-- ARGV     epoch, processor, worker, then one group of jobs (turns.settle_successes)
-- Returns  {OK, ids whose settling was refused}; {NO_QUEUE}
-- States   active -> done; blocked -> waiting | scheduled
function verbs.settle()
  if epoch ~= ARGV[1] then return { NO_QUEUE } end
  processor, worker = ARGV[2], ARGV[3]
  done_count = tonumber(ARGV[5])
  settled, refused = {}, {}
  turns.settle_successes(4, #ARGV + 1)
  turns.drop_settled(worker_key(processor, worker, 'processing'))
  hints.wake_idle(nil, WAKE_LIMITED)
  journal.write(worker)
  return { OK, refused }
end
