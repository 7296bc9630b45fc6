-- Registers the verbs as server functions: name, how its call starts, flag. 'allow-oom': may run while the server is
-- out of memory, because it frees memory or must not be lost. 'no-writes': only reads.

local VERBS = {
  { 'accept', open, 'allow-oom' },
  { 'ack', open_counts, 'allow-oom' },
  { 'add_members', open, '' },
  { 'announce', open_queue, 'allow-oom' },
  { 'answer', open_queue, 'allow-oom' },
  { 'attach', open_counts, 'allow-oom' },
  { 'await', open_counts, 'allow-oom' },
  { 'cancel', open_counts, 'allow-oom' },
  { 'collect', open, 'allow-oom' },
  { 'configure', open, 'allow-oom' },
  { 'counts', open, 'no-writes' },
  { 'create', open_counts, 'allow-oom' },
  { 'delete', open_counts, 'allow-oom' },
  { 'describe_flow', open, '' },
  { 'discard', open_counts, 'allow-oom' },
  { 'drop_schedule', open, 'allow-oom' },
  { 'enqueue', open_counts, '' },
  { 'evict', open_counts, 'allow-oom' },
  { 'finish', open_counts, 'allow-oom' },
  { 'fire', open_counts, '' },
  { 'forget', open, 'allow-oom' },
  { 'free', open, 'allow-oom' },
  { 'heartbeat', open_counts, 'allow-oom' },
  { 'join', open, 'allow-oom' },
  { 'lose', open_counts, 'allow-oom' },
  { 'open_batch', open_counts, '' },
  { 'pause', open_counts, 'allow-oom' },
  { 'pause_schedule', open, 'allow-oom' },
  { 'progress', open, '' },
  { 'promote', open_counts, 'allow-oom' },
  { 'recover', open_counts, 'allow-oom' },
  { 'release', open_counts, 'allow-oom' },
  { 'remember', begin, 'allow-oom' },
  { 'report', open_counts, 'allow-oom' },
  { 'request', open_queue, 'allow-oom' },
  { 'rescue', open_counts, 'allow-oom' },
  { 'reserve', begin, 'allow-oom' },
  { 'resume_schedule', open, 'allow-oom' },
  { 'retire', begin, 'allow-oom' },
  { 'revive', open_counts, 'allow-oom' },
  { 'run_now', open_counts, 'allow-oom' },
  { 'seal_batch', open_counts, 'allow-oom' },
  { 'set_schedule', open, 'allow-oom' },
  { 'take', open_queue, 'allow-oom' },
  { 'trigger', open_counts, '' },
  { 'turn', open_counts, 'allow-oom' },
  { 'unawait', open_counts, 'allow-oom' },
  { 'verify', open, 'no-writes' },
  { 'wait', open, 'allow-oom' },
  { 'withdraw', open_queue, 'allow-oom' },
}

-- While a library is loaded, no Lua library function exists, not even pairs.
if not EVAL_KEYS then
  for i = 1, #VERBS do
    local name, start, flag = VERBS[i][1], VERBS[i][2], VERBS[i][3]
    local run = verbs[name]
    redis.register_function({
      function_name = 'forq_' .. name .. '_' .. BUILD,
      callback = function(keys, args)
        start(keys, args)
        return run()
      end,
      flags = flag ~= '' and { flag } or {},
    })
  end
  return
end

-- Through EVAL, for servers without functions, the verb is the last argument.
local verb = table.remove(EVAL_ARGV)
for i = 1, #VERBS do
  if VERBS[i][1] == verb then
    VERBS[i][2](EVAL_KEYS, EVAL_ARGV)
    return verbs[verb]()
  end
end
