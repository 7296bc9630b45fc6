-- Items that leave when somebody awaits them: awaiters, what each was handed, leases, items that are too old.

-- Who awaits an item of a queue of the release modes. `awaiters`: AWAITER -> EXPIRES_MS ' ' ARRIVAL ' ' VIA ' ' ID,
-- where ID '' means any item. `awaiting`: ID ' ' ARRIVAL ' ' AWAITER in the order of the alphabet (all scores are 0):
-- the first of an id is the one that came first. One that died without leaving is forgotten when its turn comes, or by
-- chance.

local FORGOTTEN_PER_CALL = 1000
local LOOKED_AT_BY_CHANCE = 2

function awaiters.read(awaiter)
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

function awaiters.forget(awaiter)
  local known = awaiters.read(awaiter)
  if not known then return end
  redis.call('HDEL', key('awaiters'), awaiter)
  redis.call('ZREM', key('awaiting'), known.member)
end

-- The first one that awaits this item ('': any item); nil if nobody does.
function awaiters.first(id)
  for _ = 1, FORGOTTEN_PER_CALL do
    local member = redis.call('ZRANGEBYLEX', key('awaiting'), '[' .. id .. ' ', '(' .. id .. '!', 'LIMIT', 0, 1)[1]
    if not member then return nil end
    local known = awaiters.read(string.match(member, '(%S+)$'))
    if known and known.member == member and known.expires_ms > now_ms then return known end
    redis.call('ZREM', key('awaiting'), member)
    if known and known.expires_ms <= now_ms then redis.call('HDEL', key('awaiters'), known.name) end
  end
  forgot_enough = true
end

-- It keeps its place in line as long as it renews in time.
function awaiters.register(awaiter, id, via, valid_ms)
  local known = awaiters.read(awaiter)
  local in_time = known and known.id == id and known.expires_ms > now_ms
  local arrival = in_time and known.arrival or string.format('%.0f', now_us)
  if not in_time then awaiters.forget(awaiter) end
  redis.call('HSET', key('awaiters'), awaiter, string.format('%.0f %s %s ', now_ms + valid_ms, arrival, via) .. id)
  redis.call('ZADD', key('awaiting'), 0, id .. ' ' .. arrival .. ' ' .. awaiter)
  -- When all are dead, nothing is left of them.
  redis.call('PEXPIRE', key('awaiters'), 2 * valid_ms)
  redis.call('PEXPIRE', key('awaiting'), 2 * valid_ms)
  for _, other in ipairs(redis.call('HRANDFIELD', key('awaiters'), LOOKED_AT_BY_CHANCE)) do
    if awaiters.read(other).expires_ms <= now_ms then awaiters.forget(other) end
  end
end

-- An item that leaves on request has become ready: whoever awaits it is rung, and asks for it.

local RUNG_PER_CALL = 1000

function awaiters.ring(known)
  -- It is not rung again until it asks: the next item rings the next one.
  redis.call('ZREM', key('awaiting'), known.member)
  if known.via ~= '-' then
    redis.call('PUBLISH', channel('handed:' .. known.via), known.name)
    return
  end
  local list = key_of('awaiter', known.name)
  if redis.call('EXISTS', list) == 1 then return end
  redis.call('RPUSH', list, '')
  redis.call('PEXPIRE', list, string.format('%.0f', known.expires_ms - now_ms))
end

-- Everybody: the queue is gone, or what was ready all the time may be had again.
function awaiters.ring_all()
  for _, awaiter in ipairs(redis.call('HRANDFIELD', key('awaiters'), RUNG_PER_CALL)) do
    awaiters.ring(awaiters.read(awaiter))
  end
end

function awaiters.ring_ready()
  if redis.call('EXISTS', key('awaiting')) == 0 then return end
  local others = 0
  for _, id in ipairs(made_ready) do
    local known = awaiters.first(id)
    if known then awaiters.ring(known) else others = others + 1 end
  end
  -- Who was rung last may have died since: as long as anything waits, each call rings one more.
  if others == 0 and hints.main_waiting() + in_lane > 0 then others = 1 end
  for _ = 1, math.min(others, RUNG_PER_CALL) do
    local known = awaiters.first('')
    if not known then return end
    awaiters.ring(known)
  end
end

-- What an awaiter has in hand: `awaiter:A`, a list of one entry. FENCE ' ' ID ' ' LEASE_MS '\n' RECORD: it was handed
-- that; in mode external, where an awaiter is a worker, LEASE_MS is followed by ' ' and the bridge that was told. '':
-- it was rung. 'acked ' FENCE: it has acknowledged that. Of an external worker also 'accepted ' FENCE ' ' ID, and
-- 'ended ' OUTCOME ' ' ID. `accepted`: jobs that external workers have accepted, by their last sign of life (ms).
-- `workers`: these by when they were last seen.

local FORGOTTEN_PER_LAPSE = 200

function leases.hand_key(awaiter)
  return key_of('awaiter', awaiter)
end

-- The id it has in hand, and whether it has accepted that, and the bridge that was told; nil if it has none.
function leases.in_hand(awaiter)
  local hand = redis.call('LINDEX', leases.hand_key(awaiter), 0) or ''
  local accepted, id, rest = string.match(hand, '^(%a* ?)%d+ (%S+)([^\n]*)')
  return id, accepted == 'accepted ', id and string.match(rest, '^ %d+ (%S+)')
end

function leases.put_in_hand(awaiter, hand, ms)
  redis.call('DEL', leases.hand_key(awaiter))
  redis.call('RPUSH', leases.hand_key(awaiter), hand)
  redis.call('PEXPIRE', leases.hand_key(awaiter), string.format('%.0f', ms))
end

function leases.see_worker(worker)
  redis.call('ZADD', key('workers'), string.format('%.0f', now_ms), worker)
end

-- Workers that were silent for a whole lease are idle no more; what they held has lapsed by itself.
function leases.forget_silent_workers()
  local silent = redis.call('ZRANGEBYSCORE', key('workers'), '-inf', string.format('%.0f', now_ms - option('lease_ms')),
    'LIMIT', 0, FORGOTTEN_PER_LAPSE)
  for _, worker in ipairs(silent) do
    redis.call('ZREM', key('workers'), worker)
    awaiters.forget(worker)
  end
end

-- An item is handed over: it is active, owned by an awaiter under a fence, until that acknowledges it or its lease
-- lapses. In mode external that is a worker, which accepts it and then says again and again that it is alive.

local LAPSED_PER_CALL = 200
local MAX_SKIPS = 1000

-- Whether this is what the awaiter was handed and still holds, and not what it had of an item that has gone back, or of
-- an earlier queue of this name.
function leases.is_held(awaiter, hand)
  local id = string.match(hand, '^%d+ (%S+) ')
  return id and holdings.is_owner(awaiter, redis.call('HGET', key('active'), id))
end

-- The next job of a list and its record; its hint is taken out. nil if there is none.
function leases.take_from(place)
  for _ = 1, MAX_SKIPS do
    local ids = hints.pop(place, 1)
    if not ids then return nil end
    local id = ids[1]
    if id ~= '' and not hints.ignore(place, id) then
      if place == LANE then hints.count(place, -1) end
      local record = redis.call('HGET', key('jobs'), id)
      if not record then
        hints.drop(id)
      elseif redis.call('HEXISTS', key('active'), id) == 0 then
        return id, record
      end
    end
  end
  skipped_enough = true
end

function leases.take_next()
  if other_hints == 0 then return leases.take_from('5') end
  for priority = 0, 9 do
    local id, record = leases.take_from(tostring(priority))
    if id or skipped_enough then return id, record end
  end
end

-- `to`: the awaiter's name, and by which clerk it is told ('-': it reads its list); of a worker, by which bridge it is.
function leases.hand_over(id, record, to, via, lease_ms)
  local fence = holdings.next_fence()
  redis.call('HSET', key('active'), id, to .. ':' .. fence)
  journal.note('claimed ' .. fence .. ' ' .. attempts.number(records.read(record)) .. ' ' .. id)
  timers.set('leases', id, now_ms + lease_ms)
  local external = mode == 'external'
  local told = external and ' ' .. via or ''
  local hand = fence .. ' ' .. id .. string.format(' %.0f', lease_ms) .. told .. '\n' .. record
  leases.put_in_hand(to, hand, lease_ms)
  -- Of a worker it is its bridge that asked.
  if via ~= '-' and not external then redis.call('PUBLISH', channel('handed:' .. via), to) end
  awaiters.forget(to)
  return hand
end

-- Goes back to the front, uncounted; what a worker had accepted has stalled.
function leases.take_back(awaiter, owner, id, cause)
  local lost
  redis.call('ZREM', key('leases'), id)
  if redis.call('ZREM', key('accepted'), id) == 1 then
    local micros = string.format('%.0f', math.max(0, now_us - tonumber(holdings.fence_of(owner))))
    lost = { id = id, outcome = 'stalled', cause = cause, micros = micros, count = failures.count_loss }
  end
  -- It may have been handed something else meanwhile.
  if leases.in_hand(awaiter) == id then redis.call('UNLINK', leases.hand_key(awaiter)) end
  holdings.hand_back(awaiter, { id }, lost)
end

-- What was not acknowledged in time goes back, in its order; what was accepted, if its worker was silent for so long.
function leases.lapse()
  local due = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', string.format('%.0f', now_ms),
    'LIMIT', 0, LAPSED_PER_CALL)
  for i = #due, 1, -1 do
    if returned_bytes > READ_BYTES then break end
    local id = due[i]
    local owner = redis.call('HGET', key('active'), id)
    if owner then
      leases.take_back(string.match(owner, '^([^:]+):'), owner, id, 'silent')
    else
      redis.call('ZREM', key('leases'), id)
    end
  end
  if mode == 'external' then leases.forget_silent_workers() end
end

-- Items that are older than `item_timeout` are given up: each is dead, and has a line in the failed log.

local EXPIRED_PER_CALL = 200

function leases.expire()
  local due = redis.call('ZRANGEBYSCORE', key('expiries'), '-inf', string.format('%.0f', now_ms),
    'LIMIT', 0, math.max(1, records.readable(EXPIRED_PER_CALL, READ_BYTES)))
  if #due == 0 then return end

  -- The oldest are mostly at the head of their list: such hints go at once. `heads`: place -> the first ones, and how
  -- many of them go. The others are given up after that: to give up a hint may change the heads.
  local heads, others = {}, {}
  local function forget_first_hint(place, id)
    heads[place] = heads[place]
      or { ids = redis.call('LRANGE', (hints.first_list(place)), 0, EXPIRED_PER_CALL - 1), going = 0 }
    local first = heads[place]
    if first.ids[first.going + 1] == id then first.going = first.going + 1 else others[#others + 1] = { place, id } end
  end

  local packed = redis.call('HMGET', key('jobs'), unpack(due))
  local owners = redis.call('HMGET', key('active'), unpack(due))
  local scheduled = redis.call('ZMSCORE', key('scheduled'), unpack(due))
  local error = string.format(
    '{"name":"ItemTimeout","message":"nobody took it within item_timeout = %s s","kind":"permanent","traceback":null}',
    tostring(option('item_timeout_ms') / 1000))
  local fence, old, bytes = nil, {}, 0
  for i, id in ipairs(due) do
    local record = packed[i]
    if not record then
      redis.call('ZREM', key('expiries'), id)
    elseif owners[i] then
      -- It is in somebody's hands: it is looked at again when it comes back. The half tells that it was too old before.
      local lapses = redis.call('ZSCORE', key('leases'), id) or now_ms
      redis.call('ZADD', key('expiries'), string.format('%.1f', tonumber(lapses) + 0.5), id)
    elseif bytes < READ_BYTES then
      local job = records.read(record)
      if scheduled[i] then
        redis.call('ZREM', key('scheduled'), id)
        -- Between two tries: nothing that is scheduled can be claimed.
        journal.note('updated 0 ' .. id)
      else
        forget_first_hint(job and records.place_for(job) or '5', id)
      end
      fence = fence or holdings.next_fence()
      journal.note('claimed ' .. fence .. ' ' .. attempts.number(job) .. ' ' .. id)
      old[#old + 1] = { id = id, fence = fence, micros = '-', record = record, error = error, brief = error }
      bytes = bytes + #record
    end
  end
  for place, first in pairs(heads) do
    if first.going > 0 then
      hints.pop(place, first.going)
      if place == LANE then hints.count(LANE, -first.going) end
    end
  end
  for _, other in ipairs(others) do hints.forget(other[1], other[2]) end
  if #old > 0 then dead.bury(old) end
end
