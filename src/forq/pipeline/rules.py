"""What may happen to a job, as tables: the audit's side of docs/states.md. Nothing here knows Spark.

A **step** is a verb of the journal, with two names of the audit's own: `cancelled_run` is `cancelled` with a fence (the
job was active), and `born` is the birth of a fail job, which is told as `failing` in the journal of its parent's queue.

Three things are told apart, each with its own path:

1. The **life** of a job: ready, active, gone. AFTER says which steps may come after which.
2. What is **blocked** behind an active job of the same id.
3. What is **archived**: a dead job, as (job, fence), until it is revived, discarded or forgotten.
"""

from typing import Final

BEGINNING: Final = ""

LOSSES: Final = ("stalled", "timed_out", "suspected", "interrupted")

# Which state a job is in after a step of its life.
READY: Final = (
    "enqueued",
    "born",
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
LIFE: Final = (*READY, *ACTIVE, *GONE)

BIRTHS: Final = ("enqueued", "born", "unblocked", "revived")
# The steps that end a run: from a claim to one of these the job is in one worker's hands.
RUN_ENDS: Final = ("done", "released", "retried", "dead", "cancelled_run", "returned")

# Step -> the steps that may be the last one of the job's life before it.
AFTER: Final[dict[str, tuple[str, ...]]] = {
    "enqueued": (BEGINNING, *GONE),
    "born": (BEGINNING,),
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
    "dropped": (BEGINNING, *LIFE),
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
    step for step in LIFE if step not in ("marked", *LOSSES, "done", "released", "dead", "cancelled_run", "unblocked")
)
MERGED_BEFORE: Final = ("retried", "returned")

ARCHIVE: Final = ("dead", "failing", "revived", "discarded", "forgotten")
ARCHIVE_ENDS: Final = ("revived", "discarded", "forgotten")

# Name of each rule -> what it says, as the audit shows it.
RULES: Final = {
    "chain": "sequence, hash and time of every entry follow from the one before",
    "rows": "the rows of every entry are what its text says",
    "paths": "every job's events are a path of the state table",
    "conservation": "born = ended + still there, and Redis holds what is still there",
    "overlap": "no two runs of one id overlap",
    "fail_jobs": "every permanent failure of a queue with a fail handler has its fail job",
    "states": "no record was lost, and nothing is in two states",
}


def pairs() -> frozenset[str]:
    """AFTER as texts 'before>step', which Spark looks up in one set."""
    return frozenset(f"{before}>{step}" for step, allowed in AFTER.items() for before in allowed)


def pairs_of_one_entry() -> frozenset[str]:
    return frozenset(f"{before}>{step}" for before, step in IN_ONE_ENTRY)
