-- The number of a claim: max(last + 1, server time). It never goes back, not even after a failover to a slower clock.

local function next_fence()
  local fence = string.format('%.0f', math.max(tonumber(remembered[4] or 0) + 1, now_us))
  remembered[4] = fence
  remember('fence', fence)
  return fence
end
