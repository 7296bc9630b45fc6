"""Live and dead jobs of a queue as rows. Each row is true at some moment of the read; there is no common moment."""

from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa

from forq.broker.dead import read_dead
from forq.broker.inspect import live_state
from forq.broker.keys import queue_base
from forq.broker.record import Record, unpack
from forq.errors import InvalidData
from forq.pipeline.reading import Journals
from forq.pipeline.schema import JOBS_ARROW

JOBS_PER_CALL = 1000


def job_batches(journals: Journals, queue: str) -> Iterator[pa.RecordBatch]:
    base = queue_base(journals.prefix, queue)
    for chunk in _scan(journals, f"{base}:jobs"):
        yield _record_batch([_live(queue, *found) for found in _with_state(journals, base, chunk)])
    for chunk in _scan(journals, f"{base}:dead:jobs"):
        died = journals.link.call("ZMSCORE", f"{base}:dead", *chunk)
        yield _record_batch([_dead(queue, *found) for found in zip(chunk.keys(), chunk.values(), died, strict=True)])


def _scan(journals: Journals, key: str) -> Iterator[dict[bytes, bytes]]:
    """The fields of a hash, each once: HSCAN may give one twice while the hash grows or shrinks."""
    seen: set[bytes] = set()
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
    """Each with its owner and its time; those that are gone by now are left out."""
    ids = list(records)
    present, owners, due = journals.link.pipeline(
        [
            ("HMGET", f"{base}:jobs", *ids),
            ("HMGET", f"{base}:active", *ids),
            ("ZMSCORE", f"{base}:scheduled", *ids),
        ]
    )
    return (found for found in zip(ids, present, owners, due, strict=True) if found[1] is not None)


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
        "enqueued_at": record.enqueued_ms * 1000,
        "data": orjson.dumps(record.data).decode(),
    }


def _record_batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([row.get(column.name) for row in rows], column.type) for column in JOBS_ARROW]
    return pa.RecordBatch.from_arrays(arrays, schema=JOBS_ARROW)
