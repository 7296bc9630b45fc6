"""forq pipeline ingest: brings the journals into a history, each event exactly once.

1. Spark reads a batch of the journals (source.py) and records the range it is about to read.
2. The batch is added to the history (history.py); Spark records that it is done.
3. The watermark is published: the journals may be trimmed up to there.

A kill between any two of them is made good by the next ingest: Spark repeats the batch, or the watermark comes later.

Ingest as a job: the queue that `[pipeline]` in forq.toml makes runs this, and it runs itself again later.
"""

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TextIO

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from forq.broker.keys import DEFAULT_PREFIX
from forq.client import Client
from forq.errors import ForqError
from forq.job import Job
from forq.paths import redis_url, state_dir
from forq.pipeline.cli import add_common
from forq.pipeline.history import History
from forq.pipeline.reader import Journals, require_queues
from forq.pipeline.session import spark_session
from forq.pipeline.source import ForqSource
from forq.values import parse_duration

ENTRIES_PER_BATCH = 100_000
_LOOK_SECONDS = 0.2
_OWN_ERROR = re.compile(r"forq\.errors\.\w+: (.+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--follow", action="store_true", help="go on until stopped; else end when all is read")
    parser.add_argument("--every", default="10s", metavar="DURATION", help="with --follow: how often to look (10s)")
    parser.add_argument("--queues", default="", metavar="NAMES", help="only these, with commas; NAME#fail: fail queue")
    parser.add_argument(
        "--accept-loss",
        dest="accept_loss",
        action="store_true",
        help="go on if the server has lost entries that were read before, or an entry cannot be read",
    )
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    every_seconds = parse_duration(args.every)
    require_queues(args.redis or redis_url(), args.prefix)
    ingest = Ingest(
        spark_session("ingest"),
        history_directory(args.history),
        args.redis or redis_url(),
        args.prefix,
        queues=args.queues,
        accept_loss=args.accept_loss,
    )
    with stop_on_signal(ingest):
        tally = ingest.run(every_seconds if args.follow else None, shown_on(sys.stderr, args.json))
    print(json.dumps(tally.as_json()) if args.json else tally.summary())
    return 0


def history_directory(given: str | None) -> str:
    return given or os.path.join(state_dir(), "history")


@dataclass
class Tally:
    """What one ingest has done so far."""

    history: str
    started: float
    rows: int = 0
    batches: int = 0
    compacted: int = 0
    # Server time minus that of the last row, when its batch was in the history.
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

    def summary(self) -> str:
        lag = "" if self.lag_seconds is None else f", {self.lag_seconds:.1f} s behind"
        return (
            f"{self.rows:,} rows in {self.batches} batches, {self.seconds:.1f} s "
            f"({self.rows_per_second:,.0f} rows/s{lag}) -> {self.history}"
        )


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
        # Else times are written in an old form that has no statistics and, for others, no zone.
        spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        # A task writes so many queues and days side by side; else it would sort its rows first.
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
        # The number of the last batch that was added.
        self._added = -1

    def run(self, every_seconds: float | None, show: "Show | None" = None) -> Tally:
        """Reads all that is there now; with `every_seconds`: again and again, until stopped."""
        with self._history.locked():
            self._history.recover()
            consumer = self._history.consumer()
            self._journals.announce(consumer)
            self._publish(consumer)
            query = self._start(every_seconds)
            try:
                self._attend(query, consumer, show)
            finally:
                query.stop()
            self._publish(consumer)
            if not self._stopping.is_set():
                self._compact(sys.maxsize)
        return self._tally

    def stop(self) -> None:
        """Ends a run soon, wherever it is: what is unfinished is finished by the next one."""
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
        """One batch. All before it are recorded as done, so that they may be put together."""
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

    def _attend(self, query: StreamingQuery, consumer: str, show: "Show | None") -> None:
        published = -1
        while query.isActive and not self._stopping.wait(_LOOK_SECONDS):
            # Spark records a batch as done some time after it has been added: until then there is more to publish.
            if self._added > published:
                published = self._publish(consumer)
            if show is not None:
                show.progress(self._tally)
        if show is not None:
            show.end()
        failure = query.exception()
        if failure is not None:
            raise ForqError(own_words(failure)) from failure

    def _publish(self, consumer: str) -> int:
        """Tells up to where the history is complete; the number of the last batch in that."""
        number, offsets = self._history.committed()
        self._journals.publish(consumer, offsets)
        return number

    def _compact(self, before: int) -> None:
        self._tally.compacted += self._history.compaction.run(before)


def own_words(exc: PySparkException) -> str:
    """What forq said, if it is in what Spark makes of it; else Spark's first line."""
    text = str(exc)
    said = _OWN_ERROR.findall(text)
    return said[-1] if said else text.strip().partition("\n")[0]


class Show:
    """One line on a terminal that is written over and over."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = ""

    def progress(self, tally: Tally) -> None:
        line = tally.summary().rpartition(" -> ")[0]
        if line != self._shown:
            self._out.write(f"\r\x1b[K{line}")
            self._out.flush()
            self._shown = line

    def end(self) -> None:
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()


def shown_on(out: TextIO, quiet: bool) -> Show | None:
    return Show(out) if out.isatty() and not quiet else None


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


# A session that is used again so soon is kept: to start one takes ten seconds.
KEPT_FOR_SECONDS = 120.0


def ingest(data: dict[str, Any], job: Job) -> None:
    """Reads what is new into the history; then enqueues itself (blocked behind this run until it has ended)."""
    every = float(data["every_seconds"])
    queue = Client(prefix=data["prefix"]).queue(job.queue)
    parser = argparse.ArgumentParser()
    add_common(parser)
    add_arguments(parser)
    try:
        run(parser.parse_args(["--history", data["history"], "--prefix", data["prefix"]]))
    finally:
        if every > KEPT_FOR_SECONDS:
            _end_session()
    queue.enqueue(data, id=job.id, run_in=every)


def _end_session() -> None:
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()
