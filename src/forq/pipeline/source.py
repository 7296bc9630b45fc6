"""Spark's data source format("forq"): reads events (batch and stream) and jobs (batch), and writes jobs.

An offset is {queue: id of the last entry read}, sorted by queue. A queue that is not in it was not read yet. The same
range of offsets always gives the same rows, unless entries were trimmed meanwhile.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from forq.errors import ForqError, UsageError
from forq.pipeline.format import EVENTS, JOBS, SourceOptions, read_options
from forq.pipeline.reader import BEGINNING, EntryRef, Journals, Range, event_batches, id_key, job_batches
from forq.pipeline.sink import JobWriter, StreamJobWriter

Offset = dict[str, str]

# Entries per task: several small queues, or a part of a large one. An entry may have hundreds of events.
MIN_PER_TASK, MAX_PER_TASK = 500, 10_000
_TASKS = 8


class ForqSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "forq"

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._options = read_options(options)
        self._raw_options = dict(options)

    def schema(self) -> StructType:
        return JOBS if self._options.what == "jobs" else EVENTS

    def reader(self, schema: StructType) -> DataSourceReader:
        _check_schema(schema, self.schema())
        return JobReader(self._options) if self._options.what == "jobs" else EventReader(self._options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self._options.what == "jobs":
            raise UsageError("jobs can only be read as a batch: use spark.read, or what=events for a stream")
        _check_schema(schema, self.schema())
        return EventStreamReader(self._options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return JobWriter(self._raw_options, self._options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return StreamJobWriter(self._raw_options, self._options, schema, overwrite)


def _check_schema(given: StructType, own: StructType) -> None:
    if given.fieldNames() != own.fieldNames():
        raise UsageError(f"format 'forq' accepts no other schema: its columns are {', '.join(own.fieldNames())}")


@dataclass
class EventTask(InputPartition):
    ranges: tuple[Range, ...]


@dataclass
class QueueTask(InputPartition):
    queue: str


class JobReader(DataSourceReader):
    def __init__(self, source_options: SourceOptions) -> None:
        self._options = source_options

    def partitions(self) -> Sequence[InputPartition]:
        journals = Journals(self._options.redis, self._options.prefix)
        return [QueueTask(queue) for queue in self._options.queues or journals.queues()]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        # If there is no queue, Spark creates an empty partition.
        if not isinstance(partition, QueueTask):
            return iter(())
        return job_batches(Journals(self._options.redis, self._options.prefix), partition.queue)


class _Planner:
    """Plans offsets and tasks, for batch and stream."""

    def __init__(self, source_options: SourceOptions) -> None:
        self._options = source_options
        self.journals = Journals(source_options.redis, source_options.prefix)

    def last_entries(self, start: Offset) -> dict[str, EntryRef]:
        """The last entries of the journals. Includes deleted queues of `start`: they may be created again."""
        queues = self._options.queues or sorted({*self.journals.queues(), *start})
        ends = self.journals.last_entries(queues)
        for queue, end in ends.items():
            if self._options.fail_on_loss and id_key(end.id) < id_key(start.get(queue, BEGINNING)):
                raise ForqError(
                    f"the journal of queue {queue!r} ends at {end.id}, but was read up to {start[queue]} before: the "
                    "server has lost data (a failover, or an old backup). To continue with newer entries: "
                    "failOnLoss=false, or `forq pipeline ingest --accept-loss`; the audit will report the loss"
                )
        return ends

    def unread(self, start: Offset, ends: dict[str, EntryRef]) -> list[Range]:
        parts = [
            self.journals.remaining(queue, start.get(queue, BEGINNING), end)
            for queue, end in ends.items()
            if id_key(end.id) > id_key(start.get(queue, BEGINNING))
        ]
        return [part for part in parts if part.entries]

    def limited(self, unread: list[Range], entries: int) -> Offset:
        """End offsets for about this many entries, shared fairly among the queues."""
        reached: Offset = {}
        waiting = sorted(unread, key=lambda part: part.entries)
        for at, part in enumerate(waiting):
            share = max(1, entries // (len(waiting) - at))
            reached[part.queue] = self.journals.cut(part, share)
            entries = max(0, entries - min(share, part.entries))
        return reached

    def tasks(self, start: Offset, end: Offset) -> list[InputPartition]:
        unread = self.unread(start, self.journals.entries_at(end))
        size = min(MAX_PER_TASK, max(MIN_PER_TASK, sum(part.entries for part in unread) // _TASKS))
        tasks: list[InputPartition] = []
        gathered: list[Range] = []
        for whole in unread:
            for part in self.journals.split(whole, size):
                if gathered and sum(one.entries for one in gathered) + part.entries > size:
                    tasks.append(EventTask(tuple(gathered)))
                    gathered = []
                gathered.append(part)
        return [*tasks, EventTask(tuple(gathered))] if gathered else tasks

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, EventTask):
            return iter(())
        return event_batches(self.journals, partition.ranges, skip_broken=not self._options.fail_on_loss)


class EventReader(DataSourceReader):
    """Reads all events that the journals have now."""

    def __init__(self, source_options: SourceOptions) -> None:
        self._planner = _Planner(source_options)

    def partitions(self) -> Sequence[InputPartition]:
        return self._planner.tasks({}, {queue: end.id for queue, end in self._planner.last_entries({}).items()})

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._planner.read(partition)


class EventStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, source_options: SourceOptions) -> None:
        self._options = source_options
        self._planner = _Planner(source_options)
        self._target: dict[str, EntryRef] | None = None

    def initialOffset(self) -> Offset:
        if self._options.starting_from == "earliest":
            return {}
        return {queue: end.id for queue, end in sorted(self._planner.last_entries({}).items())}

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._planner.last_entries({})

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        ends = self._planner.last_entries(start)
        if self._target is not None:
            ends = {queue: self._target[queue] for queue in ends if queue in self._target}
        unread = self._planner.unread(start, ends)
        if isinstance(limit, ReadMaxRows):
            reached = self._planner.limited(unread, limit.max_rows)
        else:
            reached = {part.queue: part.last for part in unread}
        # Sorted: Spark compares offsets as text.
        return dict(sorted({**start, **reached}.items()))

    def getDefaultReadLimit(self) -> ReadLimit:
        entries = self._options.max_entries_per_batch
        return ReadAllAvailable() if entries is None else ReadMaxRows(entries)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        return self._planner.tasks(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._planner.read(partition)

    def commit(self, end: Offset) -> None:
        if self._options.consumer:
            self._planner.journals.publish_watermarks(self._options.consumer, end)
