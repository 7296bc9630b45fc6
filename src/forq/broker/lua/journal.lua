-- The journal: what one call did, as one stream entry that is chained to the one before it (schema: journal.py).

-- What an entry costs besides its text, roughly; the cap is for memory, not for accounting.
local ENTRY_BYTES = 150
local EXACT_TRIM_MAX = 100000

-- For the field `name` of `counts`, which is written at the end of the call.
function journal.set_count(name, value)
  new_counts[#new_counts + 1] = name
  new_counts[#new_counts + 1] = value
end

function journal.note(event)
  events[#events + 1] = event
end

-- Ids never hold spaces, so a list of them is one string.
function journal.note_ids(verb, fence, ids)
  if #ids > 0 then journal.note(verb .. ' ' .. fence .. ' ' .. table.concat(ids, ' ')) end
end

-- Entries go from the old end: what every consumer has read for good, up to the last such entry, which stays (readers
-- know their place by it); and if the journal is too long, its older half, read or not. What no consumer can read any
-- more is counted.
function journal.trim(too_long)
  local stream = key('events')

  -- nil if there is no consumer; '0-0' if one of them has said what cannot be: then nothing is known to be read.
  local function lowest_watermark()
    local consumers = redis.call('HKEYS', key('journal:watermarks'))
    if #consumers == 0 then return nil end
    local lowest, lowest_ms, lowest_number = nil, math.huge, math.huge
    for _, id in ipairs(redis.call('HMGET', key('journal:watermarks'), unpack(consumers))) do
      local ms, number = string.match(id, '^(%d+)-(%d+)$')
      if not ms or #ms > 15 or #number > 15 then return '0-0' end
      ms, number = tonumber(ms), tonumber(number)
      if ms < lowest_ms or (ms == lowest_ms and number < lowest_number) then
        lowest, lowest_ms, lowest_number = id, ms, number
      end
    end
    -- Ahead of the last entry: these are not the entries that it has read (the server's data is older).
    if #redis.call('XRANGE', stream, lowest, '+', 'COUNT', 1) == 0 then return '0-0' end
    return lowest
  end

  local before, lowest, lost = redis.call('XLEN', stream), lowest_watermark(), 0
  if lowest and before > EXACT_TRIM_MAX and not too_long then
    -- Of a very long stream whole nodes only, and not all at once.
    redis.call('XTRIM', stream, 'MINID', '~', lowest, 'LIMIT', EXACT_TRIM_MAX)
  elseif lowest then
    redis.call('XTRIM', stream, 'MINID', lowest)
  end
  if too_long then
    local read = lowest and #redis.call('XRANGE', stream, lowest, lowest) or 0
    local trimmed = redis.call('XTRIM', stream, 'MAXLEN', math.max(1, math.floor(before / 2)))
    if lowest then lost = trimmed - read end
  end
  local left = redis.call('XLEN', stream)
  if left == before then return end
  -- Which bytes went is not known: entries count as equally long.
  local bytes = tonumber(redis.call('HGET', key('counts'), 'journal_bytes') or 0)
  redis.call('HSET', key('counts'), 'journal_bytes', math.floor(bytes * left / before))
  redis.call('HINCRBY', key('counts'), 'journal_trimmed', before - left)
  if lost > 0 then redis.call('HINCRBY', key('counts'), 'journal_lost', lost) end
end

-- Call it last, also if there is nothing to tell: what is to be remembered is written here.
function journal.write(actor)
  local bytes, refused = 0, false
  if #events > 0 and journal_on then
    local text, time = table.concat(events, '\n'), string.format('%d', now_us)
    local sequence = string.format('%d', tonumber(stored_counts[1] or 0) + 1)
    local hash = redis.sha1hex((stored_counts[2] or '') .. '\n' .. epoch .. ' ' .. sequence .. ' ' .. time .. ' '
      .. actor .. '\n' .. text)
    -- By now the call has changed the queue and must not fail: what is refused leaves a gap in the sequence.
    refused = redis.pcall('XADD', key('events'), '*', 'v', '3', 'q', epoch, 's', sequence, 't', time, 'a', actor,
      'e', text, 'h', hash).err
    journal.set_count('journal_sequence', sequence)
    journal.set_count('journal_hash', hash)
    if not refused then
      bytes = tonumber(stored_counts[3] or 0) + #text + ENTRY_BYTES
      journal.set_count('journal_bytes', bytes)
    end
  end
  if #new_counts > 0 then redis.call('HSET', key('counts'), unpack(new_counts)) end
  if refused then redis.call('HINCRBY', key('counts'), 'journal_lost', 1) end
  if bytes > journal_max then journal.trim(true) end
end
