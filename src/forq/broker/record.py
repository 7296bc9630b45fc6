"""The packed record of a job, as the hash `jobs` holds it under the job's id.

    FLAG PRIORITY ' ' ENQUEUED_US [' ' RETRIES ' ' STALLS ' ' TIMEOUTS ' ' LANE [' ' SNOOZES ' ' OPTIONS]] '\\n' BODY

FLAG is `p` (plain: all counts are 0), `d` (delayed: all counts are 0, and the job was scheduled or blocked, so its age
is not its waiting time), `c` (counts follow), `o` (counts and options follow) or `O` (the same, delayed). LANE is 0
in the main lane, the number of the next attempt in the retry lane, and -1 for a suspect, which runs alone next time.
OPTIONS are the job's own (job_options.py), '-' for none. BODY is the JSON array [identifier, type, data], with the
trace context as fourth element if there is one.

Scripts write the line before BODY. No script decodes BODY, so data comes back exactly as it went in. A dead job's
record is followed by its error and its attempts (dead.py).
"""

import marshal
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any
from uuid import UUID

import orjson

from forq.errors import InvalidData
from forq.job_options import StoredOptions, unpack_options
from forq.values import show_duration

MAX_IDENTIFIER = 1024
# The start of BODY without identifier and type.
NO_NAMES = b"[null,null,"

# Refuse types that JSON lacks instead of converting them.
_PLAIN_JSON = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
# marshal only checks types here; this is its fastest format for small data.
_MARSHAL_VERSION = 2
# Between the data of several jobs. No text in JSON contains it, since its quotes would be escaped.
_BETWEEN = "|forq|"
_PACKED_BETWEEN = b',"|forq|",'
# The identifier and the type at the start of BODY.
_NAMES = re.compile(rb'\[(null|"(?:[^"\\]|\\.)*"),(null|"(?:[^"\\]|\\.)*"),')
_JSON_TYPES = (type(None), bool, int, float, str, dict, list, tuple)


@dataclass(frozen=True, slots=True)
class Record:
    priority: int
    enqueued_us: int
    retry_count: int
    stall_count: int
    timeout_count: int
    suspect: bool
    identifier: str | None
    type: str | None
    data: Any
    # The trace context in which the job was enqueued.
    trace: Any = None
    lane: int = 0
    snooze_count: int = 0
    # The job's own; None if it has none.
    options: StoredOptions | None = None


def pack_body(data: Any, identifier: str | None, job_type: str | None, trace: dict[str, str] | None = None) -> bytes:
    """Packs BODY; raises InvalidData for anything that is not JSON."""
    names = NO_NAMES if identifier is None and job_type is None else pack_names(identifier, job_type)
    return join_body(names, data, trace)


def join_body(names: bytes, data: Any, trace: dict[str, str] | None) -> bytes:
    """The same with names packed by `pack_names`."""
    return names + pack_data(data) + (b"]" if trace is None else pack_end(trace))


def pack_end(trace: dict[str, str] | None) -> bytes:
    return b"]" if trace is None else b"," + orjson.dumps(trace) + b"]"


def join_bodies(names: bytes, every_data: Iterable[Any], trace: dict[str, str] | None) -> Iterator[bytes]:
    """`join_body` for each item, in half of the time. Packs an item before it takes the next."""
    end = pack_end(trace)
    for data in every_data:
        try:
            packed = orjson.dumps(data, None, _PLAIN_JSON)
            marshal.dumps(data, _MARSHAL_VERSION)
        except (TypeError, ValueError):
            packed = pack_data(data)
        yield names + (pack_data(data) if b"null" in packed else packed) + end


def pack_names(identifier: str | None, job_type: str | None) -> bytes:
    if identifier is not None and len(identifier) > MAX_IDENTIFIER:
        raise InvalidData(f"identifier is longer than {MAX_IDENTIFIER} characters")
    try:
        return b"[" + orjson.dumps(identifier) + b"," + orjson.dumps(job_type) + b","
    except (TypeError, ValueError) as exc:
        raise InvalidData(f"job data is not JSON: {exc}") from exc


def pack_data(data: Any, subject: str = "job data") -> bytes:
    """Data as one line of JSON; the InvalidData for anything else names the path of the bad value."""
    root = "data" if subject == "job data" else "result"
    try:
        packed = orjson.dumps(data, option=_PLAIN_JSON)
    except (TypeError, ValueError) as exc:
        raise InvalidData(f"{subject} is not JSON: {_find_foreign(data, root) or exc}") from exc
    # orjson silently converts UUIDs and Enums. marshal refuses all types that are not built in, at the speed of C, but
    # also harmless subclasses such as OrderedDict: hence the second check.
    try:
        marshal.dumps(data, _MARSHAL_VERSION)
    except ValueError:
        if foreign := _find_foreign(data, root):
            raise InvalidData(f"{subject} is not JSON: {foreign}") from None
    # orjson writes NaN and Infinity as null.
    if b"null" in packed and _has_non_finite(data):
        path = next(path for path, value in _values(data, root) if isinstance(value, float) and value - value != 0)
        raise InvalidData(f"{subject} is not JSON: {path} is NaN or Infinity, which are not allowed")
    return packed


def pack_each(every_data: list[Any]) -> list[bytes]:
    """The same for each item, in a tenth of the time."""
    between: list[Any] = [_BETWEEN] * (2 * len(every_data) - 1)
    between[::2] = every_data
    try:
        packed = orjson.dumps(between, option=_PLAIN_JSON)
        marshal.dumps(every_data, _MARSHAL_VERSION)
    except (TypeError, ValueError):
        return [pack_data(data) for data in every_data]
    each = packed[1:-1].split(_PACKED_BETWEEN)
    # Data may contain the same text as a value of its own.
    if len(each) != len(every_data) or (b"null" in packed and _has_non_finite(every_data)):
        return [pack_data(data) for data in every_data]
    return each


def unpack(packed: bytes) -> Record:
    """Raises InvalidData if the record is broken."""
    head, _, body = packed.partition(b"\n")
    try:
        identifier, job_type, data, *rest = orjson.loads(body)
        fields = head[3:].split(b" ")
        enqueued_us = int(fields[0])
        retries, stalls, timeouts = map(int, fields[1:4]) if len(fields) > 1 else (0, 0, 0)
        lane, snoozes = int(fields[4]) if len(fields) > 4 else 0, int(fields[5]) if len(fields) > 5 else 0
        options = unpack_options(fields[6].decode()) if fields[6:7] not in ([], [b"-"]) else None
        counts = (retries, stalls, timeouts)
        trace = rest[0] if rest else None
        about = (identifier, job_type, data, trace)
        return Record(int(head[1:2]), enqueued_us, *counts, lane == -1, *about, max(0, lane), snoozes, options)
    except (ValueError, TypeError) as exc:
        raise InvalidData(f"broken job record: {exc}") from exc


def live_state(packed: bytes, owner: bytes | None, due_ms: bytes | None) -> str:
    """The state of a job from its record, its entry in `active` and its score in `scheduled`."""
    if owner is not None or due_ms is not None:
        return "active" if owner is not None else "scheduled"
    # In the retry lane the fifth number of the record is greater than 0.
    numbers = packed.partition(b"\n")[0].split(b" ")[1:]
    return "retry" if len(numbers) > 4 and numbers[4] not in (b"0", b"-1") else "waiting"


def packed_options(packed: bytes) -> str | None:
    """The job's own options as the record has them; None if it has none."""
    if packed[:1] not in (b"o", b"O"):
        return None
    stored = packed[: packed.find(b"\n")].rpartition(b" ")[2]
    return None if stored == b"-" else stored.decode(errors="replace")


def stored_options(packed: bytes) -> StoredOptions | None:
    """The job's own options; None if it has none. InvalidData if they are broken."""
    stored = packed_options(packed)
    return None if stored is None else unpack_options(stored)


def unpacked_fields(packed: bytes, *, expiry_begun: bool = True) -> dict[str, Any]:
    """The fields of a record by name, without those that most jobs lack.

    `expiry_begun`: whether an expiry is a time. That of a held job is in ms, since it begins when the job is ready.
    """
    record = unpack(packed)
    fields = {
        name: getattr(record, name)
        for name in ("priority", "enqueued_us", "retry_count", "stall_count", "timeout_count", "suspect")
    }
    fields |= {"identifier": record.identifier, "type": record.type, "data": record.data}
    if record.trace is not None:
        fields["trace"] = record.trace
    if record.snooze_count:
        fields["snooze_count"] = record.snooze_count
    return fields | _show_options(record.options, expiry_begun=expiry_begun)


def brief_fields(packed: bytes) -> dict[str, Any]:
    """Those fields that lists show; InvalidData if the record is broken. The data may be large and is not decoded."""
    end = packed.find(b"\n")
    names = _NAMES.match(packed, end + 1)
    if end < 0 or names is None:
        record = unpack(packed)
        if not isinstance(record.identifier, str | None) or not isinstance(record.type, str | None):
            raise InvalidData("broken job record: its identifier or its type is no text")
        packed = packed[: packed.find(b"\n")] + b"\n" + pack_names(record.identifier, record.type)
        return brief_fields(packed)
    try:
        numbers = [int(number) for number in packed[3:end].split(b" ")[:5]]
        identifier, job_type = orjson.loads(names[1]), orjson.loads(names[2])
        priority = int(packed[1:2])
    except ValueError as exc:
        raise InvalidData(f"broken job record: {exc}") from exc
    enqueued_us, retries, stalls, timeouts, lane = (*numbers, 0, 0, 0, 0)[:5]
    return {
        "identifier": identifier,
        "type": job_type,
        "priority": priority,
        "enqueued_at": enqueued_us / 1e6,
        "retry_count": retries,
        "stall_count": stalls,
        "timeout_count": timeouts,
        "suspect": lane == -1,
    }


def _show_options(options: StoredOptions | None, *, expiry_begun: bool) -> dict[str, Any]:
    if options is None:
        return {}
    own = options.show()
    if options.expires_ms is not None and not expiry_begun:
        own["expires_in"] = show_duration(options.expires_ms / 1000)
    shown: dict[str, Any] = {"options": own} if own else {}
    if options.expires_ms is not None and expiry_begun:
        shown["expires_at"] = options.expires_ms / 1000
    if options.tick_ms is not None:
        shown["tick"] = options.tick_ms / 1000
    if options.batch:
        shown["batch"] = options.batch
    return shown


def show_record(packed: bytes, job_id: str) -> dict[str, Any]:
    """The record of an ended job for output; for a broken record, the reason."""
    try:
        fields = unpacked_fields(packed)
    except InvalidData as exc:
        return {"record_error": str(exc)}
    enqueued_us, _ = fields.pop("enqueued_us"), fields.pop("suspect")
    return fields | {"identifier": fields["identifier"] or job_id, "enqueued_at": enqueued_us / 1e6}


def read_error(error: bytes) -> Any:
    """The error or the attempts of an ended job; text that is not JSON is returned as text."""
    try:
        return orjson.loads(error)
    except ValueError:
        return error.decode(errors="replace")


def _find_foreign(data: Any, root: str) -> str | None:
    """The path and type of the first value that JSON has no type for; None if there is none."""
    for path, value in _values(data, root):
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str) or isinstance(key, Enum):
                    return f"{path} has the key {key!r:.100}, but keys must be str"
        elif isinstance(value, Enum | UUID) or not isinstance(value, _JSON_TYPES):
            kind = f"{type(value).__name__:.100}" + (", an Enum" if isinstance(value, Enum) else "")
            return f"{path} is of type {kind}; allowed are str, int, float, bool, None, dict, list and tuple"
    return None


def _has_non_finite(data: Any) -> bool:
    """Tracks no paths: that takes five times as long, and data with None in it is common."""
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
    """Every value in the data with its path in Python syntax; visits a container only once, so cycles end."""
    stack, seen = [(root, data)], set()
    while stack:
        path, value = stack.pop()
        yield path, value
        if not isinstance(value, dict | list | tuple) or isinstance(value, Enum) or id(value) in seen:
            continue
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        stack += reversed([(f"{path}[{key!r:.100}]", item) for key, item in items])
