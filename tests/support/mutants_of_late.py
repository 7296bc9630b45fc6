# ruff: noqa: E501
"""One mutant per guard against requests that arrive late."""

from tests.support.mutants import Mutant

MUTANTS_OF_LATE = (
    Mutant(
        "turn.lua",
        "if tonumber(turn) > number_of(registered) then",
        "if true then",
        "a late turn takes away what its worker runs",
        "late test_a_late_turn_takes_nothing_away",
    ),
    Mutant(
        "turn.lua",
        "if tonumber(turn) > number_of(registered) then",
        "if tonumber(turn) >= number_of(registered) then",
        "a turn that arrives twice is taken twice",
        "late test_a_turn_that_arrives_twice",
    ),
    Mutant(
        "turn.lua",
        "if tonumber(turn) > number_of(registered) then",
        "if turn > registered then",
        "after its ninth turn a worker is fenced",
        "late test_numbers_are_told_apart_up_to_53_bits or test_numbers_are_compared_as_numbers",
    ),
    Mutant(
        "turn.lua",
        "  return_parked(processor, worker)\n",
        "",
        "what a late BLMOVE moved waits behind a running job",
        "late test_a_late_turn_gives_back",
    ),
    Mutant(
        "turn.lua",
        "  return_parked(processor, worker)\n  wake_idle_worker()\n",
        "  return_parked(processor, worker)\n",
        "a wake token that a late BLMOVE moved is gone",
        "late test_a_wake_token",
    ),
    Mutant(
        "lib/parked.lua",
        "return tonumber(registered) or tonumber(string.match(registered, '^%d+'))",
        "return tonumber(registered) or 0",
        "after a rescue a late turn is taken",
        "late test_a_late_turn_is_known_after_a_rescue",
    ),
    Mutant(
        "lib/parked.lua",
        " and not kept[id] then",
        " then",
        "the hint of an id that its worker runs stays in the list of the worker",
        "late test_a_late_blmove_of_an_id_that_its_worker_runs",
    ),
    Mutant(
        "lib/parked.lua",
        "if is_owner(worker, owners[i]) and",
        "if false and",
        "a late turn takes away what its worker runs",
        "late test_a_late_turn_takes_nothing_away",
    ),
    Mutant(
        "lib/parked.lua",
        "hand_back(worker, parked, nil, kept)",
        "hand_back(worker, parked)",
        "with the hint of an id goes the running job",
        "late test_a_late_blmove_of_an_id_that_its_worker_runs",
    ),
    Mutant(
        "lib/parked.lua",
        "  if #own > 0 then redis.call('RPUSH', processing, unpack(own)) end\n",
        "",
        "a running job is in nobody's list",
        "late test_a_late_turn_gives_back",
    ),
    Mutant(
        "lib/parked.lua",
        "  redis.call('DEL', processing)\n",
        "",
        "what was given back is in the list of the worker, too",
        "late test_a_late_turn_gives_back",
    ),
    Mutant(
        "heartbeat.lua",
        "for _, worker in ipairs(unturned) do return_parked(processor, worker) end\n",
        "",
        "what a late BLMOVE moved waits behind a running job",
        "late test_heartbeats_give_back",
    ),
    Mutant(
        "heartbeat.lua",
        "if before[i] and string.match(before[i], '^%S+') == ARGV[4 * i] then",
        "if true then",
        "every heartbeat reads every batch",
        "late test_a_heartbeat_leaves_the_list",
    ),
    Mutant(
        "join.lua",
        "redis.call('HSETNX', workers_key(processor), worker, '0')",
        "redis.call('HSET', workers_key(processor), worker, '0')",
        "after a late join a late turn is taken",
        "late test_a_late_join_does_not_take_back_the_number",
    ),
    Mutant(
        "join.lua",
        "if removed[1] or removed[2] then",
        "if removed[1] then",
        "a late join registers a worker that was removed, and nobody removes it again",
        "late test_a_late_join_of_a_worker_that_was_removed",
    ),
)
