"""A folder on any file system that Hadoop knows (a local path, hdfs://, s3a:// …), through Spark's JVM.

Nothing here needs more of a file system than that one file is moved or written whole or not at all.

Event rows as Parquet by queue and day.

Making few large files out of many small ones, in a history.

1. The rows of all small batches are written once more, in order, to `_staging/ID`.
2. `_compaction/ID.plan` is written: from here on it is only finished, never taken back.
3. The small batches are deleted, then `_compaction/ID.cleared` is written.
4. The new files are moved to the folder of the last of those batches.
5. The plan is deleted.

`finish` does steps 3 to 5 from wherever a kill has left them. A program that reads `events/` as it is misses the rows
of the small batches from step 3 to the end of 4; after a kill there, until the next ingest. `read_history` follows the
plan and does not.

The history: every event of the journal as Parquet, in a folder on any file system that Spark knows.

    DIR/events/batch=N/queue=NAME/day=YYYY-MM-DD/*.parquet    the rows; what other programs read
    DIR/_published/N       batch N is complete
    DIR/_staging/          what is being written
    DIR/_compaction/       the compaction that is under way (compaction.py)
    DIR/_checkpoint/       how far Spark has read
    DIR/_consumer          under which name this history publishes how far the journal may be trimmed
    DIR/_lock              held by the ingest that runs (local file systems only)

A batch is written beside the others, moved in file by file, then marked. Spark repeats a batch whose end it did not
record, with the same range of the journal: one that is marked is left as it is, any other is written anew. So a kill at
any moment neither loses nor doubles a row.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import DateType, StructField, StructType

from forq.errors import ConfigError, ForqError, UsageError
from forq.pipeline.schema import EVENTS


class Folder:
    """Names are relative to the folder, with slashes."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        jvm: Any = spark._jvm
        self._make_path = jvm.org.apache.hadoop.fs.Path
        self._io = jvm.org.apache.commons.io.IOUtils
        self._charset = jvm.java.nio.charset.StandardCharsets.UTF_8
        path = self._make_path(url)
        self._files: Any = path.getFileSystem(spark._jsc.hadoopConfiguration())
        self._root = self._files.makeQualified(path)
        self.url: str = self._root.toString()
        uri = self._root.toUri()
        self.local_path: str | None = uri.getPath() if uri.getScheme() == "file" else None
        if self.local_path is not None:
            # Without the hidden file of checksums beside each file, at which other programs stumble.
            self._files = self._files.getRawFileSystem()

    def path(self, name: str) -> str:
        """The whole URL, as Spark's readers and writers want it."""
        return f"{self.url.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._at(name)))

    def names(self, name: str) -> list[str]:
        """What is in a folder; nothing if there is none."""
        at = self._at(name)
        if not self._files.exists(at):
            return []
        return sorted(status.getPath().getName() for status in self._files.listStatus(at))

    def files(self, name: str, suffix: str) -> dict[str, int]:
        """Every file below a folder whose name ends so, relative to that folder, with its size."""
        at = self._at(name)
        if not self._files.exists(at):
            return {}
        top = self._files.makeQualified(at).toString().rstrip("/") + "/"
        found, listed = {}, self._files.listFiles(at, True)
        while listed.hasNext():
            status = listed.next()
            path = status.getPath().toString()
            if path.endswith(suffix):
                found[path.removeprefix(top)] = int(status.getLen())
        return found

    def make(self, name: str) -> None:
        self._files.mkdirs(self._at(name))

    def move_file(self, source: str, target: str) -> None:
        """Moves one file; what is at its new place already (of a move that was cut off) is replaced."""
        to = self._at(target)
        self._files.mkdirs(to.getParent())
        if self._files.exists(to):
            self._files.delete(to, False)
        if not self._files.rename(self._at(source), to):
            raise ForqError(f"cannot move {self.path(source)} to {target}")

    def delete(self, name: str) -> None:
        """A file or a folder with all that is in it; nothing happens if there is none."""
        at = self._at(name)
        if self._files.exists(at) and not self._files.delete(at, True):
            raise ForqError(f"cannot delete {self.path(name)}")

    def read(self, name: str) -> str | None:
        at = self._at(name)
        if not self._files.exists(at):
            return None
        stream = self._files.open(at)
        try:
            return str(self._io.toString(stream, self._charset))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Makes a small file, whole or not at all. One that is there is replaced, and missing for a moment."""
        fresh = f"{name}.new"
        stream = self._files.create(self._at(fresh), True)
        try:
            self._io.write(text, stream, self._charset)
        finally:
            stream.close()
        self.move_file(fresh, name)

    def _at(self, name: str) -> Any:
        return self._make_path(self.path(name))


# As they are read: queue and day are in the names of the folders.
STORED = StructType([*EVENTS.fields, StructField("day", DateType())])
_DAY_MICROS = 86_400_000_000


def write_rows(rows: DataFrame, path: str) -> None:
    """Replaces what is at `path`. Days are those of UTC, whatever the session's zone is."""
    day = f.expr(f"date_from_unix_date(cast(unix_micros(time) div {_DAY_MICROS} as int))")
    (
        rows.withColumn("day", day)
        .write.mode("overwrite")
        .partitionBy("queue", "day")
        .option("compression", "zstd")
        .option("maxRecordsPerFile", 5_000_000)
        .parquet(path)
    )


def read_rows(spark: SparkSession, roots: Iterable[tuple[str, list[str]]]) -> DataFrame:
    """The rows in some folders (queue, day and the columns of EVENTS), given as a common base and folders below it."""
    tables = [
        spark.read.schema(STORED).option("basePath", base).parquet(*paths).select(STORED.fieldNames())
        for base, paths in roots
        if paths
    ]
    return reduce(DataFrame.union, tables) if tables else spark.createDataFrame([], STORED)


EVENTS_FOLDER = "events"
STAGING = "_staging"
_PLANS = "_compaction"
_MARKERS = "_published"

# A batch below this size is small; so many of them are put together.
SMALL_BYTES = 16 * 1024 * 1024
MANY = 32


def batch_folder(number: int) -> str:
    return f"{EVENTS_FOLDER}/batch={number}"


def marker(number: int) -> str:
    return f"{_MARKERS}/{number}"


class Compaction:
    def __init__(self, spark: SparkSession, folder: Folder) -> None:
        self.folder = folder
        self._spark = spark

    def batches(self) -> list[int]:
        """Those that are complete, in order."""
        return sorted(int(name) for name in self.folder.names(_MARKERS) if name.isdigit())

    def run(self, before: int, many: int = MANY) -> int:
        """Puts small batches with a number below `before` together if there are many; how many that were.

        `before`: the batch that Spark may still repeat, or the one after the last.
        """
        small = [number for number in self.batches() if number < before and self._bytes(number) < SMALL_BYTES]
        if len(small) < many:
            return 0
        name = f"compact-{secrets.token_hex(4)}"
        self._stage(small, f"{STAGING}/{name}")
        self.folder.write(f"{_PLANS}/{name}.plan", json.dumps({"sources": small, "target": small[-1]}))
        self.finish()
        return len(small)

    def finish(self) -> None:
        """Carries out the plans that are there."""
        plans = self._plans()
        for name, (sources, target) in plans.items():
            if not self.folder.exists(f"{_PLANS}/{name}.cleared"):
                for number in sources:
                    self.folder.delete(batch_folder(number))
                    if number != target:
                        self.folder.delete(marker(number))
                self.folder.make(batch_folder(target))
                self.folder.write(f"{_PLANS}/{name}.cleared", "")
            for file in self.folder.files(f"{STAGING}/{name}", ".parquet"):
                self.folder.move_file(f"{STAGING}/{name}/{file}", f"{batch_folder(target)}/{file}")
            self.folder.delete(f"{_PLANS}/{name}.plan")
            self.folder.delete(f"{STAGING}/{name}")
        self.folder.delete(_PLANS)

    def visible(self) -> list[tuple[str, list[str]]] | None:
        """Where each row is once, by the plans too, as `read_rows` wants it; None if that changed during the look."""
        plans = self._plans()
        replaced = {number for sources, _ in plans.values() for number in sources}
        moved_to = {target for name, (_, target) in plans.items() if self.folder.exists(f"{_PLANS}/{name}.cleared")}
        placed = [number for number in self.batches() if number not in replaced or number in moved_to]
        staged = [f"{STAGING}/{name}" for name in plans]
        if self._plans() != plans or not all(map(self.folder.exists, [*map(batch_folder, placed), *staged])):
            return None
        return [self._root(placed), *((self.folder.path(name), [self.folder.path(name)]) for name in staged)]

    def _stage(self, small: list[int], staged: str) -> None:
        rows = read_rows(self._spark, [self._root(small)])
        in_order = rows.repartition("queue").sortWithinPartitions("queue", "epoch", "sequence", "position")
        write_rows(in_order, self.folder.path(staged))
        self.folder.make(staged)
        written = read_rows(self._spark, [(self.folder.path(staged), [self.folder.path(staged)])]).count()
        if written != (expected := rows.count()):
            raise ForqError(f"compaction wrote {written} rows of {expected}: nothing was replaced")

    def _root(self, numbers: list[int]) -> tuple[str, list[str]]:
        return self.folder.path(EVENTS_FOLDER), [self.folder.path(batch_folder(number)) for number in numbers]

    def _plans(self) -> dict[str, tuple[list[int], int]]:
        plans = {}
        for file in self.folder.names(_PLANS):
            text = self.folder.read(f"{_PLANS}/{file}") if file.endswith(".plan") else None
            if text is not None:
                plan = json.loads(text)
                plans[file.removesuffix(".plan")] = (list(plan["sources"]), int(plan["target"]))
        return plans

    def _bytes(self, number: int) -> int:
        return sum(self.folder.files(batch_folder(number), ".parquet").values())


CHECKPOINT = "_checkpoint"
_CONSUMER = "_consumer"
_LOOKS = 20


class History:
    """A history as the one ingest that fills it sees it."""

    def __init__(self, spark: SparkSession, directory: str) -> None:
        self.folder = Folder(spark, directory)
        self.compaction = Compaction(spark, self.folder)
        self.checkpoint = self.folder.path(CHECKPOINT)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Held while an ingest writes. Elsewhere than on a local file system Spark itself refuses the second one, when
        both have come to the end of a batch."""
        self.folder.make("")
        if self.folder.local_path is None:
            yield
            return
        lock = os.open(
            os.path.join(self.folder.local_path, "_lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as exc:
            raise ForqError(f"another ingest is writing to {self.folder.url}") from exc
        finally:
            os.close(lock)

    def recover(self) -> None:
        """Finishes what a killed ingest had begun."""
        self.compaction.finish()
        self.folder.delete(STAGING)
        if self.compaction.batches() and not self.folder.names(f"{CHECKPOINT}/offsets"):
            raise ConfigError(
                f"{self.folder.url} has rows, but its {CHECKPOINT} is gone: nobody knows how far the journal was read. "
                "Give another directory, or move this one away"
            )

    def consumer(self) -> str:
        """Its name among those that read the journal; kept in the history, so that two histories are two consumers."""
        known = self.folder.read(_CONSUMER)
        if known:
            return known.strip()
        name = f"history-{secrets.token_hex(6)}"
        self.folder.write(_CONSUMER, name + "\n")
        return name

    def publish(self, number: int, rows: DataFrame) -> bool:
        """Adds a batch; False if it is there already."""
        if self.folder.exists(marker(number)):
            return False
        # A name of its own for each attempt: Spark may go on writing for a moment after its driver was killed.
        staged = f"{STAGING}/batch-{number}-{secrets.token_hex(4)}"
        write_rows(rows, self.folder.path(staged))
        # What an earlier, unfinished attempt has moved.
        self.folder.delete(batch_folder(number))
        self.folder.make(batch_folder(number))
        for name in self.folder.files(staged, ".parquet"):
            self.folder.move_file(f"{staged}/{name}", f"{batch_folder(number)}/{name}")
        self.folder.write(marker(number), "")
        self.folder.delete(staged)
        return True

    def committed(self) -> tuple[int, dict[str, str]]:
        """The last batch that Spark has recorded to be in the history (-1: none), and the offsets at its end."""
        done = [int(name) for name in self.folder.names(f"{CHECKPOINT}/commits") if name.isdigit()]
        text = self.folder.read(f"{CHECKPOINT}/offsets/{max(done)}") if done else None
        # Line by line: a version, Spark's own metadata, one offset per source.
        lines = text.splitlines() if text else []
        return max(done, default=-1), dict(json.loads(lines[2])) if len(lines) > 2 else {}


def read_history(
    spark: SparkSession, directory: str, *, since: date | None = None, until: date | None = None
) -> DataFrame:
    """The event rows of a history, each once; `since` and `until` (days, in UTC, both included) spare reading others.

    What an ingest compacts meanwhile may vanish under a query that is running: then it fails, and may be repeated.
    """
    rows = read_rows(spark, _roots(Compaction(spark, Folder(spark, directory))))
    if since is not None:
        rows = rows.where(f.col("day") >= f.lit(since))
    if until is not None:
        rows = rows.where(f.col("day") <= f.lit(until))
    return rows.select(EVENTS.fieldNames())


def require_history(spark: SparkSession, directory: str) -> None:
    """Refuses a place where no ingest has been: a mistyped one would look like a time in which nothing happened."""
    if not Folder(spark, directory).exists("events"):
        raise UsageError(f"there is no history in {directory}: `forq pipeline ingest` makes one; --history says where")


def _roots(compaction: Compaction) -> list[tuple[str, list[str]]]:
    """A look at a folder that is being changed is repeated until nothing was missing."""
    for _ in range(_LOOKS):
        roots = compaction.visible()
        if roots is not None:
            return roots
    raise ForqError(f"{compaction.folder.url} lacks batches that are marked as complete")
