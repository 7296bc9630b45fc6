#!lua flags=allow-oom
-- create: makes the queue, or joins it if it exists with the same mode and protocol; then sets the options given.
-- Fixed ones are set when it is made; a queue that has another value is not joined.
--
-- KEYS[1]  the queue's base
-- ARGV     protocol, mode, number of default options, number of fixed options given, what `deleted` and `freed` held before the
--          caller looked at the registry (separated by a blank), then (name, value) per default, per fixed option, and per other
--          option given
-- Returns  {OK, 1 made | 0 joined, epoch}; {OTHER_MODE, its mode}; {OTHER_PROTOCOL, its number};
--          {OTHER_OPTION, name, its value}; {CHANGED} if a queue of this name was deleted, or its name made free, since then: the
--          registry may have no entry for it any more. {NO_QUEUE}: a fail queue, and its queue is not there
--@include base codes journal

if epoch and protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end
if epoch and mode ~= ARGV[2] then return { OTHER_MODE, mode } end

local made = not epoch
if parent and redis.call('EXISTS', parent .. ':options') == 0 then return { NO_QUEUE } end
if made and not parent then
  local deleted, freed = redis.call('GET', key('deleted')) or '', redis.call('GET', key('freed')) or ''
  if deleted .. ' ' .. freed ~= ARGV[5] then return { CHANGED } end
end
local first_default = 6
local first_fixed = first_default + 2 * tonumber(ARGV[3])
local first_given = first_fixed + 2 * tonumber(ARGV[4])
for at = first_fixed, first_given - 1, 2 do
  local value = redis.call('HGET', key('options'), ARGV[at])
  if epoch and value ~= ARGV[at + 1] then return { OTHER_OPTION, ARGV[at], value or '' } end
end
if made then
  redis.call('DEL', key('deleted'))
  epoch = string.format('%.0f', now_us)
  -- What every script reads stands first: a small hash is searched from its beginning.
  redis.call('HSET', key('options'), 'epoch', epoch, 'version', '0', 'protocol', ARGV[1], 'mode', ARGV[2], 'paused', '0', 'journal', '0',
    'journal_max', '0', 'rate_count', '0', 'max_active', '0', 'largest_record', '8192')
  for at = first_default, first_given - 1, 2 do redis.call('HSET', key('options'), ARGV[at], ARGV[at + 1]) end
  -- Only of one that is made now: of one that is there, `pause` has seen to it, and may do so at this moment.
  if parent then redis.call('HSET', key('options'), 'paused', redis.call('HGET', parent .. ':options', 'paused') or '0') end
end
for at = first_given, #ARGV, 2 do redis.call('HSET', key('options'), ARGV[at], ARGV[at + 1]) end
redis.call('HINCRBY', key('options'), 'version', 1)
options.db = redis.call('HGET', key('options'), 'db') or '0'
if made then
  -- What the last queue of this name left in `graves` outlives its deletion; from here on each grave has its own end.
  redis.call('PERSIST', key('graves'))
  local given = redis.call('HMGET', key('options'), 'journal', 'journal_max')
  journal_on, journal_max = given[1] == '1', tonumber(given[2] or 0)
  -- Its journal goes on in the stream of the last queue of this name.
  redis.call('PERSIST', key('events'))
  redis.call('PERSIST', key('journal:watermarks'))
  redis.call('PERSIST', key('counts'))
  remembered[1], remembered[2] = false, false
  note('created 0 ' .. epoch)
  -- The fail queue of one that is paused.
  if redis.call('HGET', key('options'), 'paused') == '1' then note('paused 0') end
  write_journal('-')
  -- Every supervisor serves a queue that releases, or whose workers are elsewhere; one that works needs code, which only its own
  -- supervisor has.
  if ARGV[2] == 'auto_release' or ARGV[2] == 'on_request' or ARGV[2] == 'external' then redis.call('PUBLISH', channel('due'), 'new') end
elseif not journal_on and redis.call('HGET', key('options'), 'journal') == '1' then
  -- Nobody wrote down what happened meanwhile: a number is left out.
  redis.call('HINCRBY', key('counts'), 'journal_sequence', 1)
end
-- Who is held up by the limits that were is told by promote.
if rate_count > 0 or max_active > 0 then redis.call('PUBLISH', channel('due'), '0') end
return { OK, made and 1 or 0, epoch }
