-- How far running jobs are: `progress`, id -> FRACTION ' ' MS ' ' TEXT, of active jobs only. `progress` is also the channel that
-- names the jobs whose progress has changed or is over, with a blank between them.

-- Asked for once per call: most queues have none, and then that is all it costs.
local some_progress

-- `fraction` (0 to 1) and `text` (one line) were checked by who calls; so was who owns the job.
local function set_progress(id, fraction, text)
  redis.call('HSET', key('progress'), id, string.format('%.6g %.0f ', fraction, now_ms) .. text)
  redis.call('PUBLISH', channel('progress'), id)
  some_progress = true
end

-- To be called wherever ids leave `active`.
local function forget_progress(ids)
  if #ids == 0 then return end
  if some_progress == nil then some_progress = redis.call('EXISTS', key('progress')) == 1 end
  if some_progress and redis.call('HDEL', key('progress'), unpack(ids)) > 0 then
    redis.call('PUBLISH', channel('progress'), table.concat(ids, ' '))
  end
end
