"""The events about jobs as steps (verbs.py), fail jobs with their birth, each with its segment.

A **segment** is a stretch of a queue's journal without a hole. What came before its beginning is not known, so nothing
is said about it: the hole has been reported.
"""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from forq.broker.keys import fail_queue
from forq.pipeline.chain import Epoch, Hole

JOB = ("history", "queue", "epoch", "job")
FAIL = fail_queue("")
_UNKNOWN_JOB = "?"
_FOREVER = 2**62


def steps_of(events: DataFrame, epochs: Sequence[Epoch], holes: Sequence[Hole]) -> DataFrame:
    """One row per event of a job, in partitions by job."""
    verb = F.col("verb")
    step = F.when((verb == "cancelled") & (F.col("fence") != 0), "cancelled_run").otherwise(verb)
    told_of_jobs = events.where(F.col("job").isNotNull() & (F.col("job") != _UNKNOWN_JOB))
    steps = told_of_jobs.select(
        *JOB, "sequence", "position", "time", step.alias("step"), "fence", "attempt", "fail_job", "verb"
    )
    steps = _with_segments(steps, holes)
    return steps.unionByName(_births(steps, epochs, holes)).repartition("history", "queue", "job")


def _with_segments(steps: DataFrame, holes: Sequence[Hole]) -> DataFrame:
    """`segment` is the number of holes before the row; `orphans`: whether the birth of a job may be in a hole."""
    if not holes:
        return steps.withColumn("segment", F.lit(0)).withColumn("orphans", F.lit(False))
    stretches = [
        (*epoch, number + 1, hole.last, (*after, _HOLE_AT_END)[0].first)
        for epoch, missing in _by_epoch(holes).items()
        for number, hole in enumerate(missing)
        for after in [missing[number + 1 :]]
    ]
    spark = steps.sparkSession
    segments = spark.createDataFrame(
        stretches, "history int, queue string, epoch long, segment int, after long, until long"
    )
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


_HOLE_AT_END = Hole(0, "", 0, _FOREVER, _FOREVER)


def _by_epoch(holes: Sequence[Hole]) -> dict[tuple[int, str, int], list[Hole]]:
    found: dict[tuple[int, str, int], list[Hole]] = {}
    for hole in sorted(holes, key=lambda hole: hole.first):
        found.setdefault((hole.history, hole.queue, hole.epoch), []).append(hole)
    return found


def _births(steps: DataFrame, epochs: Sequence[Epoch], holes: Sequence[Hole]) -> DataFrame:
    """`failing` in the journal of a queue is the birth of ID:FENCE in the fail queue of that moment."""
    failing = steps.where("step = 'failing'").select(
        "history",
        F.concat("queue", F.lit(FAIL)).alias("queue"),
        F.concat_ws(":", "job", "fence").alias("job"),
        # Before everything that its own journal tells; two births stay in order.
        (F.col("sequence") - _FOREVER).alias("sequence"),
        "position",
        "time",
        F.lit("born").alias("step"),
        F.lit(0).cast("long").alias("fence"),
        F.lit(None).cast("int").alias("attempt"),
        F.lit(None).cast("boolean").alias("fail_job"),
        F.lit("failing").alias("verb"),
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
    """From when to when each fail queue was the fail queue; an epoch is named by the time of its creation."""
    fail = sorted((e.history, e.queue, e.epoch) for e in epochs if e.queue.endswith(FAIL))
    spans = [
        (history, queue, epoch, epoch, after[2] if after[:2] == (history, queue) else _FOREVER)
        for (history, queue, epoch), after in zip(fail, [*fail[1:], (0, "", 0)], strict=False)
    ]
    return spark.createDataFrame(spans, "history int, queue string, epoch long, since long, until long")
