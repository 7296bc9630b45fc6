-- A job of a schedule is stored, as enqueue does it. DATA and IDENTIFIER are JSON that nobody decodes here.

local function run_id(name, policy, suffix)
  return 'schedule:' .. name .. (policy.overlap == 'queue' and ':' .. suffix or '')
end

local function is_unfinished(id)
  return redis.call('HEXISTS', key('jobs'), id) == 1
end

local function is_full()
  local max_items = option('max_items')
  return max_items > 0 and redis.call('HLEN', key('jobs')) + redis.call('HLEN', key('blocked')) >= max_items
end

local function store_run(id, policy, identifier, data, run_at_ms)
  local priority = string.format('%d', policy.priority)
  local body = '[' .. identifier .. ',' .. cjson.encode(policy.type) .. ',' .. data .. ']'
  redis.call('HSET', key('jobs'), id, string.format('%s%s %.0f\n', run_at_ms > now_ms and 'd' or 'p', priority, now_ms) .. body)
  note_size(#body, base)
  note_ids('enqueued', 0, { id })
  make_ready(id, priority, run_at_ms)
  set_expiry(id, run_at_ms)
end
