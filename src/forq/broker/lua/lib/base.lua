-- What every script of one queue starts with: its keys, the server's clock, its options.
-- KEYS[1] is the queue's base, PREFIX .. 'queue:{NAME}'; all its keys are base .. ':' .. a name listed in keys.py.

-- What would be worked out in every call: the names of the keys, and the options of the queue. It follows from the base, and from
-- the epoch and the version of the options, which are read each time: no call sees what another one did.
local KNOWN, MOST_KNOWN = { queues = {}, number = 0 }, 1000

local base = KEYS[1]
local memo = KNOWN.queues[base]
if not memo then
  if KNOWN.number == MOST_KNOWN then KNOWN.queues, KNOWN.number = {}, 0 end
  -- A queue with a fail handler has a fail queue below it, BASE ':fail', with the same keys and scripts: its jobs are the permanent
  -- failures of the queue, and the retry child works on them. `parent`: the queue that this one belongs to.
  memo = { keys = {}, parent = string.match(base, '^(.*):fail$') }
  KNOWN.queues[base], KNOWN.number = memo, KNOWN.number + 1
end
local known_keys, parent = memo.keys, memo.parent

local function key(name)
  local full = known_keys[name]
  if not full then
    full = base .. ':' .. name
    known_keys[name] = full
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

local now = redis.call('TIME')
local now_us = tonumber(now[1]) * 1000000 + tonumber(now[2])
local now_ms = math.floor(now_us / 1000)

-- Pausing does not change the version: workers need not hear of the other options then.
local options_now = redis.call('HMGET', key('options'), 'epoch', 'version', 'paused')
local epoch, paused = options_now[1], options_now[3] == '1'
if not options_now[2] or memo.epoch ~= epoch or memo.version ~= options_now[2] then
  local all, named = redis.call('HGETALL', key('options')), {}
  for at = 1, #all, 2 do named[all[at]] = all[at + 1] end
  memo.epoch, memo.version, memo.options, memo.numbers = epoch, options_now[2], named, {}
end
local options, known_numbers = memo.options, memo.numbers

-- An option that is a number; 0 if the queue was made by a release that did not know it.
local function option(name)
  local value = known_numbers[name]
  if not value then
    value = tonumber(options[name] or 0)
    known_numbers[name] = value
  end
  return value
end

-- Published messages reach all databases of a server, in which there may be queues of the same name: a channel has the number
-- of the database in it. A script cannot ask for that; whoever makes or joins the queue says it.
local function channel(name)
  return base .. '@' .. (options.db or '0') .. ':' .. name
end

local protocol, mode, journal_on, journal_max = options.protocol, options.mode, options.journal == '1', option('journal_max')
local rate_count, max_active = option('rate_count'), option('max_active')
