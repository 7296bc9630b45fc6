"""Rule `dependencies`: jobs that wait for others become ready, or dead, when these have ended, and not before.

1. `steps_of_held`: the steps of jobs that were held, each with its hold: when it began, and what it names.
2. `bound_dependencies`: for each hold and dependency, which job of that id is meant, and how it ended. An id may be
   used again; a hold means the job that had the id when the hold began, or the one blocked behind it, or, if there was
   none, the last one that had ended.
3. `held_findings`, and `dependency_findings` over `decisions`: the rule.

A hold is judged by what the journal has since its last hole. A dependency with no event there is left out: its end was
trimmed, or it is a batch. The end of a job is noted before what follows from it, so places in the journal are compared.
"""

from collections import Counter
from collections.abc import Iterable

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from forq.pipeline import verbs
from forq.pipeline.audit.chain import Epoch, Hole
from forq.pipeline.audit.findings import findings_where, text, union
from forq.pipeline.audit.redis_state import RedisState
from forq.pipeline.audit.transitions import JOB

_EPOCH = ("history", "queue", "epoch")
# Sorts after all steps of an entry: the script decides what is meant when all jobs of its call are stored.
_AFTER_ENTRY = 2**31 - 1
_MAX_NAMES_SHOWN = 10


def steps_of_held(steps: DataFrame) -> DataFrame:
    """The lifecycle of jobs that were held. `born`: place and segment of the step at which its hold began; `hold`: its
    last `held` step, as `when`, `names` and `others`. `earlier`, `before`, `after` and `later`: the steps around it."""
    step = F.col("step")
    in_order = Window.partitionBy(*JOB).orderBy("sequence", "position")
    until_now = in_order.rowsBetween(Window.unboundedPreceding, 0)
    beside = F.struct("step", "sequence", "segment")
    words = F.split("cause", " ")
    when, names = F.rtrim(words[0], F.lit("+")), F.slice(words, 2, F.size(words))
    # It also waits for batches, or for jobs of other queues, of which this journal knows nothing.
    others = words[0].endswith("+")
    hold = F.struct(when.alias("when"), names.alias("names"), others.alias("others"))
    jobs = steps.where(step == "held").select(*JOB).distinct()
    own = steps.where(step.isin(*verbs.LIFECYCLE)).join(jobs, list(JOB), "left_semi")
    seen = own.select(
        *JOB,
        *("sequence", "position", "step", "cause", "segment"),
        F.lag(beside).over(in_order).alias("before"),
        F.lag(beside, 2).over(in_order).alias("earlier"),
        F.lead(beside).over(in_order).alias("after"),
        F.lead(beside, 2).over(in_order).alias("later"),
        F.lead("step").over(in_order).isNull().alias("last"),
    )
    begins = (step == "held") & F.col("before.step").isin("enqueued", "revived")
    born = F.when(begins, F.struct("sequence", "segment", when.alias("when"), names.alias("names")))
    return seen.withColumns(
        {
            "born": F.last(born, ignorenulls=True).over(until_now),
            "hold": F.last(F.when(step == "held", hold), ignorenulls=True).over(until_now),
        }
    )


def bound_dependencies(held: DataFrame, steps: DataFrame) -> DataFrame:
    """One row per hold and dependency: JOB, `begun` (sequence), `dependency`, and `ended` (place and how; null: it has
    not). Dependencies of which the journal does not have enough are left out."""
    step = F.col("step")
    named = held.where((step == "held") & (F.col("born.sequence") == F.col("sequence"))).select(
        *_EPOCH,
        F.explode("born.names").alias("job"),
        F.col("sequence"),
        F.lit(_AFTER_ENTRY).alias("position"),
        F.lit("named").alias("step"),
        "segment",
        F.col("job").alias("dependant"),
    )
    of_dependencies = steps.join(named.select(*JOB).distinct(), list(JOB), "left_semi").select(
        *JOB, "sequence", "position", "step", "segment", F.lit(None).cast("string").alias("dependant")
    )
    # An update in the same entry repeats the line.
    rows = of_dependencies.unionByName(named.distinct())
    place = ("sequence", "position", "dependant")
    so_far = (Window.unboundedPreceding, -1)
    past = Window.partitionBy(*JOB).orderBy(*place).rowsBetween(*so_far)
    # Backwards: Spark would evaluate a frame up to the end again for each row.
    coming = Window.partitionBy(*JOB).orderBy(*(F.desc(column) for column in place)).rowsBetween(*so_far)

    def last(of: Iterable[str], value: Column) -> Column:
        return F.last(F.when(step.isin(*of), value), ignorenulls=True).over(past)

    states = rows.withColumns(
        {
            "state": last(verbs.LIFECYCLE, F.struct("step", "segment")),
            "claim": last(("claimed",), F.col("segment")),
            "blocking": last(verbs.BLOCKING, step),
        }
    )
    # Dropping the hint of an ended job ends nothing.
    ends = step.isin(*verbs.GONE) & ((step != "dropped") | F.col("state.step").isin(*verbs.PRESENT))
    end = F.struct("sequence", "position", _how(step).alias("how"))
    nearest = F.last(F.when(ends, end), ignorenulls=True)
    states = states.withColumns({"next_end": nearest.over(coming), "last_end": nearest.over(past)})
    # What was blocked has become a job, or has updated the active one, or it has ended.
    of_blocked = F.when(step == "withdrawn", F.struct(end.alias("end"))).when(
        step.isin("unblocked", "merged"), F.struct(F.col("next_end").alias("end"))
    )
    bound = states.withColumn("of_blocked", F.last(of_blocked, ignorenulls=True).over(coming)).where("step = 'named'")
    state = F.col("state.step")
    ended = (
        F.when(state.isin(*verbs.ACTIVE) & (F.col("blocking") == "blocked"), F.col("of_blocked.end"))
        .when(state.isin(*verbs.PRESENT), F.col("next_end"))
        .otherwise(F.col("last_end"))
    )
    # Before a hole it may have ended, or another enqueue may have been blocked behind it.
    known = (F.col("state.segment") == F.col("segment")) & (
        ~state.isin(*verbs.ACTIVE) | (F.col("claim") == F.col("segment"))
    )
    return bound.where(known).select(
        *_EPOCH,
        F.col("dependant").alias("job"),
        F.col("sequence").alias("begun"),
        F.col("job").alias("dependency"),
        ended.alias("ended"),
    )


def held_findings(held: DataFrame) -> DataFrame:
    """The steps of a hold in their order, as far as the state table cannot say it."""
    step, earlier, before, after, later = (F.col(name) for name in ("step", "earlier", "before", "after", "later"))
    here = F.col("sequence")
    again = F.coalesce((after["sequence"] == here) & (after["step"] == "held"), F.lit(False))
    dies = (after["step"] == "claimed") & (later["sequence"] == here) & (later["step"] == "dead")
    known, was_known = before["segment"] == F.col("segment"), earlier["segment"] == F.col("segment")
    is_judged = F.col("born.segment") == F.col("segment")
    new_names = F.array_except("hold.names", "born.names")
    cause, _ = _cause()
    of_others = F.col("hold.others") & (cause == "-")
    checks = [
        (
            (step == "held") & (before["step"] == "updated") & (earlier["step"] != "held") & was_known,
            text("held after an update, but it was not held before"),
        ),
        (
            (step == "held") & is_judged & (F.size(new_names) > 0),
            text("held after an update for ", F.concat_ws(" ", new_names), ", for which it did not wait before"),
        ),
        (
            (step == "updated") & known & (before["step"] == "held") & ~again,
            text("updated while it was held, but not held again in the same entry"),
        ),
        (
            (step == "unmet") & ~F.coalesce(dies, F.lit(False)),
            text("unmet, but not claimed and dead in the same entry"),
        ),
        (
            (step == "unmet") & is_judged & (F.col("hold.when") != "done") & ~of_others,
            text("unmet, but it was held with when = ", F.col("hold.when")),
        ),
        (
            (step == "unmet") & is_judged & ~F.array_contains("hold.names", cause) & ~of_others,
            text("unmet because of ", cause, ", for which it did not wait"),
        ),
    ]
    return findings_where(held, "dependencies", checks)


def decisions(held: DataFrame, bound: DataFrame) -> DataFrame:
    """One row per dependency of each `met` and `unmet`, and of each job that is held at the end. `how` it had ended
    before that; null: it had not. `number`: of all dependencies, also those left out."""
    step = F.col("step")
    decided = held.where(
        (F.col("born.segment") == F.col("segment")) & (step.isin("met", "unmet") | ((step == "held") & F.col("last")))
    ).select(
        *JOB,
        *("sequence", "position", "step", "segment", "cause", "hold.when", "hold.others"),
        F.col("born.sequence").alias("begun"),
        F.size("hold.names").alias("number"),
        F.explode("hold.names").alias("dependency"),
    )
    ended_before = F.struct("ended.sequence", "ended.position") < F.struct("sequence", "position")
    how = F.when((step == "held") | ended_before, F.col("ended.how"))
    return decided.join(bound, [*JOB, "begun", "dependency"]).withColumns(
        {"how": how, "succeeded": F.coalesce(how.isin(*verbs.SUCCEEDED), F.lit(False))}
    )


def dependency_findings(
    decided: DataFrame, epochs: Iterable[Epoch], holes: Iterable[Hole], redis_state: RedisState | None
) -> DataFrame:
    """`met` and `unmet` must follow from the ends before them, and no job may stay held although they decide."""
    step, when, how, succeeded = (F.col(name) for name in ("step", "when", "how", "succeeded"))
    dependency, met = F.col("dependency"), step == "met"
    cause, noted = _cause()
    of_cause = (step == "unmet") & (dependency == cause)
    checks = [
        (met & (when != "dead") & how.isNull(), text("met, but ", dependency, ", for which it waits, has not ended")),
        (
            met & (when == "done") & how.isNotNull() & ~succeeded,
            text("met, but ", dependency, ", for which it waits, ended as ", how),
        ),
        (of_cause & how.isNull(), text("unmet because of ", cause, ", which has not ended")),
        (of_cause & succeeded, text("unmet because of ", cause, ", but it ended as ", how)),
        (
            of_cause & ~succeeded & (how != noted),
            text("unmet because ", cause, " ended as ", noted, ", but it ended as ", how),
        ),
    ]
    whole = (
        decided.where(step != "unmet")
        .groupBy(*JOB, "sequence", "segment", "step", "when", "others", "number")
        .agg(
            F.count("*").alias("known"),
            F.count("how").alias("ended"),
            F.count_if(how.isNotNull() & ~succeeded).alias("otherwise"),
            F.count_if(how == "dead").alias("dead"),
            F.max(F.when(how.isNotNull(), F.col("ended.sequence"))).alias("last_end"),
        )
        .join(F.broadcast(_resolved(decided, epochs, holes, redis_state)), list(_EPOCH), "left")
    )
    is_over = (step == "held") & (F.col("segment") == F.col("last_segment")) & (F.col("last_end") <= F.col("until"))
    all_ended = F.col("ended") == F.col("number")
    enough = ((when == "done") & (F.col("otherwise") > 0)) | ((when == "dead") & (F.col("dead") > 0))
    whole_checks = [
        (
            met & (when == "dead") & ~F.col("others") & (F.col("known") == F.col("number")) & (F.col("dead") == 0),
            text("met, but none of the jobs for which it waits is dead"),
        ),
        (is_over & all_ended & ~F.col("others"), text("still held, but all jobs for which it waits have ended")),
        (is_over & ~all_ended & enough, text("still held with when = ", when, ", but the ends so far decide")),
    ]
    return union([findings_where(decided, "dependencies", checks), findings_where(whole, "dependencies", whole_checks)])


def _cause() -> tuple[Column, Column]:
    """The dependency that `unmet` names, and how it ended."""
    words = F.split("cause", " ")
    return words[0], words[1]


def _resolved(
    decided: DataFrame, epochs: Iterable[Epoch], holes: Iterable[Hole], redis_state: RedisState | None
) -> DataFrame:
    """The epochs that continue: their last segment, and the last entry whose ends all dependants have been told."""
    segments = Counter((hole.history, hole.queue, hole.epoch) for hole in holes)
    rows = [
        (*key, segments[key], until)
        for epoch in epochs
        for key in [(epoch.history, epoch.queue, epoch.epoch)]
        if not epoch.deleted and (until := _resolved_until(epoch, redis_state)) is not None
    ]
    columns = "history int, queue string, epoch long, last_segment int, until long"
    return decided.sparkSession.createDataFrame(rows, columns)


def _resolved_until(epoch: Epoch, redis_state: RedisState | None) -> int | None:
    """Pulse may have yet to follow some ends, which Redis shows. Without Redis those of the last entry are left out."""
    queue_state = redis_state.queues.get((epoch.history, epoch.queue)) if redis_state else None
    if queue_state is None:
        return epoch.last - 1
    is_compared = (queue_state.epoch, queue_state.sequence) == (epoch.epoch, epoch.last)
    return epoch.last if is_compared and queue_state.journal_on and not queue_state.resolving else None


def _how(step: Column) -> Column:
    return F.create_map(*(F.lit(word) for pair in verbs.ENDED_AS.items() for word in pair))[step]


def show_hold(about: str) -> str:
    """What follows the job in `held`, for output."""
    when, *names = about.split(" ")
    more = len(names) - _MAX_NAMES_SHOWN
    shown = [*names[:_MAX_NAMES_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]
    return f"when {when}: {' '.join(shown)}"


def show_unmet(about: str) -> str:
    return about.replace(" ", " ended as ", 1)
