-- A job that was lost with its worker too often is not run again; looked at when it is claimed, with the limits of that moment.

-- Why it is not, as an error in JSON; nil if it is.
local function used_up(job, max_stalls, max_timeouts)
  local text = '{"name":"%s","message":"the number of attempts that %s is %d, and %s is %d","kind":"stall","traceback":null}'
  if job.stalls > max_stalls then
    return string.format(text, 'StallError', 'died with their process', job.stalls, 'max_stalls', max_stalls)
  elseif job.timeouts > max_timeouts then
    return string.format(text, 'TimeoutError', 'timed out', job.timeouts, 'max_timeouts', max_timeouts)
  end
end
