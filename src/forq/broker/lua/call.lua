-- State of one call: arguments, server clock, the queue's options, and every variable that lives only for the call.
-- KEYS[1] is the queue's base, PREFIX .. 'queue:{NAME}'. Its keys are base .. ':' .. a name listed in keys.py.
--
-- scripts.py joins the files of this folder into one library. Functions live in tables, one per duty, so that each can
-- call all others. Per-call state lives in the variables below. begin, open and open_counts set all of them, so no call
-- sees state left by another one, not even by one that failed.

local journal, records, attempts, hints, limits, timers, schedules, blocked = {}, {}, {}, {}, {}, {}, {}, {}
local progress, waiters, done, awaiters, leases, claims, failures, dead = {}, {}, {}, {}, {}, {}, {}, {}
local recovery, turns, control, flows, batches, verbs = {}, {}, {}, {}, {}, {}

-- Key names and options per queue base. Options are valid for one epoch and version. The field `options` of `counts`
-- has both, and every call reads it again, so a call never sees stale options.
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
-- The hash `counts` is read once and written once per call: each command costs as much as hashing a journal entry.
local stored_counts, new_counts
local events
-- other_hints: hints in lists of priorities other than 5; while it is 0, a claim reads one list only. in_lane: jobs
-- waiting in the retry lane (stale hints excluded).
local other_hints, in_lane, suspect_hints
local other_hints_before, in_lane_before, suspect_hints_before
-- Whether `stale` may have entries, and the number of hints in swept lists. nil: not read yet.
local may_be_stale, swept_hints
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
-- Edges of sources that have ended in this call, whether flows.resolve runs, and how much it may still do.
local edge_work, edges_resolving, edges_left, edge_bytes
local EDGES_PER_CALL = 500

local function begin(keys, args)
  KEYS, ARGV = keys, args
  base, parent, cached, cached_keys, now_us, now_ms = nil, nil, nil, nil, nil, nil
  epoch, paused, options, cached_numbers, protocol, mode, on_request = nil, nil, nil, nil, nil, nil, nil
  journal_on, journal_max, rate_count, max_active, has_limits, flows_on = nil, nil, nil, nil, nil, nil
  stored_counts, new_counts, events, ready_ids, lost_jobs = nil, {}, {}, {}, {}
  other_hints, in_lane, suspect_hints = nil, nil, nil
  other_hints_before, in_lane_before, suspect_hints_before = nil, nil, nil
  may_be_stale, swept_hints, bucket, reserved_until_ms, has_progress, call_fence = nil, nil, nil, nil, nil, nil
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

-- The server's time in µs as text. Lua's own conversion to text rounds to 14 digits.
local function now_text()
  return string.format('%.0f', now_us)
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

-- Increments the version of a queue's options. Call it after each change of them. `of`: the base of this queue or of
-- its fail queue.
local function next_version(of)
  local version = redis.call('HINCRBY', of .. ':options', 'version', 1)
  redis.call('HSET', of .. ':counts', 'options', redis.call('HGET', of .. ':options', 'epoch') .. ' ' .. version)
  return version
end

-- Starts a call about a queue, up to the options.
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

-- Reads the options, unless those in the cache are of this version (nil or false: there is no queue).
local function read_options(version)
  if not version or cached.version ~= version then
    local all, named = redis.call('HGETALL', key('options')), {}
    for at = 1, #all, 2 do named[all[at]] = all[at + 1] end
    cached.version, cached.epoch, cached.paused = version, named.epoch, named.paused == '1'
    cached.options, cached.numbers = named, {}
    options, cached_numbers = named, cached.numbers
    cached.journal_on, cached.journal_max = named.journal == '1', option('journal_max')
    cached.on_request = named.mode == 'on_request' or named.mode == 'external'
    cached.rate_count, cached.max_active = option('rate_count'), option('max_active')
    cached.has_limits = cached.rate_count > 0 or cached.max_active > 0
    cached.flows_on = option('flows') == FLOWS_ON or named.flows_used == '1'
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
  read_options(redis.call('HGET', key('counts'), 'options'))
end

-- Starts a call that changes jobs: also reads `counts`.
local function open_counts(keys, args)
  open_queue(keys, args)
  stored_counts = redis.call('HMGET', key('counts'), 'journal_sequence', 'journal_hash', 'journal_bytes', 'fence',
    'other_hints', 'lane', 'suspect_hints', 'options')
  read_options(stored_counts[8])
  other_hints, in_lane = (stored_counts[5] or 0) + 0, (stored_counts[6] or 0) + 0
  suspect_hints = (stored_counts[7] or 0) + 0
  other_hints_before, in_lane_before, suspect_hints_before = other_hints, in_lane, suspect_hints
end
