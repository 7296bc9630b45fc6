-- Schedules. `schedules`: KEY -> RULE '\n' POLICY '\n' DATA (scheduling.py); `schedules:next`: KEY by its next tick (ms).
-- Ticks are computed in Python, which gets RULE and POLICY, the head; whoever comes back with a plan has to show the same
-- head.

local TOLD_PER_CALL = 100

-- The two first lines of a definition, and the rest; nil if it is broken.
local function read_definition(definition)
  return string.match(definition, '^([^\n]*\n[^\n]*)\n(.*)$')
end

-- KEY, tick and head of each tick that is due, behind what `reply` has already; not of those that the caller cannot fire.
local function tell_due_ticks(reply, refused)
  local leave_out = {}
  for _, name in ipairs(refused) do leave_out[name] = true end
  local due = redis.call('ZRANGEBYSCORE', key('schedules:next'), '-inf', string.format('%.0f', now_ms), 'WITHSCORES',
    'LIMIT', 0, TOLD_PER_CALL + #refused)
  for at = 1, #due, 2 do
    local definition = not leave_out[due[at]] and redis.call('HGET', key('schedules'), due[at])
    if definition then
      reply[#reply + 1] = due[at]
      reply[#reply + 1] = due[at + 1]
      reply[#reply + 1] = read_definition(definition) or ''
    elseif not leave_out[due[at]] then
      redis.call('ZREM', key('schedules:next'), due[at])
    end
  end
  return reply
end
