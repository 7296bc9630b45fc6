-- One call: what it was called with, the server's clock, the options of its queue, and every variable that lasts no
-- longer than the call. KEYS[1] is the queue's base, PREFIX .. 'queue:{NAME}'; its keys are base .. ':' .. a name
-- listed in keys.py.
--
-- The files of this folder are one library, put together in the order that scripts.py lists. Functions are in tables,
-- one per duty, so each may use all others. What a call has to remember is in the variables below: all of them are set
-- by begin, open and open_counts, so no call sees what another one left, not even one that ended with an error.

local journal, records, attempts, hints, limits, timers, schedules, blocked = {}, {}, {}, {}, {}, {}, {}, {}
local progress, waiters, done, awaiters, leases, claims, failures, dead = {}, {}, {}, {}, {}, {}, {}, {}
local recovery, turns, verbs = {}, {}, {}

-- What would be worked out in every call: the names of the keys, and the options of the queue. It follows from the
-- base, and from the epoch and the version of the options, which are read each time: no call sees what another one did.
local CACHE, CACHE_MAX = { queues = {}, count = 0 }, 1000

local KEYS, ARGV
-- The queue. `parent`: the queue that a fail queue belongs to. `memo`: its part of KNOWN.
local base, parent, cached, cached_keys
local now_us, now_ms
-- Options. `on_request`: items leave when somebody asks for them; then nobody blocks on a list, and awaiters are rung.
local epoch, paused, options, cached_numbers, protocol, mode, on_request
local journal_on, journal_max, rate_count, max_active, has_limits
-- `counts` is read once per call and written once: each command costs as much as the hash of an entry of the journal.
local stored_counts, new_counts
-- Lines for the journal.
local events
-- How many hints are in the lists of the priorities other than 5: while it is 0 a claim looks at one list only. How
-- many jobs wait in the retry lane (hints that are not stale). How many hints of suspects there are.
local other_hints, in_lane, suspect_hints
local other_hints_before, in_lane_before, suspect_hints_before
-- Whether `stale` may have entries, and how many hints are in swept lists; nil: nobody has asked yet.
local may_be_stale, swept_hints
-- Ids that have become ready in this call, of a queue whose items leave on request.
local ready_ids
-- The token bucket of the rate, and until when a place is left to the suspects; nil: nobody has asked yet.
local bucket, reserved_until_ms
-- Whether `progress` has entries; nil: nobody has asked yet. Most queues have none, and then asking is all it costs.
local has_progress
-- Whether there were too many dead awaiters before any living one, or too many hints to skip: then the call is to be
-- repeated.
local too_many_expired, too_many_skipped
-- What was read of the records of jobs that this call has given back: a call for many owners ends when that is much.
local returned_bytes
-- The jobs that were running and come back, each with its fate: five values.
local lost_jobs
-- The number of the claims of this call; nil: there was none yet.
local call_fence

-- The beginning of every call.
local function begin(keys, args)
  KEYS, ARGV = keys, args
  base, parent, cached, cached_keys, now_us, now_ms = nil, nil, nil, nil, nil, nil
  epoch, paused, options, cached_numbers, protocol, mode, on_request = nil, nil, nil, nil, nil, nil, nil
  journal_on, journal_max, rate_count, max_active, has_limits = nil, nil, nil, nil, nil
  stored_counts, new_counts, events, ready_ids, lost_jobs = nil, {}, {}, {}, {}
  other_hints, in_lane, suspect_hints = nil, nil, nil
  other_hints_before, in_lane_before, suspect_hints_before = nil, nil, nil
  may_be_stale, swept_hints, bucket, reserved_until_ms, has_progress, call_fence = nil, nil, nil, nil, nil, nil
  too_many_expired, too_many_skipped, returned_bytes = false, false, 0
end

local function key(name)
  local full = cached_keys[name]
  if not full then
    full = base .. ':' .. name
    cached_keys[name] = full
  end
  return full
end

-- A key of something that comes and goes.
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

-- An option that is a number; 0 if the queue was made by a release that did not know it.
local function option(name)
  local value = cached_numbers[name]
  if not value then
    value = tonumber(options[name] or 0)
    cached_numbers[name] = value
  end
  return value
end

-- Published messages reach all databases of a server, in which there may be queues of the same name: a channel has the
-- number of the database in it. A script cannot ask for that; whoever makes or joins the queue says it.
local function channel(name)
  return base .. '@' .. (options.db or '0') .. ':' .. name
end

-- The beginning of a call about a queue.
local function open(keys, args)
  begin(keys, args)
  base = keys[1]
  cached = CACHE.queues[base]
  if not cached then
    if CACHE.count == CACHE_MAX then CACHE.queues, CACHE.count = {}, 0 end
    -- A queue with a fail handler has a fail queue below it, BASE ':fail', with the same keys and verbs: its jobs are
    -- the permanent failures of the queue, and the retry child works on them.
    cached = { keys = {}, parent = string.match(base, '^(.*):fail$') }
    CACHE.queues[base], CACHE.count = cached, CACHE.count + 1
  end
  cached_keys, parent = cached.keys, cached.parent

  local now = redis.call('TIME')
  now_us = tonumber(now[1]) * 1000000 + tonumber(now[2])
  now_ms = math.floor(now_us / 1000)

  -- Pausing does not change the version: workers need not hear of the other options then.
  local stored = redis.call('HMGET', key('options'), 'epoch', 'version', 'paused')
  epoch, paused = stored[1], stored[3] == '1'
  if not stored[2] or cached.epoch ~= epoch or cached.version ~= stored[2] then
    local all, named = redis.call('HGETALL', key('options')), {}
    for at = 1, #all, 2 do named[all[at]] = all[at + 1] end
    cached.epoch, cached.version, cached.options, cached.numbers = epoch, stored[2], named, {}
  end
  options, cached_numbers = cached.options, cached.numbers
  protocol, mode = options.protocol, options.mode
  journal_on, journal_max = options.journal == '1', option('journal_max')
  on_request = mode == 'on_request' or mode == 'external'
  rate_count, max_active = option('rate_count'), option('max_active')
  has_limits = rate_count > 0 or max_active > 0
end

-- The beginning of a call that changes jobs: with what `counts` says of the journal, the last fence and the hints.
local function open_counts(keys, args)
  open(keys, args)
  stored_counts = redis.call('HMGET', key('counts'), 'journal_sequence', 'journal_hash', 'journal_bytes', 'fence',
    'other_hints', 'lane', 'suspect_hints')
  other_hints, in_lane = tonumber(stored_counts[5] or 0), tonumber(stored_counts[6] or 0)
  suspect_hints = tonumber(stored_counts[7] or 0)
  other_hints_before, in_lane_before, suspect_hints_before = other_hints, in_lane, suspect_hints
end
