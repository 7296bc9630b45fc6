-- Items that leave when somebody awaits them: awaiters, what each was handed, leases, items that are too old.

-- Who awaits an item of a queue of the release modes. `awaiters`: AWAITER -> EXPIRES_MS ' ' ARRIVAL ' ' VIA ' ' ID,
-- where ID '' means any item. `awaiting`: ID ' ' ARRIVAL ' ' AWAITER in the order of the alphabet (all scores are 0):
-- the first of an id is the one that came first. One that died without leaving is forgotten when its turn comes, or by
-- chance.

local EXPIRED_AWAITERS_PER_CALL = 1000
local SAMPLED_AWAITERS = 2

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

function awaiters.remove(awaiter)
  local registration = awaiters.read(awaiter)
  if not registration then return end
  redis.call('HDEL', key('awaiters'), awaiter)
  redis.call('ZREM', key('awaiting'), registration.member)
end

-- The first one that awaits this item ('': any item); nil if nobody does.
function awaiters.first(id)
  for _ = 1, EXPIRED_AWAITERS_PER_CALL do
    local member = redis.call('ZRANGEBYLEX', key('awaiting'), '[' .. id .. ' ', '(' .. id .. '!', 'LIMIT', 0, 1)[1]
    if not member then return nil end
    local registration = awaiters.read(string.match(member, '(%S+)$'))
    if registration and registration.member == member and registration.expires_ms > now_ms then return registration end
    redis.call('ZREM', key('awaiting'), member)
    local expired = registration and registration.expires_ms <= now_ms
    if expired then redis.call('HDEL', key('awaiters'), registration.name) end
  end
  too_many_expired = true
end

-- It keeps its place in line as long as it renews in time.
function awaiters.register(awaiter, id, via, valid_ms)
  local registration = awaiters.read(awaiter)
  local in_time = registration and registration.id == id and registration.expires_ms > now_ms
  local arrival = in_time and registration.arrival or string.format('%.0f', now_us)
  if not in_time then awaiters.remove(awaiter) end
  redis.call('HSET', key('awaiters'), awaiter, string.format('%.0f %s %s ', now_ms + valid_ms, arrival, via) .. id)
  redis.call('ZADD', key('awaiting'), 0, id .. ' ' .. arrival .. ' ' .. awaiter)
  -- When all are dead, nothing is left of them.
  redis.call('PEXPIRE', key('awaiters'), 2 * valid_ms)
  redis.call('PEXPIRE', key('awaiting'), 2 * valid_ms)
  for _, other in ipairs(redis.call('HRANDFIELD', key('awaiters'), SAMPLED_AWAITERS)) do
    if awaiters.read(other).expires_ms <= now_ms then awaiters.remove(other) end
  end
end

-- An item that leaves on request has become ready: whoever awaits it is rung, and asks for it.

local NOTIFIED_PER_CALL = 1000

function awaiters.notify(registration)
  -- It is not rung again until it asks: the next item rings the next one.
  redis.call('ZREM', key('awaiting'), registration.member)
  if registration.via ~= '-' then
    redis.call('PUBLISH', channel('handed:' .. registration.via), registration.name)
    return
  end
  local list = key_of('awaiter', registration.name)
  if redis.call('EXISTS', list) == 1 then return end
  redis.call('RPUSH', list, '')
  redis.call('PEXPIRE', list, string.format('%.0f', registration.expires_ms - now_ms))
end

-- Everybody: the queue is gone, or what was ready all the time may be had again.
function awaiters.notify_all()
  for _, awaiter in ipairs(redis.call('HRANDFIELD', key('awaiters'), NOTIFIED_PER_CALL)) do
    awaiters.notify(awaiters.read(awaiter))
  end
end

function awaiters.notify_ready()
  if redis.call('EXISTS', key('awaiting')) == 0 then return end
  local others = 0
  for _, id in ipairs(ready_ids) do
    local registration = awaiters.first(id)
    if registration then awaiters.notify(registration) else others = others + 1 end
  end
  -- Who was rung last may have died since: as long as anything waits, each call rings one more.
  if others == 0 and hints.main_waiting() + in_lane > 0 then others = 1 end
  for _ = 1, math.min(others, NOTIFIED_PER_CALL) do
    local registration = awaiters.first('')
    if not registration then return end
    awaiters.notify(registration)
  end
end

-- What an awaiter has in hand: `awaiter:A`, a list of one entry. FENCE ' ' ID ' ' LEASE_MS '\n' RECORD: it was handed
-- that; in mode external, where an awaiter is a worker, LEASE_MS is followed by ' ' and the bridge that was told. '':
-- it was rung. 'acked ' FENCE: it has acknowledged that. Of an external worker also 'accepted ' FENCE ' ' ID, and
-- 'ended ' OUTCOME ' ' ID. `accepted`: jobs that external workers have accepted, by their last sign of life (ms).
-- `workers`: these by when they were last seen.

local REMOVED_WORKERS_PER_CALL = 200

function leases.entry_key(awaiter)
  return key_of('awaiter', awaiter)
end

-- The id it has in hand, and whether it has accepted that, and the bridge that was told; nil if it has none.
function leases.read_entry(awaiter)
  local entry = redis.call('LINDEX', leases.entry_key(awaiter), 0) or ''
  local accepted, id, rest = string.match(entry, '^(%a* ?)%d+ (%S+)([^\n]*)')
  return id, accepted == 'accepted ', id and string.match(rest, '^ %d+ (%S+)')
end

function leases.write_entry(awaiter, entry, ms)
  redis.call('DEL', leases.entry_key(awaiter))
  redis.call('RPUSH', leases.entry_key(awaiter), entry)
  redis.call('PEXPIRE', leases.entry_key(awaiter), string.format('%.0f', ms))
end

function leases.touch_worker(worker)
  redis.call('ZADD', key('workers'), string.format('%.0f', now_ms), worker)
end

-- Workers that were silent for a whole lease are idle no more; what they held has lapsed by itself.
function leases.remove_silent_workers()
  local silent = redis.call('ZRANGEBYSCORE', key('workers'), '-inf', string.format('%.0f', now_ms - option('lease_ms')),
    'LIMIT', 0, REMOVED_WORKERS_PER_CALL)
  for _, worker in ipairs(silent) do
    redis.call('ZREM', key('workers'), worker)
    awaiters.remove(worker)
  end
end

-- An item is handed over: it is active, owned by an awaiter under a fence, until that acknowledges it or its lease
-- lapses. In mode external that is a worker, which accepts it and then says again and again that it is alive.

local LAPSED_PER_CALL = 200
local MAX_SKIPS = 1000

-- Whether this is what the awaiter was handed and still holds, and not what it had of an item that has gone back, or of
-- an earlier queue of this name.
function leases.is_held(awaiter, entry)
  local id = string.match(entry, '^%d+ (%S+) ')
  return id and claims.is_owner(awaiter, redis.call('HGET', key('active'), id))
end

-- The next job of a list and its record; its hint is taken out. nil if there is none.
function leases.take_from(place)
  for _ = 1, MAX_SKIPS do
    local ids = hints.pop(place, 1)
    if not ids then return nil end
    local id = ids[1]
    if id ~= '' and not hints.consume_stale(place, id) then
      if place == RETRY_PLACE then hints.count(place, -1) end
      local record = redis.call('HGET', key('jobs'), id)
      if not record then
        hints.drop(id)
      elseif redis.call('HEXISTS', key('active'), id) == 0 then
        return id, record
      end
    end
  end
  too_many_skipped = true
end

function leases.take_next()
  if other_hints == 0 then return leases.take_from('5') end
  for priority = 0, 9 do
    local id, record = leases.take_from(tostring(priority))
    if id or too_many_skipped then return id, record end
  end
end

-- `to`: the awaiter's name, and by which clerk it is told ('-': it reads its list); of a worker, by which bridge it is.
function leases.start(id, record, awaiter, via, lease_ms)
  local fence = claims.next_fence()
  redis.call('HSET', key('active'), id, awaiter .. ':' .. fence)
  journal.note('claimed ' .. fence .. ' ' .. attempts.number(records.read(record)) .. ' ' .. id)
  timers.set('leases', id, now_ms + lease_ms)
  local external = mode == 'external'
  local bridge = external and ' ' .. via or ''
  local entry = fence .. ' ' .. id .. string.format(' %.0f', lease_ms) .. bridge .. '\n' .. record
  leases.write_entry(awaiter, entry, lease_ms)
  -- Of a worker it is its bridge that asked.
  if via ~= '-' and not external then redis.call('PUBLISH', channel('handed:' .. via), awaiter) end
  awaiters.remove(awaiter)
  return entry
end

-- Goes back to the front, uncounted; what a worker had accepted has stalled.
function leases.revoke(awaiter, owner, id, cause)
  local lost
  redis.call('ZREM', key('leases'), id)
  if redis.call('ZREM', key('accepted'), id) == 1 then
    local micros = string.format('%.0f', math.max(0, now_us - tonumber(claims.fence_of(owner))))
    lost = { id = id, outcome = 'stalled', cause = cause, micros = micros, count = failures.count_loss }
  end
  -- It may have been handed something else meanwhile.
  if leases.read_entry(awaiter) == id then redis.call('UNLINK', leases.entry_key(awaiter)) end
  claims.return_jobs(awaiter, { id }, lost)
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
      leases.revoke(string.match(owner, '^([^:]+):'), owner, id, 'silent')
    else
      redis.call('ZREM', key('leases'), id)
    end
  end
  if mode == 'external' then leases.remove_silent_workers() end
end

-- Items that are older than `item_timeout` are given up: each is dead, and has a line in the failed log.

local EXPIRED_PER_CALL = 200

function leases.expire_items()
  local due = redis.call('ZRANGEBYSCORE', key('expiries'), '-inf', string.format('%.0f', now_ms),
    'LIMIT', 0, math.max(1, records.readable(EXPIRED_PER_CALL, READ_BYTES)))
  if #due == 0 then return end

  -- The oldest are mostly at the head of their list: such hints go at once. `heads`: place -> the first ones, and how
  -- many of them go. The others are given up after that: to give up a hint may change the heads.
  local heads, others = {}, {}
  local function forget_first_hint(place, id)
    heads[place] = heads[place]
      or { ids = redis.call('LRANGE', (hints.first_list(place)), 0, EXPIRED_PER_CALL - 1), count = 0 }
    local first = heads[place]
    if first.ids[first.count + 1] == id then first.count = first.count + 1 else others[#others + 1] = { place, id } end
  end

  local packed = redis.call('HMGET', key('jobs'), unpack(due))
  local owners = redis.call('HMGET', key('active'), unpack(due))
  local scheduled = redis.call('ZMSCORE', key('scheduled'), unpack(due))
  local error = string.format(
    '{"name":"ItemTimeout","message":"nobody took it within item_timeout = %s s","kind":"permanent","traceback":null}',
    tostring(option('item_timeout_ms') / 1000))
  local fence, expired, bytes = nil, {}, 0
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
      fence = fence or claims.next_fence()
      journal.note('claimed ' .. fence .. ' ' .. attempts.number(job) .. ' ' .. id)
      expired[#expired + 1] = { id = id, fence = fence, micros = '-', record = record, error = error, brief = error }
      bytes = bytes + #record
    end
  end
  for place, first in pairs(heads) do
    if first.count > 0 then
      hints.pop(place, first.count)
      if place == RETRY_PLACE then hints.count(RETRY_PLACE, -first.count) end
    end
  end
  for _, other in ipairs(others) do hints.remove(other[1], other[2]) end
  if #expired > 0 then dead.bury(expired) end
end
