-- Leases of the release modes: awaiters, their leased items, and items that expire. In mode external the awaiters are
-- workers behind a bridge.

-- `awaiters`: AWAITER -> EXPIRES_MS ' ' ARRIVAL ' ' VIA ' ' ID, where ID '' means any item. `awaiting`: ID ' ' ARRIVAL
-- ' ' AWAITER, all with score 0, so the first one of an id arrived first. Expired awaiters are removed when it is their
-- turn, or by random sampling.

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

-- The first awaiter of this item ('': of any item); nil if there is none.
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

-- An awaiter keeps its arrival time if it renews before it expires.
function awaiters.register(awaiter, id, via, valid_ms)
  local registration = awaiters.read(awaiter)
  local in_time = registration and registration.id == id and registration.expires_ms > now_ms
  local arrival = in_time and registration.arrival or string.format('%.0f', now_us)
  if not in_time then awaiters.remove(awaiter) end
  redis.call('HSET', key('awaiters'), awaiter, string.format('%.0f %s %s ', now_ms + valid_ms, arrival, via) .. id)
  redis.call('ZADD', key('awaiting'), 0, id .. ' ' .. arrival .. ' ' .. awaiter)
  -- Redis deletes both when all awaiters have expired.
  redis.call('PEXPIRE', key('awaiters'), 2 * valid_ms)
  redis.call('PEXPIRE', key('awaiting'), 2 * valid_ms)
  for _, other in ipairs(redis.call('HRANDFIELD', key('awaiters'), SAMPLED_AWAITERS)) do
    if awaiters.read(other).expires_ms <= now_ms then awaiters.remove(other) end
  end
end

local NOTIFIED_PER_CALL = 1000

function awaiters.notify(registration)
  -- Notified once; it registers again when it asks for the item. The next item notifies the next awaiter.
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

-- For a deleted queue, and after a pause.
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
  -- The awaiter notified last may have died: while items wait, each call notifies one more.
  if others == 0 and hints.main_waiting() + in_lane > 0 then others = 1 end
  for _ = 1, math.min(others, NOTIFIED_PER_CALL) do
    local registration = awaiters.first('')
    if not registration then return end
    awaiters.notify(registration)
  end
end

-- An awaiter's entry: `awaiter:A`, a list with one element.
--   FENCE ' ' ID ' ' LEASE_MS '\n' RECORD    its leased item; in mode external LEASE_MS is followed by ' ' BRIDGE
--   ''                                       it was notified
--   'acked ' FENCE                           it has acknowledged that item
--   'accepted ' FENCE ' ' ID                 an external worker has accepted that job
--   'ended ' OUTCOME ' ' ID                  an external worker has finished that job
-- `accepted`: jobs accepted by external workers, by last sign of life (ms). `workers`: external workers by last seen.

local REMOVED_WORKERS_PER_CALL = 200

function leases.entry_key(awaiter)
  return key_of('awaiter', awaiter)
end

-- Returns the id of the leased item, whether it was accepted, and the bridge; nil if there is none.
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

-- Workers silent for a whole lease no longer count as idle. Their leases lapse separately.
function leases.remove_silent_workers()
  local silent = redis.call('ZRANGEBYSCORE', key('workers'), '-inf', string.format('%.0f', now_ms - option('lease_ms')),
    'LIMIT', 0, REMOVED_WORKERS_PER_CALL)
  for _, worker in ipairs(silent) do
    redis.call('ZREM', key('workers'), worker)
    awaiters.remove(worker)
  end
end

-- A leased item is active and owned by an awaiter until it is acknowledged or the lease lapses. An external worker
-- accepts it and then renews the lease.

local LAPSED_PER_CALL = 200
local MAX_SKIPS = 1000

-- False for an entry of an item that was returned, or of an earlier queue of this name.
function leases.is_held(awaiter, entry)
  local id = string.match(entry, '^%d+ (%S+) ')
  return id and claims.is_owner(awaiter, redis.call('HGET', key('active'), id))
end

-- Removes the next hint of a place; returns the job's id and record, nil if there is none.
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

-- Leases an item. `via`: the clerk that the awaiter is connected to ('-': it blocks on its own list), or its bridge.
function leases.start(id, record, awaiter, via, lease_ms)
  local fence = claims.next_fence()
  redis.call('HSET', key('active'), id, awaiter .. ':' .. fence)
  journal.note('claimed ' .. fence .. ' ' .. attempts.number(records.read(record)) .. ' ' .. id)
  timers.set('leases', id, now_ms + lease_ms)
  local external = mode == 'external'
  local bridge = external and ' ' .. via or ''
  local entry = fence .. ' ' .. id .. string.format(' %.0f', lease_ms) .. bridge .. '\n' .. record
  leases.write_entry(awaiter, entry, lease_ms)
  -- A bridge gets the item in the reply of await.
  if via ~= '-' and not external then redis.call('PUBLISH', channel('handed:' .. via), awaiter) end
  awaiters.remove(awaiter)
  return entry
end

-- Returns an item to the front. An unaccepted one is not counted; an accepted one has stalled.
function leases.revoke(awaiter, owner, id, cause)
  local lost
  redis.call('ZREM', key('leases'), id)
  if redis.call('ZREM', key('accepted'), id) == 1 then
    lost = { id = id, outcome = 'stalled', cause = cause, micros = claims.micros_since(claims.fence_of(owner)) }
  end
  -- The entry may be about another item by now.
  if leases.read_entry(awaiter) == id then redis.call('UNLINK', leases.entry_key(awaiter)) end
  claims.return_jobs(awaiter, { id }, lost)
end

-- Returns items whose lease has lapsed, in their order.
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

local EXPIRED_PER_CALL = 200

function leases.expire_items()
  local due = redis.call('ZRANGEBYSCORE', key('expiries'), '-inf', string.format('%.0f', now_ms),
    'LIMIT', 0, math.max(1, records.readable(EXPIRED_PER_CALL, READ_BYTES)))
  if #due == 0 then return end

  -- Expired items are mostly at the head of their list: these hints are popped at once. `heads`: place -> first hints,
  -- and how many of them to pop. The others are removed afterwards, since that may change the heads.
  local heads, others = {}, {}
  local function remove_hint(place, id)
    heads[place] = heads[place]
      or { ids = redis.call('LRANGE', (hints.first_list(place)), 0, EXPIRED_PER_CALL - 1), count = 0 }
    local head = heads[place]
    if head.ids[head.count + 1] == id then head.count = head.count + 1 else others[#others + 1] = { place, id } end
  end

  local packed = redis.call('HMGET', key('jobs'), unpack(due))
  local owners = redis.call('HMGET', key('active'), unpack(due))
  local scheduled = redis.call('ZMSCORE', key('scheduled'), unpack(due))
  local error = string.format(
    '{"name":"ItemTimeout","message":"not taken within item_timeout = %s s","kind":"permanent","traceback":null}',
    tostring(option('item_timeout_ms') / 1000))
  local fence, expired, bytes = nil, {}, 0
  for i, id in ipairs(due) do
    local record = packed[i]
    if not record then
      redis.call('ZREM', key('expiries'), id)
    elseif owners[i] then
      -- Leased: checked again when the lease lapses. The half millisecond marks that it had expired before.
      local lapses = redis.call('ZSCORE', key('leases'), id) or now_ms
      redis.call('ZADD', key('expiries'), string.format('%.1f', tonumber(lapses) + 0.5), id)
    elseif bytes < READ_BYTES then
      local job = records.read(record)
      if scheduled[i] then
        redis.call('ZREM', key('scheduled'), id)
        -- It was between two attempts; 'updated' makes it waiting in the journal, so that it can be claimed.
        journal.note('updated 0 ' .. id)
      else
        remove_hint(job and records.place_for(job) or '5', id)
      end
      fence = fence or claims.next_fence()
      journal.note('claimed ' .. fence .. ' ' .. attempts.number(job) .. ' ' .. id)
      expired[#expired + 1] = { id = id, fence = fence, micros = '-', record = record, error = error, brief = error }
      bytes = bytes + #record
    end
  end
  for place, head in pairs(heads) do
    if head.count > 0 then
      hints.pop(place, head.count)
      if place == RETRY_PLACE then hints.count(RETRY_PLACE, -head.count) end
    end
  end
  for _, other in ipairs(others) do hints.remove(other[1], other[2]) end
  if #expired > 0 then dead.bury(expired) end
end
