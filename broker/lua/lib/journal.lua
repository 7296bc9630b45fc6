-- The journal: what one call did, as one stream entry (schema: journal.py). Call write_journal last.

local events = {}

local function note(event)
  events[#events + 1] = event
end

-- Ids never hold spaces, so a list of them is one string.
local function note_ids(verb, fence, ids)
  if #ids > 0 then note(verb .. ' ' .. fence .. ' ' .. table.concat(ids, ' ')) end
end

local function write_journal(actor)
  if #events == 0 or not journal_on then return end
  local text = table.concat(events, '\n')
  local counts = key('counts')
  local sequence = redis.call('HINCRBY', counts, 'journal_sequence', 1)
  redis.call('XADD', key('events'), '*', 'v', 1, 's', sequence, 'a', actor, 'e', text)
  -- 60: what an entry costs besides its text, roughly; the cap is for memory, not for accounting.
  local bytes = redis.call('HINCRBY', counts, 'journal_bytes', #text + 60)
  if bytes > journal_max then
    local keep = math.floor(redis.call('XLEN', key('events')) / 2)
    local trimmed = redis.call('XTRIM', key('events'), 'MAXLEN', keep)
    redis.call('HINCRBY', counts, 'journal_trimmed', trimmed)
    redis.call('HSET', counts, 'journal_bytes', math.floor(bytes / 2))
  end
end
