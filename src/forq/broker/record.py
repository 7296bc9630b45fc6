"""The packed record of a job: what the hash `jobs` holds under its id.

    FLAG PRIORITY ' ' ENQUEUED_MS [' ' RETRIES ' ' STALLS ' ' TIMEOUTS ' ' LANE] '\\n' BODY

BODY is JSON, [identifier, type, data], and a fourth element if it was enqueued within a trace (trace_context.py).
FLAG is `p` (plain: all counts are 0), `d` (delayed: the same, but the job had a time ahead, so that its age is not the
time that it waited) or `c` (the counts follow). LANE is 0 in the main lane; the number of the attempt
that the job waits for in the retry lane; -1 for a suspect, which runs alone next time. The server writes the part
before the newline; the rest is JSON that no script ever decodes, so that data comes back exactly as it went in. A dead
job's record is followed by its error and its attempts (dead.py).
"""

import marshal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any
from uuid import UUID

import orjson

from forq.errors import InvalidData

MAX_IDENTIFIER = 1024

# What is not JSON by itself is refused rather than turned into something else.
_PLAIN_JSON = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
# The fastest format of marshal for small data. It is only asked whether it can write the data.
_MARSHAL_VERSION = 2
_OF_JSON = (type(None), bool, int, float, str, dict, list, tuple)


@dataclass(frozen=True, slots=True)
class Record:
    priority: int
    enqueued_ms: int
    retry_count: int
    stall_count: int
    timeout_count: int
    suspect: bool
    identifier: str | None
    type: str | None
    data: Any
    # The trace context of who enqueued it (trace_context.py).
    trace: Any = None


def pack_body(data: Any, identifier: str | None, job_type: str | None, trace: dict[str, str] | None = None) -> bytes:
    """The client's part of a record; refuses what is not JSON."""
    if identifier is not None and len(identifier) > MAX_IDENTIFIER:
        raise InvalidData(f"identifier is longer than {MAX_IDENTIFIER} characters")
    try:
        names = b"[null,null," if identifier is None and job_type is None else _pack_names(identifier, job_type)
    except (TypeError, ValueError) as exc:
        raise InvalidData(f"job data is not JSON: {exc}") from exc
    end = b"]" if trace is None else b"," + orjson.dumps(trace) + b"]"
    return names + pack_data(data) + end


def pack_data(data: Any, what: str = "job data") -> bytes:
    """Data as JSON, in one line; refuses what is not JSON, and names its place."""
    root = "data" if what == "job data" else "result"
    try:
        packed = orjson.dumps(data, option=_PLAIN_JSON)
    except (TypeError, ValueError) as exc:
        raise InvalidData(f"{what} is not JSON: {_find_foreign(data, root) or exc}") from exc
    # orjson writes UUIDs and Enums as something else without a word. marshal refuses every type that is not built in,
    # at the speed of C; subclasses such as OrderedDict are fine.
    try:
        marshal.dumps(data, _MARSHAL_VERSION)
    except ValueError:
        if foreign := _find_foreign(data, root):
            raise InvalidData(f"{what} is not JSON: {foreign}") from None
    # orjson writes NaN and Infinity as null; only a look at the value itself can tell.
    if b"null" in packed and _has_non_finite(data):
        place = next(at for at, value in _values(data, root) if isinstance(value, float) and value - value != 0)
        raise InvalidData(f"{what} is not JSON: {place} is NaN or Infinity, which are not allowed")
    return packed


def _pack_names(identifier: str | None, job_type: str | None) -> bytes:
    return b"[" + orjson.dumps(identifier) + b"," + orjson.dumps(job_type) + b","


def unpack(packed: bytes) -> Record:
    """Reads a record; raises InvalidData if it is broken."""
    head, _, body = packed.partition(b"\n")
    try:
        identifier, job_type, data, *rest = orjson.loads(body)
        fields = head[3:].split(b" ")
        enqueued_ms = int(fields[0])
        retries, stalls, timeouts = map(int, fields[1:4]) if len(fields) > 1 else (0, 0, 0)
        suspect = fields[4:5] == [b"-1"]
        counts = (retries, stalls, timeouts)
        trace = rest[0] if rest else None
        return Record(int(head[1:2]), enqueued_ms, *counts, suspect, identifier, job_type, data, trace)
    except (ValueError, TypeError) as exc:
        raise InvalidData(f"broken job record: {exc}") from exc


def unpacked_fields(packed: bytes) -> dict[str, Any]:
    """A record as it is shown, by name; its trace only if it has one."""
    fields = asdict(unpack(packed))
    if fields["trace"] is None:
        del fields["trace"]
    return fields


def show_record(packed: bytes, job_id: str) -> dict[str, Any]:
    """What is shown of the record of a job that has ended; of a broken one, why it cannot be."""
    try:
        fields = unpacked_fields(packed)
    except InvalidData as exc:
        return {"record_error": str(exc)}
    enqueued_ms, _ = fields.pop("enqueued_ms"), fields.pop("suspect")
    return fields | {"identifier": fields["identifier"] or job_id, "enqueued_at": enqueued_ms / 1000}


def read_error(error: bytes) -> Any:
    """The error (or the attempts) of a dead job; of a broken one what can be shown."""
    try:
        return orjson.loads(error)
    except ValueError:
        return error.decode(errors="replace")


def _find_foreign(data: Any, root: str) -> str | None:
    """The place and type of the first value that JSON has no type for; None if there is none."""
    for place, value in _values(data, root):
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str) or isinstance(key, Enum):
                    return f"{place} has the key {key!r:.100}, and keys are texts"
        elif isinstance(value, Enum | UUID) or not isinstance(value, _OF_JSON):
            kind = f"{type(value).__name__:.100}" + (", an Enum" if isinstance(value, Enum) else "")
            return f"{place} is of type {kind}; allowed are str, int, float, bool, None, dict, list and tuple"
    return None


def _has_non_finite(data: Any) -> bool:
    """Data with None in it is common, so this names no places: that would take five times as long."""
    stack = [data]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
        elif isinstance(value, float) and value - value != 0:
            return True
    return False


def _values(data: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Every value in the data with its place, as Python would write it; what contains itself only once."""
    stack, seen = [(root, data)], set()
    while stack:
        place, value = stack.pop()
        yield place, value
        if not isinstance(value, dict | list | tuple) or isinstance(value, Enum) or id(value) in seen:
            continue
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        stack += reversed([(f"{place}[{key!r:.100}]", item) for key, item in items])
