-- State of one call: arguments, server clock, the queue's options, and every variable that lives only for the call.
-- KEYS[1] is the queue's base, PREFIX .. 'queue:{NAME}'. Its keys are base .. ':' .. a name listed in keys.py.
--
-- scripts.py joins the files of this folder into one library. Functions live in tables, one per duty, so that each can
-- call all others. Per-call state lives in the variables below. begin, open and open_counts set all of them, so no call
-- sees state left by another one, not even by one that failed.

local journal, records, attempts, hints, limits, timers, schedules, blocked = {}, {}, {}, {}, {}, {}, {}, {}
local progress, waiters, done, awaiters, leases, claims, failures, dead = {}, {}, {}, {}, {}, {}, {}, {}
local recovery, turns, control, flows, batches, summary, verbs = {}, {}, {}, {}, {}, {}, {}
-- By verb: its short form for the most common call (quick.lua), or nil; and the keys that these use.
local quick = {}
local QUICK_KEYS = { 'summary', 'jobs', 'pending', 'active', 'events', 'counts', 'processed:count' }

-- A record with a body up to this length is not measured (records.lua).
local SMALL_BODY = 7680

-- Per queue base: key names, the options of one version, and the values in `summary` (summary.lua) while it has the
-- same text. Every call reads `summary` again, so none sees stale values.
local CACHE, CACHE_MAX = { queues = {}, count = 0 }, 1000

-- The option `flows`, as settings.py stores it: off, auto, on.
local FLOWS_NEVER, FLOWS_ON = '0', 2
-- No time (ms) is later.
local FAR = 9007199254740991

local KEYS, ARGV
-- `parent`: the base of the queue that a fail queue belongs to. `cached`: the queue's entry in CACHE.
local base, parent, cached, cached_keys
local now_us, now_ms
-- `on_request`: items leave only on request, so no worker blocks on a list and awaiters are notified instead.
local epoch, paused, options, cached_numbers, protocol, mode, on_request
local journal_on, journal_max, rate_count, max_active, has_limits
-- Whether the queue has had jobs that wait for others (flows.lua).
local flows_on
-- The values in `summary`. last_fence is text.
local version, sequence, last_hash, journal_bytes, last_fence
local other_hints, in_lane, suspect_hints, first_due_ms, may_be_stale, may_be_rare
-- The number of suspects when the call began.
local suspect_hints_before
-- Fields of the hash `counts` with their new values, and the events of the call.
local new_counts, events
-- Whether this call knows that `stale` exists, and the number of hints in swept lists (nil: not read yet).
local stale_known, swept_hints
-- Ids that became ready in this call (on_request only).
local ready_ids
-- The token bucket of the rate, and until when one unit of the limits is reserved for suspects. nil: not read yet.
local bucket, reserved_until_ms
-- Whether `progress` has entries. nil: not read yet. Most queues have none, so one check is the whole cost.
local has_progress
-- The call stopped at too many expired awaiters, or at too many skipped hints: the caller must repeat it.
local too_many_expired, too_many_skipped
-- Record bytes read for jobs returned by this call; calls for many owners stop when it gets large.
local returned_bytes
-- Jobs that were running and return, each with its fate: five values per job.
local lost_jobs
-- The fence of all claims of this call; nil: none yet.
local call_fence
-- The server's time in µs as text. nil: not needed yet.
local now_as_text
-- Edges of sources that have ended in this call, whether flows.resolve runs, and how much it may still do.
local edge_work, edges_resolving, edges_left, edge_bytes
local EDGES_PER_CALL = 500

local function begin(keys, args)
  KEYS, ARGV = keys, args
  base, parent, cached, cached_keys, now_us, now_ms, version = nil, nil, nil, nil, nil, nil, nil
  epoch, paused, options, cached_numbers, protocol, mode, on_request = nil, nil, nil, nil, nil, nil, nil
  journal_on, journal_max, rate_count, max_active, has_limits, flows_on = nil, nil, nil, nil, nil, nil
  new_counts, events, ready_ids, lost_jobs = {}, {}, {}, {}
  stale_known, swept_hints = false, nil
  bucket, reserved_until_ms, has_progress, call_fence, now_as_text = nil, nil, nil, nil, nil
  too_many_expired, too_many_skipped, returned_bytes = false, false, 0
  edge_work, edges_resolving, edges_left, edge_bytes = nil, false, EDGES_PER_CALL, 0
end

local function key(name)
  local full = cached_keys[name]
  if not full then
    full = base .. ':' .. name
    cached_keys[name] = full
  end
  return full
end

-- Lua's own conversion to text rounds to 14 digits.
local function now_text()
  now_as_text = now_as_text or string.format('%d', now_us)
  return now_as_text
end

-- Builds a key with a variable part. These are not cached: there is no limit to their number.
local function key_of(kind, name)
  return base .. ':' .. kind .. ':' .. name
end

local function pending_key(priority)
  if priority == '5' then return key('pending') end
  if priority == 'r' then return key('retry') end
  return key('pending:' .. priority)
end

local function workers_key(processor)
  return key_of('processor', processor .. ':workers')
end

local function worker_key(processor, worker, list)
  return key_of('processor', processor .. ':worker:' .. worker .. ':' .. list)
end

-- A numeric option; 0 if the queue was created by a release without it.
local function option(name)
  local value = cached_numbers[name]
  if not value then
    value = tonumber(options[name] or 0)
    cached_numbers[name] = value
  end
  return value
end

-- Published messages reach all databases of a server, and other databases may have a queue of the same name. So the
-- channel contains the database number. Scripts cannot read it; the option `db` stores it.
local function channel(name)
  return base .. '@' .. (options.db or '0') .. ':' .. name
end

-- Starts a call about a queue, up to `summary`.
local function open_queue(keys, args)
  begin(keys, args)
  base = keys[1]
  cached = CACHE.queues[base]
  if not cached then
    if CACHE.count == CACHE_MAX then CACHE.queues, CACHE.count = {}, 0 end
    -- The fail queue of a queue is BASE ':fail', with the same keys and verbs. Its jobs are the queue's permanent
    -- failures; the retry process runs them.
    cached = { keys = {}, parent = string.match(base, '^(.*):fail$') }
    CACHE.queues[base], CACHE.count = cached, CACHE.count + 1
  end
  cached_keys, parent = cached.keys, cached.parent

  -- Arithmetic converts text to numbers at a fraction of the cost of tonumber, and % is cheaper than math.floor.
  local now = redis.call('TIME')
  now_us = now[1] * 1000000 + now[2]
  now_ms = (now_us - now_us % 1000) / 1000
end

-- Reads the options, unless those in the cache are of this version (nil: no queue, or its summary is lost).
local function read_options(of_version)
  if not of_version or cached.options_version ~= of_version then
    local all, named = redis.call('HGETALL', key('options')), {}
    for at = 1, #all, 2 do named[all[at]] = all[at + 1] end
    version = of_version or (named.epoch and named.epoch .. ' ' .. (named.version or '0'))
    cached.options_version, cached.epoch, cached.paused = version, named.epoch, named.paused == '1'
    cached.options, cached.numbers = named, {}
    options, cached_numbers = named, cached.numbers
    cached.journal_on, cached.journal_max = named.journal == '1', option('journal_max')
    cached.on_request = named.mode == 'on_request' or named.mode == 'external'
    cached.rate_count, cached.max_active = option('rate_count'), option('max_active')
    cached.has_limits = cached.rate_count > 0 or cached.max_active > 0
    cached.flows_on = option('flows') == FLOWS_ON or named.flows_used == '1'
    cached.is_plain = named.mode == 'work' and cached.journal_on and not cached.flows_on
      and option('max_items') == 0
    cached.small_body, cached.keeps_done = math.min(option('max_data'), SMALL_BODY), option('keep_done_ms') > 0
    cached.due_channel = channel('due')
    -- As turns return them (verbs.turn).
    cached.limits = { option('timeout_ms'), tonumber(named.size or 1), option('priority'),
      cached.keeps_done and option('max_data') or -option('max_data'), option('max_retries'),
      option('retry_lane_retries') }
    for _, name in ipairs(QUICK_KEYS) do key(name) end
  end
  epoch, paused, options, cached_numbers = cached.epoch, cached.paused, cached.options, cached.numbers
  protocol, mode, on_request = options.protocol, options.mode, cached.on_request
  journal_on, journal_max = cached.journal_on, cached.journal_max
  rate_count, max_active, has_limits = cached.rate_count, cached.max_active, cached.has_limits
  flows_on = cached.flows_on
end

-- Starts a call about a queue.
local function open(keys, args)
  open_queue(keys, args)
  summary.read()
  read_options(version)
end
