"""Rule `options`: the options that jobs have of their own are well-formed, and claims respect them.

1. `steps_with_options`: the steps of jobs that have had options of their own, each with the options in force.
2. `option_findings`: malformed options, options that no step has set, and claims after the expiry.
3. `claims_beyond_max_retries`, `retry_findings`: claims in the main lane after more retries than the job allows.

The rule uses only what the journal proves:

- A hole may hide new options or a reset of the counts. So every segment begins with options unknown and no retries.
- `updated` and `merged` may reset the counts. So retries are counted from the last of them. The one directly after
  `merged` is left out: it was decided with the counts and options before.
- The retry lane allows retries beyond the job's own, and the journal does not have `retry_lane_retries`. But only
  workers of the main lane claim jobs that were never claimed before, and the lane of a worker never changes. So a
  worker that has claimed a new job claims no job from the retry lane.
- A claim with `dead` in the same entry has started nothing. If `unmet` precedes it, any script may have made it, also
  in the turn of a worker of the retry lane.
"""

from datetime import UTC, datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from forq.errors import InvalidData
from forq.job_options import PACKED, show_own_options, unpack_options
from forq.pipeline import verbs
from forq.pipeline.audit.findings import findings_where, text
from forq.pipeline.audit.transitions import JOB

NONE = "-"
_WORKER = ("history", "queue", "epoch", "actor")


def steps_with_options(steps: DataFrame) -> DataFrame:
    """`own`: the options in force before the step; null if there are none or they are unknown. `before`, `after`: the
    steps beside it. `retries`: how often the job was certainly retried since its counts may have been reset."""
    step = F.col("step")
    in_order = Window.partitionBy(*JOB, "segment").orderBy("sequence", "position")
    so_far = in_order.rowsBetween(Window.unboundedPreceding, -1)
    jobs = steps.where(step == "options").select(*JOB).distinct()
    set_here = F.struct(F.when((step == "options") & (F.col("cause") != NONE), F.col("cause")).alias("packed"))
    seen = steps.join(jobs, list(JOB), "left_semi").select(
        *JOB,
        *("segment", "sequence", "position", "time", "step", "fence", "cause", "actor"),
        F.last(F.when(step.isin("options", *verbs.STARTS), set_here), ignorenulls=True)
        .over(so_far)["packed"]
        .alias("own"),
        F.lag(F.struct("step", "sequence")).over(in_order).alias("before"),
        F.lead(F.struct("step", "sequence")).over(in_order).alias("after"),
    )
    counts = (step == "retried") & ~F.coalesce(F.col("before.step") == "merged", F.lit(False))
    retried = seen.withColumn("retried", F.coalesce(F.sum(counts.cast("int")).over(so_far), F.lit(0)))
    # The sum never falls, so its highest value at a reset is that of the last one.
    at_reset = F.max(F.when(step.isin(*verbs.STARTS, *verbs.MAY_RESET), F.col("retried"))).over(so_far)
    return retried.withColumn("retries", F.col("retried") - F.coalesce(at_reset, F.lit(0)))


def option_findings(steps: DataFrame) -> DataFrame:
    step, packed, expires_ms = F.col("step"), F.col("cause"), _number("x")
    is_set = _beside("before", (*verbs.STARTS, "met", "scheduled")) | _beside("after", verbs.MAY_RESET)
    expired = expires_ms <= F.floor(F.col("time") / 1000)
    checks = [
        ((step == "options") & (packed != NONE) & ~packed.rlike(PACKED), text("malformed options: ", packed)),
        ((step == "options") & ~is_set, text("options without the event that sets them: ", packed)),
        (
            (step == "claimed") & expired & ~_beside("after", ("dead",)),
            text(
                "claimed at ",
                F.floor(F.col("time") / 1000),
                " ms and not moved to dead, but it expired at ",
                expires_ms,
            ),
        ),
    ]
    return findings_where(steps, "options", checks)


def claims_beyond_max_retries(steps: DataFrame) -> DataFrame:
    """Claims of jobs that have used up their own retries. Those of the retry lane are allowed."""
    return steps.where((F.col("step") == "claimed") & (F.col("retries") > _number("r")))


def retry_findings(claims: DataFrame, steps: DataFrame) -> DataFrame:
    """Those of `claims_beyond_max_retries` that were made in the main lane."""
    step = F.col("step")
    in_order = Window.partitionBy(*JOB, "segment").orderBy("sequence", "position")
    origins = steps.where(step.isin("claimed", "unmet", *verbs.STARTS)).withColumn(
        "origin", F.lag("step").over(in_order)
    )
    of_main_lane = origins.where((step == "claimed") & F.col("origin").isin(*verbs.STARTS)).select(*_WORKER).distinct()
    message = text(
        "claimed in the main lane after ", F.col("retries"), " retries; its own max_retries is ", _number("r")
    )
    return findings_where(claims.join(of_main_lane, list(_WORKER), "left_semi"), "options", [(F.lit(True), message)])


def show_options(packed: str) -> str:
    """The options of an event for output; malformed ones as they are."""
    try:
        own = unpack_options(packed)
    except InvalidData:
        return packed
    parts = [show_own_options(own.show())] if own.show() else []
    for name, ms in (("expires at", own.expires_ms), ("tick", own.tick_ms)):
        if ms is not None:
            parts.append(f"{name} {_iso(ms)}")
    return ", ".join(parts) or "none"


def _iso(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def _number(letter: str) -> Column:
    """A numeric option in force; null if it is not set, or if the options are malformed."""
    value = F.regexp_extract("own", f"(?:^|,){letter}=([0-9]+)", 1).try_cast("long")
    return F.when(F.col("own").rlike(PACKED), value)


def _beside(name: str, steps: tuple[str, ...]) -> Column:
    """Whether the step before or after is one of these, and in the same entry."""
    same = (F.col(f"{name}.sequence") == F.col("sequence")) & F.col(f"{name}.step").isin(*steps)
    return F.coalesce(same, F.lit(False))
