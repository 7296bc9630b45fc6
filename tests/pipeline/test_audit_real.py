"""Audits of real queues: clean, also while the queues work; with gaps after their journal was trimmed."""

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import redis
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from forq.broker.journal import VERBS, unpack_entry
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.errors import UnknownQueue, UsageError
from forq.pipeline.audit import run
from forq.pipeline.audit.run import CLEAN, GAPS, VIOLATIONS, AuditResult
from forq.pipeline.cli import add_common
from forq.pipeline.format import EVENTS
from forq.pipeline.history import History
from forq.pipeline.source import ForqSource
from tests.pipeline.busy_external import BusyExternal
from tests.pipeline.busy_gates import BusyGate
from tests.pipeline.busy_queues import BusyQueue
from tests.pipeline.event_rows import Journal, event
from tests.pipeline.histories import rows_on_server
from tests.support.drive.one_queue import one_queue


@pytest.fixture
def busy(redis_url: str) -> Iterator[BusyQueue]:
    queue = BusyQueue(redis_url, "busy", seed=5)
    try:
        yield queue
    finally:
        queue.close()


@contextmanager
def at_work(queue: BusyQueue) -> Iterator[None]:
    """The queue works until the end of the block."""
    over = Event()

    def work() -> None:
        while not over.wait(0.01):
            queue.run(5)

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        try:
            yield
        finally:
            over.set()
        working.result()


def run_audit(url: str, history: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    parser = ArgumentParser()
    add_common(parser)
    run.add_arguments(parser)
    code = run.run(parser.parse_args(["--redis", url, "--history", str(history), *more]))
    return code, capsys.readouterr().out


@pytest.mark.timeout(300)
def test_the_audit_of_real_queues_is_clean(
    spark: SparkSession, redis_url: str, busy: BusyQueue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Part of the events is in a history, the rest in Redis, and one queue keeps working."""
    busy.run(1500)
    busy.delete()
    busy.create()
    other = BusyQueue(redis_url, "other", seed=6, ids=5)
    other.run(500)
    gates: list[BusyGate | BusyExternal] = [
        *(BusyGate(redis_url, mode, seed=7) for mode in ("auto_release", "on_request")),
        BusyGate(redis_url, "auto_release", seed=8, name="hasty", release_retries=0, retry_lane_retries=0),
        BusyExternal(redis_url, "external", seed=7),
    ]
    for gate in gates:
        gate.run(1000)
    spark.dataSource.register(ForqSource)
    History(spark, str(tmp_path)).publish(0, spark.read.format("forq").option("redis", redis_url).load())
    busy.run(1500)
    for gate in gates:
        gate.run(1000)
        gate.close()
    with at_work(other):
        code, text = run_audit(redis_url, tmp_path, capsys, "--json")
    other.close()
    result = json.loads(text)
    assert result["findings"] == []
    assert (code, result["result"], result["notes"]) == (CLEAN, "clean", [])
    assert result["compared_with_redis"]
    assert all(rule["checked"] > 0 for rule in result["rules"])
    verbs = {event.verb for event in rows_on_server(redis_url, "busy", "busy#fail", "other", "auto_release")}
    assert VERBS - verbs == {"dropped"}
    stalls = {event.cause for event in rows_on_server(redis_url, "external") if event.verb == "stalled"}
    assert stalls == {"idle", "silent"}
    for name, cause in (("auto_release", "ItemTimeout"), ("on_request", "ItemTimeout"), ("hasty", "NotAwaited")):
        assert cause in {event.cause for event in rows_on_server(redis_url, name) if event.verb == "dead"}


@pytest.mark.timeout(300)
def test_a_lost_record_is_a_violation_and_a_trimmed_journal_is_a_gap(
    spark: SparkSession, redis_url: str, busy: BusyQueue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy.run(100)
    client: Any = redis.Redis.from_url(redis_url)
    with client:
        base = queue_base(DEFAULT_PREFIX, "busy")
        job, record = next(iter(client.hgetall(f"{base}:jobs").items()))
        client.hdel(f"{base}:jobs", job)
        code, text = run_audit(redis_url, tmp_path, capsys)
        assert code == VIOLATIONS
        wanted = (
            f"conservation: queue busy job {job.decode()}: present according to the journal, but Redis has no record"
        )
        assert wanted in text.splitlines()
        assert f"enqueued {job.decode()} -" in text

        client.hset(f"{base}:jobs", job, record)
        client.xtrim(f"{base}:events", maxlen=20, approximate=False)
        first = unpack_entry(client.xrange(f"{base}:events", count=1)[0][1]).sequence
    code, text = run_audit(redis_url, tmp_path, capsys)
    assert code == GAPS
    assert f"gap, chain: queue busy: entries 1 to {first - 1} are missing" in text.splitlines()


def test_without_redis_and_history_there_is_nothing_to_audit(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing to audit: cannot reach Redis at .*, and there is no history in"):
        run.audit_all(spark, f"unix://{tmp_path}/none.sock", DEFAULT_PREFIX, str(tmp_path))


def test_a_prefix_without_queues_is_refused_unless_the_history_has_their_deletion(
    spark: SparkSession, redis_url: str, tmp_path: Path
) -> None:
    wrong = r"no queue whose keys begin with 'other:'.* give --prefix"
    with one_queue(redis_url) as queue:
        queue.enqueue("a")
        with pytest.raises(UnknownQueue, match=wrong):
            run.audit_all(spark, redis_url, "other:", str(tmp_path / "none"))
        spark.dataSource.register(ForqSource)
        history = History(spark, str(tmp_path / "history"))
        history.publish(0, spark.read.format("forq").option("redis", redis_url).load())
        with pytest.raises(UnknownQueue, match=wrong):
            run.audit_all(spark, redis_url, "other:", str(tmp_path / "history"))
        end = Journal(queue.name, epoch=10**18)
        end.note(10**12, event("deleted"))
        history.publish(1, spark.createDataFrame(end.rows(), EVENTS))
    found, _ = run.audit_all(spark, redis_url, "other:", str(tmp_path / "history"))
    assert found.compared_with_redis


def test_an_audit_starts_again_if_its_files_were_compacted() -> None:
    audited: tuple[AuditResult, list[str]] = (AuditResult([], 0, False), [])
    answers: list[Exception | tuple[AuditResult, list[str]]] = [
        PySparkException("[FAILED_READ_FILE.FILE_NOT_EXIST] gone"),
        audited,
        PySparkException("out of memory"),
    ]

    def once() -> tuple[AuditResult, list[str]]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert run._retry_after_compaction(once) is audited
    with pytest.raises(PySparkException, match="out of memory"):
        run._retry_after_compaction(once)


def test_queues_without_a_fail_queue_are_audited(spark: SparkSession, redis_url: str, tmp_path: Path) -> None:
    with one_queue(redis_url) as queue:
        queue.enqueue("a", "b")
        worker = queue.worker()
        worker.turn(want=2)
        worker.turn(done="a", failed="b")
    found, _ = run.audit_all(spark, redis_url, DEFAULT_PREFIX, str(tmp_path / "none"))
    assert (found.exit_code, found.findings) == (0, [])
