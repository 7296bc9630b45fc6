-- A processor is taken out with all its workers, some of them per call; what each was running is known from its last
-- heartbeat. It is fenced from the first step on. `evicting`: processor -> cause, while workers of it are left; until its
-- turn comes, each of these may go on taking turns.

local EVICTED_PER_CALL = 16

local function positions_key(of)
  return key_of('processor', of .. ':positions')
end

-- Lines for the failed log that its scribe took and did not live to write: others write them, before all later ones.
local function return_lines(silent)
  local hand, returned = key_of('outbox', silent), false
  while redis.call('LMOVE', hand, key('outbox'), 'RIGHT', 'LEFT') do returned = true end
  if returned then redis.call('PUBLISH', channel('outbox'), string.match(base, '{(.+)}')) end
end

-- The jobs that were running and come back, each with its fate: five values.
local lost_jobs = {}

-- The next workers of a processor; how many were taken out, and how many are left.
local function evict_workers(silent, cause)
  local taken_out = 0
  for _, worker in ipairs(redis.call('HRANDFIELD', workers_key(silent), EVICTED_PER_CALL)) do
    if returned_bytes > READ_BYTES then break end
    taken_out = taken_out + 1
    local known = redis.call('HGET', positions_key(silent), worker) or '- 0 0'
    local turn, index, running = string.match(known, '^(%S+) (%d+) (%d)$')
    local lost = { outcome = 'stalled', cause = cause, silent = true }
    remove_worker(silent, worker, turn, tonumber(index), running == '1', lost)
    if lost.counted then
      lost_jobs[#lost_jobs + 1] = lost.id
      for _, value in ipairs(fate_of_lost(lost)) do lost_jobs[#lost_jobs + 1] = value end
    end
  end
  local left = redis.call('HLEN', workers_key(silent))
  if left == 0 then
    redis.call('UNLINK', positions_key(silent))
    redis.call('HDEL', key('evicting'), silent)
  end
  return taken_out, left
end

-- The first step; safe to repeat.
local function evict(silent, cause)
  redis.call('ZREM', key('processors'), silent)
  redis.call('ZADD', key('graves'), now_ms + GRAVE_MS, silent)
  redis.call('HSET', key('evicting'), silent, cause)
  return_lines(silent)
  return evict_workers(silent, cause)
end

-- The next step of an eviction that is under way, whoever began it; false if there is none.
local function continue_eviction()
  local silent = redis.call('HRANDFIELD', key('evicting'))
  if not silent then return false end
  evict_workers(silent, redis.call('HGET', key('evicting'), silent))
  return true
end
