#!lua flags=allow-oom
-- wait: somebody waits for the end of a job: whether it has ended by now; if not, he is written down, to be told. To be repeated
-- before that lapses, and whenever he may have missed something.
--
-- KEYS[1]  the queue's base
-- ARGV     id, epoch, mark ('' and '' the first time, then those of the last answer), for how long he is written down (ms)
-- Returns  {OK, 'live', epoch, mark of the job}; {OK, 'done', epoch, mark, fence, what is kept of it (if anything)};
--          {OK, 'dead', epoch, mark, fence}; {OK, 'cancelled', epoch, mark}; {OK, 'gone', epoch, mark} if it is neither live nor
--          kept; {KEEPS_NOTHING}; {NO_QUEUE}. Of a job that was not live the first time the mark is ''
--@include base codes

-- One that died without a word is forgotten by chance.
local WAITERS_SEEN_BY_CHANCE = 2

-- A mark is MICROSECONDS '-' ENQUEUED_MS of the job: when somebody was first written down for it. Every end of the id takes the
-- entry out, so as long as the mark is there the job is the same.
-- '' if there is none.
local function mark_of(id)
  return string.match(redis.call('HGET', key('waiters'), id) or '', ' (%S+)$') or ''
end

-- Until when (ms) somebody waits; 0 if nobody does.
local function waited_for_until(id)
  return tonumber(string.match(redis.call('HGET', key('waiters'), id) or '', '^%d+') or 0)
end

-- Several may wait for one job: the last to go counts.
local function write_waiter_down(id, mark, valid_ms)
  local waits_until = math.max(now_ms + valid_ms, waited_for_until(id))
  redis.call('HSET', key('waiters'), id, string.format('%.0f ', waits_until) .. mark)
  -- When all are dead, nothing is left of them.
  redis.call('PEXPIRE', key('waiters'), string.format('%.0f', 2 * valid_ms))
  for _, other in ipairs(redis.call('HRANDFIELD', key('waiters'), WAITERS_SEEN_BY_CHANCE)) do
    if waited_for_until(other) <= now_ms then redis.call('HDEL', key('waiters'), other) end
  end
end

-- When the live job of that id was enqueued; nil if there is none.
local function live_since(id)
  local record = redis.call('HGET', key('jobs'), id)
  return record and (string.match(record, '^.%d (%d+)') or '0')
end

local id, mark, valid_ms = ARGV[1], ARGV[3], tonumber(ARGV[4])
if not epoch or ARGV[2] ~= '' and ARGV[2] ~= epoch then return { NO_QUEUE } end

local function live(its_mark)
  write_waiter_down(id, its_mark, valid_ms)
  return { OK, 'live', epoch, its_mark }
end

local function done(kept)
  return { OK, 'done', epoch, mark, string.match(kept, '^%d+ (%d+)'), kept }
end

local function first_look()
  if option('keep_done_ms') == 0 or options.done_max == '0' then return { KEEPS_NOTHING } end
  local enqueued_ms = live_since(id)
  if enqueued_ms then
    local known = mark_of(id)
    return live(known ~= '' and known or string.format('%.0f-', now_us) .. enqueued_ms)
  end
  local kept = redis.call('HGET', key('done:jobs'), id)
  return kept and done(kept) or { OK, 'gone', epoch, '' }
end

local function look_again()
  local known = mark_of(id)
  if known == mark and redis.call('HEXISTS', key('jobs'), id) == 1 then return live(mark) end
  local told = redis.call('GET', key_of('told', mark .. ':' .. id))
  if told then
    local how, fence, kept = string.match(told, '^(%a+) (%d+)\n?(.*)$')
    return { OK, how, epoch, mark, fence, kept ~= '' and kept or nil }
  end
  -- He was away for long, or what ended it did not know of marks: the job is known by the time it was enqueued.
  local enqueued_ms = string.match(mark, '-(%d+)$')
  if live_since(id) == enqueued_ms then return live(known ~= '' and known or mark) end
  local kept = redis.call('HGET', key('done:jobs'), id)
  if kept and string.match(kept, '^[^\n]*\n[^\n]*\n.%d (%d+)') == enqueued_ms then return done(kept) end
  return { OK, 'gone', epoch, mark }
end

return mark == '' and first_look() or look_again()
