#!lua
-- trigger: a schedule makes a job now, whatever its ticks are; they and its counts stay as they are.
--
-- KEYS[1]  the queue's base
-- ARGV     KEY, identifier (JSON)
-- Returns  {OK, id}; {NO_QUEUE}; {NO_SCHEDULE}; {EXISTS, 1}: its last job is unfinished; {FULL, max_items}
-- States   (new) -> waiting
--@include base codes journal hints records schedule awaiters ringing timers item_ages ticks runs

if not epoch then return { NO_QUEUE } end
local name, identifier = ARGV[1], ARGV[2]
local head, data = read_definition(redis.call('HGET', key('schedules'), name) or '')
if not head then return { NO_SCHEDULE } end
local policy = cjson.decode(string.match(head, '\n(.*)$'))
local id = run_id(name, policy, string.format('triggered:%.0f', now_us))
if is_unfinished(id) then return { EXISTS, 1 } end
if is_full() then return { FULL, option('max_items') } end
store_run(id, policy, identifier, data, now_ms)
wake_idle_worker()
write_journal('-')
return { OK, id }
