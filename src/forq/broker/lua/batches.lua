-- Batches: sets of jobs in any queues, and what waits for all of them. A batch lives in one queue, its home.
--
--   batches         B -> STATE USE ADDED OPEN DONE DEAD OTHER AT_MS NONCE. STATE: 'open' (members may be added),
--                   'sealed', 'cancelled' (sealed, and running members may not add any), or how it has ended. USE: '1'
--                   if results are kept. ADDED: members so far; OPEN: those that have not ended; DONE, DEAD, OTHER: how
--                   the others have. AT_MS: of its creation, and of the end once it has ended. NONCE: in the edges of
--                   its members, so that those of an earlier batch of this id do not count
--   batch:members   B ' ' NUMBER -> QUEUE ' ' ID ' ' SECONDS ' ' PARENT of a member that has not ended. SECONDS: when
--                   its number was reserved, before it was stored; PARENT: the number of the member that added it, or 0
--   batch:results   B ' ' NUMBER -> HOW ' ' RESULT of one that has, with USE
--   batch:children  B ' ' NUMBER -> members that this member has added; B ' ' NUMBER '.' N -> the number of one of them
--   checks          zset: 'b' B or 'j' ID (a held job) by the time (ms) at which it is looked after again
--   reports:QUEUE   list: HOW ' ' EPOCH ' ' EDGE '\n' RESULT: ends for that queue, which pulse delivers
--   reports         QUEUE -> 1, if it has reports
--
-- A member's edge ends in batches.end_member. A batch ends when it is sealed and no member is open; then it is a source
-- like a job that has ended: 'done' if all members are, else 'failed' (also if it was cancelled), or 'abandoned' (never
-- sealed).

-- A batch that nobody has sealed this long after its last member was added is abandoned.
local UNSEALED_MS = 3600 * 1000
-- Members in other queues are looked after in this interval.
local CHECK_MS = 600 * 1000
-- How long storing a flow may take: after CHECK_MS its jobs would count as lost what is not attached to them.
local ATTACHED_WITHIN_MS = CHECK_MS / 2
-- How long an ended batch is known, with its results.
local ENDED_MS = 24 * 3600 * 1000
local CHECKS_PER_CALL, FORGOTTEN_PER_CALL = 20, 500
local ENDED = { done = true, failed = true, abandoned = true }
-- A callback's id and token are those of the batch, followed by its name.
local CALLBACKS = { ':on_done', ':on_end', ':on_dead' }

function batches.read(id)
  local entry = redis.call('HGET', key('batches'), id)
  if not entry then return nil end
  local state, use, added, open_count, done_count, dead_count, other_count, at_ms, nonce =
    string.match(entry, '^(%l+) (%d) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
  return {
    id = id,
    state = state,
    use = use,
    added = tonumber(added),
    open = tonumber(open_count),
    done = tonumber(done_count),
    dead = tonumber(dead_count),
    other = tonumber(other_count),
    at_ms = tonumber(at_ms),
    nonce = nonce,
  }
end

function batches.write(batch)
  redis.call('HSET', key('batches'), batch.id, string.format('%s %s %d %d %d %d %d %.0f %s', batch.state,
    batch.use, batch.added, batch.open, batch.done, batch.dead, batch.other, batch.at_ms, batch.nonce))
end

-- A callback that has not ended may read the results.
function batches.has_live_callback(batch)
  for _, name in ipairs(CALLBACKS) do
    if flows.live_record(batch.id .. name) then return true end
  end
end

-- Whether what waits for this batch may still run.
function batches.may_succeed(id)
  local batch = batches.read(id)
  return batch and (batch.state == 'open' or batch.state == 'sealed' or batch.state == 'done')
end

function batches.check_at(what, at_ms)
  redis.call('ZADD', key('checks'), string.format('%.0f', at_ms), what)
end

function batches.check_later(what)
  batches.check_at(what, now_ms + CHECK_MS)
end

-- Ends the batch. `how`: 'done', 'failed' or 'abandoned'.
function batches.finish(batch, how)
  batch.state, batch.at_ms = how, now_ms
  batches.write(batch)
  batches.check_at('b' .. batch.id, now_ms + ENDED_MS)
  journal.note('batch_ended 0 ' .. batch.id .. ' ' .. how .. ' ' .. batch.added)
  -- At its first death, those that wait for it have gone.
  flows.detach({ batch.id .. ' deaths', batch.id .. ' batch' }, how)
end

function batches.finish_if_over(batch)
  if ENDED[batch.state] or batch.state == 'open' or batch.open > 0 then return batches.write(batch) end
  batches.finish(batch, batch.state == 'sealed' and batch.dead + batch.other == 0 and 'done' or 'failed')
end

-- A member has ended. Removing its field is the only thing that counts, so a report may arrive twice.
function batches.end_member(id, nonce, number, use, how, result)
  local field, batch = id .. ' ' .. number, batches.read(id)
  if not batch or batch.nonce ~= nonce or redis.call('HDEL', key('batch:members'), field) == 0 then return end
  batch.open = batch.open - 1
  if SUCCESS[how] then
    batch.done = batch.done + 1
  elseif how == 'dead' then
    batch.dead = batch.dead + 1
    flows.detach({ id .. ' deaths' }, 'dead')
  else
    batch.other = batch.other + 1
  end
  if use ~= '0' then
    if not result and SUCCESS[how] then result = MISSING_RESULT end
    redis.call('HSET', key('batch:results'), field, how .. ' ' .. (result or ''))
    edge_bytes = edge_bytes + #(result or '')
  end
  batches.finish_if_over(batch)
end

-- Connects a job that waits for a batch: for its end, or with 'dead' for its first death.
function batches.connect(id, edge, when, target)
  local batch = batches.read(id)
  local died = when == 'dead' and batch.dead > 0
  if not ENDED[batch.state] and not died then
    return flows.add_edges(id .. (when == 'dead' and ' deaths' or ' batch'), { edge }, false)
  end
  flows.meet(target[1], target[2], target[3], target[4], died and 'dead' or batch.state)
end

-- Leaves a report for another queue. Pulse delivers it, and forgets it when that queue has it.
function batches.send_report(queue, epoch_there, edge, how, result)
  redis.call('RPUSH', key_of('reports', queue), how .. ' ' .. epoch_there .. ' ' .. edge .. '\n' .. result)
  if redis.call('HSETNX', key('reports'), queue, '1') == 1 then redis.call('PUBLISH', channel('due'), 'report') end
  edge_bytes = edge_bytes + #result
end

-- What is looked after now: batches that nobody seals, members in other queues, ended batches that are forgotten.
-- Returns the batches and held jobs whose members or dependencies in other queues pulse has to verify.
function batches.tend()
  if not flows_on then return {} end
  local due = redis.call('ZRANGEBYSCORE', key('checks'), '-inf', string.format('%.0f', now_ms), 'LIMIT', 0,
    CHECKS_PER_CALL)
  local to_verify = {}
  for _, what in ipairs(due) do
    local kind, id = string.sub(what, 1, 1), string.sub(what, 2)
    local batch = kind == 'b' and batches.read(id)
    if kind == 'j' and flows.is_held(id) or batch and (batch.state == 'sealed' or batch.state == 'cancelled') then
      to_verify[#to_verify + 1] = what
      batches.check_later(what)
    elseif batch and ENDED[batch.state] and batches.has_live_callback(batch) then
      batches.check_later(what)
    elseif not batch or batches.forget(batch) then
      redis.call('ZREM', key('checks'), what)
    end
  end
  flows.resolve()
  return to_verify
end

-- Abandons an open batch, or forgets a part of an ended one. Returns true if nothing is left of it.
function batches.forget(batch)
  if batch.state == 'open' then
    batches.finish(batch, 'abandoned')
    return false
  end
  local fields, children = {}, {}
  local last = math.min(batch.added, FORGOTTEN_PER_CALL)
  for i = 1, last do fields[i] = batch.id .. ' ' .. batch.added - last + i end
  if last > 0 then
    for i, count in ipairs(redis.call('HMGET', key('batch:children'), unpack(fields))) do
      for n = 1, tonumber(count or 0) do children[#children + 1] = fields[i] .. '.' .. n end
    end
    redis.call('HDEL', key('batch:results'), unpack(fields))
    redis.call('HDEL', key('batch:members'), unpack(fields))
    redis.call('HDEL', key('batch:children'), unpack(fields))
    for first = 1, #children, FORGOTTEN_PER_CALL do
      redis.call('HDEL', key('batch:children'), unpack(children, first,
        math.min(first + FORGOTTEN_PER_CALL - 1, #children)))
    end
    batch.added = batch.added - last
    batches.write(batch)
  end
  if batch.added > 0 then return false end
  redis.call('HDEL', key('batches'), batch.id)
  -- The next batch of this id has callbacks of its own.
  for _, name in ipairs(CALLBACKS) do redis.call('DEL', key_of('token', epoch .. ':' .. batch.id .. name)) end
  return true
end

-- open_batch: creates a batch, or joins it. Its callbacks are enqueued after this, waiting for it.
-- KEYS[1]  the queue's base
-- ARGV     protocol, B, whether results are kept ('1' | '0')
-- Returns  {OK, epoch, now (ms)}; {NO_QUEUE}; {OTHER_PROTOCOL, its number}; {FLOWS_OFF}; {BATCH_ENDED}
-- States   unchanged
function verbs.open_batch()
  if not epoch then return { NO_QUEUE } end
  if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end
  if options.flows == FLOWS_NEVER then return { FLOWS_OFF } end
  local id, use = ARGV[2], ARGV[3]
  local batch = batches.read(id)
  if batch and batch.state ~= 'open' then return { BATCH_ENDED } end
  if batch then return { OK, epoch, now_ms } end
  flows.switch_on()
  batches.write({ id = id, state = 'open', use = use, added = 0, open = 0, done = 0, dead = 0, other = 0,
    at_ms = now_ms, nonce = now_text() })
  batches.check_at('b' .. id, now_ms + UNSEALED_MS)
  journal.note('batch_opened 0 ' .. id)
  journal.write('-')
  return { OK, epoch, now_ms }
end

-- add_members: reserves numbers for new members, before they are stored in their queues. With a parent, itself a member
-- that has not ended, the call may be repeated: it returns the same numbers.
-- KEYS[1]  the queue's base
-- ARGV     B, number of the parent ('': none), children of the parent before these, then QUEUE ' ' ID per member
-- Returns  {OK, number per member (0: it has ended already)}; {NO_BATCH}; {BATCH_ENDED}: sealed or ended, and for
--          children also if the parent has ended; {NO_QUEUE}
-- States   unchanged
function verbs.add_members()
  if not epoch then return { NO_QUEUE } end
  local FIRST_MEMBER = 4
  local id, parent_number = ARGV[1], ARGV[2]
  local batch = batches.read(id)
  if not batch then return { NO_BATCH } end
  local parent_field = id .. ' ' .. parent_number
  if parent_number ~= '' then
    if redis.call('HEXISTS', key('batch:members'), parent_field) == 0 then return { BATCH_ENDED } end
    if batch.state == 'cancelled' or ENDED[batch.state] then return { BATCH_ENDED } end
  elseif batch.state ~= 'open' then
    return { BATCH_ENDED }
  end

  local reply, fields = { OK }, {}
  local since = string.format(' %.0f %s', now_ms / 1000, parent_number == '' and '0' or parent_number)
  local function reserve(at)
    batch.added, batch.open = batch.added + 1, batch.open + 1
    fields[#fields + 1], fields[#fields + 2] = id .. ' ' .. batch.added, ARGV[at] .. since
    return batch.added
  end
  for at = FIRST_MEMBER, #ARGV do
    local number
    if parent_number == '' then
      number = reserve(at)
    else
      local n = tonumber(ARGV[3]) + at - FIRST_MEMBER + 1
      local known = redis.call('HGET', key('batch:children'), parent_field .. '.' .. n)
      number = tonumber(known) or reserve(at)
      if known and redis.call('HEXISTS', key('batch:members'), id .. ' ' .. known) == 0 then
        number = 0
      elseif known then
        -- Its time begins again: verbs.lose must not take it for one that was never stored.
        fields[#fields + 1], fields[#fields + 2] = id .. ' ' .. known, ARGV[at] .. since
      end
      if not known then
        redis.call('HSET', key('batch:children'), parent_field .. '.' .. n, number, parent_field, n)
      end
    end
    reply[#reply + 1] = number
  end
  if #fields > 0 then redis.call('HSET', key('batch:members'), unpack(fields)) end
  batches.write(batch)
  if batch.state == 'open' then batches.check_at('b' .. id, now_ms + UNSEALED_MS) end
  return reply
end

-- seal_batch: no further members, but those that running members add; a batch without open members ends. Repeatable.
-- KEYS[1]  the queue's base
-- ARGV     B, '1' to cancel it: it ends as failed once its members have ended, which the caller cancels
-- Returns  {OK, open members}; {NO_BATCH}; {NO_QUEUE}
-- States   held -> waiting | scheduled | dead | cancelled (its callbacks)
function verbs.seal_batch()
  if not epoch then return { NO_QUEUE } end
  local batch, cancels = batches.read(ARGV[1]), ARGV[2] == '1'
  if not batch then return { NO_BATCH } end
  if ENDED[batch.state] then return { OK, batch.open } end
  if batch.state == 'open' or cancels then
    batch.state = cancels and 'cancelled' or 'sealed'
    batches.check_later('b' .. batch.id)
    batches.finish_if_over(batch)
    flows.resolve()
    hints.wake_idle(NOTIFY_AWAITERS)
    journal.write('-')
  end
  return { OK, batch.open }
end

-- report: applies ends that other queues report. Repeatable: an edge counts once.
-- KEYS[1]  the queue's base
-- ARGV     lines as in reports:QUEUE
-- Returns  {OK, number of lines applied}; fewer than given if the limits of one call were reached; {NO_QUEUE}
-- States   held -> waiting | scheduled | dead | cancelled
function verbs.report()
  if not epoch then return { NO_QUEUE } end
  local applied = 0
  for i = 1, #ARGV do
    if edges_left <= 0 or edge_bytes >= READ_BYTES then break end
    local how, epoch_here, edge, result = string.match(ARGV[i], '^(%l+) (%d+) ([^\n]*)\n(.*)$')
    edges_left, applied = edges_left - 1, i
    if epoch_here == epoch then flows.apply(edge, how, result ~= '' and result or nil) end
  end
  flows.resolve()
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  return { OK, applied }
end

-- attach: adds edges from the gate of a flow to targets in other queues, which were stored a short time ago.
-- KEYS[1]  the queue's base
-- ARGV     B, then an edge ('to QUEUE EPOCH …') each
-- Returns  {OK}; {NO_BATCH}; {LATE}; {NO_QUEUE}
-- States   unchanged
function verbs.attach()
  if not epoch then return { NO_QUEUE } end
  local batch, added = batches.read(ARGV[1]), {}
  if not batch then return { NO_BATCH } end
  if batch.state == 'open' and now_ms - batch.at_ms > ATTACHED_WITHIN_MS then return { LATE } end
  for i = 2, #ARGV do added[i - 1] = ARGV[i] end
  flows.add_edges(batch.id .. ' batch', added, false)
  if ENDED[batch.state] then
    flows.detach({ batch.id .. ' batch' }, batch.state)
    flows.resolve()
  end
  return { OK }
end

-- verify: which members or dependencies another queue still expects from jobs of this one.
-- KEYS[1]  the queue's base
-- ARGV     the other queue, then (id, edge) each; id: of a job, or of a batch with ' batch'
-- Returns  {OK, per pair: 1 its end will be reported, or cannot be excluded | 0 it is not here}; {NO_QUEUE}
-- States   unchanged
function verbs.verify()
  if not epoch then return { NO_QUEUE } end
  local reply = { OK }
  -- An end that is on its way.
  local pending = redis.call('EXISTS', key_of('reports', ARGV[1]), key('resolving')) > 0
  for at = 2, #ARGV, 2 do
    reply[#reply + 1] = (pending or flows.has_edge(ARGV[at], ARGV[at + 1])) and 1 or 0
  end
  return reply
end

-- lose: ends members, or dependencies, whose jobs are gone without a report: data was lost, or a queue was deleted. Not
-- members that may still be stored: those whose number was reserved a short time ago, and those that a member has to
-- add which has not ended.
-- KEYS[1]  the queue's base
-- ARGV     how ('lost' | 'deleted'), 'b' B or 'j' ID, its nonce, then the number of each
-- Returns  {OK}; {NO_QUEUE}
-- States   held -> waiting | scheduled | dead | cancelled
function verbs.lose()
  if not epoch then return { NO_QUEUE } end
  local how, kind, id, nonce = ARGV[1], string.sub(ARGV[2], 1, 1), string.sub(ARGV[2], 2), ARGV[3]
  local batch = kind == 'b' and batches.read(id)
  for i = 4, #ARGV do
    local hold = kind == 'j' and flows.read_hold(id)
    if hold then flows.meet(id, nonce, ARGV[i], hold.use, how) end
    local member = batch and redis.call('HGET', key('batch:members'), id .. ' ' .. ARGV[i])
    local seconds, parent_number = string.match(member or '', ' (%d+) (%d+)$')
    if seconds and now_ms - 1000 * seconds >= CHECK_MS
      and redis.call('HEXISTS', key('batch:members'), id .. ' ' .. parent_number) == 0 then
      batches.end_member(id, nonce, ARGV[i], batch.use, how)
    end
  end
  flows.resolve()
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  return { OK }
end

-- describe_flow: keeps the plan of a flow for a while, for its picture.
-- KEYS[1]  the queue's base
-- ARGV     flow, ms to keep it, the plan as JSON; '' removes it
-- Returns  {OK, the plan before ('': none)}; {NO_QUEUE}; {FLOWS_OFF}
-- States   unchanged
function verbs.describe_flow()
  if not epoch then return { NO_QUEUE } end
  if options.flows == FLOWS_NEVER then return { FLOWS_OFF } end
  local name = key_of('flow', ARGV[1])
  local before = redis.call('GET', name) or ''
  if ARGV[3] == '' then redis.call('DEL', name) else redis.call('SET', name, ARGV[3], 'PX', ARGV[2]) end
  return { OK, before }
end
