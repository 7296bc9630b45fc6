"""Mutants of what the scripts tell about what follows a failed or lost attempt."""

from tests.support.mutants import Mutant

MUTANTS_OF_FATES = [
    Mutant(
        "lib/fates.lua",
        "math.max(0, due_ms - now_ms)",
        "due_ms",
        "a log line says that a job is tried again in 50 years",
        "fates test_every_failure_says_when",
    ),
    Mutant(
        "lib/fates.lua",
        "attempt + left }",
        "attempt }",
        "every attempt is said to be the last one",
        "fates test_every_failure_says_when",
    ),
    Mutant(
        "lib/fates.lua",
        "  if job.lane > 0 then return math.max(0, option('retry_lane_retries') - job.lane) end\n",
        "",
        "an attempt in the retry lane promises more of them than there are",
        "fates test_every_failure_says_when",
    ),
    Mutant(
        "lib/fates.lua",
        " + option('retry_lane_retries')",
        "",
        "attempts in the retry lane are not counted",
        "fates test_every_failure_says_when",
    ),
    Mutant(
        "lib/fates.lua",
        "most + 1 - count",
        "most - count",
        "a job is said to have failed for good before its last attempt",
        "fates test_a_recovery_tells_what_follows",
    ),
    Mutant(
        "lib/failing.lua",
        "    local attempt = attempts_of(job)\n    due = come_back",
        "    local attempt = attempts_of(job)\n    attempt = nil\n    due = come_back",
        "the number of an attempt is missing",
        "fates test_every_failure_says_when",
    ),
    Mutant(
        "lib/failing.lua",
        "make_ready(id, place_for(job), due)\n    return due\n",
        "make_ready(id, place_for(job), due)\n    return 0\n",
        "every job is said to be tried again at once",
        "fates test_the_wait_is_that_of_the_schedule",
    ),
    Mutant(
        "lib/losses.lua",
        "  lost.counted = { retries = job.retries, stalls = job.stalls, timeouts = job.timeouts, lane = job.lane }\n",
        "",
        "nobody says what follows the death of a process",
        "fates test_a_recovery_tells_what_follows",
    ),
    Mutant(
        "lib/holdings.lua",
        "if running then lost.run_at_ms = run_at end",
        "if running then lost.run_at_ms = 0 end",
        "a lost job that is scheduled is said to be tried again at once",
        "fates test_a_lost_job_that_is_scheduled",
    ),
    Mutant(
        "turn.lua",
        "{ 'refused', 0, 0, 0 }",
        "{}",
        "the fate of one failed job is taken for that of another",
        "fates test_a_job_that_was_removed_or_taken_away",
    ),
    Mutant(
        "lib/eviction.lua",
        "lost_jobs[#lost_jobs + 1] = lost.id",
        "lost_jobs[#lost_jobs + 1] = worker",
        "nobody says which jobs were lost with a supervisor",
        "fates test_an_eviction_tells_what_follows",
    ),
    Mutant(
        "heartbeat.lua",
        "wanted(), lost_jobs }",
        "wanted(), {} }",
        "nobody says which jobs were lost with a host",
        "fates test_a_heartbeat_that_takes_over",
    ),
    Mutant(
        "evict.lua",
        "taken_out, lost_jobs }",
        "taken_out, {} }",
        "nobody says which jobs were lost with the last run of a supervisor",
        "fates test_an_eviction_tells_what_follows",
    ),
    Mutant(
        "lib/fates.lua",
        "job.lane == SUSPECT and 'suspect' or 'interrupted'",
        "'interrupted'",
        "nobody says that a job will run alone",
        "fates test_a_recovery_tells_what_follows",
    ),
]
