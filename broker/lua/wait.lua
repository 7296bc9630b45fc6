#!lua flags=allow-oom
-- wait: somebody waits for the end of a job: whether it has ended by now; if not, he is written down, to be told. To be repeated
-- before that lapses, and whenever he may have missed something.
--
-- KEYS[1]  the queue's base
-- ARGV     id, epoch, fence ('' and '' the first time, then those of the last answer), for how long he is written down (ms)
-- Returns  {OK, 'live', epoch, least fence that an attempt of this job ends with}; {OK, 'done', epoch, fence, what is kept of it};
--          {OK, 'gone', epoch, fence} if it is neither; {KEEPS_NOTHING}; {NO_QUEUE}
--@include base codes

-- One that died without a word is forgotten by chance.
local WAITERS_SEEN_BY_CHANCE = 2

-- Several may wait for one job: the last to go counts.
local function write_waiter_down(id, valid_ms)
  local waits_until = math.max(now_ms + valid_ms, tonumber(redis.call('HGET', key('waiters'), id) or 0))
  redis.call('HSET', key('waiters'), id, string.format('%.0f', waits_until))
  -- When all are dead, nothing is left of them.
  redis.call('PEXPIRE', key('waiters'), string.format('%.0f', 2 * valid_ms))
  for _, other in ipairs(redis.call('HRANDFIELD', key('waiters'), WAITERS_SEEN_BY_CHANCE)) do
    if tonumber(redis.call('HGET', key('waiters'), other)) <= now_ms then redis.call('HDEL', key('waiters'), other) end
  end
end

local id, since, valid_ms = ARGV[1], ARGV[3], tonumber(ARGV[4])
if not epoch or ARGV[2] ~= '' and ARGV[2] ~= epoch then return { NO_QUEUE } end
local first = since == ''
if first and (option('keep_done_ms') == 0 or options.done_max == '0') then return { KEEPS_NOTHING } end

local live = redis.call('HEXISTS', key('jobs'), id) == 1
local done = redis.call('HGET', key('done:jobs'), id)
local ended_with = done and string.match(done, '^%d+ (%d+)')
if first and live then
  -- What ended before is another job of that id; the one that runs, or is claimed next, has this fence or a later one.
  local owner = redis.call('HGET', key('active'), id)
  since = owner and string.match(owner, ':(%d+)')
    or string.format('%.0f', tonumber(redis.call('HGET', key('counts'), 'fence') or 0) + 1)
elseif first then
  since = '0'
end
if ended_with and tonumber(ended_with) >= tonumber(since) then return { OK, 'done', epoch, since, done } end
if not live then return { OK, 'gone', epoch, since } end
write_waiter_down(id, valid_ms)
return { OK, 'live', epoch, since }
