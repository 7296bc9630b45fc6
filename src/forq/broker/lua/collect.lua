#!lua flags=allow-oom
-- collect: a scribe takes lines for the failed log in hand. What it has in hand already (it died, or the reply was lost)
-- it gets again, and nothing else: each line is in exactly one hand until it is forgotten or the processor is evicted.
--
-- KEYS[1]  the queue's base
-- ARGV     processor, how long it may stay silent (ms), how many lines at most, bytes after which no more are taken
-- Returns  {OK, line, line ...}; {NO_QUEUE}; {FENCED} if the processor has been evicted
--@include base codes

if not epoch then return { NO_QUEUE } end
local processor, expiry_ms, max_lines, max_bytes = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('ZSCORE', key('graves'), processor) then return { FENCED } end

local hand, bytes = key_of('outbox', processor), 0
local reply = { OK, unpack(redis.call('LRANGE', hand, 0, -1)) }
if #reply > 1 then return reply end
while #reply <= max_lines and bytes < max_bytes do
  local line = redis.call('LMOVE', key('outbox'), hand, 'LEFT', 'RIGHT')
  if not line then break end
  reply[#reply + 1] = line
  bytes = bytes + #line
end
-- Whoever has lines in hand can be evicted: its silence is noticed even if it never sends a heartbeat.
if #reply > 1 then redis.call('ZADD', key('processors'), 'NX', now_ms + expiry_ms, processor) end
return reply
