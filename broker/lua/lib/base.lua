-- What every script of one queue starts with: its keys, the server's clock, its options.
-- KEYS[1] is the queue's base, PREFIX .. 'queue:{NAME}'; all its keys are base .. ':' .. a name listed in keys.py.

local base = KEYS[1]

local function key(name)
  return base .. ':' .. name
end

-- A queue with a fail handler has a fail queue below it, BASE ':fail', with the same keys and scripts: its jobs are
-- the permanent failures of the queue, and the retry child works on them. `parent`: the queue that this one belongs to.
local parent = string.match(base, '^(.*):fail$')

local function pending_key(priority)
  if priority == '5' then return key('pending') end
  if priority == 'r' then return key('retry') end
  if priority == 's' then return key('suspects') end
  return key('pending:' .. priority)
end

local function workers_key(processor)
  return key('processor:' .. processor .. ':workers')
end

local function worker_key(processor, worker, list)
  return key('processor:' .. processor .. ':worker:' .. worker .. ':' .. list)
end

local now = redis.call('TIME')
local now_us = tonumber(now[1]) * 1000000 + tonumber(now[2])
local now_ms = math.floor(now_us / 1000)

local fields = redis.call('HMGET', key('options'), 'epoch', 'protocol', 'paused', 'journal', 'journal_max', 'mode',
  'rate_count', 'max_active')
local epoch, protocol, paused = fields[1], fields[2], fields[3] == '1'
local journal_on, journal_max, mode = fields[4] == '1', tonumber(fields[5] or 0), fields[6]
local rate_count, max_active = tonumber(fields[7] or 0), tonumber(fields[8] or 0)

local known_options = {}

-- Asked for once per call: a call may look at many jobs.
local function option(name)
  local value = known_options[name]
  if not value then
    value = tonumber(redis.call('HGET', key('options'), name) or 0)
    known_options[name] = value
  end
  return value
end
