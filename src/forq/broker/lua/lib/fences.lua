-- The number of the claims of one call: max(last + 1, server time). It never goes back, not even after a failover to a
-- slower clock. No id is claimed twice in one call.

local fence_of_this_call

local function next_fence()
  if not fence_of_this_call then
    fence_of_this_call = string.format('%d', math.max(tonumber(remembered[4] or 0) + 1, now_us))
    remember('fence', fence_of_this_call)
  end
  return fence_of_this_call
end
