#!lua
-- enqueue: stores jobs and makes them waiting; all of them or none.
--
-- KEYS[1]  the queue's base
-- ARGV     protocol, what to do about an id that is there ('refuse' | 'skip'), number of jobs, then per job:
--          id, priority, body, token ('' = none)
-- Returns  {OK, index, id, index, id ...}: the jobs (from 1) that a token shows to be stored already, with their id;
--          {NO_QUEUE}; {OTHER_PROTOCOL, its number}; {FULL, max_items}; {EXISTS, index}; {TOO_LARGE, index, max_data}
-- States   (new) -> waiting
--@include base codes journal hints

if not epoch then return { NO_QUEUE } end
if protocol ~= ARGV[1] then return { OTHER_PROTOCOL, protocol } end

local skip_existing, count = ARGV[2] == 'skip', tonumber(ARGV[3])
local limits = redis.call('HMGET', key('options'), 'max_items', 'max_data', 'dedup_ttl_ms')
local max_items, max_data, dedup_ttl_ms = tonumber(limits[1]), tonumber(limits[2]), tonumber(limits[3])

local function token_key(token)
  return key('token:' .. epoch .. ':' .. token)
end

local ids = {}
for i = 1, count do ids[i] = ARGV[4 * i] end
local existing = redis.call('HMGET', key('jobs'), unpack(ids))

local reply, new, seen, tokens = { OK }, {}, {}, {}
for i = 1, count do
  local at = 4 * i
  local id, body, token = ARGV[at], ARGV[at + 2], ARGV[at + 3]
  local stored = token ~= '' and (tokens[token] or redis.call('GET', token_key(token)))
  if #body > max_data then return { TOO_LARGE, i, max_data } end
  if stored then
    reply[#reply + 1] = i
    reply[#reply + 1] = stored
  elseif existing[i] or seen[id] then
    if not skip_existing then return { EXISTS, i } end
  else
    seen[id] = true
    new[#new + 1] = at
  end
  -- Also of a job that was skipped: the repeated call is to skip it too, even if the job has run meanwhile.
  if token ~= '' and not stored then tokens[token] = id end
end
if max_items > 0 and redis.call('HLEN', key('jobs')) + #new > max_items then return { FULL, max_items } end

for token, id in pairs(tokens) do redis.call('SET', token_key(token), id, 'PX', dedup_ttl_ms) end
if #new == 0 then return reply end

local records, by_priority, stored_ids = {}, {}, {}
local header = string.format(' %.0f\n', now_ms)
for i, at in ipairs(new) do
  local id, priority = ARGV[at], ARGV[at + 1]
  records[2 * i - 1] = id
  records[2 * i] = 'p' .. priority .. header .. ARGV[at + 2]
  by_priority[priority] = by_priority[priority] or {}
  table.insert(by_priority[priority], id)
  stored_ids[i] = id
end
redis.call('HSET', key('jobs'), unpack(records))
for priority, list in pairs(by_priority) do push_back(priority, list) end
wake_idle_worker()
note_ids('enqueued', 0, stored_ids)
write_journal('-')
return reply
