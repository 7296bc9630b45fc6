"""The data source format("forq"): events of the journals (batch and stream), live and dead jobs (batch), and writing.

An offset is {queue: id of the last entry read}, with the queues in order; one that is not in it was not read yet. Rows
of one range of offsets are the same whenever they are read, unless entries were trimmed meanwhile.
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
from forq.pipeline.options import SourceOptions, read_options
from forq.pipeline.reader import BEGINNING, Journals, Mark, Range, event_batches, id_key, job_batches
from forq.pipeline.schema import EVENTS, JOBS
from forq.pipeline.sink import JobWriter, StreamJobWriter

Offset = dict[str, str]

# A task reads about so many entries: several small queues, or a part of a large one. One may hold hundreds of events.
FEWEST_PER_TASK, MOST_PER_TASK = 500, 10_000
_TASKS = 8


class ForqSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "forq"

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(dict(options))
        self._chosen = read_options(options)
        self._options = dict(options)

    def schema(self) -> StructType:
        return JOBS if self._chosen.what == "jobs" else EVENTS

    def reader(self, schema: StructType) -> DataSourceReader:
        _check_schema(schema, self.schema())
        return JobReader(self._chosen) if self._chosen.what == "jobs" else EventReader(self._chosen)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self._chosen.what == "jobs":
            raise UsageError("jobs can be read as a batch only; what streams are events")
        _check_schema(schema, self.schema())
        return EventStreamReader(self._chosen)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return JobWriter(self._options, self._chosen, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return StreamJobWriter(self._options, self._chosen, schema, overwrite)


def _check_schema(given: StructType, own: StructType) -> None:
    if given.fieldNames() != own.fieldNames():
        raise UsageError(f"format 'forq' has the columns {', '.join(own.fieldNames())}; it takes no other schema")


@dataclass
class Task(InputPartition):
    """What one task reads."""

    ranges: tuple[Range, ...]


@dataclass
class QueueTask(InputPartition):
    queue: str


class JobReader(DataSourceReader):
    def __init__(self, chosen: SourceOptions) -> None:
        self._chosen = chosen

    def partitions(self) -> Sequence[InputPartition]:
        journals = Journals(self._chosen.redis, self._chosen.prefix)
        return [QueueTask(queue) for queue in self._chosen.queues or journals.queues()]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        # Spark makes an empty partition of its own if there is no queue.
        if not isinstance(partition, QueueTask):
            return iter(())
        return job_batches(Journals(self._chosen.redis, self._chosen.prefix), partition.queue)


class _Planner:
    """Offsets and tasks, for batch and stream."""

    def __init__(self, chosen: SourceOptions) -> None:
        self._chosen = chosen
        self.journals = Journals(chosen.redis, chosen.prefix)

    def ends(self, start: Offset) -> dict[str, Mark]:
        """Where the journals end now. A queue that was read before is looked at for ever: it may come back."""
        queues = self._chosen.queues or sorted({*self.journals.queues(), *start})
        ends = self.journals.ends(queues)
        for queue, end in ends.items():
            if self._chosen.fail_on_loss and id_key(end.id) < id_key(start.get(queue, BEGINNING)):
                raise ForqError(
                    f"the journal of queue {queue!r} ends at {end.id}, but was read up to {start[queue]} before: the "
                    "server has lost what it had (a failover, or an old backup). failOnLoss=false goes on with what "
                    "comes after that; the audit will show the break"
                )
        return ends

    def unread(self, start: Offset, ends: dict[str, Mark]) -> list[Range]:
        parts = [
            self.journals.remaining(queue, start.get(queue, BEGINNING), end)
            for queue, end in ends.items()
            if id_key(end.id) > id_key(start.get(queue, BEGINNING))
        ]
        return [part for part in parts if part.entries]

    def limited(self, unread: list[Range], entries: int) -> Offset:
        """Where to stop so that about so many entries are read, shared fairly among the queues."""
        reached: Offset = {}
        waiting = sorted(unread, key=lambda part: part.entries)
        for at, part in enumerate(waiting):
            share = max(1, entries // (len(waiting) - at))
            reached[part.queue] = self.journals.cut(part, share)
            entries = max(0, entries - min(share, part.entries))
        return reached

    def tasks(self, start: Offset, end: Offset) -> list[InputPartition]:
        unread = self.unread(start, self.journals.at(end))
        size = min(MOST_PER_TASK, max(FEWEST_PER_TASK, sum(part.entries for part in unread) // _TASKS))
        tasks: list[InputPartition] = []
        gathered: list[Range] = []
        for whole in unread:
            for part in self.journals.split(whole, size):
                if gathered and sum(one.entries for one in gathered) + part.entries > size:
                    tasks.append(Task(tuple(gathered)))
                    gathered = []
                gathered.append(part)
        return [*tasks, Task(tuple(gathered))] if gathered else tasks

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, Task):
            return iter(())
        return event_batches(self.journals, partition.ranges, skip_broken=not self._chosen.fail_on_loss)


class EventReader(DataSourceReader):
    """Everything that the journals hold now."""

    def __init__(self, chosen: SourceOptions) -> None:
        self._planner = _Planner(chosen)

    def partitions(self) -> Sequence[InputPartition]:
        return self._planner.tasks({}, {queue: end.id for queue, end in self._planner.ends({}).items()})

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._planner.read(partition)


class EventStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, chosen: SourceOptions) -> None:
        self._chosen = chosen
        self._planner = _Planner(chosen)
        self._target: dict[str, Mark] | None = None

    def initialOffset(self) -> Offset:
        if self._chosen.starting_from == "earliest":
            return {}
        return {queue: end.id for queue, end in sorted(self._planner.ends({}).items())}

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._planner.ends({})

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        ends = self._planner.ends(start)
        if self._target is not None:
            ends = {queue: self._target[queue] for queue in ends if queue in self._target}
        unread = self._planner.unread(start, ends)
        if isinstance(limit, ReadMaxRows):
            reached = self._planner.limited(unread, limit.max_rows)
        else:
            reached = {part.queue: part.last for part in unread}
        # In order: Spark compares offsets as text.
        return dict(sorted({**start, **reached}.items()))

    def getDefaultReadLimit(self) -> ReadLimit:
        entries = self._chosen.max_entries_per_batch
        return ReadAllAvailable() if entries is None else ReadMaxRows(entries)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        return self._planner.tasks(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return self._planner.read(partition)

    def commit(self, end: Offset) -> None:
        if self._chosen.consumer:
            self._planner.journals.publish(self._chosen.consumer, end)
