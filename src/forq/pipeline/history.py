"""The history: every event of the journal as Parquet, in a folder on any file system that Spark knows.

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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from forq.errors import ConfigError, ForqError, UsageError
from forq.pipeline.compaction import STAGING, Compaction, batch_folder, marker
from forq.pipeline.folder import Folder
from forq.pipeline.rows import read_rows, write_rows
from forq.pipeline.schema import EVENTS

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
