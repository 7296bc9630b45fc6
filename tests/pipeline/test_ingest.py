"""Every event is in the history once, through kills at every step, restarts and compaction, also for other readers."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet
import pytest
from pyspark.sql import DataFrame, SparkSession

from forq.broker.journal import Event
from forq.errors import ConfigError, ForqError, UnknownQueue
from forq.pipeline import history, ingest
from forq.pipeline.format import EVENTS
from forq.pipeline.history import Folder, History, read_history
from forq.pipeline.ingest import Ingest
from forq.settings import stored_defaults
from tests.pipeline.busy_queue import drain, events_of, fill
from tests.pipeline.failing_folder import killed_at
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.wait import wait_until

KILLS = int(os.environ.get("FORQ_TEST_INGEST_KILLS", "2"))
# Import paths of child processes.
ROOTS = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url) as queue:
        yield queue


def as_events(rows: DataFrame) -> list[Event]:
    micros = {"time": "unix_micros(time) as time", "due": "unix_micros(due) as due"}
    found = rows.selectExpr([micros.get(name, name) for name in EVENTS.fieldNames()]).collect()
    return sorted(Event(*row) for row in found)


def keys_for_others(directory: Path) -> Counter[tuple[str, int, int, int]]:
    """The keys of the rows as another program reads them from the files."""
    files = pyarrow.dataset.dataset(
        sorted(map(str, (directory / "events").rglob("*.parquet"))),
        partitioning=pyarrow.dataset.partitioning(
            pyarrow.schema([("batch", pyarrow.int64()), ("queue", pyarrow.string()), ("day", pyarrow.string())]),
            flavor="hive",
        ),
        partition_base_dir=str(directory / "events"),
    )
    columns = files.to_table(columns=["queue", "epoch", "sequence", "position"]).to_pydict()
    return Counter(zip(*columns.values(), strict=True))


def keys_of(events: list[Event]) -> Counter[tuple[str, int, int, int]]:
    return Counter((event.queue, event.epoch, event.sequence, event.position) for event in events)


def small_rows(spark: SparkSession, number: int) -> DataFrame:
    """Rows of two queues on two days."""
    late = datetime(2026, 1, 1, 23, 59, 59, 999_999, tzinfo=UTC)
    rows = [
        (
            queue,
            1,
            number,
            day,
            late + timedelta(microseconds=day),
            "paused",
            None,
            0,
            None,
            "-",
            None,
            None,
            None,
            None,
            "",
            "",
        )
        for queue in ("0123", "b#fail")
        for day in (0, 1)
    ]
    return spark.createDataFrame(rows, EVENTS)


def spawn(queue: OneQueue, directory: Path, die_at: int = 0, every: float = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.pipeline.ingest_child", queue.url, str(directory), str(die_at), str(every)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*ROOTS, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_history_has_every_event_of_queues_and_fail_queues_once(
    spark: SparkSession, queue: OneQueue, tmp_path: Path
) -> None:
    queue.registry.create("q", "work", 100, stored_defaults(), {"fail_handler": 1}, fail_options={})
    worker = queue.worker()
    with one_queue(queue.url, "42") as other:
        for part in range(2):
            fill(queue, 300, f"part{part}")
            drain(queue, worker, failing="7")
            other.enqueue(f"x{part}")
            Ingest(spark, str(tmp_path), queue.url, entries_per_batch=9).run(None)
        expected = sorted([*events_of(queue), *events_of(queue, "fail:events"), *events_of(other)])
    assert as_events(read_history(spark, str(tmp_path))) == expected
    assert keys_for_others(tmp_path) == keys_of(expected)
    assert Ingest(spark, str(tmp_path), queue.url).run(None).rows == 0
    files = [path for path in (tmp_path / "events").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".parquet"}
    assert pyarrow.parquet.read_schema(files[0]).field("time").type == pyarrow.timestamp("us", tz="UTC")


def test_each_history_publishes_its_own_watermark(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    fill(queue, 10)
    Ingest(spark, str(tmp_path / "one"), queue.url).run(None)
    last = queue.redis.xrevrange(queue.key("events"), count=1)[0][0].decode()
    fill(queue, 10, "more")
    Ingest(spark, str(tmp_path / "two"), queue.url).run(None)
    newest = queue.redis.xrevrange(queue.key("events"), count=1)[0][0].decode()
    names = {part: (tmp_path / part / "_consumer").read_text().strip() for part in ("one", "two")}
    assert queue.hash("journal:watermarks") == {names["one"]: last, names["two"]: newest}


def test_trimming_up_to_the_watermark_loses_nothing(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    expected: list[Event] = []
    for part in range(3):
        fill(queue, 20, f"part{part}")
        expected = sorted({*expected, *events_of(queue)})
        Ingest(spark, str(tmp_path), queue.url).run(None)
        (watermark,) = queue.hash("journal:watermarks").values()
        queue.redis.xtrim(queue.key("events"), minid=watermark, approximate=False)
    assert as_events(read_history(spark, str(tmp_path))) == expected


def test_a_batch_killed_at_any_step_and_repeated_is_stored_once(spark: SparkSession, tmp_path: Path) -> None:
    step, going_on = 0, True
    while going_on:
        step += 1
        directory = tmp_path / str(step)
        history = History(spark, str(directory))
        history.publish(0, small_rows(spark, 0))
        with killed_at(step) as came_so_far:
            history.publish(1, small_rows(spark, 1))
        going_on = came_so_far[0]
        assert read_history(spark, str(directory)).where("sequence = 0").count() == 4
        history.folder.make("_checkpoint/offsets/1")
        history.recover()
        history.publish(1, small_rows(spark, 1))
        assert read_history(spark, str(directory)).count() == 8
        assert set(keys_for_others(directory).values()) == {1}
        assert len(keys_for_others(directory)) == 8
        assert history.folder.files("_staging", "") == {}
    assert step > 6


def test_a_compaction_killed_at_any_step_leaves_each_row_once(spark: SparkSession, tmp_path: Path) -> None:
    step, going_on = 0, True
    while going_on:
        step += 1
        directory = tmp_path / str(step)
        history = History(spark, str(directory))
        for number in range(3):
            history.publish(number, small_rows(spark, number))
        history.folder.make("_checkpoint/offsets/1")
        with killed_at(step) as came_so_far:
            history.compaction.run(before=2, min_batches=2)
        going_on = came_so_far[0]
        # read_history has each row even before the recovery.
        seen = Counter(row.sequence for row in read_history(spark, str(directory)).collect())
        assert seen == {0: 4, 1: 4, 2: 4}
        history.recover()
        assert len(keys_for_others(directory)) == 12
        assert set(keys_for_others(directory).values()) == {1}
        assert read_history(spark, str(directory)).count() == 12
        assert history.folder.names("_compaction") == []
    assert history.compaction.batches() == [1, 2]
    assert step > 10


def test_small_batches_are_compacted_while_rows_are_added(
    spark: SparkSession, queue: OneQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history.Compaction.run, "__defaults__", (3,))
    for n in range(30):
        queue.enqueue(f"a{n}")
    tally = Ingest(spark, str(tmp_path), queue.url, entries_per_batch=5).run(None)
    assert tally.compacted >= tally.batches >= 7
    assert len(list((tmp_path / "events").rglob("*.parquet"))) <= 2
    assert as_events(read_history(spark, str(tmp_path))) == events_of(queue)
    assert keys_for_others(tmp_path) == keys_of(events_of(queue))


def test_days_are_utc_days_and_queue_names_stay_strings(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        History(spark, str(tmp_path)).publish(0, small_rows(spark, 0))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    folders = {path.parent.name for path in (tmp_path / "events").rglob("*.parquet")}
    assert folders == {"day=2026-01-01", "day=2026-01-02"}
    rows = read_history(spark, str(tmp_path), since=date(2026, 1, 2), until=date(2026, 1, 2)).collect()
    assert sorted(row.queue for row in rows) == ["0123", "b#fail"]


def test_a_history_without_its_checkpoint_is_refused(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    queue.enqueue("a")
    Ingest(spark, str(tmp_path), queue.url).run(None)
    Folder(spark, str(tmp_path)).delete("_checkpoint")
    with pytest.raises(ConfigError, match="has rows, but its _checkpoint is gone"):
        Ingest(spark, str(tmp_path), queue.url).run(None)


def test_a_second_ingest_of_one_history_is_refused(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    with History(spark, str(tmp_path)).locked(), pytest.raises(ForqError, match="another ingest is writing"):
        Ingest(spark, str(tmp_path), queue.url).run(None)


def test_an_error_inside_spark_is_reported_in_one_line(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    queue.redis.xadd(queue.key("events"), {"v4": "what is this"})
    with pytest.raises(ForqError, match=r"^queue 'q', entry \S+: a journal entry cannot be read"):
        Ingest(spark, str(tmp_path), queue.url).run(None)


def test_an_empty_history_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    rows = read_history(spark, str(tmp_path / "nothing"))
    assert (rows.count(), rows.columns) == (0, EVENTS.fieldNames())


def test_the_command_prints_a_summary(
    spark: SparkSession, queue: OneQueue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(queue, 7)
    parser = argparse.ArgumentParser()
    ingest.add_arguments(parser)
    common = {"history": str(tmp_path), "redis": queue.url, "prefix": "forq:"}
    assert ingest.run(parser.parse_args(["--json"], argparse.Namespace(**common))) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["batches"]) == (len(events_of(queue)), 1)
    assert 0 <= summary["lag_seconds"] < 60
    assert ingest.run(parser.parse_args([], argparse.Namespace(**common))) == 0
    assert capsys.readouterr().out.startswith("0 rows in 0 batches")


def test_the_command_refuses_a_prefix_without_queues(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    ingest.add_arguments(parser)
    common = argparse.Namespace(history=str(tmp_path), redis=queue.url, prefix="other:")
    with pytest.raises(
        UnknownQueue, match=r"no queue whose keys begin with 'other:'.* give --prefix, or set FORQ_PREFIX"
    ):
        ingest.run(parser.parse_args([], common))
    assert list(tmp_path.iterdir()) == [], "refused before the ingest begins"


@pytest.mark.timeout(60 + 60 * KILLS)
def test_after_repeated_kills_of_the_driver_each_event_is_stored_once(
    spark: SparkSession, queue: OneQueue, tmp_path: Path
) -> None:
    worker = queue.worker()
    for kill in range(KILLS):
        fill(queue, 2000, f"kill{kill}")
        drain(queue, worker)
        # Before and during the move, before and during the marking, and marked but not recorded by Spark.
        child = spawn(queue, tmp_path, die_at=(7, 9, 5, 6, 8)[kill % 5])
        _, errors = child.communicate(timeout=100)
        assert child.returncode == -signal.SIGKILL, errors[-2000:]
    Ingest(spark, str(tmp_path), queue.url, entries_per_batch=40).run(None)
    assert as_events(read_history(spark, str(tmp_path))) == events_of(queue)
    assert keys_for_others(tmp_path) == keys_of(events_of(queue))


@pytest.mark.timeout(180)
def test_a_following_ingest_reads_new_events_and_stops_on_sigterm(
    spark: SparkSession, queue: OneQueue, tmp_path: Path
) -> None:
    queue.enqueue("a")
    child = spawn(queue, tmp_path, every=0.2)
    try:
        wait_until(lambda: len(list((tmp_path / "events").rglob("*.parquet"))) == 1, 90, "first batch")
        queue.enqueue("b")
        last = queue.redis.xrevrange(queue.key("events"), count=1)[0][0].decode()
        wait_until(lambda: last in queue.hash("journal:watermarks").values(), 60, "watermark of the second batch")
        child.terminate()
        output, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, output.strip()) == (0, "3"), errors[-2000:]
    assert as_events(read_history(spark, str(tmp_path))) == events_of(queue)
