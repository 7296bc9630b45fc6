"""Rule `batches`: a batch ends once, after it was opened, and its callbacks become ready after that, as it has ended.

The callbacks of batch B are the jobs B:on_done and B:on_end. B:on_dead may be ready before the end. Only epochs whose
journal has no holes are judged.
"""

from collections.abc import Iterable

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from forq.pipeline.audit.chain import Hole
from forq.pipeline.audit.findings import findings_where, text

_EPOCH = ("history", "queue", "epoch")
_CALLBACK = r"^(.+):(on_done|on_end)$"


def batch_steps(events: DataFrame, held: DataFrame, holes: Iterable[Hole]) -> DataFrame:
    """The steps of batches and of their callbacks in order. `earlier`: the step of the batch before."""
    place = ("sequence", "position")
    words = F.split("cause", " ")
    of_batches = events.where(F.col("verb").isin("batch_opened", "batch_ended")).select(
        *_EPOCH,
        *place,
        words[0].alias("batch"),
        F.col("verb").alias("step"),
        F.when(F.col("verb") == "batch_ended", words[1]).alias("ended"),
        F.lit(None).cast("string").alias("job"),
    )
    known = of_batches.select(*_EPOCH, "batch").distinct()
    met = held.where((F.col("step") == "met") & F.col("job").rlike(_CALLBACK)).select(
        *_EPOCH,
        *place,
        F.regexp_extract("job", _CALLBACK, 1).alias("batch"),
        F.col("step"),
        F.lit(None).cast("string").alias("ended"),
        "job",
    )
    broken = {(hole.history, hole.queue, hole.epoch) for hole in holes}
    both = of_batches.unionByName(met.join(known, [*_EPOCH, "batch"], "left_semi"))
    if broken:
        columns = "history int, queue string, epoch long"
        both = both.join(
            F.broadcast(both.sparkSession.createDataFrame(sorted(broken), columns)), list(_EPOCH), "left_anti"
        )
    before = Window.partitionBy(*_EPOCH, "batch").orderBy(*place).rowsBetween(Window.unboundedPreceding, -1)
    of_batch = F.when(F.col("step") != "met", F.struct("step", "ended"))
    return both.withColumn("earlier", F.last(of_batch, ignorenulls=True).over(before))


def batch_findings(steps: DataFrame) -> DataFrame:
    step, earlier, batch = F.col("step"), F.col("earlier.step"), F.col("batch")
    is_open = F.coalesce(earlier == "batch_opened", F.lit(False))
    done = F.coalesce(F.col("earlier.ended") == "done", F.lit(False))
    checks = [
        ((step == "batch_opened") & is_open, text("batch ", batch, " opened, but it was open")),
        ((step == "batch_ended") & ~is_open, text("batch ", batch, " ended, but it was not open")),
        ((step == "met") & (earlier != "batch_ended"), text("met, but batch ", batch, " has not ended")),
        (
            (step == "met") & F.col("job").endswith(":on_done") & (earlier == "batch_ended") & ~done,
            text("met, but batch ", batch, " ended as ", F.col("earlier.ended")),
        ),
    ]
    return findings_where(steps, "batches", checks)
