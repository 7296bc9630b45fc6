-- How far jobs are that say so: `progress`, id -> FRACTION ' ' MS ' ' TEXT.

local function set_progress(id, fraction, text)
  redis.call('HSET', key('progress'), id, fraction .. string.format(' %.0f ', now_ms) .. text)
end

local function forget_progress(ids)
  if #ids > 0 and redis.call('EXISTS', key('progress')) == 1 then redis.call('HDEL', key('progress'), unpack(ids)) end
end
