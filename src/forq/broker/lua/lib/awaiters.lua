-- Who awaits an item of a queue of the release modes. `awaiters`: AWAITER -> EXPIRES_MS ' ' ARRIVAL ' ' VIA ' ' ID, where ID ''
-- means any item. `awaiting`: ID ' ' ARRIVAL ' ' AWAITER in the order of the alphabet (all scores are 0): the first of an id is
-- the one that came first. One that died without leaving is forgotten when its turn comes, or by chance.

local FORGOTTEN_PER_CALL = 1000
local LOOKED_AT_BY_CHANCE = 2
-- Whether there were more dead ones than that before any living one: then the call is to be repeated.
local forgot_enough = false

local function read_awaiter(awaiter)
  local entry = redis.call('HGET', key('awaiters'), awaiter)
  if not entry then return nil end
  local expires, arrival, via, id = string.match(entry, '^(%d+) (%d+) (%S+) (.*)$')
  return {
    name = awaiter,
    expires_ms = tonumber(expires),
    arrival = arrival,
    via = via,
    id = id,
    member = id .. ' ' .. arrival .. ' ' .. awaiter,
  }
end

local function forget_awaiter(awaiter)
  local known = read_awaiter(awaiter)
  if not known then return end
  redis.call('HDEL', key('awaiters'), awaiter)
  redis.call('ZREM', key('awaiting'), known.member)
end

-- The first one that awaits this item ('': any item); nil if nobody does.
local function first_awaiter(id)
  for _ = 1, FORGOTTEN_PER_CALL do
    local member = redis.call('ZRANGEBYLEX', key('awaiting'), '[' .. id .. ' ', '(' .. id .. '!', 'LIMIT', 0, 1)[1]
    if not member then return nil end
    local known = read_awaiter(string.match(member, '(%S+)$'))
    if known and known.member == member and known.expires_ms > now_ms then return known end
    redis.call('ZREM', key('awaiting'), member)
    if known and known.expires_ms <= now_ms then redis.call('HDEL', key('awaiters'), known.name) end
  end
  forgot_enough = true
end

-- It keeps its place in line as long as it renews in time.
local function register_awaiter(awaiter, id, via, valid_ms)
  local known = read_awaiter(awaiter)
  local in_time = known and known.id == id and known.expires_ms > now_ms
  local arrival = in_time and known.arrival or string.format('%.0f', now_us)
  if not in_time then forget_awaiter(awaiter) end
  redis.call('HSET', key('awaiters'), awaiter, string.format('%.0f %s %s ', now_ms + valid_ms, arrival, via) .. id)
  redis.call('ZADD', key('awaiting'), 0, id .. ' ' .. arrival .. ' ' .. awaiter)
  -- When all are dead, nothing is left of them.
  redis.call('PEXPIRE', key('awaiters'), 2 * valid_ms)
  redis.call('PEXPIRE', key('awaiting'), 2 * valid_ms)
  for _, other in ipairs(redis.call('HRANDFIELD', key('awaiters'), LOOKED_AT_BY_CHANCE)) do
    if read_awaiter(other).expires_ms <= now_ms then forget_awaiter(other) end
  end
end
