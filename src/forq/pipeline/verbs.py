"""Sets of journal verbs, and the order in which they may happen to a job (docs/design/states.md). Does not need Spark.

A **step** is a verb of the journal, or one of two names that only the audit uses: `cancelled_run` is `cancelled` with a
fence (the job was active), `fail_job_added` is the creation of a fail job (`failing` in the journal of the main queue).

The audit follows three paths:

1. The **lifecycle** of a job: held, ready, active, gone. AFTER has the allowed order of its steps.
2. The job **blocked** behind an active job of the same id.
3. The **archive**: a dead job, as (job, fence), until it is revived, discarded or forgotten.
"""

from typing import Final

from forq.broker import journal

BEGINNING: Final = ""

LOSSES: Final = ("stalled", "timed_out", "suspected", "interrupted")

# The state of a job after a step of its lifecycle.
READY: Final = (
    "enqueued",
    "fail_job_added",
    "updated",
    "scheduled",
    "promoted",
    "unblocked",
    "retried",
    "snoozed",
    "returned",
    "revived",
    "met",
    "unmet",
)
HELD: Final = ("held",)
ACTIVE: Final = ("claimed", "marked", *LOSSES)
GONE: Final = ("done", "released", "cancelled", "cancelled_run", "dead", "dropped")
PRESENT: Final = (*READY, *HELD, *ACTIVE)
LIFECYCLE: Final = (*PRESENT, *GONE)

STARTS: Final = ("enqueued", "fail_job_added", "unblocked", "revived")
# The steps that end a run. From its claim until then a worker holds the job.
RUN_ENDS: Final = ("done", "released", "retried", "snoozed", "dead", "cancelled_run", "returned")

# `unmet` makes a job ready only for the claim that moves it to dead.
_WAITS: Final = (*(step for step in READY if step != "unmet"), *HELD)

# Step -> the steps of the lifecycle that may precede it.
AFTER: Final[dict[str, tuple[str, ...]]] = {
    "enqueued": (BEGINNING, *GONE),
    "fail_job_added": (BEGINNING,),
    "revived": GONE,
    "unblocked": ("done", "released", "dead", "cancelled_run"),
    # An update of a held job is followed by `held`: see rule `dependencies`.
    "updated": _WAITS,
    "held": ("enqueued", "updated", "revived"),
    "met": HELD,
    "unmet": HELD,
    "scheduled": ("enqueued", "updated", "unblocked", "retried", "snoozed", "returned", "met"),
    # Updating a job that stays scheduled writes `scheduled` again.
    "promoted": ("scheduled",),
    # A scheduled job is promoted first.
    "claimed": tuple(step for step in READY if step != "scheduled"),
    "marked": ("claimed",),
    "stalled": ("claimed",),
    "timed_out": ("claimed",),
    "suspected": ("claimed",),
    "interrupted": ("claimed",),
    "returned": ("claimed", *LOSSES),
    "retried": ("claimed",),
    "snoozed": ("claimed",),
    "done": ("claimed", "marked"),
    "released": ("claimed", "marked"),
    "dead": ("claimed",),
    "cancelled_run": ("claimed", "marked"),
    "cancelled": _WAITS,
    # Dropping the hint of an ended job is allowed. If the job was present, its record was lost: see rule `states`.
    "dropped": (BEGINNING, *LIFECYCLE),
}

# Pairs (before, step) of one script call, therefore of one entry.
IN_ONE_ENTRY: Final = (
    *((before, "scheduled") for before in AFTER["scheduled"]),
    *((before, "unblocked") for before in AFTER["unblocked"]),
    *((before, "held") for before in AFTER["held"]),
    ("unmet", "claimed"),
    *((loss, "returned") for loss in LOSSES),
)

# Steps of a run: they have the fence of its claim.
FENCED: Final = ("marked", *LOSSES, "retried", "snoozed", "done", "released", "dead", "cancelled_run")
# Steps without a fence.
UNFENCED: Final = (
    "enqueued",
    "updated",
    "held",
    "met",
    "unmet",
    "scheduled",
    "promoted",
    "blocked",
    "unblocked",
    "merged",
    "withdrawn",
    "options",
    "returned",
    "cancelled",
    "dropped",
)

# Steps after which the next attempt has a higher number.
COUNTED: Final = ("retried", "stalled", "timed_out")
# Steps that may reset the counts: the next attempt may be number 1 again.
MAY_RESET: Final = ("updated", "merged")

BLOCKING: Final = ("blocked", "unblocked", "merged", "withdrawn")
# Steps that must not happen before the blocked job is merged, unblocked or withdrawn.
NOT_WHILE_BLOCKED: Final = tuple(
    step
    for step in LIFECYCLE
    if step not in ("marked", *LOSSES, "done", "released", "dead", "cancelled_run", "unblocked")
)
MERGED_BEFORE: Final = ("retried", "snoozed", "returned")

# How the dependants of a job that has ended so are told: the HOW of `unmet`.
ENDED_AS: Final = {
    "done": "done",
    "released": "released",
    "dead": "dead",
    "cancelled": "cancelled",
    "cancelled_run": "cancelled",
    "withdrawn": "cancelled",
    "dropped": "dropped",
}

ARCHIVE: Final = ("dead", "failing", "revived", "discarded", "forgotten")
ARCHIVE_ENDS: Final = ("revived", "discarded", "forgotten")

# Steps about a job that change nothing on any path.
NOTES: Final = ("options",)

# Steps after which a job may be claimed at once.
READY_AT_ONCE: Final = ("enqueued", "unblocked", "returned", "retried", "snoozed", "revived", "met")
# Verbs that end a lifecycle.
ENDS: Final = journal.ENDS
SUCCEEDED: Final = ("done", "released")
FAILED: Final = ("retried", "dead", "stalled", "timed_out")
# Ends of a run without a run time from the worker.
CUT_SHORT: Final = (*LOSSES, "cancelled")
# Verbs that can follow a claim. `returned` directly after it: the job was returned unstarted.
AFTER_CLAIM: Final = ("done", "released", "retried", "snoozed", "dead", *CUT_SHORT, "returned")
# Verbs about a blocked job, a dead job or a queue, which are not part of a lifecycle.
NOT_IN_LIFECYCLE: Final = tuple(sorted(journal.VERBS - set(LIFECYCLE)))


def pairs() -> frozenset[str]:
    """AFTER as strings 'before>step', for one lookup in Spark."""
    return frozenset(f"{before}>{step}" for step, allowed in AFTER.items() for before in allowed)


def pairs_of_one_entry() -> frozenset[str]:
    return frozenset(f"{before}>{step}" for before, step in IN_ONE_ENTRY)


def quoted(*verbs: str) -> str:
    """For `in (…)` in SQL."""
    return ", ".join(f"'{verb}'" for verb in verbs)
