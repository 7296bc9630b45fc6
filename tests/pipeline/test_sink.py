"""Rows become jobs, each once, even if a task or a whole write is repeated after the jobs have run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from forq.errors import BackPressure, OutcomeUnknown
from forq.pipeline.sink import with_patience
from forq.settings import stored_defaults
from tests.pipeline.busy_queue import drain
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.wait import wait_until

ROOTS = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url) as queue:
        yield queue


def write(rows: DataFrame, to: OneQueue, **options: str) -> None:
    rows.write.format("forq").mode("append").options(redis=to.url, **options).save()


def numbered(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(count, numPartitions=partitions).select(
        f.lit("q").alias("queue"), f.struct(f.col("id").alias("n")).alias("data")
    )


def data_of(queue: OneQueue) -> list[Any]:
    return sorted((queue.inspector.job(job_id)["data"] for job_id in queue.state().jobs), key=repr)


def test_each_row_becomes_a_job_with_the_values_of_its_columns(spark: SparkSession, queue: OneQueue) -> None:
    rows = spark.sql(
        """select 'q' queue, '{"a": [1.0, null, "ü"]}' data, 'one' id, 'who' identifier, 2 priority, 't' type,
           timestamp_micros(2000000000123000) run_at, 'token' token
           union all select 'q', 'null', 'two', null, null, null, null, null"""
    )
    write(rows, queue)
    one, two = (queue.inspector.job(job_id) for job_id in ("one", "two"))
    assert (one["data"], one["identifier"], one["priority"], one["type"]) == ({"a": [1.0, None, "ü"]}, "who", 2, "t")
    assert (one["state"], one["run_at"]) == ("scheduled", 2_000_000_000.123)
    assert (two["data"], two["identifier"], two["priority"], two["state"]) == (None, "two", 5, "waiting")
    assert queue.redis.keys(queue.key("token:*:token"))


def test_jobs_get_the_options_of_their_columns(spark: SparkSession, queue: OneQueue) -> None:
    rows = spark.sql(
        """select 'q' queue, 1 data, 'one' id, '5m' timeout, 2 max_retries, array('1s', '1m') backoff,
           interval '1' hour expires_in, 0.5 keep_done
           union all select 'q', 2, 'two', null, null, null, null, null"""
    )
    began = time.time()
    write(rows, queue)
    one, two = (queue.inspector.job(job_id) for job_id in ("one", "two"))
    assert one["options"] == {"timeout": "5m", "max_retries": 2, "backoff": ["1s", "1m"], "keep_done": "500ms"}
    assert began + 3599 < one["expires_at"] < time.time() + 3601
    assert "options" not in two
    assert "expires_at" not in two
    write(spark.sql("select 'q' queue, 1 data, 'three' id, 5 backoff"), queue)
    assert queue.inspector.job("three")["options"] == {"backoff": ["5s"]}


def test_options_need_a_queue_of_mode_work(spark: SparkSession, queue: OneQueue) -> None:
    queue.registry.create("outside", "external", 100, stored_defaults("external"), {})
    rows = spark.sql("select 'outside' queue, 1 data, 1 max_retries")
    with pytest.raises(
        PySparkException, match=r"rows 0 to 0 of partition 0: queue 'outside' is of mode external: timeout"
    ):
        write(rows, queue)


def test_data_may_be_any_json_value(spark: SparkSession, queue: OneQueue) -> None:
    for data in (
        "named_struct('a', array(1, null), 'm', map('k', 0.25), 'd', 3.0, 'none', null, 'b', true)",
        "array('x')",
        "7",
        "1.5e0",
        "map('k', array(named_struct('deep', 1)))",
    ):
        write(spark.sql(f"select 'q' queue, {data} data"), queue)
    assert data_of(queue) == [
        1.5,
        7,
        ["x"],
        {"a": [1, None], "b": True, "d": 3, "m": {"k": 0.25}, "none": None},
        {"k": [{"deep": 1}]},
    ]


def test_rows_for_several_queues_are_stored_in_large_chunks(spark: SparkSession, queue: OneQueue) -> None:
    with one_queue(queue.url, "other") as other:
        rows = spark.range(2400, numPartitions=2).selectExpr(
            "if(id % 2 = 0, 'q', 'other') queue", "id data", "cast(id as string) id"
        )
        write(rows, queue)
        assert (len(queue.state().jobs), len(other.state().jobs)) == (1200, 1200)
        enqueues = [event.sequence for event in queue.events() if event.verb == "enqueued"]
    assert len(set(enqueues)) == 4


def test_repeating_a_write_with_the_same_run_stores_nothing_even_after_the_jobs_have_ended(
    spark: SparkSession, queue: OneQueue
) -> None:
    worker = queue.worker()
    with_ids = spark.sql("select 'q' queue, 1 data, explode(array('a', 'b')) id")
    for _ in range(2):
        write(numbered(spark, 700), queue, run="import-1")
        write(with_ids, queue, run="import-1")
        drain(queue, worker)
    assert queue.inspector.counts().done == 702
    write(numbered(spark, 700), queue, run="import-2")
    write(numbered(spark, 10), queue)
    write(numbered(spark, 10), queue)
    assert len(queue.state().jobs) == 720


def test_an_existing_job_is_skipped_or_updated(spark: SparkSession, queue: OneQueue) -> None:
    queue.enqueue("a")
    rows = spark.sql("select 'q' queue, 'new' text, 'a' id").selectExpr("queue", "to_json(struct(text)) data", "id")
    write(rows, queue)
    assert queue.inspector.job("a")["data"] == {"n": "a"}
    write(rows, queue, ifExists="update")
    assert queue.inspector.job("a")["data"] == {"text": "new"}


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("'nowhere' queue, 1 data", "rows 0 to 0 of partition 0: no queue 'nowhere'"),
        ("'q' queue, '{' data, 'bad' id", r"row 0 of partition 0 .queue 'q', id 'bad'.: data is not JSON"),
        ("'q' queue, 1 data, 'a b' id", "row 0 of partition 0 .*: job id 'a b' is not allowed"),
        ("'q' queue, 1 data, 10 priority", "row 0 of partition 0 .*: priority 10 is not allowed"),
        ("cast(null as string) queue, 1 data", "row 0 of partition 0 .*: column queue is null"),
        (
            "'q' queue, to_json(array(repeat('1', 2000000))) data, 'big' id",
            "row 0 of partition 0 .id 'big'.: .* larger than max_data",
        ),
        ("'q' queue, double('nan') data", "row 0 of partition 0 .*: job data is not JSON: data is NaN"),
        (
            "'q' queue, 1 data, -1 max_retries",
            "row 0 of partition 0 .*: options of a job: max_retries = -1 is not allowed",
        ),
        ("'q' queue, 1 data, 'soon' timeout", "row 0 of partition 0 .*: options of a job: timeout = 'soon' is not"),
        ("'q' queue, 1 data, 0 expires_in", "row 0 of partition 0 .*: options of a job: expires_in = 0 is not allowed"),
        (
            "'q' queue, 1 data, array(1, null) backoff",
            r"row 0 of partition 0 .*: options of a job: backoff = \[1, None\] is not allowed",
        ),
        ("'q' queue", "has no column 'data'"),
        ("'q' queue, 1 data, 2 priorty", "has an unknown column 'priorty'"),
        ("'q' queue, 1 data, 2 id", "column id is int, not a string"),
        ("'q' queue, 1 data, '2' max_retries", "column max_retries is string, not a whole number"),
        (
            "'q' queue, 1 data, true timeout",
            "column timeout is boolean, not a number of seconds, a string such as '30s'",
        ),
        (
            "'q' queue, 1 data, map(1, 2) backoff",
            "column backoff is map<int,int>, not a number of .* or an array of them",
        ),
        ("'q' queue, current_date() data", "data of type date cannot be written as JSON"),
    ],
)
def test_the_error_names_the_row_that_cannot_be_stored(
    spark: SparkSession, queue: OneQueue, select: str, message: str
) -> None:
    with pytest.raises(PySparkException, match=message):
        write(spark.sql(f"select {select}"), queue)
    assert queue.state().jobs == set()


def test_rows_stored_before_a_queue_was_full_stay_and_are_not_stored_again(
    spark: SparkSession, queue: OneQueue
) -> None:
    queue.registry.configure("q", {"max_items": 1200}, {})
    with pytest.raises(PySparkException, match="rows 1000 to 1499 of partition 0: queue 'q' holds max_items = 1200"):
        write(numbered(spark, 2000, partitions=1), queue, run="r")
    assert len(queue.state().jobs) == 1000
    queue.registry.configure("q", {"max_items": 0}, {})
    write(numbered(spark, 2000, partitions=1), queue, run="r")
    assert data_of(queue) == sorted(({"n": n} for n in range(2000)), key=repr)


def test_a_write_cannot_overwrite_a_queue(spark: SparkSession, queue: OneQueue) -> None:
    with pytest.raises(PySparkException, match="jobs can be added to a queue"):
        numbered(spark, 1).write.format("forq").mode("overwrite").options(redis=queue.url).save()


def test_a_call_is_repeated_while_redis_is_full_or_down_for_a_limited_time() -> None:
    failures: list[Exception] = [BackPressure("full"), OutcomeUnknown("broke")]

    def store() -> None:
        if failures:
            raise failures.pop()

    with_patience(store, 10)
    assert failures == []
    failures += [BackPressure("full")] * 100
    with pytest.raises(BackPressure):
        with_patience(store, 0.2)
    assert len(failures) > 90


def test_a_write_waits_while_redis_is_out_of_memory(spark: SparkSession, queue: OneQueue) -> None:
    queue.redis.config_set("maxmemory", 1)
    refused = queue.redis.info("errorstats").get("errorstat_OOM", {"count": 0})["count"]

    def make_room() -> None:
        wait_until(lambda: queue.redis.info("errorstats").get("errorstat_OOM", {"count": 0})["count"] > refused, 60)
        queue.redis.config_set("maxmemory", 0)

    helper = threading.Thread(target=make_room)
    helper.start()
    try:
        write(numbered(spark, 100), queue, patience="60s")
    finally:
        queue.redis.config_set("maxmemory", 0)
        helper.join()
    assert len(queue.state().jobs) == 100


def test_a_stream_that_repeats_its_last_batch_stores_nothing_twice(
    spark: SparkSession, queue: OneQueue, tmp_path: Path
) -> None:
    numbered(spark, 300).write.parquet(str(tmp_path / "rows"))

    def stream() -> None:
        rows = spark.readStream.schema("queue string, data struct<n: bigint>").parquet(str(tmp_path / "rows"))
        to_queue = rows.writeStream.format("forq").options(redis=queue.url)
        query = to_queue.option("checkpointLocation", str(tmp_path / "at")).trigger(availableNow=True).start()
        query.awaitTermination(100)

    stream()
    worker = queue.worker()
    drain(queue, worker)
    # As if Spark was killed before it recorded the end of the batch.
    for name in ("0", ".0.crc"):
        (tmp_path / "at" / "commits" / name).unlink()
    stream()
    assert queue.inspector.counts().done == 300
    assert queue.state().jobs == set()
    numbered(spark, 300).write.mode("append").parquet(str(tmp_path / "rows"))
    stream()
    assert len(queue.state().jobs) == 300


_CHILD = """
import sys
from pyspark.sql import functions as f
from forq.pipeline.session import spark_session
spark = spark_session("child")
rows = spark.range(40000, numPartitions=4).selectExpr("'q' queue", "named_struct('n', id) data")
rows.write.format("forq").mode("append").options(redis=sys.argv[1], run="killed").save()
"""


@pytest.mark.timeout(180)
def test_a_killed_and_repeated_write_stores_each_row_once(spark: SparkSession, queue: OneQueue) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*ROOTS, os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen([sys.executable, "-c", _CHILD, queue.url], env=environ, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: queue.redis.hlen(queue.key("jobs")) > 0, 100, "first jobs")
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    rows = spark.range(40000, numPartitions=4).selectExpr("'q' queue", "named_struct('n', id) data")
    write(rows, queue, run="killed")
    # Tasks of the killed driver may still write for a moment, with the same tokens.
    found = spark.read.format("forq").options(redis=queue.url, what="jobs").load().selectExpr("data")
    assert (found.count(), found.distinct().count()) == (40000, 40000)
