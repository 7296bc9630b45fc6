"""Rule `options`: what it reports about jobs with options of their own, and that real queues never break it."""

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from forq.broker.dead import DeadJobs
from forq.broker.enqueue import Update, new_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.pipeline.audit import run
from forq.pipeline.audit.own_options import show_options
from forq.pipeline.audit.run import Auditor
from tests.pipeline.busy_queues import BusyQueue
from tests.pipeline.histories import JournalWriter, frame_of, rows_of, rows_on_server
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.wait import wait_until


def audited(spark: SparkSession, folder: Path, journal: JournalWriter) -> list[str]:
    found = Auditor(frame_of(spark, folder, [rows_of(journal.entries)]), None).run().findings
    return [f"{one.rule}: {one.job}: {one.found}" for one in found]


def audit_of(spark: SparkSession, queue: OneQueue, folder: Path) -> run.AuditResult:
    return run.audit_all(spark, queue.url, DEFAULT_PREFIX, str(folder / "none"))[0]


def test_each_finding_reports_the_option_and_what_happened(spark: SparkSession, tmp_path: Path) -> None:
    journal = JournalWriter()
    journal.create("q")
    journal.write("q", "enqueued 0 a b c", "options 0 a r=0", "options 0 b x=900", "options 0 c x=,t", actor="-")
    journal.write("q", "claimed 1 1 a b c")
    journal.write("q", "retried 1 a 5 KeyError", "done 1 b 5", "done 1 c 5", "claimed 2 2 a")
    assert audited(spark, tmp_path, journal) == [
        "options: c: malformed options: x=,t",
        "options: b: claimed at 1002 ms and not moved to dead, but it expired at 900",
        "options: a: claimed in the main lane after 1 retries; its own max_retries is 0",
    ]


def test_options_and_counts_before_a_hole_are_unknown_after_it(spark: SparkSession, tmp_path: Path) -> None:
    journal = JournalWriter()
    journal.create("q")
    journal.write("q", "enqueued 0 a b", "options 0 a r=1", "options 0 b x=900", actor="-")
    journal.write("q", "claimed 1 1 a")
    journal.write("q", "retried 1 a 5 KeyError", "claimed 2 2 a")
    journal.write("q", "paused 0", actor="-")
    journal.write("q", "retried 2 a 5 KeyError", "claimed 3 3 a b")
    rows = [row for row in rows_of(journal.entries) if row.verb != "paused"]
    found = Auditor(frame_of(spark, tmp_path, [rows]), None).run().findings
    assert [(one.rule, one.kind) for one in found] == [("chain", "gap")]


def test_the_events_of_a_job_show_its_options(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    with one_queue(redis_url) as queue:
        queue.producer.enqueue([new_job(1, id="a", max_retries=2, backoff=[1, "1m"], timeout="5m")])
        queue.redis.hdel(queue.key("jobs"), "a")
        events = {event for found in audit_of(spark, queue, tmp_path).findings for event in found.events}
    assert any(event.endswith(" options a timeout = 5m, max_retries = 2, backoff = 1s 1m -") for event in events)


@pytest.mark.parametrize(
    ("packed", "shown"),
    [
        ("-", "none"),
        ("r=2", "max_retries = 2"),
        ("k=3600000,x=1500", "keep_done = 1h, expires at 1970-01-01T00:00:01.500+00:00"),
        ("T=0", "tick 1970-01-01T00:00:00.000+00:00"),
        ("x=999999999999999999", "expires at 999999999999999999 ms"),
        ("r=?", "r=?"),
    ],
)
def test_options_are_shown_as_users_give_them(packed: str, shown: str) -> None:
    assert show_options(packed) == shown


def test_the_retry_lane_and_updates_that_keep_the_counts_are_clean(
    spark: SparkSession, redis_url: str, tmp_path: Path
) -> None:
    """The job uses up its retries of both lanes; an update in between lowers its max_retries and keeps its counts."""
    with one_queue(redis_url, max_retries=9, retry_lane_retries=3, min_backoff_ms=0, max_backoff_ms=0) as queue:
        main, lane = queue.worker("w1"), queue.worker("w2", lane="retry")
        queue.producer.enqueue([new_job(1, id="a", max_retries=2)])
        for _ in range(3):
            assert main.turn(want=1) == ["a"]
            main.turn(failed="a", kind="retriable")
        assert lane.turn(want=1) == ["a"]
        lane.turn(failed="a", kind="retriable")
        queue.producer.enqueue([new_job(1, id="a", max_retries=0)], Update(reset_counts=False))
        for _ in range(2):
            assert lane.turn(want=1) == ["a"]
            lane.turn(failed="a", kind="retriable")
        assert queue.state().jobs == set()
        assert sum(event.verb == "retried" for event in queue.events()) == 5
        assert audit_of(spark, queue, tmp_path).findings == []


def test_an_expired_job_is_clean_also_after_it_was_revived(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    with one_queue(redis_url) as queue:
        queue.producer.enqueue([new_job(1, id="a", expires_in=0.001), new_job(1, id="b", expires_in=60)])
        expires_at = queue.inspector.job("a")["expires_at"]
        wait_until(lambda: time.time() > expires_at)
        worker = queue.worker()
        assert worker.turn(want=2) == ["b"]
        worker.turn(done="b")
        DeadJobs(queue.link, DEFAULT_PREFIX, "q").retry("a")
        assert worker.turn(want=2) == ["a"]
        worker.turn(done="a")
        assert [event.cause for event in queue.events() if event.verb == "dead"] == ["Expired"]
        assert audit_of(spark, queue, tmp_path).findings == []


@pytest.mark.timeout(300)
def test_random_operations_never_break_the_rule(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    names = [f"busy{seed}" for seed in range(4)]
    for seed, name in enumerate(names):
        busy = BusyQueue(redis_url, name, seed=seed, ids=4 + 3 * seed, failures=0.7)
        busy.run(800)
        busy.close()
    histories = [[row for row in rows_on_server(redis_url, name) if row.queue == name] for name in names]
    audit = Auditor(frame_of(spark, tmp_path, histories), None).run()
    (options,) = [verdict for verdict in audit.verdicts if verdict.rule == "options"]
    assert options.checked > 500
    assert [found for found in audit.findings if found.rule == "options"] == []
