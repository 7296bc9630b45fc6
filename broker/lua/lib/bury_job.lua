-- A job that failed for good: its record moves to `dead` under id@fence, apart from live jobs, followed by its error and
-- its attempts.

local DEAD_EXPIRED_PER_CALL = 100

local function forget_dead(members)
  if #members == 0 then return end
  redis.call('ZREM', key('dead'), unpack(members))
  redis.call('HDEL', key('dead:jobs'), unpack(members))
end

local function bury_job(id, fence, micros, record, error)
  redis.call('HDEL', key('jobs'), id)
  redis.call('HDEL', key('active'), id)
  local member = id .. '@' .. fence
  redis.call('HSET', key('dead:jobs'), member, record .. '\n' .. error .. '\n' .. attempts_of(id))
  forget_attempts({ id })
  redis.call('ZADD', key('dead'), now_ms, member)
  redis.call('INCR', key('failed:count'))
  note('dead ' .. fence .. ' ' .. id .. ' ' .. micros)
  unblock({ id })
  local excess = redis.call('ZCARD', key('dead')) - option('dead_max')
  if excess > 0 then forget_dead(redis.call('ZRANGE', key('dead'), 0, math.min(excess, DEAD_EXPIRED_PER_CALL) - 1)) end
  forget_dead(redis.call('ZRANGEBYSCORE', key('dead'), '-inf', now_ms - option('dead_ttl_ms'),
    'LIMIT', 0, DEAD_EXPIRED_PER_CALL))
end
