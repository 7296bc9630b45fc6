-- The three calls of a plain job that comes alone, each in as few steps as possible: enqueue, claim (turn), settle.
-- Each returns nil for any other job, queue or call: then nothing has changed, and the verb of that name does it. They
-- work on the cached values of the queue, and set no variable of the call.

-- Whether the queue needs nothing but what these do, as far as its cached values tell.
local function is_simple(queue)
  return queue and queue.is_plain and queue.options_version == queue.version and queue.other_hints == 0
    and queue.in_lane == 0 and queue.suspect_hints == 0
end

-- The server's time in µs as text, and in ms.
local function read_time()
  local now = redis.call('TIME')
  return now[1] .. string.sub('00000' .. now[2], -6), now[1] * 1000 + (now[2] - now[2] % 1000) / 1000
end

local function worker_keys(of, processor, worker)
  local own = of .. ':processor:' .. processor
  return own .. ':workers', own .. ':worker:' .. worker .. ':processing'
end

-- Journals an event and stores the summary. One command does that and checks that the cached values were those that are
-- stored. If not, returns false, and nothing has changed.
local function record(queue, us, actor, event, fence)
  local names, number = queue.keys, string.format('%d', queue.sequence + 1)
  local bytes = queue.journal_bytes + journal.bytes_of(event)
  if bytes > queue.journal_max then return false end
  local hash, entry = journal.pack(queue.epoch, number, us, actor, queue.last_hash, event)
  local text = summary.pack(queue.version, number, hash, bytes, fence, queue.rest)
  local before = redis.call('SET', names.summary, text, 'GET')
  if before ~= queue.summary then
    if before then redis.call('SET', names.summary, before) else redis.call('DEL', names.summary) end
    return false
  end
  if not journal.store(names.events, names.counts, entry) then
    bytes = queue.journal_bytes
    text = summary.pack(queue.version, number, hash, bytes, fence, queue.rest)
    redis.call('SET', names.summary, text)
  end
  queue.summary, queue.sequence, queue.last_hash = text, queue.sequence + 1, hash
  queue.journal_bytes, queue.last_fence = bytes, fence
  return true
end

-- One new job of priority 5 that may run at once.
function quick.enqueue(keys, args)
  local queue, id, body = CACHE.queues[keys[1]], args[3], args[5]
  if not is_simple(queue) or args[1] ~= queue.options.protocol or args[4] ~= '5' or args[6]
    or #body > queue.small_body then
    return nil
  end
  local names, fence, us = queue.keys, queue.last_fence, read_time()
  if redis.call('HSETNX', names.jobs, id, 'p5 ' .. us .. '\n' .. body) == 0 then return nil end
  if not record(queue, us, '-', 'enqueued 0 ' .. id, fence) then
    redis.call('HDEL', names.jobs, id)
    return nil
  end
  redis.call('RPUSH', names.pending, id)
  return { OK, queue.epoch .. ' ' .. fence .. ' ' .. us }
end

-- A worker that waited claims the only id that BLMOVE has moved to it.
function quick.turn(keys, args)
  local queue, worker, turn = CACHE.queues[keys[1]], args[3], args[4]
  if args[7] ~= 'waiting' or args[5] ~= '1' or not is_simple(queue) or args[1] ~= queue.epoch or queue.paused
    or queue.has_limits or queue.may_be_stale then
    return nil
  end
  local names, us, ms = queue.keys, read_time()
  local is_due = queue.first_due_ms > 0 and queue.first_due_ms <= ms
  if is_due or #us ~= #queue.last_fence or us <= queue.last_fence then return nil end
  local workers, list_key = worker_keys(keys[1], args[2], worker)
  local registered = redis.call('HGET', workers, worker)
  if not registered or tonumber(turn) <= claims.last_turn(registered) then return nil end
  local list = redis.call('LRANGE', list_key, 0, -1)
  local id = list[1]
  if #list ~= 1 or id == '' then return nil end
  local packed = redis.call('HGET', names.jobs, id)
  -- No other flag sorts behind that of plain records.
  if not packed or packed < 'p' then return nil end
  if redis.call('HSETNX', names.active, id, worker .. ':' .. us) == 0 then return nil end
  if not record(queue, us, worker, 'claimed ' .. us .. ' 1 ' .. id, us) then
    redis.call('HDEL', names.active, id)
    return nil
  end
  redis.call('HSET', workers, worker, turn)
  turns.publish_claim(queue, ms, worker, turn)
  local reply = { OK, 0, {}, us, unpack(queue.limits) }
  reply[11], reply[12] = id, packed
  return reply
end

-- One job that succeeded, without a result, in a queue that keeps none.
function quick.settle(keys, args)
  local queue, worker, fence, id = CACHE.queues[keys[1]], args[3], args[4], args[7]
  if not is_simple(queue) or args[1] ~= queue.epoch or args[5] ~= '1' or queue.keeps_done or queue.has_limits
    or queue.may_be_rare then
    return nil
  end
  local names, _, list = queue.keys, worker_keys(keys[1], args[2], worker)
  if redis.call('HGET', names.active, id) ~= worker .. ':' .. fence then return nil end
  local first = redis.call('LPOP', list)
  if first ~= id or not record(queue, (read_time()), worker, 'done ' .. fence .. ' ' .. args[6], queue.last_fence) then
    if first then redis.call('LPUSH', list, first) end
    return nil
  end
  redis.call('HDEL', names.jobs, id)
  redis.call('HDEL', names.active, id)
  redis.call('INCR', names['processed:count'])
  return { OK, {} }
end
