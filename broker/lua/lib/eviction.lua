-- A processor is taken out with all its workers; what each was running is known from its last heartbeat.

local function positions_key(of)
  return key('processor:' .. of .. ':positions')
end

local function evict(silent, cause)
  for _, worker in ipairs(redis.call('HKEYS', workers_key(silent))) do
    local known = redis.call('HGET', positions_key(silent), worker) or '- 0 0'
    local turn, index, running = string.match(known, '^(%S+) (%d+) (%d)$')
    remove_worker(silent, worker, turn, tonumber(index), running == '1', true, cause)
  end
  redis.call('UNLINK', workers_key(silent), positions_key(silent))
  redis.call('ZREM', key('processors'), silent)
  redis.call('ZADD', key('graves'), now_ms + GRAVE_MS, silent)
end
