-- Registers the verbs as server functions: name, how its call starts, flag. 'allow-oom': may run while the server is
-- out of memory, because it frees memory or must not be lost. 'no-writes': only reads.

local VERBS = {
  { 'accept', open, 'allow-oom' },
  { 'ack', open, 'allow-oom' },
  { 'add_members', open, '' },
  { 'announce', open_queue, 'allow-oom' },
  { 'answer', open_queue, 'allow-oom' },
  { 'attach', open, 'allow-oom' },
  { 'await', open, 'allow-oom' },
  { 'cancel', open, 'allow-oom' },
  { 'collect', open, 'allow-oom' },
  { 'configure', open, 'allow-oom' },
  { 'counts', open, 'no-writes' },
  { 'create', open, 'allow-oom' },
  { 'delete', open, 'allow-oom' },
  { 'describe_flow', open, '' },
  { 'discard', open, 'allow-oom' },
  { 'drop_schedule', open, 'allow-oom' },
  { 'enqueue', open, '' },
  { 'evict', open, 'allow-oom' },
  { 'finish', open, 'allow-oom' },
  { 'fire', open, '' },
  { 'forget', open, 'allow-oom' },
  { 'free', open, 'allow-oom' },
  { 'heartbeat', open, 'allow-oom' },
  { 'join', open, 'allow-oom' },
  { 'lose', open, 'allow-oom' },
  { 'open_batch', open, '' },
  { 'pause', open, 'allow-oom' },
  { 'pause_schedule', open, 'allow-oom' },
  { 'progress', open, '' },
  { 'promote', open, 'allow-oom' },
  { 'recover', open, 'allow-oom' },
  { 'release', open, 'allow-oom' },
  { 'remember', begin, 'allow-oom' },
  { 'report', open, 'allow-oom' },
  { 'request', open_queue, 'allow-oom' },
  { 'rescue', open, 'allow-oom' },
  { 'reserve', begin, 'allow-oom' },
  { 'resume_schedule', open, 'allow-oom' },
  { 'retire', begin, 'allow-oom' },
  { 'revive', open, 'allow-oom' },
  { 'run_now', open, 'allow-oom' },
  { 'seal_batch', open, 'allow-oom' },
  { 'set_schedule', open, 'allow-oom' },
  { 'settle', open, 'allow-oom' },
  { 'take', open_queue, 'allow-oom' },
  { 'trigger', open, '' },
  { 'turn', open, 'allow-oom' },
  { 'unawait', open, 'allow-oom' },
  { 'verify', open, 'no-writes' },
  { 'wait', open, 'allow-oom' },
  { 'withdraw', open_queue, 'allow-oom' },
}

-- While a library is loaded, no Lua library function exists, not even pairs.
if not EVAL_KEYS then
  for i = 1, #VERBS do
    local name, start, flag = VERBS[i][1], VERBS[i][2], VERBS[i][3]
    local run, alone = verbs[name], quick[name]
    redis.register_function({
      function_name = 'forq_' .. name .. '_' .. BUILD,
      callback = function(keys, args)
        local reply = alone and alone(keys, args)
        if reply then return reply end
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
