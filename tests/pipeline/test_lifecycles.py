"""Lifecycles: a job id has one row per use, with its end and the fate of its dead job."""

from typing import Any

from pyspark.sql import SparkSession

from forq.pipeline.format import EVENTS
from forq.pipeline.replay import job_lifecycles
from tests.pipeline.event_rows import Journal, event, moment


def lifecycles(spark: SparkSession, *journals: Journal) -> list[dict[str, Any]]:
    events = spark.createDataFrame([row for journal in journals for row in journal.rows()], EVENTS)
    return [row.asDict() for row in job_lifecycles(spark, events).orderBy("queue", "epoch", "job", "life").collect()]


def some(rows: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in rows]


def test_a_job_id_has_one_lifecycle_per_use(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(1, event("enqueued", "a"))
    journal.note(2, event("claimed", "a", fence=5, attempt=1))
    journal.note(3, event("blocked", "a"))
    journal.note(4, event("done", "a", fence=5, micros=2), event("unblocked", "a"))
    journal.note(6, event("claimed", "a", fence=7, attempt=1))
    journal.note(8, event("dead", "a", fence=7, micros=1, fail_job=True), event("failing", "a", fence=7))
    journal.note(9, event("revived", "a", fence=7))
    assert some(
        lifecycles(spark, journal), "life", "state", "enqueued_at", "ended_at", "attempts", "micros", "fence", "fate"
    ) == [
        (0, "done", at(1), at(4), 1, 2, 5, None),
        (1, "dead", at(4), at(8), 1, 1, 7, "revived"),
        (2, "ready", at(9), None, None, None, 7, None),
    ]


def test_a_lifecycle_has_its_highest_attempt_and_the_cause_of_the_last_lost_one(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(1, event("enqueued", "a"))
    journal.note(2, event("claimed", "a", fence=2, attempt=1))
    journal.note(3, event("stalled", "a", fence=2, cause="signal-9"), event("returned", "a"))
    journal.note(4, event("claimed", "a", fence=4, attempt=2))
    journal.note(5, event("timed_out", "a", fence=4, cause="timeout", micros=900), event("returned", "a"))
    journal.note(6, event("claimed", "a", fence=6, attempt=3), event("dead", "a", fence=6, cause="TimeoutError"))
    journal.note(7, event("forgotten", "a", fence=6))
    assert some(lifecycles(spark, journal), "state", "attempts", "cause", "micros", "fence", "fate") == [
        ("dead", 3, "timeout", 900, 6, "forgotten")
    ]


def test_the_cause_of_a_lifecycle_is_that_of_its_last_unsuccessful_attempt(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(1, *(event("enqueued", job) for job in "abc"))
    journal.note(2, *(event("claimed", job, fence=2, attempt=1) for job in "abc"))
    journal.note(3, *(event("retried", job, fence=2, cause="OSError", micros=1) for job in "abc"))
    journal.note(4, *(event("claimed", job, fence=4, attempt=2) for job in "abc"))
    journal.note(5, event("dead", "a", fence=4, cause="KeyError", micros=1), event("done", "b", fence=4, micros=1))
    # An exception of a handler has a run time, a job buried by a claim has none.
    journal.note(6, event("dead", "c", fence=4, cause="TimeoutError", micros=1))
    assert some(lifecycles(spark, journal), "job", "state", "cause") == [
        ("a", "dead", "KeyError"),
        ("b", "done", "OSError"),
        ("c", "dead", "TimeoutError"),
    ]


def test_a_held_job_has_no_cause_and_a_dead_one_has_what_it_waited_for(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(1, *(event("enqueued", job) for job in "abc"), event("held", "b", cause="done a x"))
    journal.note(1, event("held", "c", cause="ended b"))
    journal.note(2, event("updated", "b"), event("held", "b", cause="done a"))
    journal.note(3, event("claimed", "a", fence=3, attempt=1))
    journal.note(4, event("dead", "a", fence=3, cause="KeyError"), event("unmet", "b", cause="a dead"))
    expected = [("a", "dead", "KeyError", None), ("b", "held", None, None), ("c", "held", None, None)]
    columns = ("job", "state", "cause", "waited_for")
    at_claim = Journal(
        "q", notes=[(at, [one for one in noted if one["verb"] != "unmet"]) for at, noted in journal.notes]
    )
    assert some(lifecycles(spark, at_claim), *columns) == expected
    journal.note(4, event("claimed", "b", fence=4, attempt=1), event("dead", "b", fence=4, cause="DependencyFailed"))
    journal.note(5, event("met", "c"))
    assert some(lifecycles(spark, journal), *columns) == [
        ("a", "dead", "KeyError", None),
        ("b", "dead", "DependencyFailed", ["a"]),
        ("c", "ready", None, None),
    ]


def test_a_lifecycle_has_the_options_that_its_job_had_last(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(1, *(event("enqueued", job) for job in "abc"), event("options", "a", cause="r=1"))
    journal.note(2, event("options", "b", cause="t=5"), event("updated", "b"))
    journal.note(3, event("claimed", "a", fence=3, attempt=1))
    journal.note(4, event("dead", "a", fence=3, cause="KeyError", micros=1))
    journal.note(5, event("options", "b", cause="-"), event("updated", "b"))
    journal.note(6, event("revived", "a", fence=3), event("options", "a", cause="r=2"))
    assert some(lifecycles(spark, journal), "job", "life", "state", "verb", "cause", "fence", "options") == [
        ("a", 0, "dead", "dead", "KeyError", 3, "r=1"),
        ("a", 1, "ready", "revived", None, 3, "r=2"),
        ("b", 0, "ready", "updated", None, 0, None),
        ("c", 0, "ready", "enqueued", None, 0, None),
    ]


def test_a_released_job_has_ended(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(1, event("enqueued", "a"))
    journal.note(2, event("claimed", "a", fence=2, attempt=1))
    journal.note(3, event("released", "a", fence=2, micros=1), event("unblocked", "a"))
    assert some(lifecycles(spark, journal), "life", "state", "ended_at") == [(0, "released", at(3)), (1, "ready", None)]


def test_events_of_a_dead_job_do_not_affect_a_live_job_of_the_same_id(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(1, event("enqueued", "a"))
    journal.note(2, event("claimed", "a", fence=2, attempt=1))
    journal.note(3, event("dead", "a", fence=2))
    journal.note(4, event("enqueued", "a"))
    journal.note(5, event("claimed", "a", fence=5, attempt=1))
    journal.note(6, event("discarded", "a", fence=2))
    assert some(lifecycles(spark, journal), "life", "state", "fate") == [(0, "dead", "discarded"), (1, "active", None)]


def test_deleting_a_queue_ends_its_jobs_and_the_next_epoch_is_another_queue(spark: SparkSession) -> None:
    journal, later = Journal("q"), Journal("q", epoch=2)
    journal.note(1, event("enqueued", "a"), event("enqueued", "b"), event("enqueued", "c"))
    journal.note(2, event("claimed", "a", fence=2, attempt=1), event("claimed", "b", fence=2, attempt=1))
    journal.note(3, event("done", "a", fence=2), event("dead", "b", fence=2))
    journal.note(4, event("deleted", cause="1"))
    later.note(5, event("created", cause="2"), event("enqueued", "c"))
    assert some(lifecycles(spark, journal, later), "epoch", "job", "state", "fate", "ended_at") == [
        (1, "a", "done", None, at(3)),
        (1, "b", "dead", "deleted", at(3)),
        (1, "c", "deleted", None, at(4)),
        (2, "c", "ready", None, None),
    ]


def at(micros: int) -> Any:
    """As Spark returns it: naive, in the local time zone."""
    return moment(micros).astimezone().replace(tzinfo=None)
