"""Sets of journal verbs: what may happen to a job, and in which order (docs/design/states.md). Does not need Spark.

A **step** is a verb of the journal, or one of two names that only the audit uses: `cancelled_run` is `cancelled` with a
fence (the job was active), `fail_job_added` is the creation of a fail job (`failing` in the journal of the main queue).

Three things are told apart, each with its own path:

1. The **life** of a job: ready, active, gone. AFTER says which steps may come after which.
2. What is **blocked** behind an active job of the same id.
3. What is **archived**: a dead job, as (job, fence), until it is revived, discarded or forgotten.
"""

from typing import Final

from forq.broker import journal

BEGINNING: Final = ""

LOSSES: Final = ("stalled", "timed_out", "suspected", "interrupted")

# Which state a job is in after a step of its life.
READY: Final = (
    "enqueued",
    "fail_job_added",
    "updated",
    "scheduled",
    "promoted",
    "unblocked",
    "retried",
    "returned",
    "revived",
)
ACTIVE: Final = ("claimed", "marked", *LOSSES)
GONE: Final = ("done", "released", "cancelled", "cancelled_run", "dead", "dropped")
LIFECYCLE: Final = (*READY, *ACTIVE, *GONE)

STARTS: Final = ("enqueued", "fail_job_added", "unblocked", "revived")
# The steps that end a run: from a claim to one of these the job is in one worker's hands.
RUN_ENDS: Final = ("done", "released", "retried", "dead", "cancelled_run", "returned")

# Step -> the steps that may be the last one of the job's life before it.
AFTER: Final[dict[str, tuple[str, ...]]] = {
    "enqueued": (BEGINNING, *GONE),
    "fail_job_added": (BEGINNING,),
    "revived": GONE,
    "unblocked": ("done", "released", "dead", "cancelled_run"),
    "updated": READY,
    "scheduled": ("enqueued", "updated", "unblocked", "retried", "returned"),
    # An update of one that stays scheduled says `scheduled` again.
    "promoted": ("scheduled",),
    # Not one that is scheduled: it is promoted first.
    "claimed": tuple(step for step in READY if step != "scheduled"),
    "marked": ("claimed",),
    "stalled": ("claimed",),
    "timed_out": ("claimed",),
    "suspected": ("claimed",),
    "interrupted": ("claimed",),
    "returned": ("claimed", *LOSSES),
    "retried": ("claimed",),
    "done": ("claimed", "marked"),
    "released": ("claimed", "marked"),
    "dead": ("claimed",),
    "cancelled_run": ("claimed", "marked"),
    "cancelled": READY,
    # A hint whose job has ended is nothing; one whose job was there is a lost record, which is a rule of its own.
    "dropped": (BEGINNING, *LIFECYCLE),
}

# Pairs (before, step) of one script call, and so of one entry.
IN_ONE_ENTRY: Final = (
    *((before, "scheduled") for before in AFTER["scheduled"]),
    *((before, "unblocked") for before in AFTER["unblocked"]),
    *((loss, "returned") for loss in LOSSES),
)

# Steps that tell of a run: their fence is that of its claim.
FENCED: Final = ("marked", *LOSSES, "retried", "done", "released", "dead", "cancelled_run")
# Steps that tell of no run.
UNFENCED: Final = (
    "enqueued",
    "updated",
    "scheduled",
    "promoted",
    "blocked",
    "unblocked",
    "merged",
    "withdrawn",
    "returned",
    "cancelled",
    "dropped",
)

# Steps after which the next claim is an attempt with a higher number.
COUNTED: Final = ("retried", "stalled", "timed_out")
# Steps that may reset the counts, so that the next attempt may be the first again.
MAY_RESET: Final = ("updated", "merged")

BLOCKING: Final = ("blocked", "unblocked", "merged", "withdrawn")
# What must not happen while something is blocked behind the job: it has to be merged, unblocked or withdrawn first.
NOT_WHILE_BLOCKED: Final = tuple(
    step
    for step in LIFECYCLE
    if step not in ("marked", *LOSSES, "done", "released", "dead", "cancelled_run", "unblocked")
)
MERGED_BEFORE: Final = ("retried", "returned")

ARCHIVE: Final = ("dead", "failing", "revived", "discarded", "forgotten")
ARCHIVE_ENDS: Final = ("revived", "discarded", "forgotten")

# Steps from which a job may be claimed at once.
READY_AT_ONCE: Final = ("enqueued", "unblocked", "returned", "retried", "revived")
# How a life ends, in the words of the journal.
ENDS: Final = journal.ENDS
ENDED_WELL: Final = ("done", "released")
FAILED: Final = ("retried", "dead", "stalled", "timed_out")
# Ends of a run of which the worker told no time.
CUT_SHORT: Final = (*LOSSES, "cancelled")
# What can follow a claim; `returned` at once means that the job was handed back before it began.
AFTER_CLAIM: Final = ("done", "released", "retried", "dead", *CUT_SHORT, "returned")
# What is about a blocked dispatch, an archived job or a queue, and not about the life of a job.
ABOUT_OTHERS: Final = tuple(sorted(journal.VERBS - set(LIFECYCLE)))


def pairs() -> frozenset[str]:
    """AFTER as texts 'before>step', which Spark looks up in one set."""
    return frozenset(f"{before}>{step}" for step, allowed in AFTER.items() for before in allowed)


def pairs_of_one_entry() -> frozenset[str]:
    return frozenset(f"{before}>{step}" for before, step in IN_ONE_ENTRY)


def quoted(*verbs: str) -> str:
    """For `in (…)` of SQL."""
    return ", ".join(f"'{verb}'" for verb in verbs)
