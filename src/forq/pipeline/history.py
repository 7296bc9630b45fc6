"""The history: every event of the journals as Parquet, in a folder on any file system that Spark supports.

    DIR/events/batch=N/queue=NAME/day=YYYY-MM-DD/*.parquet    the rows; other programs may read them
    DIR/_published/N       marker: batch N is complete
    DIR/_staging/          files being written
    DIR/_compaction/       plan of the current compaction
    DIR/_checkpoint/       how far Spark has read
    DIR/_consumer          name under which this history publishes its watermarks
    DIR/_lock              held by the running ingest (local file systems only)

A batch is staged, moved in file by file, then marked. Spark repeats a batch whose end it did not record, with the same
range of the journal: a marked batch is skipped, any other is written again. So a kill at any time neither loses nor
duplicates a row. The file system only has to write and move single files atomically.
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
from forq.pipeline.format import EVENTS


class Folder:
    """A folder on any file system that Hadoop supports (local, hdfs://, s3a:// …), through Spark's JVM.

    Names are relative to the folder, with slashes.
    """

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
            # Without hidden checksum files, which confuse other programs.
            self._files = self._files.getRawFileSystem()

    def path(self, name: str) -> str:
        """The whole URL, for Spark's readers and writers."""
        return f"{self.url.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._at(name)))

    def names(self, name: str) -> list[str]:
        """The names in a folder; empty if it does not exist."""
        at = self._at(name)
        if not self._files.exists(at):
            return []
        return sorted(status.getPath().getName() for status in self._files.listStatus(at))

    def files(self, name: str, suffix: str) -> dict[str, int]:
        """All files below a folder with this suffix, relative to the folder, with their sizes."""
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
        """Moves one file. Replaces the target, which an interrupted move may have left."""
        to = self._at(target)
        self._files.mkdirs(to.getParent())
        if self._files.exists(to):
            self._files.delete(to, False)
        if not self._files.rename(self._at(source), to):
            raise ForqError(f"cannot move {self.path(source)} to {target}")

    def delete(self, name: str) -> None:
        """Deletes a file, or a folder with its content, if it exists."""
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
        """Writes a small file atomically. An existing file is replaced, and missing for a moment."""
        fresh = f"{name}.new"
        stream = self._files.create(self._at(fresh), True)
        try:
            self._io.write(text, stream, self._charset)
        finally:
            stream.close()
        self.move_file(fresh, name)

    def _at(self, name: str) -> Any:
        return self._make_path(self.path(name))


# Includes queue and day, which are in the folder names.
STORED = StructType([*EVENTS.fields, StructField("day", DateType())])
_DAY_MICROS = 86_400_000_000


def write_rows(rows: DataFrame, path: str) -> None:
    """Replaces the content of `path`. Days are UTC days, whatever the session's time zone is."""
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
    """Rows (columns of EVENTS, and day) of the folders. `roots`: pairs of a base and the folders below it."""
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

# Batches smaller than SMALL_BYTES are merged when there are MIN_BATCHES of them.
SMALL_BYTES = 16 * 1024 * 1024
MIN_BATCHES = 32


def batch_folder(number: int) -> str:
    return f"{EVENTS_FOLDER}/batch={number}"


def marker(number: int) -> str:
    return f"{_MARKERS}/{number}"


class Compaction:
    """Merges small batches into fewer files.

    1. Writes the rows of all small batches again, sorted, to `_staging/ID`.
    2. Writes `_compaction/ID.plan`. From here on the compaction can only be finished.
    3. Deletes the small batches, then writes `_compaction/ID.cleared`.
    4. Moves the new files to the folder of the last small batch.
    5. Deletes the plan.

    After a kill, `finish` continues with steps 3 to 5. From step 3 to the end of step 4 a program that reads `events/`
    directly misses the rows of the small batches. `read_history` follows the plan and misses none.
    """

    def __init__(self, spark: SparkSession, folder: Folder) -> None:
        self.folder = folder
        self._spark = spark

    def batches(self) -> list[int]:
        """Numbers of the complete batches, sorted."""
        return sorted(int(name) for name in self.folder.names(_MARKERS) if name.isdigit())

    def run(self, before: int, min_batches: int = MIN_BATCHES) -> int:
        """Merges the small batches with a number below `before` if there are enough; returns how many.

        `before`: the first batch that Spark may still repeat.
        """
        small = [number for number in self.batches() if number < before and self._bytes(number) < SMALL_BYTES]
        if len(small) < min_batches:
            return 0
        name = f"compact-{secrets.token_hex(4)}"
        self._stage(small, f"{STAGING}/{name}")
        self.folder.write(f"{_PLANS}/{name}.plan", json.dumps({"sources": small, "target": small[-1]}))
        self.finish()
        return len(small)

    def finish(self) -> None:
        """Executes the existing plans."""
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
        """The folders that have each row once, as `read_rows` takes them; None if they changed meanwhile."""
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
            raise ForqError(f"compaction wrote {written} of {expected} rows; no file was replaced")

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
_TRIES = 20


class History:
    """The history as its only writer, the ingest, uses it."""

    def __init__(self, spark: SparkSession, directory: str) -> None:
        self.folder = Folder(spark, directory)
        self.compaction = Compaction(spark, self.folder)
        self.checkpoint = self.folder.path(CHECKPOINT)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock while an ingest writes. On other than local file systems Spark refuses a second ingest at the
        end of its first batch."""
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
            raise ForqError(f"another ingest is writing to {self.folder.url}: stop it, or wait for it") from exc
        finally:
            os.close(lock)

    def recover(self) -> None:
        """Finishes the work of a killed ingest."""
        self.compaction.finish()
        self.folder.delete(STAGING)
        if self.compaction.batches() and not self.folder.names(f"{CHECKPOINT}/offsets"):
            raise ConfigError(
                f"{self.folder.url} has rows, but its {CHECKPOINT} is gone, so the position in the journals is lost: "
                "give another --history, or move this directory away"
            )

    def consumer(self) -> str:
        """Name of this history as a consumer of the journals. It is stored, so each history has its own."""
        known = self.folder.read(_CONSUMER)
        if known:
            return known.strip()
        name = f"history-{secrets.token_hex(6)}"
        self.folder.write(_CONSUMER, name + "\n")
        return name

    def publish(self, number: int, rows: DataFrame) -> bool:
        """Adds a batch; False if it exists already."""
        if self.folder.exists(marker(number)):
            return False
        # A new name for each attempt: Spark may still write for a moment after its driver was killed.
        staged = f"{STAGING}/batch-{number}-{secrets.token_hex(4)}"
        write_rows(rows, self.folder.path(staged))
        # Files moved by an unfinished attempt.
        self.folder.delete(batch_folder(number))
        self.folder.make(batch_folder(number))
        for name in self.folder.files(staged, ".parquet"):
            self.folder.move_file(f"{staged}/{name}", f"{batch_folder(number)}/{name}")
        self.folder.write(marker(number), "")
        self.folder.delete(staged)
        return True

    def committed(self) -> tuple[int, dict[str, str]]:
        """The last batch that Spark recorded as done (-1: none), and the offsets at its end."""
        done = [int(name) for name in self.folder.names(f"{CHECKPOINT}/commits") if name.isdigit()]
        text = self.folder.read(f"{CHECKPOINT}/offsets/{max(done)}") if done else None
        # Lines: version, Spark's metadata, one offset per source.
        lines = text.splitlines() if text else []
        return max(done, default=-1), dict(json.loads(lines[2])) if len(lines) > 2 else {}


def read_history(
    spark: SparkSession, directory: str, *, since: date | None = None, until: date | None = None
) -> DataFrame:
    """The event rows of a history. `since` and `until` (UTC days, inclusive) limit the files read.

    A compaction may delete files that a running query needs: the query fails and can be repeated.
    """
    rows = read_rows(spark, _roots(Compaction(spark, Folder(spark, directory))))
    if since is not None:
        rows = rows.where(f.col("day") >= f.lit(since))
    if until is not None:
        rows = rows.where(f.col("day") <= f.lit(until))
    return rows.select(EVENTS.fieldNames())


def require_history(spark: SparkSession, directory: str) -> None:
    """Refuses a directory without a history: a mistyped one would look like a time without events."""
    if not Folder(spark, directory).exists("events"):
        raise UsageError(f"there is no history in {directory}: give --history, or run `forq pipeline ingest` first")


def _roots(compaction: Compaction) -> list[tuple[str, list[str]]]:
    """Repeats reading the folder until no ingest changed it meanwhile."""
    for _ in range(_TRIES):
        roots = compaction.visible()
        if roots is not None:
            return roots
    raise ForqError(f"{compaction.folder.url} lacks the files of batches that are marked as complete")
