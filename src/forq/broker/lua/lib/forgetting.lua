-- Done jobs are forgotten when others are done (done_jobs.lua); and from time to time, while none is.

-- A queue that keeps nothing any more forgets all at once.
local function forget_done_in_time(most)
  if redis.call('EXISTS', key('done')) == 0 then return end
  if option('keep_done_ms') == 0 then
    redis.call('UNLINK', key('done'), key('done:jobs'))
  else
    forget_done(most)
  end
end
