"""Rule `dependencies`: what it reports about held jobs, and that real queues never break it."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from forq.broker.chunks import NewJob
from forq.broker.enqueue import Update, new_job
from forq.broker.journal import Event
from forq.broker.keys import DEFAULT_PREFIX
from forq.pipeline.audit import run
from forq.pipeline.audit.dependencies import show_hold, show_unmet
from forq.pipeline.audit.run import Auditor
from tests.pipeline.busy_queues import BusyQueue
from tests.pipeline.histories import JournalWriter, frame_of, rows_of, rows_on_server
from tests.support.drive.one_queue import OneQueue, one_queue

MANY = 1200


def findings(spark: SparkSession, folder: Path, rows: list[Event]) -> list[str]:
    found = Auditor(frame_of(spark, folder, [rows]), None).run().findings
    return [f"{one.rule}: {one.job}: {one.found}" for one in found]


def written(*entries: str) -> list[Event]:
    journal = JournalWriter()
    journal.create("q")
    for entry in entries:
        journal.write("q", *entry.split("; "))
    return rows_of(journal.entries)


def without_entries(rows: list[Event], *sequences: int) -> list[Event]:
    return [row for row in rows if row.sequence not in sequences]


def store(queue: OneQueue, *jobs: NewJob) -> None:
    queue.producer.enqueue(list(jobs), Update("update"))


def audit_of(spark: SparkSession, queue: OneQueue, folder: Path) -> run.AuditResult:
    return run.audit_all(spark, queue.url, DEFAULT_PREFIX, str(folder / "none"))[0]


def test_each_finding_names_the_dependency_and_its_end(spark: SparkSession, tmp_path: Path) -> None:
    rows = written(
        "enqueued 0 a b c d e f g; held 0 b done a; held 0 c done a; held 0 d dead a; held 0 e done a b",
        "enqueued 0 h; held 0 h ended a",
        "met 0 b",
        "claimed 1 1 a; done 1 a 5; unmet 0 c a dead; claimed 1 1 c; dead 1 c - 0 DependencyFailed",
        "met 0 d; unmet 0 e g dead; claimed 2 1 e; dead 2 e - 0 DependencyFailed",
        "paused 0",
    )
    assert sorted(findings(spark, tmp_path, rows)) == [
        "dependencies: b: met, but a, for which it waits, has not ended",
        "dependencies: c: unmet because of a, but it ended as done",
        "dependencies: d: met, but none of the jobs for which it waits is dead",
        "dependencies: e: unmet because of g, for which it did not wait",
        "dependencies: h: still held, but all jobs for which it waits have ended",
    ]


def test_an_end_in_the_last_entry_may_have_more_dependants_than_one_call_tells(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = written("enqueued 0 a b; held 0 b done a", "claimed 1 1 a", "done 1 a 5")
    assert findings(spark, tmp_path, rows) == []


def test_what_is_in_a_hole_is_not_judged(spark: SparkSession, tmp_path: Path) -> None:
    rows = written(
        "enqueued 0 a x",
        "claimed 1 1 a; blocked 0 a",
        "enqueued 0 b c; held 0 b done a; held 0 c ended x a",
        "done 1 a 5; unblocked 0 a; cancelled 0 x",
        "claimed 2 1 a; done 2 a 5; met 0 b; met 0 c",
        "cancelled 0 b",
    )
    trimmed = [(1, 2), (1, 2, 3), (3,), (4,), (5,), (1, 2, 3, 4)]
    histories = [without_entries(rows, *sequences) for sequences in trimmed]
    # An update of a hold that began in the hole, of an id that had another job before.
    rows = written("enqueued 0 a b", "cancelled 0 b", "enqueued 0 b; held 0 b done a", "updated 0 b; held 0 b done a")
    trimmed.append((4,))
    histories.append(without_entries(rows, 4))
    found = Auditor(frame_of(spark, tmp_path, histories), None).run().findings
    assert {(one.history, one.rule) for one in found} == {(number, "chain") for number in range(len(trimmed))}


def test_a_batch_as_a_dependency_is_not_judged(spark: SparkSession, tmp_path: Path) -> None:
    rows = written("enqueued 0 a b; held 0 a done+; held 0 b ended+", "met 0 a", "paused 0")
    assert findings(spark, tmp_path, rows) == []


@pytest.mark.parametrize(
    ("about", "shown"),
    [
        ("done a b", "when done: a b"),
        ("dead " + " ".join(map(str, range(12))), "when dead: 0 1 2 3 4 5 6 7 8 9 and 2 more"),
    ],
)
def test_a_hold_is_shown_with_its_first_dependencies(about: str, shown: str) -> None:
    assert show_hold(about) == shown
    assert show_unmet("a cancelled") == "a ended as cancelled"


def test_held_jobs_of_a_real_queue_are_clean(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    """Chains, deaths, an update, a cancel, a blocked enqueue, and jobs that stay held."""
    with one_queue(redis_url) as queue:
        worker = queue.worker()
        store(queue, new_job(1, id="a"), new_job(1, id="b", after="a"), new_job(1, id="c", after=["a", "b"]))
        store(queue, new_job(2, id="c", max_retries=3))
        store(queue, new_job(1, id="d", after="c", when="dead"), new_job(1, id="e", after="d", when="ended"))
        assert worker.turn(5) == ["a"]
        store(queue, new_job(2, id="a"))
        store(queue, new_job(1, id="f", after="a"), new_job(1, id="g", after="f", expires_in=3600))
        assert worker.turn(5, done="a") == ["a", "b"]
        assert worker.turn(5, failed="a", done="b", kind="permanent") == ["c"]
        assert queue.state().dead == ["a", "f", "g"]
        assert worker.turn(5, done="c") == ["e"]
        store(queue, new_job(1, id="h"), new_job(1, id="i", after="h"), new_job(1, id="j", after="i"))
        assert queue.producer.cancel("j")
        result = audit_of(spark, queue, tmp_path)
    assert result.findings == []
    (dependencies,) = [verdict for verdict in result.verdicts if verdict.rule == "dependencies"]
    assert dependencies.checked == 9


def test_a_lost_hold_is_reported_with_the_events_of_its_job(
    spark: SparkSession, redis_url: str, tmp_path: Path
) -> None:
    with one_queue(redis_url) as queue:
        store(queue, new_job(1, id="a"), new_job(1, id="b", after="a"))
        queue.redis.hdel(queue.key("held"), "b")
        queue.redis.hdel(queue.key("held:open"), "b 1")
        found = audit_of(spark, queue, tmp_path).findings
        assert {(one.rule, one.job) for one in found} == {("conservation", None), ("states", "b")}
        assert any(" held b when done: a -" in event for one in found for event in one.events)
        worker = queue.worker()
        worker.turn(1)
        worker.turn(0, done="a")
        still = "still held, but all jobs for which it waits have ended"
        assert still in [one.found for one in audit_of(spark, queue, tmp_path).findings]


def test_dependants_that_pulse_has_yet_to_tell_are_clean(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    with one_queue(redis_url) as queue:
        store(queue, new_job(1, id="a"))
        for part in range(3):
            store(queue, *(new_job(1, id=f"j{part}.{number}", after="a") for number in range(MANY // 3)))
        worker = queue.worker()
        worker.turn(1)
        worker.turn(0, done="a")
        queue.enqueue("later")
        assert queue.inspector.counts().held > 0
        assert audit_of(spark, queue, tmp_path).findings == []
        while queue.inspector.counts().held:
            queue.recovery().promote("q")
        assert audit_of(spark, queue, tmp_path).findings == []


@pytest.mark.timeout(300)
def test_random_operations_never_break_the_rule(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    names = [f"busy{seed}" for seed in range(4)]
    for seed, name in enumerate(names):
        busy = BusyQueue(redis_url, name, seed=seed, ids=5 + 4 * seed, failures=0.5)
        busy.run(800)
        busy.close()
    histories = [[row for row in rows_on_server(redis_url, name) if row.queue == name] for name in names]
    assert {"held", "met", "unmet"} <= {row.verb for rows in histories for row in rows}
    audit = Auditor(frame_of(spark, tmp_path, histories), None).run()
    (dependencies,) = [verdict for verdict in audit.verdicts if verdict.rule == "dependencies"]
    assert dependencies.checked > 200
    assert audit.findings == []
