-- The journal: the events of one call, as one stream entry chained to the previous one (schema: journal.py).

-- Approximate overhead of an entry in bytes. The cap limits memory, so it need not be exact.
local ENTRY_BYTES = 150
local EXACT_TRIM_MAX = 100000

-- Sets a field of `counts`, which holds what few calls need; journal.write stores it at the end of the call.
function journal.set_count(name, value)
  new_counts[#new_counts + 1] = name
  new_counts[#new_counts + 1] = value
end

function journal.note(event)
  events[#events + 1] = event
end

-- Ids contain no spaces, so a list of them is one string.
function journal.note_ids(verb, fence, ids)
  if #ids > 0 then journal.note(verb .. ' ' .. fence .. ' ' .. table.concat(ids, ' ')) end
end

-- Removes entries that every consumer has read, except the last one: readers continue from it. If the journal is too
-- long, also removes its older half, read or not, and counts the entries that a consumer has lost.
function journal.trim(too_long)
  local stream = key('events')

  -- nil without consumers; '0-0' if a watermark is invalid: then no entry counts as read.
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
    -- A watermark after the last entry is invalid: the server lost data since the consumer read it.
    if #redis.call('XRANGE', stream, lowest, '+', 'COUNT', 1) == 0 then return '0-0' end
    return lowest
  end

  local before, lowest, lost = redis.call('XLEN', stream), lowest_watermark(), 0
  if lowest and before > EXACT_TRIM_MAX and not too_long then
    -- Very long stream: remove whole nodes only, a limited number per call.
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
  -- The size of the removed entries is unknown, so assume that all entries are equally long.
  journal_bytes = math.floor(journal_bytes * left / before)
  redis.call('HINCRBY', key('counts'), 'journal_trimmed', before - left)
  if lost > 0 then redis.call('HINCRBY', key('counts'), 'journal_lost', lost) end
end

-- Must be the last step of a call, even without events: it also stores the counts and the summary.
function journal.write(actor)
  if #new_counts > 0 then redis.call('HSET', key('counts'), unpack(new_counts)) end
  if #events > 0 and journal_on then journal.append(actor) end
  summary.save()
end

-- Returns the hash of an entry, and the entry. `number`: its sequence number as text.
function journal.pack(of_epoch, number, us, actor, hash_before, text)
  local about = of_epoch .. ' ' .. number .. ' ' .. us .. ' ' .. actor
  local hash = redis.sha1hex((hash_before == '-' and '' or hash_before) .. '\n' .. about .. '\n' .. text)
  return hash, about .. ' ' .. hash .. '\n' .. text
end

-- Stores an entry; false if the server refuses it. The call has changed the queue by now and must not fail: a refused
-- entry leaves a gap in the sequence. One field costs a third less than one per value.
function journal.store(events_key, counts_key, entry)
  if not redis.pcall('XADD', events_key, '*', 'v4', entry).err then return true end
  redis.call('HINCRBY', counts_key, 'journal_lost', 1)
  return false
end

-- What an entry with this text adds to journal_bytes.
function journal.bytes_of(text)
  return #text + ENTRY_BYTES
end

function journal.append(actor)
  local text = #events == 1 and events[1] or table.concat(events, '\n')
  sequence = sequence + 1
  local hash, entry = journal.pack(epoch, string.format('%d', sequence), now_text(), actor, last_hash, text)
  last_hash = hash
  if not journal.store(key('events'), key('counts'), entry) then return end
  journal_bytes = journal_bytes + journal.bytes_of(text)
  if journal_bytes > journal_max then journal.trim(true) end
end
