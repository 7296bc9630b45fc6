"""Checks names, ids and the progress of jobs; parses and shows the values of settings: durations, sizes, rates, times,
paths, addresses.

forqctl imports this module at its start, so it imports little.
"""

import os
import re
from collections.abc import Callable, Mapping

from forq.errors import InvalidData, InvalidId, InvalidName, UsageError

QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
JOB_ID = re.compile(r"[!-~]{1,128}\Z")
HANDLER_TYPE = re.compile(r"[A-Za-z0-9_.:-]{1,200}\Z")


def is_queue_name(name: object) -> bool:
    return isinstance(name, str) and QUEUE_NAME.match(name) is not None and set(name) != {"."}


def check_queue_name(name: object) -> str:
    if not isinstance(name, str) or not is_queue_name(name):
        raise InvalidName(f"queue name {shown(name)} is not allowed: 1 to 64 of A-Z a-z 0-9 _ . - (not only dots)")
    return name


def check_job_id(job_id: object, what: str = "job id") -> str:
    if not isinstance(job_id, str) or not JOB_ID.match(job_id):
        raise InvalidId(f"{what} {shown(job_id)} is not allowed: 1 to 128 printable ASCII characters without spaces")
    return job_id


def check_type(job_type: object) -> str:
    if not isinstance(job_type, str) or not HANDLER_TYPE.match(job_type):
        raise InvalidId(f"job type {shown(job_type)} is not allowed: 1 to 200 of A-Z a-z 0-9 _ . : -")
    return job_type


def check_schedule_key(key: object) -> str:
    if not isinstance(key, str) or not QUEUE_NAME.match(key):
        raise InvalidId(f"schedule key {shown(key)} is not allowed: 1 to 64 of A-Z a-z 0-9 _ . -")
    return key


def shown(value: object) -> str:
    """A user's value, escaped and cut to 80 characters for an error text."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


MAX_PROGRESS_TEXT = 200


def check_progress(fraction: object, text: object = "") -> tuple[float, str]:
    """The fraction and the text, cut at 200 characters, with control characters replaced by blanks."""
    try:
        allowed = 0 <= fraction <= 1  # type: ignore[operator]
    except TypeError:
        allowed = False
    if not allowed:
        raise InvalidData(f"progress {shown(fraction)} is not allowed: a number from 0 to 1")
    if not isinstance(text, str):
        raise InvalidData(f"progress text {shown(text)} is not allowed: it must be text")
    if len(text) > MAX_PROGRESS_TEXT:
        text = text[:MAX_PROGRESS_TEXT]
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return float(fraction), text  # type: ignore[arg-type]


def show_progress(fraction: float, text: str) -> str:
    """`40% page 12 of 30`. Rounded down, so that unfinished work never shows 100%."""
    return f"{int(round(fraction * 100, 6))}% {text}".rstrip()


OFF = "off"
# One process per CPU.
CPUS = "cpus"

_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNIT_BYTES = {"gb": 1024**3, "mb": 1024**2, "kb": 1024, "b": 1}
_FLAGS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
# A hundred years: added to any clock, it still fits every integer and date.
_LONGEST_SECONDS = 36525 * 86400.0
_MAX_RATE_COUNT = 1_000_000
_MIN_RATE_SECONDS, _MAX_RATE_SECONDS = 0.001, 30 * 86400.0

# Compiled at their use, which makes forqctl start faster.
_DURATION = r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)?"
_SIZE = r"([0-9]{1,18})\s*(b|kb|mb|gb)?"
_RATE = r"([0-9]{1,7})\s*/\s*(\S.*)"
_INT = r"[+-]?[0-9]{1,18}"
# Braces would replace the queue's name as hash tag.
_PREFIX = r"[A-Za-z0-9_.:-]{0,64}"
_HEADER = r"[A-Za-z0-9-]{1,64}"
_ADDRESS = r"(?:\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})"

_ALLOWED = {
    "flag": "true or false",
    "rate": '"COUNT/DURATION", such as "50/1s", "100/1m", "5/s", or "off"',
    "path": "a path, as text",
    "program": "a path, as text",
    "prefix": "up to 64 of A-Z a-z 0-9 _ . : -",
    "group": "the name of a group, as text",
    "patterns": "a list of regular expressions, as text",
    "names": "a list of text",
    "header": "the name of an HTTP header: letters, digits and hyphens",
    "tracing": '"off", "otlp" or "file:PATH"',
    "history": "a directory or a file-system URL",
    "listen": '"HOST:PORT" with a port from 1 to 65535, or the path of a Unix socket with a slash in it',
}


def parse_duration(value: str | int | float) -> float:
    """Seconds, from 0 to 100 years."""
    seconds = _seconds_in(value)
    # "not (0 <= x)" is true for NaN as well.
    if seconds is None or not 0 <= seconds <= _LONGEST_SECONDS:
        raise UsageError(
            f"duration {shown(value)} is not allowed: give seconds (10, 0.5) or text such as "
            '"250ms", "10s", "5m", "2h", "7d", from 0 to 36525d'
        )
    return seconds


def _seconds_in(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        # An int beyond the range of a float would raise OverflowError in float().
        return float(value) if not isinstance(value, int) or abs(value) <= _LONGEST_SECONDS else None
    if not isinstance(value, str):
        return None
    match = re.fullmatch(_DURATION, value.strip(), re.ASCII)
    if match is None:
        return None
    number, unit = match.groups()
    if unit == "ms":
        return float(number) / 1000
    return float(number) * _UNIT_SECONDS[unit or "s"]


def show_duration(seconds: float) -> str:
    """The shortest exact text that parse_duration reads back."""
    milliseconds = round(seconds * 1000, 3)
    if milliseconds % 1000:
        return f"{milliseconds:.3f}".rstrip("0").rstrip(".") + "ms"
    whole = int(milliseconds // 1000)
    for unit in ("d", "h", "m"):
        if whole and whole % _UNIT_SECONDS[unit] == 0:
            return f"{whole // int(_UNIT_SECONDS[unit])}{unit}"
    return f"{whole}s"


def show_time(epoch_seconds: float, precision: str = "seconds") -> str:
    """ISO 8601 in UTC."""
    from datetime import UTC, datetime  # forqctl starts faster without it

    try:
        return datetime.fromtimestamp(epoch_seconds, UTC).isoformat(timespec=precision).replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        # A job's time may be beyond the year 9999.
        return f"{epoch_seconds:.0f} s after 1970"


def parse_size(value: object) -> int:
    """Bytes, from a number or from text such as "64kb" or "1mb" (1 kb = 1024 bytes)."""
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    match = re.fullmatch(_SIZE, text, re.IGNORECASE)
    if match is None:
        raise UsageError(f'size {shown(value)} is not allowed: a number of bytes, or text such as "64kb", "1mb", "2gb"')
    return int(match[1]) * _UNIT_BYTES[(match[2] or "b").lower()]


def show_size(size: int) -> str:
    """The shortest exact text that parse_size reads back."""
    for unit, unit_bytes in _UNIT_BYTES.items():
        if size and unit != "b" and size % unit_bytes == 0:
            return f"{size // unit_bytes}{unit}"
    return str(size)


def parse_rate(value: object) -> tuple[int, float]:
    """A count and the seconds it applies to; a count of 0 means no limit."""
    if value in (OFF, "", 0) and not isinstance(value, bool):
        return 0, 0.0
    match = re.fullmatch(_RATE, value.strip(), re.ASCII) if isinstance(value, str) else None
    if match is None:
        raise UsageError(f"rate {shown(value)} is not allowed: {_ALLOWED['rate']}")
    count = int(match[1])
    seconds = parse_duration(f"1{match[2]}" if match[2] in _UNIT_SECONDS else match[2])
    if not 1 <= count <= _MAX_RATE_COUNT or not _MIN_RATE_SECONDS <= seconds <= _MAX_RATE_SECONDS:
        raise UsageError(f"rate {shown(value)} is not allowed: 1 to {_MAX_RATE_COUNT} in 1ms to 30d")
    return count, seconds


def show_rate(count: int, seconds: float) -> str:
    return f"{count}/{show_duration(seconds)}" if count else OFF


class NotAllowed(UsageError):
    """Its message says what is allowed, more precisely than allowed_values."""


def read_value(kind: str, value: object, base: str = "") -> object:
    """Reads a value from TOML, JSON or text; relative paths are relative to `base`. UsageError if it is invalid."""
    read = _READERS.get(kind)
    return read(value) if read else _PATH_READERS[kind](value, base)


def allowed_values(kind: str) -> str:
    if kind == "redis":
        from forq.redis_url import ALLOWED

        return ALLOWED
    return _ALLOWED[kind]


def _read_int(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(_INT, value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError
    return value


def _read_processes(value: object) -> int | str:
    return CPUS if value == CPUS else _read_int(value)


def _read_flag(value: object) -> bool:
    found = value if isinstance(value, bool) else _FLAGS.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise UsageError
    return found


def _read_text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise UsageError
    return value


def _read_path(value: object, base: str) -> str | None:
    path = _read_text(os.fspath(value) if isinstance(value, os.PathLike) else value)
    return os.path.abspath(os.path.join(base, path)) if path else None


def _read_program(value: object, base: str) -> str | None:
    """A bare name is kept, to be found on PATH."""
    path = _read_path(value, base)
    return path if "/" in str(value) else str(value) or None


def _read_redis(value: object) -> str | None:
    from forq.redis_url import read_address

    return read_address(_read_text(value)).url if value != "" else None


def _read_prefix(value: object) -> str:
    if not re.fullmatch(_PREFIX, _read_text(value)):
        raise UsageError
    return str(value)


def _read_group(value: object) -> str | None:
    import grp

    try:
        return grp.getgrnam(value).gr_name if isinstance(value, str) and value else _read_text(value) or None
    except (KeyError, ValueError) as exc:
        raise NotAllowed("a group that exists on this machine") from exc


def _read_patterns(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
        raise UsageError
    try:
        return tuple(re.compile(pattern).pattern for pattern in value)
    except re.error as exc:
        raise NotAllowed(f"{_ALLOWED['patterns']} ({exc})") from exc


def _read_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name and "\0" not in name for name in value):
        raise UsageError
    return tuple(value)


def _read_header(value: object) -> str:
    if not re.fullmatch(_HEADER, _read_text(value)):
        raise UsageError
    return str(value)


def _read_tracing(value: object, base: str) -> str:
    kind, _, path = _read_text(value).partition(":")
    if kind == "file" and path:
        return f"file:{os.path.abspath(os.path.join(base, path))}"
    if value not in (OFF, "otlp"):
        raise UsageError
    return str(value)


def _read_history(value: object, base: str) -> str | None:
    """URLs such as hdfs://… are kept as they are."""
    return _read_text(value) if "://" in str(value) else _read_path(value, base)


def _read_listen(value: object, base: str) -> str:
    if "://" in _read_text(value):
        raise UsageError
    if "/" in str(value):
        return os.path.abspath(os.path.join(base, str(value)))
    found = re.fullmatch(_ADDRESS, str(value))
    if found is None or not 1 <= int(found[1]) <= 65535:
        raise UsageError
    return str(value)


_READERS: Mapping[str, Callable[..., object]] = {
    "int": _read_int,
    "duration": parse_duration,
    "size": parse_size,
    "flag": _read_flag,
    "rate": lambda value: show_rate(*parse_rate(value)),
    "word": _read_text,
    "redis": _read_redis,
    "prefix": _read_prefix,
    "group": _read_group,
    "patterns": _read_patterns,
    "names": _read_names,
    "header": _read_header,
    "processes": _read_processes,
}
_PATH_READERS: Mapping[str, Callable[[object, str], object]] = {
    "path": _read_path,
    "program": _read_program,
    "tracing": _read_tracing,
    "history": _read_history,
    "listen": _read_listen,
}
