-- Supervisors and requests to them: announce, withdraw, request, take, answer. KEYS[1] is PREFIX .. '{control}': all of
-- these keys are on one cluster node, so a heartbeat needs one call.

local EXPIRED_SUPERVISORS_PER_CALL = 100
-- An unread request is useless after its deadline; nothing has to outlive it for long.
local MAX_REQUESTS, MAX_DEADLINE_MS, MAX_REQUEST_BYTES = 32, 60 * 1000, 16 * 1024
local ANSWER_MS = 60 * 1000
-- Longer than any requester waits for an answer. A repeated entry is recognized for at least as long as it is valid.
local TAKEN_MS = 15 * 60 * 1000

function control.remove(processor)
  redis.call('ZREM', key('supervisors'), processor)
  redis.call('HDEL', key('about'), processor)
  redis.call('UNLINK', key_of('requests', processor))
end

-- announce: keeps a supervisor in the list, and removes silent ones.
-- KEYS[1]  the base of control
-- ARGV     processor, ms until it counts as silent, its description as JSON ('': unchanged)
-- Returns  {OK, requests that wait for it, 1 if its description is missing}
-- States   unchanged
function verbs.announce()
  local processor, expiry_ms, about = ARGV[1], tonumber(ARGV[2]), ARGV[3]
  local silent = redis.call('ZRANGEBYSCORE', key('supervisors'), '-inf', '(' .. string.format('%.0f', now_ms),
    'LIMIT', 0, EXPIRED_SUPERVISORS_PER_CALL)
  for _, other in ipairs(silent) do
    if other ~= processor then control.remove(other) end
  end
  redis.call('ZADD', key('supervisors'), now_ms + expiry_ms, processor)
  if about ~= '' then redis.call('HSET', key('about'), processor, about) end
  return { OK, redis.call('LLEN', key_of('requests', processor)), 1 - redis.call('HEXISTS', key('about'), processor) }
end

-- withdraw: removes a supervisor that has ended, with the requests that it has not read.
-- KEYS[1]  the base of control
-- ARGV     processor
-- Returns  {OK}
-- States   unchanged
function verbs.withdraw()
  control.remove(ARGV[1])
  return { OK }
end

-- request: stores a request to a supervisor, with a deadline in server time, and notifies its pulse.
-- KEYS[1]  the base of control
-- ARGV     processor, id of the request, ms until its deadline, database number, the request as JSON
-- Returns  {OK, ms until its deadline}; {NO_SUPERVISOR}; {TOO_MANY_REQUESTS, maximum}
-- States   unchanged
function verbs.request()
  local processor, id, requests = ARGV[1], ARGV[2], key_of('requests', ARGV[1])
  local expires_at = redis.call('ZSCORE', key('supervisors'), processor)
  if not expires_at or tonumber(expires_at) < now_ms then return { NO_SUPERVISOR } end
  if redis.call('LLEN', requests) >= MAX_REQUESTS then return { TOO_MANY_REQUESTS, MAX_REQUESTS } end
  local left_ms = math.min(tonumber(ARGV[3]), MAX_DEADLINE_MS)
  redis.call('RPUSH', requests, id .. ' ' .. string.format('%.0f', now_ms + left_ms) .. ' ' .. ARGV[5])
  redis.call('PEXPIRE', requests, MAX_DEADLINE_MS)
  options = { db = ARGV[4] }
  redis.call('PUBLISH', channel('requests:' .. processor), id)
  return { OK, left_ms }
end

-- take: removes requests from the list of a supervisor, so that each is carried out at most once. A request past its
-- deadline, or one whose id was taken before, is dropped.
-- KEYS[1]  the base of control
-- ARGV     processor, maximum number of requests
-- Returns  {OK, requests left, number of late ones dropped, number of repeated ones dropped, number of malformed ones
--          dropped, {id, ms until its deadline, the request as JSON, each}}
-- States   unchanged
function verbs.take()
  local processor, requests = ARGV[1], key_of('requests', ARGV[1])
  local late, repeated, malformed, taken = 0, 0, 0, {}
  for _, entry in ipairs(redis.call('LPOP', requests, ARGV[2]) or {}) do
    local id, deadline_ms, body = string.match(entry, '^([%w-]+) (%d+) (.*)$')
    if not id or #id > 64 or #deadline_ms > 15 or #entry > MAX_REQUEST_BYTES + 100 then
      malformed = malformed + 1
    elseif tonumber(deadline_ms) <= now_ms then
      late = late + 1
    elseif not redis.call('SET', key_of('taken', processor .. ':' .. id), '1', 'NX', 'PX', TAKEN_MS) then
      repeated = repeated + 1
    else
      taken[#taken + 1] = id
      taken[#taken + 1] = tonumber(deadline_ms) - now_ms
      taken[#taken + 1] = body
    end
  end
  return { OK, redis.call('LLEN', requests), late, repeated, malformed, taken }
end

-- answer: stores the answer to a request that was taken, for its requester. Safe to repeat.
-- KEYS[1]  the base of control
-- ARGV     processor, id of the request, database number, the answer as JSON
-- Returns  {OK, 1 stored | 0 it was answered before, or never taken}
-- States   unchanged
function verbs.answer()
  local name = ARGV[1] .. ':' .. ARGV[2]
  -- 2: answered. The requester may have removed the answer since then.
  if redis.call('GET', key_of('taken', name)) ~= '1' then return { OK, 0 } end
  redis.call('SET', key_of('taken', name), '2', 'PX', ANSWER_MS)
  redis.call('RPUSH', key_of('answer', name), ARGV[4])
  redis.call('PEXPIRE', key_of('answer', name), ANSWER_MS)
  options = { db = ARGV[3] }
  redis.call('PUBLISH', channel('answered:' .. ARGV[2]), '')
  return { OK, 1 }
end
