-- The summary of a queue: `summary`, what every call reads, as one string, so that reading and writing it takes one
-- command each (a command costs as much as hashing a journal entry):
--   EPOCH VERSION SEQUENCE HASH BYTES FENCE OTHER LANE SUSPECTS DUE STALE RARE
--   EPOCH, VERSION         of the options; they change whenever an option does
--   SEQUENCE, HASH, BYTES  of the journal: number and hash ('-': none) of its last entry, approximate size
--   FENCE                  of the latest claim
--   OTHER                  hints in lists of priorities other than 5; while it is 0, a claim reads one list only
--   LANE, SUSPECTS         jobs waiting in the retry lane (stale hints excluded); hints of suspects
--   DUE                    no scheduled job is due before this time (ms; 0: there is none)
--   STALE, RARE            0: there is no key `stale`; none of `blocked`, `progress`, `attempts` and `waiters`
-- DUE may be too early, and STALE and RARE may be 1 in vain: then a call looks for what is not there.

local FORMAT = '^(%d+ %d+) (%d+) (%S+) (%d+) (%d+)( (%-?%d+) (%-?%d+) (%-?%d+) (%d+) (%d) (%d))$'

-- Keeps the values that `text` has: for most calls the text is the one that the last call wrote.
local function keep(text)
  local options_version, number, hash, bytes, fence, rest, other, lane, suspects, due, stale, rare
  if text then
    options_version, number, hash, bytes, fence, rest, other, lane, suspects, due, stale, rare =
      string.match(text, FORMAT)
  end
  cached.summary, cached.rest = text, rest
  cached.version, cached.last_hash, cached.last_fence = options_version, hash or '-', fence or '0'
  cached.sequence, cached.journal_bytes = tonumber(number or 0), tonumber(bytes or 0)
  cached.other_hints, cached.in_lane = tonumber(other or 0), tonumber(lane or 0)
  cached.suspect_hints = tonumber(suspects or 0)
  -- Of a lost summary nothing is certain.
  cached.first_due_ms = tonumber(due or 1)
  cached.may_be_stale, cached.may_be_rare = stale ~= '0', rare ~= '0'
end

function summary.read()
  local text = redis.call('GET', key('summary'))
  if text ~= cached.summary then keep(text) end
  version, sequence, last_hash, last_fence = cached.version, cached.sequence, cached.last_hash, cached.last_fence
  journal_bytes, other_hints, in_lane = cached.journal_bytes, cached.other_hints, cached.in_lane
  suspect_hints, first_due_ms = cached.suspect_hints, cached.first_due_ms
  may_be_stale, may_be_rare = cached.may_be_stale, cached.may_be_rare
  suspect_hints_before = suspect_hints
end

-- `number`: the sequence number as text. Joining texts costs less than formatting numbers.
function summary.pack(options_version, number, hash, bytes, fence, rest)
  return options_version .. ' ' .. number .. ' ' .. hash .. ' ' .. string.format('%d', bytes) .. ' ' .. fence .. rest
end

-- Stores the values if they have changed. journal.write does it at the end of a call.
function summary.save()
  if not version then return end
  local rest = cached.rest
  local same = rest and other_hints == cached.other_hints and in_lane == cached.in_lane
    and suspect_hints == cached.suspect_hints and first_due_ms == cached.first_due_ms
    and may_be_stale == cached.may_be_stale and may_be_rare == cached.may_be_rare
  if not same then
    rest = string.format(' %d %d %d %d %d %d', other_hints, in_lane, suspect_hints, first_due_ms,
      may_be_stale and 1 or 0, may_be_rare and 1 or 0)
  end
  local text = summary.pack(version, string.format('%d', sequence), last_hash, journal_bytes, last_fence, rest)
  if text == cached.summary then return end
  redis.call('SET', key('summary'), text)
  cached.summary, cached.version, cached.last_hash, cached.last_fence = text, version, last_hash, last_fence
  cached.sequence, cached.journal_bytes = sequence, journal_bytes
  if not same then
    cached.rest, cached.other_hints, cached.in_lane, cached.suspect_hints = rest, other_hints, in_lane, suspect_hints
    cached.first_due_ms, cached.may_be_stale, cached.may_be_rare = first_due_ms, may_be_stale, may_be_rare
  end
end

-- Whether any of the keys that are rare exists.
function summary.has_rare()
  if may_be_rare then
    may_be_rare = redis.call('EXISTS', key('blocked'), key('progress'), key('attempts'), key('waiters')) > 0
  end
  return may_be_rare
end

-- Looks whether the last values are right. Heartbeats do it, so that a wrong one would last for seconds only.
function summary.check()
  may_be_stale, stale_known = redis.call('EXISTS', key('stale')) == 1, true
  may_be_rare = true
  summary.has_rare()
end

-- The queue is gone.
function summary.forget()
  redis.call('UNLINK', key('summary'))
end

-- Increments the version of the options. Call it after each change of them. `of`: the base of this queue or of its fail
-- queue.
function summary.next_version(of)
  local number = redis.call('HINCRBY', of .. ':options', 'version', 1)
  local changed = redis.call('HGET', of .. ':options', 'epoch') .. ' ' .. number
  if of == base then
    version = changed
    summary.save()
  else
    -- Without a summary the next call reads the options anyway.
    local text = redis.call('GET', of .. ':summary')
    if text then redis.call('SET', of .. ':summary', changed .. string.match(text, '^%d+ %d+(.*)$')) end
  end
  return number
end
