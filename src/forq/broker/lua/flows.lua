-- Flows: jobs that wait for the end of others (held). Batches are in batches.lua. One way for all ends: flows.end_jobs.
--
-- A held job is in `held` and its record in `held:jobs`, not in `jobs`: nothing that counts or claims waiting jobs sees
-- it. What it waits for are its dependencies, numbered from 1. An edge leads from a source, whose end it reports, to
-- one dependency of a held job, or to one member of a batch.
--
--   held        ID -> NONCE ' ' WHEN ' ' USE ' ' RUN_AT_MS ' ' COUNT ' ' OPEN. NONCE: the enqueue time (µs); an edge of
--               an earlier job with this id has another one. COUNT: dependencies; OPEN: those that have not ended
--   held:jobs   ID -> record; an own expiry is in ms still, since it begins when the job is ready
--   held:open   ID ' ' NUMBER -> the dependency, while it has not ended: 'job ID', 'batch B', 'from QUEUE ID' (a job
--               there, which brings its edge along) or 'gate QUEUE B' (a batch there)
--   inputs      ID -> COUNT ' ' USE; ID ' ' NUMBER -> HOW ' ' RESULT of a dependency: for a job that uses results
--   sources     SOURCE -> GROUP ':' COUNT ':' USED [',' …]: its edges. SOURCE: ID (a live job), ID ' blocked' (the
--               enqueue behind an active job), B ' batch' (its end) or B ' deaths' (its first death). USED: 1 if one of
--               the edges wants the result
--   edges       GROUP ' ' INDEX -> an edge; HOLDER ' result' -> a result, while groups that use it are being resolved,
--               and HOLDER ' left' -> how many; HOLDER: one of these groups
--   resolving   list: GROUP ' ' COUNT ' ' NEXT ' ' HOW [' ' HOLDER] of ended sources whose edges did not fit into one
--               call
--   ends        ID -> how it ended, of the last jobs; `ends:old`: of those before
--   dead:holds  MEMBER -> WHEN ' ' USE ' ' RUN_AT_MS ' ' COUNT, and a line NUMBER ' ' DEPENDENCY for each that was
--               open: of a job that is dead because of one of them. MEMBER: ID@FENCE
--   dead:inputs MEMBER -> COUNT ' ' USE, of a dead job that has run; MEMBER ' ' NUMBER: as in `inputs`
--
-- An edge is 'job' ID NONCE NUMBER USE, or 'batch' B NONCE NUMBER USE, or 'to' QUEUE EPOCH followed by one of these:
-- then a report goes to that queue. WHEN: 'done' (all must succeed), 'ended' or 'dead' (the first death).
-- USE: '0': results are not needed; '1': the handler can read them; '2', '3': its first argument is the only result, or
-- the list of them.

local MAX_ENDS = 50000
-- An entry of `sources` ends with a group; it is shorter than this.
local LONGEST_GROUP = 40
-- Moving a job to dead costs about as much as this many edges.
local EDGES_PER_BURIAL = 10
local MISSING_RESULT = '!its result was not kept'
-- The letters of dependencies as enqueue gets them; of those in a queue that is named too.
local DEPENDENCY_KINDS = { j = 'job', b = 'batch', f = 'from', g = 'gate' }
local PLACED_ELSEWHERE = { f = true, g = true }
local SUCCESS = { done = true, released = true }

-- Call it before the first use in a queue. From then on the ends of its jobs are remembered.
function flows.switch_on()
  if flows_on then return end
  flows_on = true
  redis.call('HSET', key('options'), 'flows_used', '1')
  summary.next_version(base)
end

function flows.remember(ids, how)
  if not flows_on then return end
  local pairs_to_set = {}
  for i, id in ipairs(ids) do pairs_to_set[2 * i - 1], pairs_to_set[2 * i] = id, how end
  redis.call('HSET', key('ends'), unpack(pairs_to_set))
  if redis.call('HLEN', key('ends')) < MAX_ENDS then return end
  -- RENAME would free the old ones while the server waits.
  redis.call('UNLINK', key('ends:old'))
  redis.call('RENAME', key('ends'), key('ends:old'))
end

-- How a job that is neither live nor held ended; nil: unknown.
function flows.how_ended(id)
  local how = redis.call('HGET', key('ends'), id) or redis.call('HGET', key('ends:old'), id)
  if how then return how end
  return redis.call('HEXISTS', key('done:jobs'), id) == 1 and 'done' or nil
end

-- The result of a job that is kept as done; nil if there is none, or if it was lost with its worker.
function flows.kept_result(id)
  local kept = redis.call('HGET', key('done:jobs'), id)
  local result = kept and string.match(kept, '^[^\n]*\n([^\n]*)\n')
  return result ~= '' and result or nil
end

-- Held jobs.

function flows.is_held(id)
  return flows_on and redis.call('HEXISTS', key('held'), id) == 1
end

-- The record of a live job, held ones included.
function flows.live_record(id)
  return redis.call('HGET', key('jobs'), id) or (flows_on and redis.call('HGET', key('held:jobs'), id)) or nil
end

function flows.read_hold(id)
  local entry = redis.call('HGET', key('held'), id)
  if not entry then return nil end
  local nonce, when, use, run_at, count, open_count = string.match(entry, '^(%d+) (%l+) (%d) (%d+) (%d+) (%d+)$')
  return {
    id = id,
    nonce = nonce,
    when = when,
    use = use,
    run_at = tonumber(run_at),
    count = tonumber(count),
    open = tonumber(open_count),
  }
end

function flows.write_hold(hold)
  redis.call('HSET', key('held'), hold.id, string.format('%s %s %s %.0f %d %d', hold.nonce, hold.when, hold.use,
    hold.run_at, hold.count, hold.open))
end

-- The fields of all dependencies of a hold.
function flows.numbered(hold)
  local fields = {}
  for number = 1, hold.count do fields[number] = hold.id .. ' ' .. number end
  return fields
end

-- Removes the hold, and returns the record.
function flows.take_hold(hold)
  local record = redis.call('HGET', key('held:jobs'), hold.id)
  redis.call('HDEL', key('held'), hold.id)
  redis.call('HDEL', key('held:jobs'), hold.id)
  if hold.open > 0 then redis.call('HDEL', key('held:open'), unpack(flows.numbered(hold))) end
  return record
end

function flows.drop_inputs(hold)
  if hold.use ~= '0' then redis.call('HDEL', key('inputs'), hold.id, unpack(flows.numbered(hold))) end
end

-- Its dependencies are met: it becomes waiting or scheduled.
function flows.let_go(hold)
  local record = flows.take_hold(hold)
  local job = record and records.read(record)
  journal.note('met 0 ' .. hold.id)
  if not job then
    -- A broken record is claimed and fails, as any other.
    redis.call('HSET', key('jobs'), hold.id, record or '')
    hints.push_back('5', { hold.id })
    return
  end
  -- It did not wait while it was held.
  job.delayed = true
  local before = job.options
  job.options = records.start_expiry(job.options, hold.run_at)
  redis.call('HSET', key('jobs'), hold.id, records.write(job))
  if hold.use ~= '0' then redis.call('HSET', key('inputs'), hold.id, hold.count .. ' ' .. hold.use) end
  timers.make_ready(hold.id, job.priority, hold.run_at)
  timers.set_expiry(hold.id, hold.run_at)
  if job.options ~= before then records.note_options(hold.id, job.options) end
  if hold.run_at <= now_ms then timers.note_new_waiting(1) end
end

-- A dependency has ended in another way than required: the job can never run.
function flows.doom(hold, number, dependency, how)
  local fence = claims.next_fence()
  flows.archive_hold(hold, hold.id .. '@' .. fence, number .. ' ' .. dependency)
  local record = flows.take_hold(hold) or ''
  local job = records.read(record)
  if job then
    -- The job was never ready, so its time to expire has not begun.
    job.options = records.drop_expiry(job.options)
    record = records.write(job)
  end
  local kind, queue, name = string.match(dependency, '^(%l+) (.-) ?(%S+)$')
  local shown = (string.find('batch gate', kind, 1, true) and 'batch ' or 'job ') .. name
  if queue ~= '' then shown = shown .. ' of queue ' .. queue end
  local error = string.format(
    '{"name":"DependencyFailed","message":"%s, for which it waited, ended as %s","kind":"dependency",'
      .. '"traceback":null}', string.gsub(shown, '[\\"]', '\\%0'), how)
  journal.note('unmet 0 ' .. hold.id .. ' ' .. (kind == 'job' and name or '-') .. ' ' .. how)
  journal.note('claimed ' .. fence .. ' 1 ' .. hold.id)
  dead.bury({
    { id = hold.id, fence = fence, micros = '-', record = record, error = error, brief = error, no_fail_job = true,
      ends_as = how == 'abandoned' and how or nil },
  })
end

-- A dead job keeps its results of others, and what it waited for, so that it can be revived.

-- Moves the results of a job to its archive, or back.
function flows.move_inputs(from, to, source, target, count)
  local moved, fields = {}, {}
  for number = 1, count do fields[number] = source .. ' ' .. number end
  for number, value in ipairs(redis.call('HMGET', key(from), unpack(fields))) do
    if value then moved[#moved + 1], moved[#moved + 2] = target .. ' ' .. number, value end
  end
  if #moved == 0 then return end
  redis.call('HSET', key(to), unpack(moved))
  redis.call('HDEL', key(from), unpack(fields))
end

-- `failed`: NUMBER ' ' DEPENDENCY of the one that ended in another way than required.
function flows.archive_hold(hold, member, failed)
  local lines, fields = { string.format('%s %s %.0f %d', hold.when, hold.use, hold.run_at, hold.count), failed },
    flows.numbered(hold)
  for number, dependency in ipairs(redis.call('HMGET', key('held:open'), unpack(fields))) do
    if dependency then lines[#lines + 1] = number .. ' ' .. dependency end
  end
  redis.call('HSET', key('dead:holds'), member, table.concat(lines, '\n'))
  if hold.use ~= '0' then flows.move_inputs('inputs', 'dead:inputs', hold.id, member, hold.count) end
end

-- Archives the results of a job that has run.
function flows.archive_inputs(id, member)
  local entry = flows_on and redis.call('HGET', key('inputs'), id)
  if not entry then return end
  redis.call('HSET', key('dead:inputs'), member, entry)
  flows.move_inputs('inputs', 'dead:inputs', id, member, tonumber(string.match(entry, '^%d+')))
end

function flows.discard_archive(member)
  if not flows_on then return end
  local entry = redis.call('HGET', key('dead:holds'), member) or redis.call('HGET', key('dead:inputs'), member)
  if not entry then return end
  local count, fields = tonumber(string.match(entry, '^%l+ %d %d+ (%d+)') or string.match(entry, '^%d+')), { member }
  for number = 1, count do fields[number + 1] = member .. ' ' .. number end
  redis.call('HDEL', key('dead:holds'), member)
  redis.call('HDEL', key('dead:inputs'), unpack(fields))
end

-- Reads the hold of a dead job. Returns nil if it was not held; false if something that it waits for is neither live
-- nor has succeeded: then it cannot be revived.
function flows.read_archive(member)
  local entry = flows_on and redis.call('HGET', key('dead:holds'), member)
  if not entry then return nil end
  local when, use, run_at, count = string.match(entry, '^(%l+) (%d) (%d+) (%d+)')
  local after = { when = when, use = use, run_at = tonumber(run_at), count = tonumber(count), numbers = {},
    dependencies = {}, others = false, ended = {} }
  for number, dependency in string.gmatch(entry, '\n(%d+) ([^\n]+)') do
    local kind, name = string.match(dependency, '^(%l+) (.+)$')
    local at = #after.numbers + 1
    after.numbers[at], after.dependencies[at] = tonumber(number), dependency
    local how = kind == 'job' and not flows.live_record(name) and (flows.how_ended(name) or 'gone') or nil
    if (how and not SUCCESS[how]) or kind == 'from' or kind == 'gate' then return false end
    if kind == 'batch' and not batches.may_succeed(name) then return false end
    after.others = after.others or kind ~= 'job'
    after.ended[at] = how
  end
  return after
end

-- Holds a revived job again, with the results that it had.
function flows.revive_hold(id, member, record, nonce, after)
  flows.move_inputs('dead:inputs', 'inputs', member, id, after.count)
  redis.call('HDEL', key('dead:holds'), member)
  redis.call('HSET', key('held:jobs'), id, record)
  flows.write_hold({ id = id, nonce = nonce, when = after.when, use = after.use, run_at = after.run_at,
    count = after.count, open = #after.dependencies })
  for at, dependency in ipairs(after.dependencies) do
    redis.call('HSET', key('held:open'), id .. ' ' .. after.numbers[at], dependency)
  end
  flows.note_held(id, after)
end

-- Gives a revived job that has run its results back.
function flows.revive_inputs(id, member)
  local entry = flows_on and redis.call('HGET', key('dead:inputs'), member)
  if not entry then return end
  redis.call('HSET', key('inputs'), id, entry)
  flows.move_inputs('dead:inputs', 'inputs', member, id, tonumber(string.match(entry, '^%d+')))
  redis.call('HDEL', key('dead:inputs'), member)
end

-- Removes a held job. `how`: its end.
function flows.cancel(hold)
  flows.take_hold(hold)
  flows.drop_inputs(hold)
  attempts.delete({ hold.id })
  journal.note_ids('cancelled', 0, { hold.id })
  flows.end_jobs({ hold.id }, 'cancelled')
end

-- One dependency of a held job has ended.
function flows.meet(id, nonce, number, use, how, result)
  local hold = flows.read_hold(id)
  if not hold or hold.nonce ~= nonce then return end
  local field = id .. ' ' .. number
  local dependency = redis.call('HGET', key('held:open'), field)
  -- The only thing that counts an end, so that a report may arrive twice.
  if redis.call('HDEL', key('held:open'), field) == 0 then return end
  hold.open = hold.open - 1
  if use ~= '0' then
    if not result and SUCCESS[how] then result = MISSING_RESULT end
    redis.call('HSET', key('inputs'), field, how .. ' ' .. (result or ''))
    edge_bytes = edge_bytes + #(result or '')
  end
  if (hold.when == 'done' and not SUCCESS[how]) or how == 'abandoned' then
    edges_left = edges_left - EDGES_PER_BURIAL
    return flows.doom(hold, number, dependency, how)
  elseif hold.when == 'dead' and how == 'dead' then
    return flows.let_go(hold)
  elseif hold.open > 0 then
    return flows.write_hold(hold)
  elseif hold.when == 'dead' then
    return flows.cancel(hold)
  end
  flows.let_go(hold)
end

-- Edges and ends.

-- Adds edges of a source. `used`: whether one of them wants the result. They join its last group, since the entry is
-- written as a whole: a job may have 100,000 dependants, stored one by one.
function flows.add_edges(source, added, used)
  local groups, before = redis.call('HGET', key('sources'), source) or '', 0
  local group, count, was_used = string.match(string.sub(groups, -LONGEST_GROUP), '(%d+):(%d+):(%d)$')
  if group and count + #added <= EDGES_PER_CALL then
    groups = string.sub(groups, 1, -#(group .. count .. was_used) - 3)
    before, used = tonumber(count), used or was_used == '1'
  else
    group = redis.call('HINCRBY', key('counts'), 'edge_groups', 1)
    if groups ~= '' then groups = groups .. ',' end
  end
  local fields = {}
  for i, edge in ipairs(added) do fields[2 * i - 1], fields[2 * i] = group .. ' ' .. before + i, edge end
  redis.call('HSET', key('edges'), unpack(fields))
  local joined = string.format('%s:%d:%d', group, before + #added, used and 1 or 0)
  redis.call('HSET', key('sources'), source, groups .. joined)
end

-- Whether one of these edges carries the result.
function flows.wants_result(edges)
  for _, edge in ipairs(edges) do
    if string.sub(edge, -1) ~= '0' then return true end
  end
  return false
end

function flows.append_groups(source, groups)
  local before = redis.call('HGET', key('sources'), source)
  redis.call('HSET', key('sources'), source, before and before .. ',' .. groups or groups)
end

function flows.has_sources()
  return flows_on and redis.call('EXISTS', key('sources')) == 1
end

-- Whether this edge begins at the source.
function flows.has_edge(source, edge)
  local groups = redis.call('HGET', key('sources'), source) or ''
  for group, count in string.gmatch(groups, '(%d+):(%d+):') do
    for first = 1, tonumber(count), EDGES_PER_CALL do
      local fields = {}
      for index = first, math.min(first + EDGES_PER_CALL - 1, tonumber(count)) do
        fields[#fields + 1] = group .. ' ' .. index
      end
      for _, found in ipairs(redis.call('HMGET', key('edges'), unpack(fields))) do
        if found == edge then return true end
      end
    end
  end
  return false
end

-- Whether a dependant wants the result of a source with these groups.
function flows.is_used(groups)
  return groups and string.find(groups, ':1,', 1, true) ~= nil or groups and string.sub(groups, -2) == ':1'
end

-- The blocked enqueue of an id has become its job, or has updated it: so do its edges.
function flows.move_blocked(id)
  if not flows.has_sources() then return end
  local groups = redis.call('HGET', key('sources'), id .. ' blocked')
  if not groups then return end
  redis.call('HDEL', key('sources'), id .. ' blocked')
  flows.append_groups(id, groups)
end

-- Takes the edges off sources that have ended; flows.resolve follows them. `reported`: see done.settle.
function flows.detach(sources, how, reported)
  if not flows.has_sources() then return end
  edge_work = edge_work or {}
  for i, groups in ipairs(redis.call('HMGET', key('sources'), unpack(sources))) do
    if groups then
      redis.call('HDEL', key('sources'), sources[i])
      local report = reported and reported[sources[i]]
      -- One table for all groups of the source, since their result is stored once.
      local result = report and { text = report.result }
      for group, count, used in string.gmatch(groups, '(%d+):(%d+):(%d)') do
        edge_work[#edge_work + 1] = { group = group, count = tonumber(count), next = 1, how = how,
          result = used == '1' and result or nil }
      end
    end
  end
end

-- The only way in which a job ends, after its record is gone: membership and edges, the enqueue blocked behind it,
-- clients that wait. `fences` (or nil): of the last attempts, in the order of the ids. `reported`: see done.settle.
function flows.end_jobs(ids, how, fences, reported)
  if #ids == 0 then return end
  if flows_on then
    flows.remember(ids, how)
    flows.forget_inputs(ids)
    flows.detach(ids, how, reported)
  end
  blocked.unblock(ids)
  waiters.notify(ids, how == 'abandoned' and 'dead' or how, fences)
  flows.resolve()
end

function flows.forget_inputs(ids)
  if redis.call('EXISTS', key('inputs')) == 0 then return end
  for i, entry in ipairs(redis.call('HMGET', key('inputs'), unpack(ids))) do
    if entry then
      local count, use = string.match(entry, '^(%d+) (%d)$')
      flows.drop_inputs({ id = ids[i], count = tonumber(count), use = use })
    end
  end
end

-- Applies an edge: its source has ended.
function flows.apply(edge, how, result)
  local id, nonce, number, use = string.match(edge, '^job (%S+) (%d+) (%d+) (%d)$')
  if id then return flows.meet(id, nonce, number, use, how, result) end
  local batch, batch_nonce, member, batch_use = string.match(edge, '^batch (%S+) (%d+) (%d+) (%d)$')
  if batch then return batches.end_member(batch, batch_nonce, member, batch_use, how, result) end
  local queue, epoch_there, inner, use_there = string.match(edge, '^to (%S+) (%d+) (.* (%d))$')
  if queue then batches.send_report(queue, epoch_there, inner, how, use_there ~= '0' and result or '') end
end

-- Follows the edges of ended sources, as many as one call may; pulse continues with the others. Jobs that end on the
-- way only add to the work.
function flows.resolve()
  if not edge_work or edges_resolving then return end
  edges_resolving = true
  local at = 1
  while at <= #edge_work and edges_left > 0 and edge_bytes < READ_BYTES do
    local work = edge_work[at]
    local field = work.group .. ' ' .. work.next
    local edge = redis.call('HGET', key('edges'), field)
    redis.call('HDEL', key('edges'), field)
    work.next, edges_left = work.next + 1, edges_left - 1
    if edge then flows.apply(edge, work.how, work.result and work.result.text) end
    if work.next > work.count then at = at + 1 end
  end
  for i = at, #edge_work do
    local work = edge_work[i]
    local entry = work.group .. ' ' .. work.count .. ' ' .. work.next .. ' ' .. work.how
    if work.result then
      local holder = work.result.holder or work.group
      work.result.holder = holder
      local users = redis.call('HINCRBY', key('edges'), holder .. ' left', 1)
      if users == 1 then redis.call('HSET', key('edges'), holder .. ' result', work.result.text) end
      entry = entry .. ' ' .. holder
    end
    redis.call('RPUSH', key('resolving'), entry)
  end
  if at <= #edge_work then timers.publish(0) end
  edge_work, edges_resolving = nil, false
end

-- Continues with what an earlier call has left.
function flows.continue()
  if not flows_on or edges_left <= 0 then return end
  local saved = redis.call('LPOP', key('resolving'))
  while saved do
    local group, count, next_index, how, holder = string.match(saved, '^(%d+) (%d+) (%d+) (%l+) ?(%d*)$')
    local result
    if holder ~= '' then
      result = { text = redis.call('HGET', key('edges'), holder .. ' result') }
      local users = redis.call('HINCRBY', key('edges'), holder .. ' left', -1)
      if users == 0 then redis.call('HDEL', key('edges'), holder .. ' result', holder .. ' left') end
    end
    edge_work = {
      { group = group, count = tonumber(count), next = tonumber(next_index), how = how, result = result },
    }
    flows.resolve()
    saved = edges_left > 0 and edge_bytes < READ_BYTES and redis.call('LPOP', key('resolving'))
  end
end

-- The records of claimed jobs as their worker gets them: with 'w=1' if a dependant wants the result, 'i=COUNT' and
-- 'I=USE' if the job uses the results of its dependencies, and 'm=HOME:B:NUMBER' if it is a member of a batch. Stored
-- records have none of these.
function flows.mark_claimed(ids, claimed, offset)
  if redis.call('EXISTS', key('sources'), key('inputs')) == 0 then return end
  local groups = redis.call('HMGET', key('sources'), unpack(ids))
  local inputs = redis.call('HMGET', key('inputs'), unpack(ids))
  for i = 1, #ids do
    local marks = {}
    if flows.is_used(groups[i]) then marks[1] = 'w=1' end
    local count, use = string.match(inputs[i] or '', '^(%d+) (%d)$')
    if count then marks[#marks + 1] = 'i=' .. count .. ',I=' .. use end
    marks[#marks + 1] = groups[i] and flows.membership(groups[i]) or nil
    local job = #marks > 0 and records.read(claimed[offset + 2 * i])
    if job then
      if job.options ~= '' then table.insert(marks, 1, job.options) end
      job.options = table.concat(marks, ',')
      claimed[offset + 2 * i] = records.write(job)
    end
  end
end

-- The membership of a source, as in mark_claimed; nil if it is no member. It is the first edge.
function flows.membership(groups)
  local edge = redis.call('HGET', key('edges'), string.match(groups, '^%d+') .. ' 1') or ''
  local home, batch, number = string.match(edge, '^to (%S+) %d+ batch (%S+) %d+ (%d+) ')
  if not home then batch, number = string.match(edge, '^batch (%S+) %d+ (%d+) ') end
  return batch and 'm=' .. (home or '') .. ':' .. batch .. ':' .. number
end

-- Enqueue of jobs with dependencies.

-- Reads 'WHEN USE WORD WORD …'. A word is 'j' ID, 'b' B, 'f' QUEUE ':' ID or 'g' QUEUE ':' B. USE is followed by 'k' if
-- the caller knows that the tasks of these jobs keep their results: their records do not show it. Returns the hold
-- without its id. `others`: whether some dependencies are not jobs of this queue.
function flows.read_after(text)
  local when, use, kept, words = string.match(text, '^(%l+) (%d)(k?)(.+)$')
  local dependencies, others = {}, false
  for letter, name in string.gmatch(words, ' (%l)(%S+)') do
    others = others or letter ~= 'j'
    dependencies[#dependencies + 1] = DEPENDENCY_KINDS[letter] .. ' '
      .. (PLACED_ELSEWHERE[letter] and string.gsub(name, ':', ' ', 1) or name)
  end
  return { when = when, use = use, are_kept = kept == 'k', dependencies = dependencies, others = others, ended = {} }
end

-- Checks the dependencies of a new job, and notes how those ended that are not live: this call may store a new job with
-- the id of one, even the job that waits. `new`: ids of this call so far. Returns nil, or the refusal.
function flows.check_dependencies(i, after, new)
  for number, dependency in ipairs(after.dependencies) do
    local kind, id = string.match(dependency, '^(%l+) (.+)$')
    if kind == 'batch' then
      if redis.call('HEXISTS', key('batches'), id) == 0 then return { UNKNOWN_DEPENDENCY, i, id, 2 } end
    elseif kind == 'job' and not new[id] and not flows.is_held(id)
      and redis.call('HEXISTS', key('blocked'), id) == 0 then
      local record = redis.call('HGET', key('jobs'), id)
      local owner = record and redis.call('HGET', key('active'), id)
      local how = not record and flows.how_ended(id)
      if not record and not how then return { UNKNOWN_DEPENDENCY, i, id, flows_on and 1 or 0 } end
      -- Its worker has not been told that the result is wanted.
      local unused = owner and after.use ~= '0' and not after.are_kept and not flows.keeps_result(id, record)
      if unused or (how and SUCCESS[how] and after.use ~= '0' and not flows.kept_result(id)) then
        return { RESULT_NOT_KEPT, i, id }
      end
      after.ended[number] = how or nil
    end
  end
end

function flows.keeps_result(id, record)
  local own_ms = records.own(records.options_of(record), 'k')
  if (own_ms or option('keep_done_ms')) > 0 then return true end
  return flows.is_used(redis.call('HGET', key('sources'), id))
end

-- Stores a new job that waits for others, after its dependencies were checked. `after`: also its record and run_at.
function flows.hold(id, after, nonce)
  redis.call('HSET', key('held:jobs'), id, after.record)
  flows.write_hold({ id = id, nonce = nonce, when = after.when, use = after.use, run_at = after.run_at,
    count = #after.dependencies, open = #after.dependencies })
  for number, dependency in ipairs(after.dependencies) do
    redis.call('HSET', key('held:open'), id .. ' ' .. number, dependency)
  end
  flows.note_held(id, after)
end

-- WHEN is followed by '+' if it waits for others than jobs of this queue, too.
function flows.note_held(id, after)
  local words = { 'held 0 ' .. id .. ' ' .. after.when .. (after.others and '+' or '') }
  for _, dependency in ipairs(after.dependencies) do words[#words + 1] = string.match(dependency, '^job (%S+)$') end
  journal.note(table.concat(words, ' '))
end

-- Once all jobs of the call are stored: connects a held job with what it waits for. What has ended counts at once.
function flows.connect(id, after, nonce)
  for at, dependency in ipairs(after.dependencies) do
    local number = after.numbers and after.numbers[at] or at
    local kind, name = string.match(dependency, '^(%l+) (.+)$')
    local edge = 'job ' .. id .. ' ' .. nonce .. ' ' .. number .. ' ' .. after.use
    local how = after.ended[at]
    if kind == 'batch' then
      batches.connect(name, edge, after.when, { id, nonce, tostring(number), after.use })
    elseif kind ~= 'job' then
      -- The edge comes with that job, which is stored after this one.
      batches.check_later('j' .. id)
    elseif not how and redis.call('HEXISTS', key('blocked'), name) == 1 then
      flows.add_edges(name .. ' blocked', { edge }, after.use ~= '0')
    elseif not how
      and (redis.call('HEXISTS', key('jobs'), name) == 1 or redis.call('HEXISTS', key('held'), name) == 1) then
      flows.add_edges(name, { edge }, after.use ~= '0')
    else
      how = how or flows.how_ended(name)
      local result = SUCCESS[how] and after.use ~= '0' and flows.kept_result(name) or nil
      flows.meet(id, nonce, tostring(number), after.use, how, result)
    end
  end
end

-- An enqueue of a held id updates it; it stays held. Returns when it was enqueued (µs).
function flows.update_held(dispatch)
  local id, hold = dispatch.id, flows.read_hold(dispatch.id)
  local job = records.read(redis.call('HGET', key('held:jobs'), id))
  local lo, hi = blocked.fold_bounds(0, FAR, dispatch.update_run_at, dispatch.run_at)
  hold.run_at = blocked.clamp(hold.run_at, lo, hi)
  local before = job and job.options
  if not job then
    job = records.new('5', hold.nonce, 0, '', '')
    dispatch.update_data = true
  end
  if dispatch.update_data then
    job.body, job.priority, job.options = dispatch.body, dispatch.priority, dispatch.given
  end
  redis.call('HSET', key('held:jobs'), id, records.write(job))
  flows.write_hold(hold)
  if job.options ~= before then records.note_options(id, records.drop_expiry(job.options), true) end
  journal.note('updated 0 ' .. id)
  local open_ones, others = {}, false
  for _, dependency in ipairs(redis.call('HMGET', key('held:open'), unpack(flows.numbered(hold)))) do
    if dependency then
      open_ones[#open_ones + 1] = dependency
      others = others or string.sub(dependency, 1, 4) ~= 'job '
    end
  end
  flows.note_held(id, { when = hold.when, dependencies = open_ones, others = others })
  return job.enqueued_us
end
