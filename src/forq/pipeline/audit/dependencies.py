"""Rule `dependencies`: jobs that wait for others become ready, or dead, when these have ended, and not before.

1. `steps_of_held`: the steps of jobs that were held, each with its hold: when it began, and what it names.
2. `bound_dependencies`: for each hold and dependency, which job of that id is meant, and how it ended. An id may be
   used again; a hold means the job that had the id when the hold began, or the one blocked behind it, or, if there was
   none, the last one that had ended.
3. `held_findings`, `dependency_findings`: the rule.

A hold is judged by what the journal has since its last hole. A dependency with no event there is left out: its end was
trimmed, or it is a batch. The end of a job is noted before what follows from it, so places in the journal are compared.
"""

from collections.abc import Iterable, Mapping

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
    last `held` step, as `when` and `names`. `before`, `after`, `later`: the steps around it. `last`: last step."""
    step = F.col("step")
    in_order = Window.partitionBy(*JOB).orderBy("sequence", "position")
    until_now = in_order.rowsBetween(Window.unboundedPreceding, 0)
    beside = F.struct("step", "sequence", "segment")
    words = F.split("cause", " ")
    hold = F.struct(words[0].alias("when"), F.slice(words, 2, F.size(words)).alias("names"))
    jobs = steps.where(step == "held").select(*JOB).distinct()
    own = steps.where(step.isin(*verbs.LIFECYCLE)).join(jobs, list(JOB), "left_semi")
    seen = own.select(
        *JOB,
        *("sequence", "position", "step", "cause", "segment"),
        F.lag(beside).over(in_order).alias("before"),
        F.lag("step", 2).over(in_order).alias("earlier"),
        F.lead(beside).over(in_order).alias("after"),
        F.lead(beside, 2).over(in_order).alias("later"),
        F.lead("step").over(in_order).isNull().alias("last"),
    )
    begins = (step == "held") & (F.col("before.step") == "enqueued")
    born = F.when(begins, F.struct("sequence", "segment", words[0].alias("when"), hold["names"].alias("names")))
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
    step, after = F.col("step"), F.col("after")
    here = after["sequence"] == F.col("sequence")
    again = F.coalesce(here & (after["step"] == "held"), F.lit(False))
    dies = here & (after["step"] == "claimed") & (F.col("later.sequence") == F.col("sequence"))
    dies = F.coalesce(dies & (F.col("later.step") == "dead"), F.lit(False))
    known = F.col("before.segment") == F.col("segment")
    new_names = F.array_except("hold.names", "born.names")
    checks = [
        (
            (step == "held") & known & (F.col("before.step") == "updated") & (F.col("earlier") != "held"),
            text("held after an update, but it was not held before"),
        ),
        (
            (step == "held") & (F.col("born.segment") == F.col("segment")) & (F.size(new_names) > 0),
            text("held after an update for ", F.concat_ws(" ", new_names), ", for which it did not wait before"),
        ),
        (
            (step == "updated") & known & (F.col("before.step") == "held") & ~again,
            text("updated while it was held, but not held again in the same entry"),
        ),
        ((step == "unmet") & ~dies, text("unmet, but not claimed and dead in the same entry")),
    ]
    return findings_where(held, "dependencies", checks)


def dependency_findings(
    held: DataFrame,
    bound: DataFrame,
    epochs: Iterable[Epoch],
    holes: Iterable[Hole],
    redis_state: RedisState | None,
) -> DataFrame:
    """`met` and `unmet` must follow from the ends before them; and a job must not stay held although they decide."""
    step = F.col("step")
    judged = held.where((F.col("born.segment") == F.col("segment")) & F.col("hold").isNotNull())
    decided = judged.where(step.isin("met", "unmet") | ((step == "held") & F.col("last"))).select(
        *JOB,
        *("sequence", "position", "step", "segment", "cause", "hold.when", "hold.names"),
        F.col("born.sequence").alias("begun"),
    )
    one_each = decided.withColumns({"number": F.size("names"), "dependency": F.explode("names")}).drop("names")
    ended_before = F.struct("ended.sequence", "ended.position") < F.struct("sequence", "position")
    how = F.when((step == "held") | ended_before, F.col("ended.how"))
    each = one_each.join(bound, [*JOB, "begun", "dependency"]).withColumns(
        {"how": how, "succeeded": F.coalesce(how.isin(*verbs.SUCCEEDED), F.lit(False))}
    )
    return union(
        [
            _wrongly_met(each),
            _wrongly_unmet(decided, each),
            _still_held(each, epochs, holes, redis_state),
        ]
    )


def _wrongly_met(each: DataFrame) -> DataFrame:
    when, how, dependency = F.col("when"), F.col("how"), F.col("dependency")
    met = each.where("step = 'met'")
    checks = [
        ((when != "dead") & how.isNull(), text("met, but ", dependency, ", for which it waits, has not ended")),
        (
            (when == "done") & how.isNotNull() & ~F.col("succeeded"),
            text("met, but ", dependency, ", for which it waits, ended as ", how),
        ),
    ]
    all_known = F.count("*") == F.max("number")
    none_dead = (
        met.where(when == "dead")
        .groupBy(*JOB, "sequence")
        .agg(all_known.alias("known"), F.count_if(how == "dead").alias("dead"))
    )
    dead_checks = [
        (F.col("known") & (F.col("dead") == 0), text("met, but none of the jobs for which it waits is dead"))
    ]
    return union([findings_where(met, "dependencies", checks), findings_where(none_dead, "dependencies", dead_checks)])


def _wrongly_unmet(decided: DataFrame, each: DataFrame) -> DataFrame:
    words = F.split("cause", " ")
    name, noted = words[0], words[1]
    unmet = decided.where("step = 'unmet'")
    checks = [
        (F.col("when") != "done", text("unmet, but it was held with when = ", F.col("when"))),
        (~F.array_contains("names", name), text("unmet because of ", name, ", for which it did not wait")),
    ]
    of_cause = each.where((F.col("step") == "unmet") & (F.col("dependency") == name))
    how = F.col("how")
    cause_checks = [
        (how.isNull(), text("unmet because of ", name, ", which has not ended")),
        (how.isNotNull() & F.col("succeeded"), text("unmet because of ", name, ", but it ended as ", how)),
        (~F.col("succeeded") & (how != noted), text("unmet because ", name, " ended as ", noted, ", but it was ", how)),
    ]
    return union(
        [findings_where(unmet, "dependencies", checks), findings_where(of_cause, "dependencies", cause_checks)]
    )


def _still_held(
    each: DataFrame, epochs: Iterable[Epoch], holes: Iterable[Hole], redis_state: RedisState | None
) -> DataFrame:
    """Jobs that are held at the end, although their dependencies have ended. Redis tells whether pulse has yet to tell
    some of them; without it, the ends of the last entry are left out."""
    segments: dict[tuple[int, str, int], int] = {}
    for hole in holes:
        key = hole.history, hole.queue, hole.epoch
        segments[key] = segments.get(key, 0) + 1
    compared = [
        (*key, segments.get(key, 0), until)
        for epoch in epochs
        for key in [(epoch.history, epoch.queue, epoch.epoch)]
        if not epoch.deleted and (until := _resolved_until(epoch, redis_state)) is not None
    ]
    ends = each.sparkSession.createDataFrame(
        compared, "history int, queue string, epoch long, last_segment int, until long"
    )
    how = F.col("how")
    at_end = (
        each.where("step = 'held'")
        .groupBy(*JOB, "sequence", "segment", "when", "number")
        .agg(
            F.count_if(how.isNotNull()).alias("ended"),
            F.count_if(how.isNotNull() & ~F.col("succeeded")).alias("otherwise"),
            F.count_if(how == "dead").alias("dead"),
            F.max(F.when(how.isNotNull(), F.col("ended.sequence"))).alias("last_end"),
        )
        .join(F.broadcast(ends), list(_EPOCH))
        .where("segment = last_segment and last_end <= until")
    )
    all_ended = F.col("ended") == F.col("number")
    decided = ((F.col("when") == "done") & (F.col("otherwise") > 0)) | ((F.col("when") == "dead") & (F.col("dead") > 0))
    checks = [
        (all_ended, text("still held, but all jobs for which it waits have ended")),
        (~all_ended & decided, text("still held with when = ", F.col("when"), ", but the ends so far decide")),
    ]
    return findings_where(at_end, "dependencies", checks)


def _resolved_until(epoch: Epoch, redis_state: RedisState | None) -> int | None:
    """The last entry whose ends all dependants have been told; None if that is unknown."""
    queue_state = redis_state.queues.get((epoch.history, epoch.queue)) if redis_state else None
    if queue_state is None:
        return epoch.last - 1
    is_compared = (queue_state.epoch, queue_state.sequence) == (epoch.epoch, epoch.last)
    return epoch.last if is_compared and queue_state.journal_on and not queue_state.resolving else None


def _how(step: Column) -> Column:
    pairs: Mapping[str, str] = verbs.ENDED_AS
    words = F.create_map(*(F.lit(word) for pair in pairs.items() for word in pair))
    return words[step]


def show_hold(about: str) -> str:
    """What follows the job in `held`, for output."""
    when, *names = about.split(" ")
    more = len(names) - _MAX_NAMES_SHOWN
    shown = [*names[:_MAX_NAMES_SHOWN], *([f"and {more:,} more"] if more > 0 else [])]
    return f"when {when}: {' '.join(shown)}"


def show_unmet(about: str) -> str:
    return about.replace(" ", " ended as ", 1)
