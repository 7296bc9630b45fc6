"""One mutant per guard of what is done for workers that do not begin what they were given."""

from tests.support.mutants import Mutant

MUTANTS_OF_UNREAD = (
    Mutant(
        "rescue.lua",
        "local begun_nothing = ARGV[5] == '0'",
        "local begun_nothing = false",
        "the first job that a frozen worker has not begun stays with it",
        "unread test_all_that_a_worker_has_not_begun",
    ),
    Mutant(
        "rescue.lua",
        "if begun_nothing and at ~= 0 then return { OK, 0 } end\n",
        "",
        "what a worker ran runs again elsewhere",
        "unread test_a_worker_that_has_begun",
    ),
    Mutant(
        "rescue.lua",
        "  redis.call('UNLINK', processing)\n",
        "",
        "a worker that wakes up counts on jobs that others have",
        "unread test_a_worker_that_wakes_up or test_to_give_back_twice",
    ),
    Mutant(
        "rescue.lua",
        "  hand_back(worker, unstarted)\n",
        "",
        "jobs that a frozen worker has not begun are lost",
        "unread test_all_that_a_worker_has_not_begun",
    ),
    Mutant(
        "turn.lua",
        "if math.abs(now_ms - (memo.told_ms or 0)) < LOOK_MS then return end",
        "",
        "pulse is woken for every job",
        "unread test_a_claim_that_was_sent_along",
    ),
    Mutant(
        "turn.lua",
        "if ARGV[7] == 'waiting' then tell_of_claim() end",
        "tell_of_claim()",
        "pulse is woken for claims whose workers wait for the answer",
        "unread test_nobody_is_told_of_a_claim",
    ),
    Mutant(
        "turn.lua",
        "if ARGV[7] == 'waiting' then tell_of_claim() end",
        "",
        "nobody learns that a frozen worker was given a job",
        "unread test_a_claim_that_was_sent_along",
    ),
    Mutant(
        "heartbeat.lua",
        "number > tonumber(ARGV[4 * i]) and",
        "number >= tonumber(ARGV[4 * i]) and",
        "every idle worker is asked for a sign of life",
        "unread test_a_heartbeat_tells",
    ),
    Mutant(
        "heartbeat.lua",
        " and ARGV[4 * i + 2] == '0' then",
        " then",
        "a worker that runs a job is asked for a sign of life",
        "unread test_a_heartbeat_tells",
    ),
    Mutant(
        "heartbeat.lua",
        "unread[#unread + 1] = string.format('%.0f', number)",
        "unread[#unread + 1] = tostring(number)",
        "large numbers of turns are told rounded",
        "unread test_a_heartbeat_tells",
    ),
    Mutant(
        "heartbeat.lua",
        "if paused or mode ~= 'work' then return 0 end",
        "if mode ~= 'work' then return 0 end",
        "workers of a paused queue are asked for a sign of life again and again",
        "unread test_a_heartbeat_tells_for_whom",
    ),
    Mutant(
        "heartbeat.lua",
        "local main = main_waiting() > 0\n",
        "local main = false\n",
        "a process that was not woken is never asked",
        "unread test_a_heartbeat_tells_for_whom",
    ),
    Mutant(
        "heartbeat.lua",
        "local retry = suspect_hints > 0 or",
        "local retry =",
        "a retry child that was not woken is never asked",
        "unread test_a_heartbeat_tells_for_whom",
    ),
)
