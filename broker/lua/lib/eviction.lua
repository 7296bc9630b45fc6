-- A processor is taken out with all its workers; what each was running is known from its last heartbeat.

local function positions_key(of)
  return key('processor:' .. of .. ':positions')
end

-- Lines for the failed log that its scribe took and did not live to write: others write them, before all later ones.
local function return_lines(silent)
  local hand, returned = key('outbox:' .. silent), false
  while redis.call('LMOVE', hand, key('outbox'), 'RIGHT', 'LEFT') do returned = true end
  if returned then redis.call('PUBLISH', key('outbox'), string.match(base, '{(.+)}')) end
end

local function evict(silent, cause)
  for _, worker in ipairs(redis.call('HKEYS', workers_key(silent))) do
    local known = redis.call('HGET', positions_key(silent), worker) or '- 0 0'
    local turn, index, running = string.match(known, '^(%S+) (%d+) (%d)$')
    remove_worker(silent, worker, turn, tonumber(index), running == '1', true, cause)
  end
  return_lines(silent)
  redis.call('UNLINK', workers_key(silent), positions_key(silent))
  redis.call('ZREM', key('processors'), silent)
  redis.call('ZADD', key('graves'), now_ms + GRAVE_MS, silent)
end
