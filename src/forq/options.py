"""The options of a queue.

1. OPTIONS is the one table of them: what each is called, means, accepts, and defaults to, and in which modes it exists.
2. QueueSpec is the definition of one queue, as a config file, forqctl or the state directory gives it.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from forq.durations import parse_duration, show_duration
from forq.errors import ForqError, InvalidOption, UsageError
from forq.names import check_queue_name, check_type, shown
from forq.program_line import ALLOWED, is_program, read_program
from forq.rates import ALLOWED as ALLOWED_RATES
from forq.rates import OFF, parse_rate

Value = int | float | bool | str
Kind = Literal["int", "duration", "size", "flag", "rate"]

WORK, AUTO_RELEASE, ON_REQUEST, EXTERNAL = "work", "auto_release", "on_request", "external"
RELEASE_MODES = (AUTO_RELEASE, ON_REQUEST)
# Nothing of theirs needs code of a supervisor's own: every supervisor serves them.
SHARED_MODES = (*RELEASE_MODES, EXTERNAL)
MODES = (WORK, *SHARED_MODES)

_KB, _MB, _GB = 1024, 1024**2, 1024**3
_DAY = 86400.0

_INT = re.compile(r"[+-]?[0-9]{1,18}")
_SIZE = re.compile(r"([0-9]{1,18})\s*(b|kb|mb|gb)?", re.IGNORECASE)
_FLAGS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
_HANDLER = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(:[^\W\d]\w*)?")


def parse_size(value: object) -> int:
    """Bytes, from a number or from text such as "64kb" or "1mb" (1 kb = 1024 bytes)."""
    match = (
        _SIZE.fullmatch(str(value).strip()) if isinstance(value, int | str) and not isinstance(value, bool) else None
    )
    if match is None:
        raise UsageError(f'size {shown(value)} is not allowed: a number of bytes, or text such as "64kb", "1mb", "2gb"')
    unit = (match[2] or "b").lower()
    return int(match[1]) * {"b": 1, "kb": _KB, "mb": _MB, "gb": _GB}[unit]


def show_size(size: int) -> str:
    """The shortest exact text that parse_size reads back."""
    for unit, unit_bytes in (("gb", _GB), ("mb", _MB), ("kb", _KB)):
        if size and size % unit_bytes == 0:
            return f"{size // unit_bytes}{unit}"
    return str(size)


@dataclass(frozen=True)
class Option:
    """One row of a table of settings.

    `live` says whether a queue's running processes follow a change. In the modes of `fixed_in` a queue keeps the value
    that it was created with.
    """

    name: str
    kind: Kind
    default: Value
    lowest: float
    highest: float
    description: str
    live: bool = True
    # Of one that 0 switches off: the lowest other value.
    least: float = 0
    modes: tuple[str, ...] = MODES
    fixed_in: tuple[str, ...] = ()

    def parse(self, value: object, where: str) -> Value:
        """The value of this option, from a TOML or JSON value or from text."""
        try:
            parsed = self._read(value)
        except UsageError:
            parsed = None
        if parsed is None or (not isinstance(parsed, str) and not self._takes(parsed)):
            raise InvalidOption(f"{where}: {self.name} = {shown(value)} is not allowed: {self.allowed}")
        return parsed

    def _takes(self, value: float) -> bool:
        return self.lowest <= value <= self.highest and (not self.least or value == 0 or value >= self.least)

    @property
    def allowed(self) -> str:
        text = self._allowed(self.least or self.lowest)
        return f"{text}, or 0" if self.least else text

    def _allowed(self, lowest: float) -> str:
        if self.kind == "flag":
            return "true or false"
        if self.kind == "duration":
            return f'a duration from {show_duration(lowest)} to {show_duration(self.highest)} (such as "250ms", "5m")'
        if self.kind == "size":
            return f'a size from {show_size(int(lowest))} to {show_size(int(self.highest))} (such as "64kb", "1mb")'
        return ALLOWED_RATES if self.kind == "rate" else f"a whole number from {lowest} to {self.highest}"

    def _read(self, value: object) -> Value | None:
        if self.kind == "flag":
            return value if isinstance(value, bool) else _FLAGS.get(value.lower()) if isinstance(value, str) else None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return None
        if self.kind == "rate":
            return str(parse_rate(value))
        if self.kind == "duration":
            return parse_duration(value)
        if self.kind == "size":
            return parse_size(value)
        if isinstance(value, str):
            return int(value) if _INT.fullmatch(value.strip()) else None
        return value if isinstance(value, int) else None


_EVERY_MODE = (
    Option("max_items", "int", 0, 0, 10**12, "jobs the queue may hold; an enqueue past it is refused (0 = no limit)"),
    Option("max_data", "size", _MB, 1, 64 * _MB, "the largest data of one job, as JSON"),
    Option("stop_grace", "duration", 10.0, 0.0, _DAY, "how long a running job may go on when its process has to stop"),
    Option("dead_max", "int", 10_000, 0, 10**9, "dead jobs that are kept"),
    Option("dead_ttl", "duration", 7 * _DAY, 1.0, 3650 * _DAY, "how long a dead job is kept"),
    Option("dedup_ttl", "duration", _DAY, 1.0, 365 * _DAY, "how long the token of an enqueue is remembered"),
    Option("journal", "flag", True, False, True, "whether what happens is written to the queue's journal"),
    Option("journal_max", "size", 16 * _MB, 64 * _KB, 64 * _GB, "the size the journal is trimmed to"),
)
_OF_WORK = (
    Option("concurrency", "int", 1, 1, 256, "workers in the queue's process", live=False),
    Option("size", "int", 10, 1, 10**6, "units of the supervisor's capacity that a running job holds"),
    Option("priority", "int", 0, -100, 100, "which queue gets capacity first when it is short: the higher one"),
    Option("timeout", "duration", 60.0, 0.0, 365 * _DAY, "how long one attempt may take (0 = as long as it likes)"),
    Option("max_timeouts", "int", 3, 0, 10**6, "attempts that may time out before a job is dead"),
    Option("max_jobs", "int", 0, 0, 10**9, "jobs after which the process is replaced (0 = never)", live=False),
    Option("max_age", "duration", 0.0, 0.0, 365 * _DAY, "age at which it is replaced, after a job", live=False),
    Option("max_memory", "size", 0, 0, 1024 * _GB, "memory (PSS) at which it is replaced, after a job", live=False),
    Option(
        *("memory_limit", "size", 0, 0, 1024 * _GB),
        "memory at which it is killed, with all below it, while a job runs (0 = none)",
        live=False,
        least=16 * _MB,
    ),
    Option(
        *("pids_limit", "int", 0, 0, 4_194_304),
        "processes and threads that it and all below it may be (0 = any number)",
        live=False,
        least=8,
    ),
    Option(
        *("address_limit", "size", 0, 0, 1024 * _GB),
        "address space that each of its processes may ask for (0 = any)",
        live=False,
        least=256 * _MB,
    ),
    Option(
        *("open_files_limit", "int", 0, 0, 1_048_576),
        "files that each of its processes may have open (0 = as many as the supervisor)",
        live=False,
        least=64,
    ),
    Option("nice", "int", 0, 0, 19, "by how much it gives way to others when CPUs are short", live=False),
    Option("fail_max_retries", "int", 100, 0, 10**6, "how often a failed fail handler is tried again"),
    Option("fail_min_backoff", "duration", 10.0, 0.0, 3650 * _DAY, "the wait before its first retry; it doubles"),
    Option("fail_max_backoff", "duration", 900.0, 0.0, 3650 * _DAY, "the longest wait before its retry"),
    Option(
        "fail_timeout", "duration", 60.0, 0.0, 365 * _DAY, "how long one run of the fail handler may take (0 = any)"
    ),
    Option("fail_size", "int", 2, 1, 10**6, "units of capacity that a running fail handler holds"),
)
_OF_ATTEMPTS = (
    Option("max_stalls", "int", 3, 0, 10**6, "attempts that may die with their process before a job is dead"),
    Option("max_retries", "int", 10, 0, 10**6, "attempts after the first one before a job is dead"),
    Option("min_backoff", "duration", 2.0, 0.0, 3650 * _DAY, "the wait before the first retry; it doubles each time"),
    Option("max_backoff", "duration", 300.0, 0.0, 3650 * _DAY, "the longest wait before a retry"),
    Option("rate", "rate", OFF, 0, 0, "how many jobs may begin in how long, on all machines together"),
    Option("burst", "int", 0, 0, 10**6, "how many may begin at once (0 = what the rate allows in 100ms, at least 1)"),
    Option("max_active", "int", 0, 0, 10**6, "how many may run at the same time, on all machines together (0 = any)"),
    Option(
        "keep_done", "duration", 0.0, 0.0, 365 * _DAY, "how long a done job is kept, with its result (0 = not at all)"
    ),
    Option("done_max", "int", 10_000, 0, 10**7, "done jobs that are kept"),
    Option("jitter", "int", 0, 0, 100, "by how many percent the wait before a retry varies at random"),
)
_OF_RELEASES = (
    Option("release_interval", "duration", 0.1, 0.001, _DAY, "the time from one try to release an item to the next"),
    Option("release_retries", "int", 10, 0, 10**6, "tries after the first one before an item is in the retry lane"),
    Option("retry_interval", "duration", 0.2, 0.0, _DAY, "how long an item that nobody awaited waits for its next try"),
)
_LEASE = Option("lease", "duration", 10.0, 0.1, _DAY, "how long an item is held for the one it was handed to")
_ITEM_TIMEOUT = Option(
    "item_timeout", "duration", 0.0, 0.0, 3650 * _DAY, "the age at which an item is given up (0 = never)"
)
_RETRY_LANE = Option("retry_lane_retries", "int", 0, 0, 10**6, "attempts after all others, while nothing else waits")
_DEFAULTS_OF_MODE: Mapping[str, Mapping[str, Value]] = {
    AUTO_RELEASE: {"retry_lane_retries": 3},
    # Each job that a bridge adds has a token of its own.
    EXTERNAL: {"lease": 9.0, "dedup_ttl": 3600.0},
}

_TABLE = (
    *_EVERY_MODE,
    *(replace(option, modes=(WORK,)) for option in _OF_WORK),
    *(replace(option, modes=(WORK, EXTERNAL)) for option in _OF_ATTEMPTS),
    replace(_RETRY_LANE, modes=(WORK, AUTO_RELEASE, EXTERNAL), fixed_in=(AUTO_RELEASE,)),
    *(replace(option, modes=(AUTO_RELEASE,), fixed_in=(AUTO_RELEASE,)) for option in _OF_RELEASES),
    replace(_LEASE, modes=SHARED_MODES, fixed_in=RELEASE_MODES),
    replace(_ITEM_TIMEOUT, modes=RELEASE_MODES, fixed_in=RELEASE_MODES),
)
OPTIONS: Mapping[str, Option] = {option.name: option for option in _TABLE}


def defaults(mode: str = WORK) -> dict[str, Value]:
    """Every option that a queue of this mode has."""
    own = {option.name: option.default for option in OPTIONS.values() if mode in option.modes}
    return {**own, **_DEFAULTS_OF_MODE.get(mode, {})}


def fixed_options(mode: str) -> frozenset[str]:
    """Those that a queue of this mode keeps as it was created with them."""
    return frozenset(option.name for option in OPTIONS.values() if mode in option.fixed_in)


def parse_options(given: Mapping[str, object], where: str, mode: str | None = None) -> dict[str, Value]:
    """The options that were given, checked; those that were not are left out. Without a mode: those of any."""
    for name in given:
        if name not in OPTIONS:
            known = OPTIONS if mode is None else defaults(mode)
            raise InvalidOption(f"{where}: there is no option {shown(name)}{nearest(name, known)}")
    if mode is not None:
        check_options_of_mode(given, mode, where)
    return {name: OPTIONS[name].parse(value, where) for name, value in given.items()}


def check_options_of_mode(names: Iterable[str], mode: str, where: str) -> None:
    for name in names:
        modes = OPTIONS[name].modes
        if mode not in modes:
            raise InvalidOption(f"{where}: {name} is an option of mode {' or '.join(modes)}, not of mode {mode}")


def check_changes(names: Iterable[str], mode: str, queue: str) -> None:
    """Refuses options that cannot be changed while the queue exists, or not without new processes."""
    check_options_of_mode(names, mode, queue)
    for name in names:
        if mode in OPTIONS[name].fixed_in:
            raise InvalidOption(f"{name} of {queue} cannot be changed: it is fixed for the life of a queue")
        if not OPTIONS[name].live:
            raise InvalidOption(f"{name} of {queue} takes effect only in a new process: use create")


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the valid one that was probably meant, else all of them."""
    import difflib

    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(names)}"


@dataclass(frozen=True)
class QueueSpec:
    """The definition of one queue. `options` holds only what was given, so that defaults can improve."""

    name: str
    mode: str
    handler: str | None
    handlers: Mapping[str, str]
    path: tuple[str, ...]
    options: Mapping[str, Value]
    fail_handler: str | None = None

    @classmethod
    def from_mapping(
        cls, name: str, mapping: Mapping[str, object], where: str, default_mode: str = WORK
    ) -> "QueueSpec":
        """Options may stand beside handler and path, as in a config file, or in a table `options` of their own."""
        fields = {key: value for key, value in mapping.items() if value is not None}
        options = _table(fields.pop("options", {}), "options", where)
        for key, value in options.items():
            if key in fields:
                raise InvalidOption(f"{where}: {shown(key)} is given twice")
            fields[key] = value
        mode = check_mode(fields.pop("mode", default_mode), where)
        path = _check_path(fields.pop("path", ()), where)
        handler = _check_handler(fields.pop("handler"), "handler", where) if "handler" in fields else None
        fail = _check_handler(fields.pop("fail_handler"), "fail_handler", where) if "fail_handler" in fields else None
        handlers = _take_handlers(fields, where)
        checked = _checked(check_queue_name, name, where)
        spec = cls(checked, mode, handler, handlers, path, parse_options(fields, where, mode), fail)
        spec._check_code(where)
        return spec

    def _check_code(self, where: str) -> None:
        """A queue that works needs a handler; one whose jobs leave it has no place for any."""
        if self.mode == WORK:
            if self.handler is None and not self.handlers:
                raise InvalidOption(
                    f'{where}: a queue of mode work needs handler = "package.module:function" or handlers.TYPE'
                )
            return
        for key in ("handler", "handlers", "fail_handler", "path"):
            if getattr(self, key):
                raise InvalidOption(f"{where}: {key} is not allowed: a queue of mode {self.mode} runs nothing")

    def to_mapping(self) -> dict[str, object]:
        """What from_mapping reads back; only JSON types."""
        return {
            "mode": self.mode,
            "handler": self.handler,
            "handlers": dict(self.handlers),
            "fail_handler": self.fail_handler,
            "path": list(self.path),
            "options": dict(self.options),
        }


def check_mode(mode: object, where: str) -> str:
    if mode not in MODES:
        allowed = ", ".join(f'"{each}"' for each in MODES)
        raise InvalidOption(f"{where}: mode = {shown(mode)} is not allowed: {allowed}")
    return str(mode)


def _check_path(given: object, where: str) -> tuple[str, ...]:
    folders = [given] if isinstance(given, str) else given
    if not isinstance(folders, list | tuple):
        raise InvalidOption(f"{where}: path = {shown(given)} is not allowed: a directory, or a list of directories")
    for folder in folders:
        # A relative one would depend on the directory that the supervisor happens to run in.
        if not isinstance(folder, str) or not os.path.isabs(folder) or "\0" in folder:
            raise InvalidOption(f"{where}: path = {shown(folder)} is not allowed: an absolute directory, as text")
    return tuple(folders)


def _take_handlers(fields: dict[str, object], where: str) -> dict[str, str]:
    """Takes `handlers` and every `handlers.TYPE` out of the fields."""
    handlers = dict(_table(fields.pop("handlers", {}), "handlers", where))
    for key in [key for key in fields if key.startswith("handlers.")]:
        job_type = key.removeprefix("handlers.")
        if job_type in handlers:
            raise InvalidOption(f"{where}: {shown(key)} is given twice")
        handlers[job_type] = fields.pop(key)
    return {
        _checked(check_type, job_type, where): _check_handler(handler, f"handlers.{job_type}", where)
        for job_type, handler in handlers.items()
    }


def _check_handler(handler: object, key: str, where: str) -> str:
    if isinstance(handler, str) and is_program(handler):
        try:
            read_program(handler)
        except UsageError as exc:
            raise InvalidOption(f"{where}: {key} = {shown(handler)} is not allowed: {exc}") from exc
    elif not isinstance(handler, str) or not _HANDLER.fullmatch(handler):
        raise InvalidOption(
            f"{where}: {key} = {shown(handler)} is not allowed: "
            f'"package.module:function", "package.module" with a function handle, or {ALLOWED}'
        )
    return handler


def _table(given: object, key: str, where: str) -> Mapping[str, object]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidOption(f"{where}: {key} = {shown(given)} is not allowed: a table of names and values")
    return given


def _checked(check: Callable[[object], str], value: object, where: str) -> str:
    try:
        return check(value)
    except ForqError as exc:
        raise type(exc)(f"{where}: {exc}") from exc
