"""Rules `paths`, `fail_jobs`, `overlap` and lost records: every job's steps follow the state table.

1. `steps_of`: one row per event of a job (verbs.py), numbered by segment. A **segment** is a part of a queue's journal
   without a hole. A step whose predecessor is in another segment is not checked: the hole is reported already.
2. `transitions_of`: each step with the job's previous steps. One pass over the history, used by most rules.
3. `path_findings`, `fence_findings`, `archive_findings`, `overlap_findings`: the rules.
"""

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from forq.broker.keys import fail_queue
from forq.pipeline import verbs
from forq.pipeline.audit.chain import Epoch, Hole
from forq.pipeline.audit.findings import findings_where, text, union

JOB = ("history", "queue", "epoch", "job")
FAIL = fail_queue("")
_UNKNOWN_JOB = "?"
_FOREVER = 2**62
_HOLE_AT_END = Hole(0, "", 0, _FOREVER, _FOREVER)


def steps_of(events: DataFrame, epochs: Sequence[Epoch], holes: Sequence[Hole]) -> DataFrame:
    """One row per event of a job, partitioned by job."""
    verb = F.col("verb")
    step = F.when((verb == "cancelled") & (F.col("fence") != 0), "cancelled_run").otherwise(verb)
    of_jobs = events.where(F.col("job").isNotNull() & (F.col("job") != _UNKNOWN_JOB))
    steps = of_jobs.select(
        *JOB,
        *("sequence", "position", "time", step.alias("step"), "fence", "attempt", "fail_job", "verb"),
        *("cause", "actor"),
    )
    steps = _with_segments(steps, holes)
    return steps.unionByName(_fail_job_starts(steps, epochs)).repartition("history", "queue", "job")


def _with_segments(steps: DataFrame, holes: Sequence[Hole]) -> DataFrame:
    """`segment`: number of holes before the row. `orphans`: the first event of a job may be in a hole."""
    if not holes:
        return steps.withColumn("segment", F.lit(0)).withColumn("orphans", F.lit(False))
    rows = [
        (*epoch, number + 1, hole.last, (*after, _HOLE_AT_END)[0].first)
        for epoch, missing in _by_epoch(holes).items()
        for number, hole in enumerate(missing)
        for after in [missing[number + 1 :]]
    ]
    spark = steps.sparkSession
    segments = spark.createDataFrame(rows, "history int, queue string, epoch long, segment int, after long, until long")
    queues = sorted({(hole.history, fail_queue(hole.queue)) for hole in holes if not hole.queue.endswith(FAIL)})
    orphaned = spark.createDataFrame(queues, "history int, queue string").withColumn("orphaned", F.lit(True))
    here = F.col("sequence").between(F.col("after") + 1, F.col("until") - 1)
    joined = steps.alias("s").join(
        F.broadcast(segments.alias("g")),
        (F.col("s.history") == F.col("g.history"))
        & (F.col("s.queue") == F.col("g.queue"))
        & (F.col("s.epoch") == F.col("g.epoch"))
        & here,
        "left",
    )
    return (
        joined.select("s.*", F.coalesce("segment", F.lit(0)).alias("segment"))
        .join(F.broadcast(orphaned), ["history", "queue"], "left")
        .withColumn("orphans", (F.col("segment") > 0) | F.coalesce("orphaned", F.lit(False)))
        .drop("orphaned")
    )


def _by_epoch(holes: Sequence[Hole]) -> dict[tuple[int, str, int], list[Hole]]:
    found: dict[tuple[int, str, int], list[Hole]] = {}
    for hole in sorted(holes, key=lambda hole: hole.first):
        found.setdefault((hole.history, hole.queue, hole.epoch), []).append(hole)
    return found


def _fail_job_starts(steps: DataFrame, epochs: Sequence[Epoch]) -> DataFrame:
    """`failing` in the journal of a queue adds the job ID:FENCE to the fail queue of that time."""
    failing = steps.where("step = 'failing'").select(
        "history",
        F.concat("queue", F.lit(FAIL)).alias("queue"),
        F.concat_ws(":", "job", "fence").alias("job"),
        # Sorts before all events of the fail queue's own journal, and keeps the order of two fail jobs.
        (F.col("sequence") - _FOREVER).alias("sequence"),
        "position",
        "time",
        F.lit("fail_job_added").alias("step"),
        F.lit(0).cast("long").alias("fence"),
        F.lit(None).cast("int").alias("attempt"),
        F.lit(None).cast("boolean").alias("fail_job"),
        F.lit("failing").alias("verb"),
        F.lit(None).cast("string").alias("cause"),
        "actor",
        F.lit(0).alias("segment"),
        F.lit(False).alias("orphans"),
    )
    spans = _spans(failing.sparkSession, epochs)
    return (
        failing.alias("f")
        .join(
            F.broadcast(spans.alias("e")),
            (F.col("f.history") == F.col("e.history"))
            & (F.col("f.queue") == F.col("e.queue"))
            & F.col("f.time").between(F.col("e.since"), F.col("e.until") - 1),
            "left",
        )
        .select("f.*", F.coalesce("epoch", F.lit(0)).alias("epoch"))
    )


def _spans(spark: SparkSession, epochs: Sequence[Epoch]) -> DataFrame:
    """Time span of each epoch of the fail queues. An epoch is the time of its creation."""
    fail = sorted((e.history, e.queue, e.epoch) for e in epochs if e.queue.endswith(FAIL))
    spans = [
        (history, queue, epoch, epoch, after[2] if after[:2] == (history, queue) else _FOREVER)
        for (history, queue, epoch), after in zip(fail, [*fail[1:], (0, "", 0)], strict=False)
    ]
    return spark.createDataFrame(spans, "history int, queue string, epoch long, since long, until long")


def transitions_of(steps: DataFrame) -> DataFrame:
    """One row per step, with `wrong` (one bit per check of `_wrong`) and the job's state after it:

    `ready`, `due` (scheduled), `held`, `running`, `has_blocked` (a job is blocked behind it). `existed`: the job was
    ready, held or active before the step. `run`: fence of the run. `last`: last step of the job.
    """
    seen = _with_previous_steps(steps)
    step = F.col("step")
    # `returned` has no fence: it ends the last claim.
    run = F.when((step == "claimed") | step.isin(*verbs.FENCED), F.col("fence")).otherwise(F.col("origin.fence"))
    return seen.select(
        *JOB,
        *("sequence", "position", "time", "step", "fence", "last"),
        _state_after(verbs.READY).alias("ready"),
        _state_after(("scheduled",)).alias("due"),
        _state_after(verbs.HELD).alias("held"),
        _state_after(verbs.ACTIVE).alias("running"),
        _blocked_after().alias("has_blocked"),
        F.coalesce(F.col("before.step").isin(*verbs.PRESENT), F.lit(False)).alias("existed"),
        run.alias("run"),
        # One number: texts are built only for rows with a violation.
        reduce(Column.bitwiseOR, (F.when(test, 1 << bit).otherwise(0) for bit, test in enumerate(_wrong()))).alias(
            "wrong"
        ),
        F.coalesce("before.step", F.lit("nothing")).alias("before"),
        F.col("before.fence").alias("before_fence"),
        "attempt",
        "claimed_before",
    )


def _with_previous_steps(steps: DataFrame) -> DataFrame:
    in_order = Window.partitionBy(*JOB).orderBy("sequence", "position")
    so_far = in_order.rowsBetween(Window.unboundedPreceding, -1)
    place = F.struct("sequence", "position")
    step = F.col("step")

    def last(of: Sequence[str], value: Column) -> Column:
        return F.last(F.when(step.isin(*of), value), ignorenulls=True).over(so_far)

    return steps.select(
        *JOB,
        *("sequence", "position", "time", "step", "fence", "attempt", "segment", "orphans"),
        last(verbs.LIFECYCLE, F.struct("step", "fence", "sequence", "segment")).alias("before"),
        last(verbs.BLOCKING, F.struct("step", "segment")).alias("blocking"),
        last(("claimed", *verbs.STARTS), F.struct("step", "fence", "attempt", "segment", place.alias("place"))).alias(
            "origin"
        ),
        last(verbs.COUNTED, place).alias("counted"),
        last(verbs.MAY_RESET, place).alias("reset"),
        F.max(F.when(step == "claimed", F.col("fence"))).over(so_far).alias("claimed_before"),
        F.lag(F.struct("step", "sequence")).over(in_order).alias("beside"),
        F.lead("sequence").over(in_order).isNull().alias("last"),
    )


def _state_after(steps: tuple[str, ...]) -> Column:
    state = F.coalesce(F.when(F.col("step").isin(*verbs.LIFECYCLE), F.col("step")), F.col("before.step"))
    return F.coalesce(state.isin(*steps), F.lit(False))


def _blocked_after() -> Column:
    side = F.coalesce(F.when(F.col("step").isin(*verbs.BLOCKING), F.col("step")), F.col("blocking.step"))
    return F.coalesce(side == "blocked", F.lit(False))


def _known() -> Column:
    """Whether the previous step is known, and not in a hole."""
    return F.when(F.col("before").isNull(), ~F.col("orphans")).otherwise(F.col("before.segment") == F.col("segment"))


def path_findings(transitions: DataFrame) -> DataFrame:
    """Rules `paths`, `states` (lost records) and, of fail jobs, `fail_jobs`."""
    step, before = F.col("step"), F.col("before")
    of_fail_job = F.col("queue").endswith(FAIL) & ((step == "fail_job_added") | (before == "nothing"))
    lost = F.col("wrong").bitwiseAND(1) != 0
    rule = F.when(of_fail_job, "fail_jobs").otherwise("paths")
    checks = [(F.col("wrong").bitwiseAND(2 << bit) != 0, message) for bit, message in enumerate(_texts())]
    wrong = transitions.where("wrong != 0")
    return union(
        [
            findings_where(wrong, rule, checks),
            findings_where(wrong, "states", [(lost, text("its record was lost; the previous event is ", before))]),
        ]
    )


def _wrong() -> list[Column]:
    """The conditions that must not hold. The first belongs to rule `states`; `_texts` has the texts of the others, in
    the same order."""
    step, fence, known = F.col("step"), F.col("fence"), _known()
    pair = F.concat_ws(">", F.coalesce("before.step", F.lit(verbs.BEGINNING)), step)
    allowed = pair.isin(*verbs.pairs())
    existed = F.col("before.step").isin(*verbs.PRESENT)
    return [
        (step == "dropped") & known & existed,
        step.isin(*verbs.LIFECYCLE) & known & ~allowed,
        known & pair.isin(*verbs.pairs_of_one_entry()) & (F.col("before.sequence") != F.col("sequence")),
        known & allowed & step.isin(*verbs.FENCED) & (fence != F.col("before.fence")),
        step.isin(*verbs.UNFENCED) & (fence != 0),
        (step == "claimed") & (fence <= F.coalesce("claimed_before", F.lit(0))),
        (step == "claimed") & known & allowed & ~_attempt_is_right(),
        F.col("last") & _state_after(verbs.LOSSES),
        *_wrong_with_blocked(known),
    ]


def _texts() -> list[Column]:
    step, before, fence = F.col("step"), F.col("before"), F.col("fence")
    return [
        text(step, " after ", before),
        text(step, " after ", before, ", but not in the same entry"),
        text(step, " with fence ", fence, " of a run with fence ", F.col("before_fence")),
        text(step, " with fence ", fence),
        text("claimed with fence ", fence, " after ", F.col("claimed_before")),
        text("claimed as attempt ", F.col("attempt"), ", which does not follow from the attempt before"),
        text("its attempt was lost, but the job was not returned in the same entry"),
        text(step, ", but the job is not active"),
        text(step, ", but no job is blocked behind it"),
        text(step, ", but a job is blocked behind it"),
        text("merged, then ", step, " instead of retried, snoozed or returned in the same entry"),
        text("merged, with no event after it"),
        text("blocked behind a job that has ended"),
    ]


def _attempt_is_right() -> Column:
    """The number grows by one after an attempt that counts, else stays. It is 1 for a new job and after a reset."""
    origin, attempt = F.col("origin"), F.col("attempt")
    one_more = F.coalesce(F.col("counted") > origin["place"], F.lit(False)).cast("int")
    expected = F.when(origin["step"] == "claimed", origin["attempt"] + one_more).otherwise(1)
    was_reset = F.coalesce(F.col("reset") > origin["place"], F.lit(False)) & (attempt == 1)
    known = origin.isNotNull() & (origin["segment"] == F.col("segment"))
    return ~F.coalesce(known, F.lit(False)) | F.coalesce((attempt == expected) | was_reset, F.lit(False))


def _wrong_with_blocked(known: Column) -> list[Column]:
    step, was = F.col("step"), F.col("blocking.step")
    side_known = F.when(F.col("blocking").isNull(), F.col("segment") == 0).otherwise(
        F.col("blocking.segment") == F.col("segment")
    )
    is_active = F.coalesce(F.col("before.step").isin(*verbs.ACTIVE), F.lit(False))
    is_blocked = F.coalesce(was == "blocked", F.lit(False))
    merged_in_time = step.isin(*verbs.MERGED_BEFORE) & (F.col("beside.sequence") == F.col("sequence"))
    return [
        step.isin("blocked", "merged", "withdrawn") & known & ~is_active,
        step.isin("unblocked", "merged", "withdrawn") & side_known & ~is_blocked,
        step.isin(*verbs.NOT_WHILE_BLOCKED) & side_known & is_blocked,
        (F.col("beside.step") == "merged") & ~merged_in_time,
        F.col("last") & (step == "merged"),
        F.col("last") & _blocked_after() & side_known & known & ~_state_after(verbs.ACTIVE),
    ]


def fence_findings(steps: DataFrame) -> DataFrame:
    """The fence grows with every claim of a queue."""
    entry = ("history", "queue", "epoch", "sequence")
    before = Window.partitionBy("history", "queue", "epoch").orderBy("sequence")
    claims = (
        steps.where("step = 'claimed'")
        .groupBy(*entry)
        .agg(F.min("fence").alias("fence"), F.max("fence").alias("highest"))
        .withColumn("earlier", F.lag("highest").over(before))
        .withColumn("job", F.lit(None).cast("string"))
    )
    checks = [
        (F.col("fence") != F.col("highest"), text("two fences in entry ", F.col("sequence"))),
        (
            F.col("fence") <= F.col("earlier"),
            text("entry ", F.col("sequence"), " claims with fence ", F.col("fence"), " after ", F.col("earlier")),
        ),
    ]
    return findings_where(claims, "paths", checks)


def archive_of(steps: DataFrame) -> DataFrame:
    """The steps of dead jobs, by (job, fence). `last`: last step of that dead job."""
    in_order = Window.partitionBy(*JOB, "fence").orderBy("sequence", "position")
    of_dead = steps.where(F.col("step").isin(*verbs.ARCHIVE)).select(
        *JOB, "sequence", "position", "time", "step", "fence", "fail_job", "segment"
    )
    return (
        of_dead.withColumn("before", F.lag(F.struct("step", "sequence", "fail_job", "segment")).over(in_order))
        .withColumn("after", F.lead(F.struct("step", "sequence")).over(in_order))
        .withColumn("last", F.col("after").isNull())
    )


def archive_findings(archive: DataFrame) -> DataFrame:
    step, before = F.col("step"), F.coalesce("before.step", F.lit(verbs.BEGINNING))
    known = F.when(F.col("before").isNull(), F.col("segment") == 0).otherwise(
        F.col("before.segment") == F.col("segment")
    )
    has_fail_job = F.coalesce("fail_job", F.lit(False))
    has_failing = F.coalesce(
        (F.col("after.step") == "failing") & (F.col("after.sequence") == F.col("sequence")), F.lit(False)
    )
    of_this_death = F.coalesce(
        (before == "dead") & (F.col("before.sequence") == F.col("sequence")) & F.col("before.fail_job"),
        F.lit(False),
    )
    once = [
        ((step == "dead") & known & (before != verbs.BEGINNING), text("dead twice with the same fence")),
        (
            step.isin(*verbs.ARCHIVE_ENDS) & known & ~before.isin("dead", "failing"),
            text(step, ", but it is not a dead job; the previous event is ", before),
        ),
    ]
    failing = [
        ((step == "dead") & has_fail_job & ~has_failing, text("dead, but its fail job is missing")),
        ((step == "failing") & ~of_this_death, text("a fail job without a dead job in the same entry")),
    ]
    return union([findings_where(archive, "paths", once), findings_where(archive, "fail_jobs", failing)])


def runs_of(transitions: DataFrame) -> DataFrame:
    """Claims with their ends. A claim whose end was refused has none, and is left out."""
    step = F.col("step")
    ends = step.isin(*verbs.RUN_ENDS)
    return (
        transitions.where((step == "claimed") | ends)
        .groupBy(*JOB, F.col("run").alias("fence"))
        .agg(
            F.min(F.when(step == "claimed", F.col("time"))).alias("begun"),
            F.max(F.when(ends, F.col("time"))).alias("ended"),
            F.max("sequence").alias("sequence"),
        )
        .where("begun is not null and ended is not null")
    )


def overlap_findings(runs: DataFrame) -> DataFrame:
    """Compares across epochs, too: a job of a deleted queue may still have been running."""
    earlier = Window.partitionBy("history", "queue", "job").orderBy("begun", "fence")
    other = F.max(F.struct("ended", "fence")).over(earlier.rowsBetween(Window.unboundedPreceding, -1))
    compared = runs.withColumn("other", other)
    checks = [
        (
            F.col("begun") < F.col("other.ended"),
            F.concat(
                text("the run with fence ", F.col("fence"), " began ", F.col("other.ended") - F.col("begun")),
                text(" µs before the run with fence ", F.col("other.fence"), " ended"),
            ),
        ),
        (F.col("ended") < F.col("begun"), text("the run with fence ", F.col("fence"), " ended before it began")),
    ]
    return findings_where(compared, "overlap", checks)
