"""format("forq") reads events as they are in the journal, as a batch and as a stream, and jobs as they are in Redis."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from forq.broker.enqueue import new_job
from forq.broker.journal import Event
from forq.pipeline.format import EVENTS, EVENTS_ARROW, JOBS, JOBS_ARROW
from forq.pipeline.reader import BEGINNING, Journals, Range, id_key
from forq.settings import stored_defaults
from tests.pipeline.busy_queue import drain, events_of, fill
from tests.support.drive.one_queue import OneQueue, one_queue


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url) as queue:
        yield queue


def read(spark: SparkSession, of: OneQueue, **options: str) -> DataFrame:
    return spark.read.format("forq").options(redis=of.url, **options).load()


def as_events(rows: DataFrame) -> list[Event]:
    """The rows as events, in the order of the journals."""
    micros = {"time": "unix_micros(time) as time", "due": "unix_micros(due) as due"}
    found = rows.selectExpr([micros.get(name, name) for name in EVENTS.fieldNames()]).collect()
    return sorted(Event(*row) for row in found)


def stream_into(rows: DataFrame, folder: Path, table: str) -> list[dict[str, Any]]:
    """Reads all current events into a table; returns Spark's progress of each batch."""
    query = (
        rows.writeStream.format("parquet")
        .option("path", str(folder / table))
        .option("checkpointLocation", str(folder / f"{table}-checkpoint"))
    )
    running = query.trigger(availableNow=True).start()
    running.awaitTermination(100)
    return [dict(progress) for progress in running.recentProgress if progress["numInputRows"]]


def test_the_schemas_for_spark_and_arrow_match() -> None:
    assert to_arrow_schema(EVENTS, timezone="UTC").equals(EVENTS_ARROW)
    assert to_arrow_schema(JOBS, timezone="UTC").equals(JOBS_ARROW)


def test_a_batch_has_every_event_of_every_queue_and_fail_queue_once(spark: SparkSession, queue: OneQueue) -> None:
    queue.registry.create("q", "work", 100, stored_defaults(), {"fail_handler": 1}, fail_options={})
    worker = queue.worker()
    fill(queue, 120)
    drain(queue, worker, failing="7")
    queue.producer.enqueue([new_job(1, id="later", run_in=3600)])
    queue.producer.cancel("later")
    with one_queue(queue.url, "123") as other:
        fill(other, 3, "other")
        expected = sorted([*events_of(queue), *events_of(queue, "fail:events"), *events_of(other)])
    found = as_events(read(spark, queue))
    assert found == expected
    assert {event.queue for event in found} == {"q", "q#fail", "123"}
    assert {"created", "enqueued", "claimed", "done", "dead", "failing", "scheduled", "cancelled"} <= {
        event.verb for event in found
    }


def test_only_the_queues_of_the_option_are_read(spark: SparkSession, queue: OneQueue) -> None:
    with one_queue(queue.url, "other") as other:
        queue.enqueue("a")
        other.enqueue("b")
    assert {event.queue for event in as_events(read(spark, queue, queues="other"))} == {"other"}


def test_a_deleted_queue_is_read_while_its_journal_is_kept(spark: SparkSession, queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.registry.delete("q", force=True)
    while queue.registry.purge("q", lambda _: None):
        pass
    assert queue.registry.names() == {}
    assert [event.verb for event in as_events(read(spark, queue))] == ["created", "enqueued", "deleted"]


def test_a_stream_continues_at_its_checkpoint_and_stops_at_the_current_end(
    spark: SparkSession, queue: OneQueue, tmp_path: Path
) -> None:
    rows = spark.readStream.format("forq").options(redis=queue.url).load()
    fill(queue, 40, "first")
    stream_into(rows, tmp_path, "rows")
    fill(queue, 40, "second")
    with one_queue(queue.url, "new") as other:
        other.enqueue("c")
        stream_into(rows, tmp_path, "rows")
        assert as_events(spark.read.parquet(str(tmp_path / "rows"))) == sorted([*events_of(queue), *events_of(other)])
    assert stream_into(rows, tmp_path, "rows") == []


def test_a_stream_reads_at_most_max_entries_per_batch(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    for n in range(60):
        queue.enqueue(f"a{n}")
    rows = spark.readStream.format("forq").options(redis=queue.url, maxEntriesPerBatch="20").load()
    batches = [progress["numInputRows"] for progress in stream_into(rows, tmp_path, "rows")]
    assert len(batches) >= 3
    assert max(batches) <= 20
    assert as_events(spark.read.parquet(str(tmp_path / "rows"))) == events_of(queue)


def test_ranges_are_split_by_their_number_of_entries(queue: OneQueue) -> None:
    fill(queue, 20_000)
    drain(queue, queue.worker())
    journals = Journals(queue.url, "forq:")
    ids = [entry_id.decode() for entry_id, _ in queue.redis.xrange(queue.key("events"))]
    whole = journals.remaining("q", BEGINNING, journals.last_entries(["q"])["q"])
    assert whole == Range("q", BEGINNING, ids[-1], len(ids))
    parts = list(journals.split(whole, 50))
    assert [part.after for part in parts] == [BEGINNING, *(part.last for part in parts[:-1])]
    assert parts[-1].last == ids[-1]
    held = [sum(id_key(part.after) < id_key(one) <= id_key(part.last) for one in ids) for part in parts]
    assert held == [part.entries for part in parts]
    assert len(parts) >= len(ids) // 50
    assert sum(held) == len(ids)


def test_trimmed_entries_are_missing_and_the_rest_is_read(spark: SparkSession, queue: OneQueue) -> None:
    for n in range(10):
        queue.enqueue(f"a{n}")
    queue.redis.xtrim(queue.key("events"), maxlen=4, approximate=False)
    assert [event.sequence for event in as_events(read(spark, queue))] == [8, 9, 10, 11]


def test_a_server_that_lost_entries_is_an_error(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    queue.enqueue("a")
    rows = spark.readStream.format("forq").options(redis=queue.url).load()
    stream_into(rows, tmp_path, "rows")
    last = queue.redis.xrevrange(queue.key("events"), count=1)[0][0]
    queue.redis.xdel(queue.key("events"), last)
    with pytest.raises(
        PySparkException, match=r"queue 'q' ends at .* but was read up to .* before: the server has lost"
    ):
        stream_into(rows, tmp_path, "rows")
    going_on = spark.readStream.format("forq").options(redis=queue.url, failOnLoss="false").load()
    time.sleep(0.002)
    queue.enqueue("b")
    stream_into(going_on, tmp_path, "rows")
    assert [event.job for event in as_events(spark.read.parquet(str(tmp_path / "rows")))] == [None, "a", "b"]


def test_the_error_names_an_unreadable_entry(spark: SparkSession, queue: OneQueue) -> None:
    entry = queue.redis.xadd(queue.key("events"), {"v4": "what is this"}).decode()
    queue.enqueue("a")
    with pytest.raises(PySparkException, match=f"queue 'q', entry {entry}: "):
        read(spark, queue).collect()
    assert [event.verb for event in as_events(read(spark, queue, failOnLoss="false"))] == ["created", "enqueued"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "q"}, "has no option 'queue'"),
        ({"queues": "a b"}, "queue name 'a b' is not allowed"),
        ({"what": "everything"}, "option what = 'everything' is not allowed: events, jobs"),
        ({"maxEntriesPerBatch": "0"}, "option maxEntriesPerBatch = '0' is not allowed"),
    ],
)
def test_a_wrong_option_is_refused(spark: SparkSession, queue: OneQueue, options: dict[str, str], message: str) -> None:
    with pytest.raises(PySparkException, match=message):
        read(spark, queue, **options)


def test_a_stream_with_a_consumer_publishes_its_watermark(spark: SparkSession, queue: OneQueue, tmp_path: Path) -> None:
    fill(queue, 1000)
    rows = spark.readStream.format("forq").options(redis=queue.url, consumer="mine", maxEntriesPerBatch="1").load()
    stream_into(rows, tmp_path, "rows")
    marks = queue.hash("journal:watermarks")
    ids = [entry_id.decode() for entry_id, _ in queue.redis.xrange(queue.key("events"))]
    assert marks["mine"] in ids


def test_jobs_of_every_state_are_read(spark: SparkSession, queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("d")
    worker.turn(want=1)
    worker.turn(failed="d")
    queue.enqueue("a", priority=2)
    worker.turn(want=1)
    queue.producer.enqueue([new_job({"ü": [1, None]}, id="w", identifier="who", type="t")])
    queue.producer.enqueue([new_job("x", id="s", run_at=2_000_000_000.5, max_retries=2, expires_in=1)])
    queue.producer.enqueue([new_job(1, id="h", after="w", run_at=2_000_000_000.5, max_retries=2, expires_in=1)])
    queue.producer.enqueue([new_job(2, id="i", after="h", expires_in=1)])
    queue.redis.hset(queue.key("jobs"), "broken", "?")
    rows = {row.id: row for row in read(spark, queue, what="jobs").collect()}
    assert {job_id: row.state for job_id, row in rows.items()} == {
        "a": "active",
        "d": "dead",
        "w": "waiting",
        "s": "scheduled",
        "h": "held",
        "i": "held",
        "broken": "waiting",
    }
    assert (rows["a"].fence, rows["a"].priority) == (int(worker.fence), 2)
    assert (rows["w"].identifier, rows["w"].type, rows["w"].data) == ("who", "t", '{"ü":[1,null]}')
    timed = (
        read(spark, queue, what="jobs").where("run_at is not null").selectExpr("id", "unix_micros(run_at)").collect()
    )
    assert dict(timed) == {"s": 2_000_000_000_500_000, "h": 2_000_000_000_500_000}
    # The expiry of a held job begins when it is ready.
    options = {"s": "r=2,x=2000000001500", "h": "r=2"}
    assert {job_id: row.options for job_id, row in rows.items() if row.options} == options
    assert (rows["h"].data, rows["i"].run_at) == ("1", None)
    assert rows["d"].error == '{"message":"no"}'
    assert rows["d"].died_at is not None
    assert abs(rows["d"].died_at.replace(tzinfo=UTC) - datetime.now(UTC)).total_seconds() < 600
    assert rows["broken"].data is None
    assert rows["broken"].error.startswith("broken job record")


def test_many_jobs_are_each_read_once(spark: SparkSession, queue: OneQueue) -> None:
    fill(queue, 5000)
    rows = read(spark, queue, what="jobs", queues="q")
    assert (rows.count(), rows.select("id").distinct().count()) == (5000, 5000)
