-- Enqueue, update and cancel jobs. An enqueue for an active id is blocked behind it: `blocked`, id -> entry. Several
-- enqueues fold into one entry: UPDATE RESET PRIORITY OWN LO HI ENQUEUED_US [' ' OPTIONS] '\n' BODY.
--   UPDATE, RESET  whether to replace data and reset counts if the active job returns
--   OWN            run_at (ms) of the blocked job if the active one ends and it becomes a job of its own
--   LO, HI         new run_at of the active job if it returns: min(max(run_at, LO), HI). Setting a time, "if later" and
--                  "if earlier" all have this form, and so has any sequence of them.
--   ENQUEUED_US    time of the first of these enqueues; it becomes that of the blocked job
--   OPTIONS        the job's own options (records.lua)

function blocked.clamp(run_at, lo, hi)
  return math.min(math.max(run_at, lo), hi)
end

function blocked.read(id)
  local entry = redis.call('HGET', key('blocked'), id)
  if not entry then return nil end
  local update, reset, priority, own, lo, hi, enqueued, stored, body =
    string.match(entry, '^(%d) (%d) (%d) (%d+) (%d+) (%d+) (%d+) ?(%S*)\n(.*)$')
  return {
    update = update == '1',
    reset = reset == '1',
    priority = priority,
    own = tonumber(own),
    lo = tonumber(lo),
    hi = tonumber(hi),
    enqueued_us = enqueued,
    options = stored,
    body = body,
  }
end

-- The active jobs `ids` have ended: the entries blocked behind them become jobs.
function blocked.unblock(ids)
  if #ids == 0 or redis.call('EXISTS', key('blocked')) == 0 then return end
  local unblocked, entries, ready = {}, {}, 0
  for _, id in ipairs(ids) do
    local entry = blocked.read(id)
    if entry then
      redis.call('HDEL', key('blocked'), id)
      local job = records.new(entry.priority, entry.enqueued_us, 0, entry.options, entry.body)
      -- It did not wait while it was blocked.
      job.delayed = true
      redis.call('HSET', key('jobs'), id, records.write(job))
      flows.move_blocked(id)
      unblocked[#unblocked + 1] = id
      entries[#entries + 1] = entry
      if entry.own <= now_ms then ready = ready + 1 end
    end
  end
  journal.note_ids('unblocked', 0, unblocked)
  for i, entry in ipairs(entries) do
    timers.make_ready(unblocked[i], entry.priority, entry.own)
    timers.set_expiry(unblocked[i], entry.own)
    records.note_options(unblocked[i], entry.options)
  end
  timers.note_new_waiting(ready)
end

-- The active job returns and runs again at `run_at`: updates it from the blocked entry. Returns the new run_at.
function blocked.update(id, job, run_at)
  if redis.call('EXISTS', key('blocked')) == 0 then return run_at end
  local entry = blocked.read(id)
  if not entry then return run_at end
  redis.call('HDEL', key('blocked'), id)
  flows.move_blocked(id)
  local before, wanted = job.options, blocked.clamp(run_at, entry.lo, entry.hi)
  if entry.update then job.body, job.priority, job.options = entry.body, entry.priority, entry.options end
  if entry.reset then
    records.reset_counts(job)
    attempts.delete({ id })
  end
  -- Before `merged`, which must be followed directly by the return of the job.
  if job.options ~= before then records.note_options(id, job.options, true) end
  journal.note('merged 0 ' .. id)
  job.delayed = job.delayed or wanted > now_ms
  return wanted
end

-- Folds one more enqueue into the bounds.
function blocked.fold_bounds(lo, hi, how, run_at)
  if how == 'true' then return run_at, run_at end
  if how == 'if_later' then return math.max(lo, run_at), math.max(hi, run_at) end
  if how == 'if_earlier' then return math.min(lo, run_at), math.min(hi, run_at) end
  return lo, hi
end

-- Returns the enqueue time of the blocked job.
function blocked.add(id, dispatch)
  local before = blocked.read(id)
  local entry = before or {
    update = false, reset = false, priority = dispatch.priority, own = dispatch.run_at, lo = 0, hi = FAR,
    enqueued_us = dispatch.enqueued_us, options = dispatch.options, body = dispatch.body,
  }
  entry.update = entry.update or dispatch.update_data
  entry.reset = entry.reset or dispatch.reset
  if dispatch.update_data then
    entry.body, entry.priority, entry.options = dispatch.body, dispatch.priority, dispatch.options
  end
  if before then
    local lo, hi = blocked.fold_bounds(0, FAR, dispatch.update_run_at, dispatch.run_at)
    entry.own = blocked.clamp(entry.own, lo, hi)
  end
  entry.lo, entry.hi = blocked.fold_bounds(entry.lo, entry.hi, dispatch.update_run_at, dispatch.run_at)
  may_be_rare = true
  redis.call('HSET', key('blocked'), id, string.format('%d %d %s %.0f %.0f %.0f %s%s\n', entry.update and 1 or 0,
    entry.reset and 1 or 0, entry.priority, entry.own, entry.lo, entry.hi, entry.enqueued_us,
    entry.options == '' and '' or ' ' .. entry.options) .. entry.body)
  return entry.enqueued_us
end

-- First job in ARGV, and values per job.
local FIRST, WIDTH = 3, 3
-- Tokens of repeatable calls are kept this much longer than needed: the server's clock may be set back.
local KEEP_MARGIN_MS = 300000
-- The policy for ids that were generated for a call.
local REFUSE = 'refuse 0 false 0'

-- One new job that may run at once. HSETNX both checks and stores. (quick.lua does it for most queues.)
local function store_single(count, max_items, max_data, stored_at)
  local id, head, body = ARGV[FIRST], ARGV[FIRST + 1], ARGV[FIRST + 2]
  if count > 1 or #head > 1 or mode ~= 'work' or max_items > 0 or #body > max_data then return false end
  if flows_on and flows.is_held(id) then return false end
  if redis.call('HSETNX', key('jobs'), id, 'p' .. head .. stored_at .. body) == 0 then return false end
  records.note_size(#body, base)
  redis.call('RPUSH', pending_key(head), id)
  hints.count(head, 1)
  journal.note('enqueued 0 ' .. id)
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  return true
end

-- Which of these ids exist. Reading small records is cheaper than one HEXISTS per id.
local function find_existing(ids)
  local existing = {}
  if records.readable(#ids, READ_BYTES) == #ids then
    existing = redis.call('HMGET', key('jobs'), unpack(ids))
  else
    for i, id in ipairs(ids) do existing[i] = redis.call('HEXISTS', key('jobs'), id) == 1 end
  end
  if flows_on and redis.call('EXISTS', key('held')) == 1 then
    for i, held in ipairs(redis.call('HMGET', key('held'), unpack(ids))) do existing[i] = existing[i] or held end
  end
  return existing
end

-- The first data in a call of plain jobs, and the length of their ids. The policy of such a call begins with a digit.
local FIRST_DATA, ID_LENGTH, DIGIT_9 = 6, 32, 57
-- A hash with small values is a list up to this number of fields, and HSET searches a list from the start. A value
-- longer than 64 bytes makes it a table, which pays off from this number of jobs on.
local LIST_FIELDS, LONG_VALUE_BYTES, MANY_JOBS = 512, 65, 50

-- The common bulk call. False if one of its jobs exists or does not fit, or if the queue needs more than this: nothing
-- is stored then. Lua reads every character of a string that it makes, so it makes few.
local function store_plain(priority, are_new, max_items, max_data, stored_at)
  if mode ~= 'work' then return false end
  local all_ids, before, after, sub = ARGV[3], 'p' .. priority .. stored_at .. ARGV[4], ARGV[5], string.sub
  local ids, packed, count, longest = {}, {}, #ARGV - FIRST_DATA + 1, 0
  for i = 1, count do
    local end_of_id, data = (ID_LENGTH + 1) * i - 1, ARGV[FIRST_DATA + i - 1]
    local id = sub(all_ids, end_of_id - ID_LENGTH + 1, end_of_id)
    ids[i] = id
    packed[2 * i - 1] = id
    packed[2 * i] = before .. data .. after
    if #data > longest then longest = #data end
  end
  longest = longest + #ARGV[4] + #after
  if longest > max_data or (max_items > 0 and records.items() + count > max_items) then return false end
  for _, known in ipairs(are_new and {} or find_existing(ids)) do
    if known then return false end
  end

  records.note_size(longest, base)
  local is_list = count > MANY_JOBS and redis.call('HLEN', key('jobs')) <= LIST_FIELDS
  if is_list then redis.call('HSET', key('jobs'), '', string.rep('.', LONG_VALUE_BYTES)) end
  redis.call('HSET', key('jobs'), unpack(packed))
  if is_list then redis.call('HDEL', key('jobs'), '') end
  hints.push_back(priority, ids)
  journal.note('enqueued 0 ' .. all_ids)
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  return true
end

-- Turns a call of plain jobs into one of any jobs.
local function spell_out(priority, policy)
  local args, at = { ARGV[1], policy }, FIRST_DATA
  for id in string.gmatch(ARGV[3], '%S+') do
    for _, value in ipairs({ id, priority, ARGV[4] .. ARGV[at] .. ARGV[5] }) do args[#args + 1] = value end
    at = at + 1
  end
  ARGV = args
end

-- enqueue: stores jobs as waiting or scheduled; all of them or none. A job with a known id updates the existing one, or
-- is blocked behind it while that is active.
-- KEYS[1]  the queue's base
-- ARGV     protocol, policy, then per job: id, head, body. Each argument and each character costs time, so:
--          policy: what to do with a known id ('update' | 'skip' | 'refuse' | 'leave'), update_data ('1' | '0'),
--          update_run_at ('true' | 'false' | 'if_later' | 'if_earlier'), reset_counts ('1' | '0'), separated by spaces;
--          then, for jobs with tokens that may be sent again: [' ' UNTIL ' ' KEEP_UNTIL ' ' EPOCH]. The call is refused
--          after UNTIL (ms) and in another epoch; its tokens are kept beyond KEEP_UNTIL (ms), whatever dedup_ttl is
--          head: PRIORITY, or PRIORITY ' ' RUN_AT ' ' TOKEN [' ' OPTIONS] ['\n' AFTER ['\n' EDGE]]; RUN_AT (ms; '+ms'
--          from now) and TOKEN may be empty; OPTIONS: the job's own (records.lua), with 'x=' followed by ms; AFTER:
--          what a new job waits for (flows.read_after); EDGE: an edge that begins at it, such as to its batch
--          Plain jobs are those of one priority without RUN_AT, TOKEN, OPTIONS, AFTER and EDGE, whose ids have 32
--          characters and are all different. At least two may be sent as: protocol, PRIORITY [' ' policy], the ids
--          joined by ' ', the start of each body, the end of each body, then per job: the rest of its body. Without a
--          policy the ids were generated for this call, so no job has them
-- Returns  {OK, mark, index, id, index, id ...}: the jobs (from 1) whose token is known, with the stored id, and those
--          left out ('leave') with ''; {NO_QUEUE}; {OTHER_PROTOCOL, its number}; {FULL, max_items}; {EXISTS, index};
--          {TOO_LARGE, index, max_data}; {NOT_IN_MODE, mode} for options in another mode than work; {LATE}: after
--          UNTIL, or in another epoch; {FLOWS_OFF}; {UNKNOWN_DEPENDENCY, index, id, 1 if ends are remembered};
--          {RESULT_NOT_KEPT, index, id}: the result of that dependency is not kept
--          mark: EPOCH ' ' FENCE ' ' ENQUEUED_US, followed by ' ' INDEX ':' ENQUEUED_US for each job that was updated,
--          and ' ' INDEX ':' ENQUEUED_US ':' AHEAD_US for each blocked one: its time and that of the active job. The
--          times identify the jobs of this call (records.is_meant). Later claims have a higher fence
-- States   (new) -> waiting | scheduled; (new) -> blocked; (new) -> held; waiting <-> scheduled (updated)
function verbs.enqueue()
  if not epoch then return { NO_QUEUE } end
  if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end

  local max_items, max_data, dedup_ttl_ms = option('max_items'), option('max_data'), option('dedup_ttl_ms')

  local stored_us = now_text()
  local stored_at = ' ' .. stored_us .. '\n'
  local mark = epoch .. ' ' .. last_fence .. ' ' .. stored_us

  if store_single((#ARGV - FIRST + 1) / WIDTH, max_items, max_data, stored_at) then return { OK, mark } end
  if string.byte(ARGV[2]) <= DIGIT_9 then
    local priority, policy = string.match(ARGV[2], '^(%d) ?(.*)$')
    if store_plain(priority, policy == '', max_items, max_data, stored_at) then return { OK, mark } end
    spell_out(priority, policy == '' and REFUSE or policy)
  end

  local count = (#ARGV - FIRST + 1) / WIDTH
  local if_exists, update_data, update_run_at, reset, terms = string.match(ARGV[2], '^(%l+) (%d) ([%l_]+) (%d) ?(.*)$')
  if terms ~= '' then
    local last_ms, keep_until_ms, of_epoch = string.match(terms, '^(%d+) (%d+) (%S+)$')
    -- A late repeat would find its token forgotten, and store the job again.
    if of_epoch ~= epoch or now_ms > tonumber(last_ms) then return { LATE } end
    dedup_ttl_ms = math.max(dedup_ttl_ms, tonumber(keep_until_ms) - now_ms + KEEP_MARGIN_MS)
  end

  local function token_key(token)
    return key_of('token', epoch .. ':' .. token)
  end

  -- Returns priority, run_at (ms; 0 = at once), token ('' = none), options ('' = none), the options as they were given,
  -- and what the job waits for ('' = nothing).
  local function read_head(head)
    if #head == 1 then return head, 0, '', '', '', '' end
    local priority, from_now, ms, token, given, after =
      string.match(head, '^(%d) (%+?)(%d*) ([^ \n]*) ?([^\n]*)\n?([^\n]*)')
    local run_at = (tonumber(ms) or 0) + (from_now == '+' and now_ms or 0)
    return priority, run_at, token, records.start_expiry(given, run_at), given, after
  end

  -- The edges that begin at a new job, one per line.
  local function edges_of(head)
    local lines = {}
    for line in string.gmatch(string.match(head, '^[^\n]*\n[^\n]*\n(.*)$') or '', '[^\n]+') do
      lines[#lines + 1] = line
    end
    return lines
  end

  local function read_dispatch(at)
    local priority, run_at, _, own_options, given = read_head(ARGV[at + 1])
    return {
      id = ARGV[at],
      priority = priority,
      body = ARGV[at + 2],
      enqueued_us = stored_us,
      options = own_options,
      given = given,
      run_at = run_at,
      update_data = update_data == '1',
      update_run_at = update_run_at,
      reset = reset == '1',
    }
  end

  local ids = {}
  for i = 1, count do ids[i] = ARGV[FIRST + WIDTH * (i - 1)] end
  local existing = find_existing(ids)

  local reply, new, changes, seen, tokens, longest = { OK, mark }, {}, {}, {}, {}, 0
  -- What new jobs wait for, by their place in ARGV; and their places in order.
  local afters, waiting_at, sources_at = {}, {}, {}
  for i = 1, count do
    local at = FIRST + WIDTH * (i - 1)
    local id, body, _, _, token, own_options, _, after = ARGV[at], ARGV[at + 2], read_head(ARGV[at + 1])
    -- A callback of a batch has only that option, which the caller did not give.
    if own_options ~= '' and mode ~= 'work' and not string.find(own_options, '^g=[^,]*$') then
      return { NOT_IN_MODE, mode }
    end
    local stored = token ~= '' and (tokens[token] or redis.call('GET', token_key(token)))
    if #body > max_data then return { TOO_LARGE, i, max_data } end
    if #body > longest then longest = #body end
    local left_out = not stored and if_exists == 'leave' and (existing[i] or seen[id])
    if stored or left_out then
      reply[#reply + 1] = i
      reply[#reply + 1] = stored or ''
    elseif existing[i] or seen[id] then
      -- A job gets its dependencies at its birth only, so they cannot form a cycle.
      local bound = string.find(ARGV[at + 1], '\n', 1, true)
      if if_exists == 'refuse' or (bound and if_exists == 'update') then return { EXISTS, i } end
      if if_exists == 'update' then changes[#changes + 1] = at end
    else
      local edges = #ARGV[at + 1] > 1 and edges_of(ARGV[at + 1]) or {}
      if (after ~= '' or #edges > 0) and options.flows == FLOWS_NEVER then return { FLOWS_OFF } end
      if after ~= '' then
        afters[at] = flows.read_after(after)
        if afters[at].use ~= '0' and mode ~= 'work' then return { NOT_IN_MODE, mode } end
        local refusal = flows.check_dependencies(i, afters[at], seen)
        if refusal then
          -- A job that is unknown may have ended before. From now on the queue remembers how its jobs end.
          flows.switch_on()
          return refusal
        end
        waiting_at[#waiting_at + 1] = at
      end
      if #edges > 0 then sources_at[#sources_at + 1] = { id, edges } end
      seen[id] = true
      new[#new + 1] = at
    end
    -- Skipped jobs keep their token: the repeated call must skip them too, even if the job has run meanwhile. Jobs left
    -- out do not: a later call must store them.
    if token ~= '' and not stored and not left_out then tokens[token] = id end
  end

  -- How many items this call adds; updates and existing blocked entries add none.
  local function added_items()
    local added, counted = #new, {}
    for _, at in ipairs(changes) do
      local id = ARGV[at]
      if not counted[id] and redis.call('HEXISTS', key('active'), id) == 1
        and redis.call('HEXISTS', key('blocked'), id) == 0 then
        counted[id] = true
        added = added + 1
      end
    end
    return added
  end
  if max_items > 0 then
    local added = added_items()
    if added > 0 and records.items() + added > max_items then return { FULL, max_items } end
  end

  records.note_size(longest, base)
  for token, id in pairs(tokens) do redis.call('SET', token_key(token), id, 'PX', dedup_ttl_ms) end
  if #waiting_at + #sources_at > 0 then flows.switch_on() end

  local function store_new()
    if #new == 0 then return end
    local packed, by_priority, stored_ids, later, with_options = {}, {}, {}, {}, {}
    for i, at in ipairs(new) do
      local id, priority, run_at, _, own_options, given = ARGV[at], read_head(ARGV[at + 1])
      stored_ids[i] = id
      if afters[at] then
        afters[at].record = records.write(records.new(priority, stored_us, run_at, given, ARGV[at + 2]))
        afters[at].run_at = run_at
        if given ~= '' then with_options[#with_options + 1] = { id, records.drop_expiry(given) } end
      else
        packed[#packed + 1] = id
        if own_options == '' then
          packed[#packed + 1] = (run_at > now_ms and 'd' or 'p') .. priority .. stored_at .. ARGV[at + 2]
        else
          packed[#packed + 1] = records.write(records.new(priority, stored_us, run_at, own_options, ARGV[at + 2]))
          with_options[#with_options + 1] = { id, own_options }
        end
        if run_at > now_ms then
          later[#later + 1] = { id, run_at }
        else
          by_priority[priority] = by_priority[priority] or {}
          table.insert(by_priority[priority], id)
        end
      end
    end
    if #packed > 0 then redis.call('HSET', key('jobs'), unpack(packed)) end
    for priority, list in pairs(by_priority) do hints.push_back(priority, list) end
    journal.note_ids('enqueued', 0, stored_ids)
    for _, job in ipairs(later) do timers.schedule(job[1], job[2]) end
    for _, job in ipairs(with_options) do records.note_options(job[1], job[2]) end
    for _, at in ipairs(waiting_at) do flows.hold(ARGV[at], afters[at], stored_us) end
    if mode ~= 'work' then
      for _, at in ipairs(new) do
        if not afters[at] then timers.set_expiry(ARGV[at], read_dispatch(at).run_at) end
      end
    end
  end

  -- Updates a waiting or scheduled job in place, and moves it if its time or priority changed. Returns when it was
  -- enqueued (µs).
  local function update(dispatch)
    local id = dispatch.id
    local job = records.read(redis.call('HGET', key('jobs'), id))
    local due = redis.call('ZSCORE', key('scheduled'), id)
    local run_at = due and math.floor(tonumber(due)) or 0
    local lo, hi = blocked.fold_bounds(0, FAR, dispatch.update_run_at, dispatch.run_at)
    local new_run_at = blocked.clamp(run_at, lo, hi)
    local options_before = job and job.options
    if not job then
      -- A broken record has no priority; its hint goes where claims look first.
      job = records.new('5', stored_us, 0, '', '')
      dispatch.update_data = true
    end
    local place = records.place_for(job)
    if dispatch.update_data then
      job.body, job.priority, job.options = dispatch.body, dispatch.priority, dispatch.options
    end
    if dispatch.reset then
      records.reset_counts(job)
      attempts.delete({ id })
    end
    local new_place = records.place_for(job)
    job.delayed = job.delayed or new_run_at > now_ms
    redis.call('HSET', key('jobs'), id, records.write(job))
    if job.options ~= options_before then records.note_options(id, job.options, true) end
    journal.note('updated 0 ' .. id)
    -- The age counts from run_at. Updating a waiting job, or one between two attempts, must not make it younger.
    if mode ~= 'work' and new_run_at ~= run_at then timers.set_expiry(id, new_run_at, new_run_at <= now_ms) end
    if due and new_run_at > now_ms then
      -- Note it even if unchanged: after 'updated' the journal would otherwise show the job as waiting.
      if new_run_at ~= run_at then timers.schedule(id, new_run_at) else timers.note_scheduled(id, run_at) end
    elseif due then
      redis.call('ZREM', key('scheduled'), id)
      hints.push_back(new_place, { id })
    elseif new_run_at > now_ms then
      hints.remove(place, id)
      timers.schedule(id, new_run_at)
    elseif new_place ~= place then
      hints.remove(place, id)
      hints.push_back(new_place, { id })
    end
    return job.enqueued_us
  end

  store_new()
  local times = { mark }
  for i, at in ipairs(changes) do
    local dispatch = read_dispatch(at)
    local time
    if flows.is_held(dispatch.id) then
      time = flows.update_held(dispatch)
    elseif redis.call('HEXISTS', key('active'), dispatch.id) == 1 then
      local ahead_us = records.enqueued_us_of(redis.call('HGET', key('jobs'), dispatch.id)) or '0'
      time = blocked.add(dispatch.id, dispatch) .. ':' .. ahead_us
      journal.note_ids('blocked', 0, { dispatch.id })
    else
      time = update(dispatch)
    end
    times[i + 1] = (at - FIRST) / WIDTH + 1 .. ':' .. time
  end
  for _, source in ipairs(sources_at) do flows.add_edges(source[1], source[2], flows.wants_result(source[2])) end
  for _, at in ipairs(waiting_at) do flows.connect(ARGV[at], afters[at], stored_us) end
  hints.wake_idle(NOTIFY_AWAITERS)
  journal.write('-')
  reply[2] = table.concat(times, ' ')
  return reply
end

-- cancel: removes a waiting, scheduled, blocked or held job. A running job is only marked for removal: its id stays in
-- use until its owner settles it or dies.
-- KEYS[1]  the queue's base
-- ARGV     id, whether to mark a running job ('1' | '0'), which job of this id is meant (records.is_meant; a job is
--          marked whichever is meant), and perhaps an edge: only a job at which it begins is meant
-- Returns  {OK, 1 removed | 2 marked | 0 neither}; {NO_QUEUE}
-- States   waiting, scheduled, blocked, held -> cancelled
function verbs.cancel()
  if not epoch then return { NO_QUEUE } end
  local id, mark_active, meant = ARGV[1], ARGV[2] == '1', ARGV[3]
  if ARGV[4] and not flows.has_edge(id, ARGV[4]) then return { OK, 0 } end
  local record = redis.call('HGET', key('jobs'), id)
  if not record and flows.is_held(id) then
    local hold, held = flows.read_hold(id), redis.call('HGET', key('held:jobs'), id)
    if not records.is_meant(meant, held and records.enqueued_us_of(held)) then return { OK, 0 } end
    flows.cancel(hold)
    hints.wake_idle(flows_on)
    journal.write('-')
    return { OK, 1 }
  end
  if not record then return { OK, 0 } end

  local owner = redis.call('HGET', key('active'), id)
  -- The edge is that of the running job: not of the enqueue that is blocked behind it.
  if owner and ARGV[4] then return { OK, 0 } end
  if owner then
    local entry = blocked.read(id)
    local withdrawn = entry and records.is_meant(meant, entry.enqueued_us)
      and redis.call('HDEL', key('blocked'), id) or 0
    if withdrawn == 1 then
      journal.note('withdrawn 0 ' .. id)
      flows.detach({ id .. ' blocked' }, 'cancelled')
      flows.resolve()
    end
    if mark_active and not claims.is_removed(owner) then
      redis.call('HSET', key('active'), id, owner .. REMOVED)
      journal.note('marked ' .. claims.fence_of(owner) .. ' ' .. id)
    end
    hints.wake_idle(flows_on)
    journal.write('-')
    return { OK, mark_active and 2 or withdrawn }
  end

  if not records.is_meant(meant, records.enqueued_us_of(record)) then return { OK, 0 } end
  redis.call('HDEL', key('jobs'), id)
  if mode ~= 'work' then redis.call('ZREM', key('expiries'), id) end
  attempts.delete({ id })
  local place = records.place_of(record)
  if redis.call('ZREM', key('scheduled'), id) == 0 and place then hints.remove(place, id) end
  journal.note_ids('cancelled', 0, { id })
  flows.end_jobs({ id }, 'cancelled')
  hints.wake_idle(flows_on)
  journal.write('-')
  return { OK, 1 }
end
