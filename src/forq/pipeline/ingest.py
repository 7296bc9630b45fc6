"""`forq pipeline ingest`: reads the journals into a history, each event exactly once.

1. Spark records the range of the next batch, and reads it from the journals (source.py).
2. The batch is added to the history (history.py), and Spark records that it is done.
3. The watermark is published, up to which the supervisor may trim the journals.

After a kill between these steps the next ingest repeats the batch, or publishes the watermark.

`ingest` is the handler of the queue that `[pipeline]` in forq.toml creates.
"""

import argparse
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from forq.broker.keys import DEFAULT_PREFIX
from forq.client import Client
from forq.errors import ForqError
from forq.job import Job
from forq.pipeline.cli import add_common
from forq.pipeline.history import History
from forq.pipeline.reader import Journals, require_queues
from forq.pipeline.session import spark_session
from forq.pipeline.source import ForqSource
from forq.progress_line import ProgressLine
from forq.values import parse_duration

ENTRIES_PER_BATCH = 100_000
# Starting a session takes ten seconds: it is kept if the next ingest is at most this far away.
KEEP_SESSION_SECONDS = 120.0
_POLL_SECONDS = 0.2
_FORQ_ERROR = re.compile(r"forq\.errors\.\w+: (.+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="keep reading until stopped (default: exit at the end)")
    parser.add_argument("--every", default="10s", metavar="DURATION", help="with --follow: how often to read (10s)")
    parser.add_argument(
        "--queues", default="", metavar="NAMES", help="comma-separated (default: all); NAME#fail: fail queue"
    )
    parser.add_argument(
        "--accept-loss",
        dest="accept_loss",
        action="store_true",
        help="continue if the server lost entries that were read before, or an entry is unreadable",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    every_seconds = parse_duration(args.every)
    require_queues(args.redis, args.prefix)
    ingest = Ingest(
        spark_session("ingest"),
        args.history,
        args.redis,
        args.prefix,
        queues=args.queues,
        accept_loss=args.accept_loss,
    )
    with stop_on_signal(ingest):
        tally = ingest.run(every_seconds if args.follow else None, None if args.json else ProgressLine())
    print(json.dumps(tally.as_json()) if args.json else tally.summary())
    return 0


@dataclass
class Tally:
    """Work done by one ingest so far."""

    history: str
    started: float
    rows: int = 0
    batches: int = 0
    compacted: int = 0
    # Server time minus the time of the last row, when its batch was complete.
    lag_seconds: float | None = None
    seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, object]:
        return {
            "history": self.history,
            "rows": self.rows,
            "batches": self.batches,
            "seconds": round(self.seconds, 3),
            "rows_per_second": round(self.rows_per_second),
            "lag_seconds": None if self.lag_seconds is None else round(self.lag_seconds, 3),
            "compacted_batches": self.compacted,
        }

    def progress(self) -> str:
        lag = "" if self.lag_seconds is None else f", {self.lag_seconds:.1f} s behind"
        return (
            f"{self.rows:,} rows in {self.batches} batches, {self.seconds:.1f} s "
            f"({self.rows_per_second:,.0f} rows/s{lag})"
        )

    def summary(self) -> str:
        return f"{self.progress()} -> {self.history}"


class Ingest:
    def __init__(
        self,
        spark: SparkSession,
        directory: str,
        redis: str,
        prefix: str = DEFAULT_PREFIX,
        *,
        queues: str = "",
        accept_loss: bool = False,
        entries_per_batch: int = ENTRIES_PER_BATCH,
    ) -> None:
        spark.dataSource.register(ForqSource)
        # Spark's default is an old format without statistics and without a time zone.
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        # Up to this many queues and days per task are written side by side; with more the task sorts its rows first.
        spark.conf.set("spark.sql.maxConcurrentOutputFileWriters", "16")
        self._spark = spark
        self._history = History(spark, directory)
        self._journals = Journals(redis, prefix)
        self._options = {
            "redis": redis,
            "prefix": prefix,
            "queues": queues,
            "failOnLoss": "false" if accept_loss else "true",
            "maxEntriesPerBatch": str(entries_per_batch),
        }
        self._tally = Tally(self._history.folder.url, time.monotonic())
        self._stopping = threading.Event()
        # Number of the last added batch.
        self._added = -1

    def run(self, every_seconds: float | None, progress: ProgressLine | None = None) -> Tally:
        """Reads all current entries; with `every_seconds` repeats until stopped."""
        with self._history.locked():
            self._history.recover()
            consumer = self._history.consumer()
            self._journals.register_consumer(consumer)
            self._publish(consumer)
            query = self._start(every_seconds)
            try:
                self._supervise(query, consumer, progress)
            finally:
                query.stop()
            self._publish(consumer)
            if not self._stopping.is_set():
                self._compact(sys.maxsize)
        return self._tally

    def stop(self) -> None:
        """Stops soon, even within a batch: the next ingest finishes it."""
        self._stopping.set()

    def _start(self, every_seconds: float | None) -> StreamingQuery:
        reader = self._spark.readStream.format("forq").options(**self._options)
        writer = (
            reader.load().writeStream.foreachBatch(self._add).option("checkpointLocation", self._history.checkpoint)
        )
        if every_seconds is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{round(every_seconds * 1000)} milliseconds").start()

    def _add(self, rows: DataFrame, number: int) -> None:
        """Adds one batch. Spark recorded all batches before it as done, so they may be compacted."""
        seen = Observation()
        counted = rows.observe(seen, f.count(f.lit(1)).alias("rows"), f.max(f.unix_micros("time")).alias("last"))
        if self._history.publish(number, counted):
            found = seen.get
            self._tally.rows += found["rows"]
            self._tally.batches += 1
            if found["last"] is not None:
                self._tally.lag_seconds = self._journals.server_seconds() - found["last"] / 1_000_000
        self._added = number
        self._compact(number)
        self._tally.seconds = time.monotonic() - self._tally.started

    def _supervise(self, query: StreamingQuery, consumer: str, progress: ProgressLine | None) -> None:
        published = -1
        while query.isActive and not self._stopping.wait(_POLL_SECONDS):
            # Spark records a batch as done some time after it was added, so publishing may take several tries.
            if self._added > published:
                published = self._publish(consumer)
            if progress is not None:
                progress.update(self._tally.progress())
        if progress is not None:
            progress.clear()
        failure = query.exception()
        if failure is not None:
            raise ForqError(error_line(failure)) from failure

    def _publish(self, consumer: str) -> int:
        """Publishes the watermarks of the last batch that is done; returns its number."""
        number, offsets = self._history.committed()
        self._journals.publish_watermarks(consumer, offsets)
        return number

    def _compact(self, before: int) -> None:
        self._tally.compacted += self._history.compaction.run(before)


def error_line(exc: PySparkException) -> str:
    """One line for an error raised by Spark: the message of forq's exception inside it, else Spark's first line."""
    text = str(exc)
    messages = _FORQ_ERROR.findall(text)
    return messages[-1] if messages else text.strip().partition("\n")[0]


@contextmanager
def stop_on_signal(ingest: Ingest) -> Iterator[None]:
    def stop(_signal: int, _frame: FrameType | None) -> None:
        ingest.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ingest(data: dict[str, Any], job: Job) -> None:
    """Runs an ingest, then enqueues its own job again. That job is blocked until this attempt has ended."""
    every = float(data["every_seconds"])
    queue = Client(prefix=data["prefix"]).queue(job.queue)
    parser = argparse.ArgumentParser()
    add_common(parser)
    add_arguments(parser)
    try:
        run(parser.parse_args(["--history", data["history"], "--prefix", data["prefix"]]))
    finally:
        if every > KEEP_SESSION_SECONDS:
            _stop_session()
    queue.enqueue(data, id=job.id, run_in=every)


def _stop_session() -> None:
    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()
