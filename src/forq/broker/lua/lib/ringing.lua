-- An item that leaves on request has become ready: whoever awaits it is rung, and asks for it.

local RUNG_PER_CALL = 1000

local function ring(known)
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
local function ring_all()
  for _, awaiter in ipairs(redis.call('HRANDFIELD', key('awaiters'), RUNG_PER_CALL)) do ring(read_awaiter(awaiter)) end
end

ring_awaiters = function()
  if redis.call('EXISTS', key('awaiting')) == 0 then return end
  local others = 0
  for _, id in ipairs(made_ready) do
    local known = first_awaiter(id)
    if known then ring(known) else others = others + 1 end
  end
  -- Who was rung last may have died since: as long as anything waits, each call rings one more.
  if others == 0 and main_waiting() + in_lane > 0 then others = 1 end
  for _ = 1, math.min(others, RUNG_PER_CALL) do
    local known = first_awaiter('')
    if not known then return end
    ring(known)
  end
end
