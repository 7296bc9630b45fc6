"""Mutants of what keeps the progress of running jobs."""

from tests.support.mutants import Mutant

GONE = "progress test_progress_is_gone_when_its_job_leaves_active"

MUTANTS_OF_PROGRESS = (
    Mutant(
        "progress.lua",
        "if not epoch then return { NO_QUEUE } end\n",
        "",
        "an unknown queue is not told",
        "progress test_an_unknown_queue_is_told",
    ),
    Mutant(
        "progress.lua",
        "if owner ~= own and owner ~= own .. ':removed' then return { OK, 0 } end\n",
        "",
        "anybody can tell the progress of any job, and it outlives the job",
        "model",
    ),
    Mutant(
        "progress.lua",
        "worker .. ':' .. fence",
        "owner and string.match(owner, '^' .. worker .. ':.*')",
        "an attempt that is over tells the progress of the next one",
        "progress test_only_the_worker_that_runs_a_job_now_can_tell_its_progress",
    ),
    Mutant(
        "progress.lua",
        "if owner ~= own and owner ~= own .. ':removed' then",
        "if owner ~= own then",
        "a running job that was removed is refused",
        "progress test_a_running_job_that_was_removed_may_go_on_telling",
    ),
    Mutant(
        "progress.lua",
        "#!lua\n",
        "#!lua flags=allow-oom\n",
        "progress takes memory that settling needs",
        "progress test_out_of_memory_progress_is_refused_and_the_job_can_still_be_settled",
    ),
    Mutant(
        "lib/progress.lua",
        "  redis.call('PUBLISH', channel('progress'), id)\n",
        "",
        "who watches a job does not hear of its progress",
        "progress test_what_changes_and_what_ends_is_published_and_nothing_else",
    ),
    Mutant(
        "lib/progress.lua",
        "    redis.call('PUBLISH', channel('progress'), table.concat(ids, ' '))\n",
        "",
        "who watches a job does not hear of its end",
        "progress test_what_changes_and_what_ends_is_published_and_nothing_else",
    ),
    Mutant(
        "lib/progress.lua",
        " > 0 then\n",
        " >= 0 then\n",
        "the end of jobs that told nothing is published",
        "progress test_what_changes_and_what_ends_is_published_and_nothing_else",
    ),
    Mutant(
        "lib/progress.lua",
        "redis.call('EXISTS', key('progress')) == 1",
        "false",
        "progress is never forgotten",
        "model",
    ),
    Mutant(
        "lib/progress.lua",
        "  if #ids == 0 then return end\n",
        "",
        "a call that frees nothing fails",
        "progress test_a_hint_that_goes_back_leaves_the_progress_of_others_alone",
    ),
    Mutant(
        "lib/done_jobs.lua",
        "  forget_progress(ids)\n",
        "",
        "the progress of a job that is done stays for ever",
        GONE,
    ),
    Mutant(
        "lib/holdings.lua",
        "  forget_progress(freed)\n",
        "",
        "a job that went back is shown as far as its last attempt was",
        GONE,
    ),
    Mutant(
        "lib/bury_job.lua",
        "  forget_progress(ended)\n",
        "",
        "the progress of a dead job stays for ever",
        GONE,
    ),
    Mutant(
        "lib/failing.lua",
        "    forget_progress({ id })\n    note(event)\n",
        "    note(event)\n",
        "a job that is retried is shown as far as its last attempt was",
        GONE,
    ),
    Mutant(
        "lib/failing.lua",
        "    forget_progress({ id })\n    forget_attempts({ id })\n",
        "    forget_attempts({ id })\n",
        "the progress of a job that was removed and failed stays for ever",
        GONE,
    ),
    Mutant(
        "ack.lua",
        "forget_progress({ id })\n",
        "",
        "the progress of an item that was released stays for ever",
        "progress test_progress_of_an_item_is_gone_when_it_is_released_or_goes_back",
    ),
    Mutant(
        "delete.lua",
        "key('progress'), ",
        "",
        "the next queue of that name begins with the progress of the last one",
        GONE,
    ),
)
