"""Reads journals and jobs from Redis as Arrow batches.

1. `Journals` finds the journals, their ends, and ranges of them for Spark's tasks. It counts entries by their sequence
   numbers, which have no gaps. Entry ids are times, so a range is cut by binary search over time.
2. `event_batches` reads the events of some ranges.
3. `job_batches` reads the live and dead jobs of a queue. It is not a snapshot: jobs may change during the read.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa

from forq.broker.dead import read_dead
from forq.broker.journal import Event, read_entry, unpack_entry
from forq.broker.keys import events_key, fail_queue, queue_base, registry_key, watermarks_key
from forq.broker.link import Link
from forq.broker.record import Record, live_state, packed_options, unpack
from forq.broker.registry import Registry
from forq.errors import ForqError, InvalidData, OutcomeUnknown, RedisUnavailable, UnknownQueue
from forq.pipeline.format import EVENTS_ARROW, JOBS_ARROW

# Sorts before the first entry of any stream.
BEGINNING = "0-0"
ENTRIES_PER_CALL = 500
ROWS_PER_BATCH = 20_000
_TRIES = 3


@dataclass(frozen=True, slots=True)
class EntryRef:
    """Id, epoch and sequence number of a journal entry."""

    id: str
    epoch: int
    sequence: int

    @property
    def ms(self) -> int:
        return int(self.id.partition("-")[0])


@dataclass(frozen=True, slots=True)
class Range:
    """The entries of a queue's journal after `after`, up to and including `last`. `entries`: about how many."""

    queue: str
    after: str
    last: str
    entries: int


class Journals:
    """The journals of one server."""

    def __init__(self, url: str, prefix: str) -> None:
        self.prefix = prefix
        self.link = Link(url, name="forq-pipeline")

    def queues(self) -> list[str]:
        """All queues and fail queues, including deleted ones whose journals are kept."""
        registry = Registry(self.link, self.prefix)
        names = {*registry.names(), *registry.deleted()}
        return sorted([*names, *map(fail_queue, names)])

    def key(self, queue: str) -> str:
        return events_key(queue_base(self.prefix, queue))

    def last_entries(self, queues: Sequence[str]) -> dict[str, EntryRef]:
        """The last entry of each journal. Empty journals are left out."""
        found = self.link.pipeline([("XREVRANGE", self.key(queue), "+", "-", "COUNT", 1) for queue in queues])
        return {queue: read_entry_ref(entries[0]) for queue, entries in zip(queues, found, strict=True) if entries}

    def entries_at(self, offset: Mapping[str, str]) -> dict[str, EntryRef]:
        """The entries with these ids. Of a trimmed entry only the id is known."""
        found = self.link.pipeline([("XRANGE", self.key(queue), last, last) for queue, last in offset.items()])
        return {
            queue: read_entry_ref(entries[0]) if entries else EntryRef(last, -1, 0)
            for (queue, last), entries in zip(offset.items(), found, strict=True)
        }

    def first_after(self, queue: str, after: str) -> EntryRef | None:
        """The first entry after this id."""
        entries = self.link.call("XRANGE", self.key(queue), f"({after}", "+", "COUNT", 1)
        return read_entry_ref(entries[0]) if entries else None

    def remaining(self, queue: str, after: str, end: EntryRef) -> Range:
        """All entries after `after`. If a new epoch began meanwhile, the number is estimated by the stream's length."""
        first = self.first_after(queue, after)
        if first is None or id_key(first.id) > id_key(end.id):
            return Range(queue, after, end.id, 0)
        if first.epoch == end.epoch and first.sequence <= end.sequence:
            return Range(queue, after, end.id, end.sequence - first.sequence + 1)
        return Range(queue, after, end.id, int(self.link.call("XLEN", self.key(queue))))

    def cut(self, whole: Range, entries: int) -> str:
        """The id of the last of the first `entries` entries of a range, or of somewhat fewer."""
        if whole.entries <= entries:
            return whole.last
        first = self.first_after(whole.queue, whole.after)
        if first is None:
            return whole.last
        low, high, best = first.ms, int(whole.last.partition("-")[0]), self._last_before(whole, first.ms)
        if best.epoch == first.epoch and best.sequence - first.sequence >= entries:
            found = self.link.call("XRANGE", self.key(whole.queue), first.id, best.id, "COUNT", entries)
            return str(found[-1][0].decode())
        while high - low > 1:
            middle = (low + high) // 2
            probe = self._last_before(whole, middle)
            taken = probe.sequence - first.sequence + 1
            if probe.epoch != first.epoch or taken > entries:
                high = middle
            else:
                low, best = middle, probe
                if taken > 0.8 * entries:
                    break
        return min(best.id, whole.last, key=id_key)

    def split(self, whole: Range, entries: int) -> Iterator[Range]:
        """Splits a range into ranges of about this many entries."""
        rest = whole
        while rest.entries > entries:
            last = self.cut(rest, entries)
            first, end = self.first_after(rest.queue, rest.after), self.first_after(rest.queue, last)
            if last == rest.last or first is None or end is None:
                break
            taken = end.sequence - first.sequence if end.epoch == first.epoch else entries
            yield Range(rest.queue, rest.after, last, taken)
            rest = Range(rest.queue, last, rest.last, max(1, rest.entries - taken))
        yield rest

    def publish_watermarks(self, consumer: str, offsets: Mapping[str, str]) -> None:
        """Records how far `consumer` has read each journal. The supervisor trims the journals up to there."""
        queues = list(offsets)
        lifetimes = self.link.pipeline([("PTTL", self.key(queue)) for queue in queues]) if queues else []
        commands: list[tuple[Any, ...]] = []
        for queue, lifetime_ms in zip(queues, lifetimes, strict=True):
            marks = watermarks_key(queue_base(self.prefix, queue))
            # -2: the journal does not exist any more.
            if lifetime_ms != -2:
                commands.append(("HSET", marks, consumer, offsets[queue]))
            # The watermarks of a deleted queue expire with its journal.
            if lifetime_ms >= 0:
                commands.append(("PEXPIRE", marks, lifetime_ms))
        if commands:
            self.link.pipeline(commands)

    def register_consumer(self, consumer: str) -> None:
        """Keeps journals from being trimmed before `consumer` has read them. Keeps the watermarks that it has."""
        commands = [
            ("HSETNX", watermarks_key(queue_base(self.prefix, queue)), consumer, BEGINNING)
            for queue in self.last_entries(self.queues())
        ]
        if commands:
            self.link.pipeline(commands)

    def server_seconds(self) -> float:
        seconds, micros = self.link.call("TIME", at=registry_key(self.prefix))
        return int(seconds) + int(micros) / 1_000_000

    def _last_before(self, whole: Range, ms: int) -> EntryRef:
        """The last entry of a range up to this millisecond, which must not precede the first entry."""
        entries = self.link.call("XREVRANGE", self.key(whole.queue), ms, f"({whole.after}", "COUNT", 1)
        if not entries:
            raise ForqError(f"the journal of queue {whole.queue!r} was trimmed while it was read; try again")
        return read_entry_ref(entries[0])


def require_queues(url: str, prefix: str) -> list[str]:
    """Refuses a prefix without queues: reading nothing would look like success."""
    journals = Journals(url, prefix)
    try:
        queues = journals.queues()
    finally:
        journals.link.close()
    if not queues:
        raise UnknownQueue(
            f"Redis at {journals.link.shown_url} has no queue whose keys begin with {prefix!r}: give --prefix, or set "
            "FORQ_PREFIX, to the `prefix` in forq.toml"
        )
    return queues


def read_entry_ref(entry: list[Any]) -> EntryRef:
    entry_id, fields = entry[0].decode(), dict(zip(entry[1][::2], entry[1][1::2], strict=True))
    try:
        found = unpack_entry(fields)
        return EntryRef(entry_id, found.epoch, found.sequence)
    except InvalidData:
        # Only ranges become inexact. Reading the entry raises the error.
        return EntryRef(entry_id, 0, 0)


def id_key(entry_id: str) -> tuple[int, int]:
    """Sort key: ids are ordered by their numbers, not as text."""
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)


def event_batches(journals: Journals, ranges: Sequence[Range], *, skip_broken: bool) -> Iterator[pa.RecordBatch]:
    """The events of some ranges, without entries that were trimmed meanwhile."""
    # The tuples all live until their batch is built: garbage collections would traverse millions of them in vain.
    collecting = gc.isenabled()
    gc.disable()
    try:
        events: list[Event] = []
        for part in ranges:
            for entries in _entries(journals, part):
                for entry_id, flat in entries:
                    events += _read(part.queue, entry_id, flat, skip_broken)
                if len(events) >= ROWS_PER_BATCH:
                    yield _event_batch(events)
                    events = []
        if events:
            yield _event_batch(events)
    finally:
        if collecting:
            gc.enable()


def _entries(journals: Journals, part: Range) -> Iterator[list[Any]]:
    key, after = journals.key(part.queue), part.after
    while True:
        entries = _call(journals.link, "XRANGE", key, f"({after}", part.last, "COUNT", ENTRIES_PER_CALL)
        if entries:
            yield entries
        if len(entries) < ENTRIES_PER_CALL:
            return
        after = entries[-1][0].decode()


def _call(link: Link, *command: Any) -> Any:
    """Repeats a read whose reply was lost."""
    for _ in range(_TRIES - 1):
        try:
            return link.call(*command)
        except (OutcomeUnknown, RedisUnavailable):
            continue
    return link.call(*command)


def _read(queue: str, entry_id: bytes, flat: list[bytes], skip_broken: bool) -> Iterator[Event]:
    try:
        return read_entry(dict(zip(flat[::2], flat[1::2], strict=True)), queue)
    except InvalidData as exc:
        if skip_broken:
            return iter(())
        raise InvalidData(f"queue {queue!r}, entry {entry_id.decode()}: {exc}") from exc


def _event_batch(events: list[Event]) -> pa.RecordBatch:
    columns = zip(*events, strict=True)
    arrays = [pa.array(values, column.type) for values, column in zip(columns, EVENTS_ARROW, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS_ARROW)


JOBS_PER_CALL = 1000


def job_batches(journals: Journals, queue: str) -> Iterator[pa.RecordBatch]:
    base = queue_base(journals.prefix, queue)
    seen: set[bytes] = set()
    # Held jobs first: one that becomes ready meanwhile is not missed, and `seen` keeps it from being read twice.
    for chunk in _scan(journals, f"{base}:held:jobs", seen):
        holds = journals.link.call("HMGET", f"{base}:held", *chunk)
        yield _job_batch([_held(queue, *found) for found in zip(chunk.keys(), chunk.values(), holds, strict=True)])
    for chunk in _scan(journals, f"{base}:jobs", seen):
        yield _job_batch([_live(queue, *found) for found in _with_state(journals, base, chunk)])
    for chunk in _scan(journals, f"{base}:dead:jobs", set()):
        died = journals.link.call("ZMSCORE", f"{base}:dead", *chunk)
        yield _job_batch([_dead(queue, *found) for found in zip(chunk.keys(), chunk.values(), died, strict=True)])


def _scan(journals: Journals, key: str, seen: set[bytes]) -> Iterator[dict[bytes, bytes]]:
    """The fields of a hash that are not in `seen`, each once: HSCAN may return a field twice while the hash is resized.
    Adds them to `seen`."""
    cursor = b"0"
    while True:
        cursor, flat = journals.link.call("HSCAN", key, cursor, "COUNT", JOBS_PER_CALL)
        found = {field: value for field, value in zip(flat[::2], flat[1::2], strict=True) if field not in seen}
        if found:
            seen.update(found)
            yield found
        if cursor == b"0":
            return


def _with_state(journals: Journals, base: str, records: dict[bytes, bytes]) -> Iterator[tuple[Any, ...]]:
    """Adds owner and due time. Leaves out jobs that have ended meanwhile."""
    ids = list(records)
    present, owners, due = journals.link.pipeline(
        [
            ("HMGET", f"{base}:jobs", *ids),
            ("HMGET", f"{base}:active", *ids),
            ("ZMSCORE", f"{base}:scheduled", *ids),
        ]
    )
    return (found for found in zip(ids, present, owners, due, strict=True) if found[1] is not None)


def _held(queue: str, job_id: bytes, packed: bytes, hold: bytes | None) -> dict[str, Any]:
    row = {"queue": queue, "id": job_id.decode(), "state": "held", **_fields(packed)}
    # Its expiry has not begun: the record has a duration, not a time.
    own = [part for part in (row.get("options") or "").split(",") if part and not part.startswith("x=")]
    row["options"] = ",".join(own) or None
    # NONCE WHEN USE RUN_AT_MS …: 0 if it may run as soon as it is ready.
    run_at_ms = int(hold.split(b" ")[3]) if hold else 0
    return row | {"run_at": run_at_ms * 1000 or None}


def _live(queue: str, job_id: bytes, packed: bytes, owner: bytes | None, due_ms: bytes | None) -> dict[str, Any]:
    state = live_state(packed, owner, due_ms)
    row = {"queue": queue, "id": job_id.decode(), "state": state, **_fields(packed)}
    if state == "active" and owner is not None:
        row["fence"] = int(owner.split(b":")[1])
    elif due_ms is not None:
        row["run_at"] = int(float(due_ms)) * 1000
    return row


def _dead(queue: str, member: bytes, packed: bytes, died_ms: bytes | None) -> dict[str, Any]:
    job_id, _, fence = member.decode(errors="replace").rpartition("@")
    record, error, _ = read_dead(packed)
    row = {"queue": queue, "id": job_id, "state": "dead", **_fields(record)}
    row["fence"] = int(fence) if fence.isdigit() else None
    row["died_at"] = None if died_ms is None else int(float(died_ms)) * 1000
    return row | {"error": orjson.dumps(error).decode()}


def _fields(packed: bytes) -> dict[str, Any]:
    try:
        record: Record = unpack(packed)
    except InvalidData as exc:
        return {"error": str(exc)}
    return {
        "identifier": record.identifier,
        "type": record.type,
        "priority": record.priority,
        "retry_count": record.retry_count,
        "stall_count": record.stall_count,
        "timeout_count": record.timeout_count,
        "enqueued_at": record.enqueued_us,
        "options": packed_options(packed),
        "data": orjson.dumps(record.data).decode(),
    }


def _job_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([row.get(column.name) for row in rows], column.type) for column in JOBS_ARROW]
    return pa.RecordBatch.from_arrays(arrays, schema=JOBS_ARROW)
