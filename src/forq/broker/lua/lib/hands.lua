-- What an awaiter has in hand: `awaiter:A`, a list of one entry. FENCE ' ' ID ' ' LEASE_MS '\n' RECORD: it was handed that;
-- in mode external, where an awaiter is a worker, LEASE_MS is followed by ' ' and the bridge that was told. '': it was rung.
-- 'acked ' FENCE: it has acknowledged that. Of an external worker also 'accepted ' FENCE ' ' ID, and 'ended ' OUTCOME ' ' ID.
-- `accepted`: jobs that external workers have accepted, by their last sign of life (ms). `workers`: these by when they were last seen.

local FORGOTTEN_PER_LAPSE = 200

local function hand_key(awaiter)
  return key_of('awaiter', awaiter)
end

-- The id it has in hand, and whether it has accepted that, and the bridge that was told; nil if it has none.
local function in_hand(awaiter)
  local accepted, id, rest = string.match(redis.call('LINDEX', hand_key(awaiter), 0) or '', '^(%a* ?)%d+ (%S+)([^\n]*)')
  return id, accepted == 'accepted ', id and string.match(rest, '^ %d+ (%S+)')
end

local function put_in_hand(awaiter, hand, ms)
  redis.call('DEL', hand_key(awaiter))
  redis.call('RPUSH', hand_key(awaiter), hand)
  redis.call('PEXPIRE', hand_key(awaiter), string.format('%.0f', ms))
end

local function see_worker(worker)
  redis.call('ZADD', key('workers'), string.format('%.0f', now_ms), worker)
end

-- Workers that were silent for a whole lease are idle no more; what they held has lapsed by itself.
local function forget_silent_workers()
  local silent = redis.call('ZRANGEBYSCORE', key('workers'), '-inf', string.format('%.0f', now_ms - option('lease_ms')),
    'LIMIT', 0, FORGOTTEN_PER_LAPSE)
  for _, worker in ipairs(silent) do
    redis.call('ZREM', key('workers'), worker)
    forget_awaiter(worker)
  end
end
