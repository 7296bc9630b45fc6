"""The options that a job or a task may set for itself, instead of its queue's: checks them, and packs them for the
record of a job.

Packed options are one word, such as `t=30000,r=5,b=1000:5000,k=3600000` (durations in ms). Scripts read
single options from it. A record may also have `x=EXPIRES_MS`, `T=TICK_MS` and `g=BATCH`. Only the copy that a worker
gets has the marks `w=1`, `i=COUNT`, `I=USE` and `m=HOME:BATCH:NUMBER` (StoredOptions).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

from forq.api_types import Duration
from forq.errors import InvalidData, UsageError
from forq.settings import OPTIONS
from forq.values import show_duration, shown

MAX_BACKOFFS = 20
# The syntax of packed options, for readers that cannot call `unpack_options`: each letter at most once.
_MS = "[0-9]{1,18}"
_PART = f"(?:[trkxT]={_MS}|b={_MS}(?::{_MS}){{0,{MAX_BACKOFFS - 1}}}|g=[A-Za-z0-9_.-]{{1,64}})"
PACKED = f"^(?!.*([trbkxTg])=.*,\\1=){_PART}(?:,{_PART})*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOptions:
    """None, or no backoff: not set. The last backoff repeats."""

    timeout_ms: int | None = None
    max_retries: int | None = None
    backoff_ms: tuple[int, ...] = ()
    keep_done_ms: int | None = None

    def over(self, weaker: "AttemptOptions") -> "AttemptOptions":
        """These options, completed by weaker ones."""
        unset = {
            each.name: getattr(weaker, each.name) for each in fields(self) if getattr(self, each.name) in (None, ())
        }
        return replace(self, **unset)

    def pack(self) -> str:
        """'' if none is set."""
        parts = []
        if self.timeout_ms is not None:
            parts.append(f"t={self.timeout_ms}")
        if self.max_retries is not None:
            parts.append(f"r={self.max_retries}")
        if self.backoff_ms:
            parts.append(f"b={':'.join(map(str, self.backoff_ms))}")
        if self.keep_done_ms is not None:
            parts.append(f"k={self.keep_done_ms}")
        return ",".join(parts)

    def show(self) -> dict[str, Any]:
        """Those that are set, for output: as a user may give them."""
        shown: dict[str, Any] = {}
        if self.timeout_ms is not None:
            shown["timeout"] = show_duration(self.timeout_ms / 1000)
        if self.max_retries is not None:
            shown["max_retries"] = self.max_retries
        if self.backoff_ms:
            shown["backoff"] = [show_duration(each / 1000) for each in self.backoff_ms]
        if self.keep_done_ms is not None:
            shown["keep_done"] = show_duration(self.keep_done_ms / 1000)
        return shown


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOptions(AttemptOptions):
    """The options in a job's record. `expires_ms`: epoch ms. `tick_ms`: of the schedule that made the job. `batch`: the
    one whose callback it is.

    The rest are marks of a claimed job. `is_result_wanted`: another job uses its result. `input_count`: the number of
    jobs that it has waited for, if it uses their results, and how (`input_use`, dependencies.py). `member`: HOME, BATCH
    and NUMBER of the batch that it belongs to, separated by colons; HOME is '' for the job's own queue.
    """

    expires_ms: int | None = None
    tick_ms: int | None = None
    is_result_wanted: bool = False
    input_count: int = 0
    input_use: int = 0
    batch: str = ""
    member: str = ""


_NO_OPTIONS = AttemptOptions()


def check_attempt_options(
    *,
    timeout: Duration | None = None,
    max_retries: int | None = None,
    backoff: Duration | Sequence[Duration] | None = None,
    keep_done: Duration | None = None,
    where: str = "options of a job",
) -> AttemptOptions:
    """Checks options as a user gives them. InvalidOption names `where`, the option and the allowed values.

    `backoff`: delays before the first, second … retry.
    """
    if timeout is max_retries is backoff is keep_done is None:
        return _NO_OPTIONS
    return AttemptOptions(
        timeout_ms=_milliseconds("timeout", timeout, where),
        max_retries=None if max_retries is None else OPTIONS["max_retries"].parse(max_retries, where),
        backoff_ms=_check_backoff(backoff, where),
        keep_done_ms=_milliseconds("keep_done", keep_done, where),
    )


def check_expires_in(expires_in: Duration | None, where: str = "options of a job") -> int | None:
    """Milliseconds."""
    if expires_in is None:
        return None
    try:
        milliseconds = _milliseconds("keep_done", expires_in, where) or 0
    except UsageError:
        milliseconds = 0
    if not milliseconds:
        raise UsageError(
            f"{where}: expires_in = {shown(expires_in)} is not allowed: a duration from 1ms to 365d "
            '(such as "90s", "2h")'
        )
    return milliseconds


def pack_options(options: AttemptOptions, expires_in_ms: int | None = None) -> str:
    """The options of a new job, for enqueue.lua, which makes the expiry a time. '' if there is none."""
    packed = options.pack()
    if expires_in_ms is None:
        return packed
    return f"{packed},x={expires_in_ms}" if packed else f"x={expires_in_ms}"


def pack_job_options(
    *,
    timeout: Duration | None = None,
    max_retries: int | None = None,
    backoff: Duration | Sequence[Duration] | None = None,
    expires_in: Duration | None = None,
    keep_done: Duration | None = None,
) -> str:
    """Checks and packs the options of a new job as a user gives them. '' if there is none."""
    if timeout is max_retries is backoff is expires_in is keep_done is None:
        return ""
    options = check_attempt_options(timeout=timeout, max_retries=max_retries, backoff=backoff, keep_done=keep_done)
    return pack_options(options, check_expires_in(expires_in))


def show_own_options(shown: Mapping[str, Any]) -> str:
    """The dict of `AttemptOptions.show` in one line."""
    return ", ".join(
        f"{name} = {' '.join(value) if isinstance(value, list) else value}" for name, value in shown.items()
    )


def unpack_options(packed: str) -> StoredOptions:
    """Reads the options of a record; InvalidData if they are broken."""
    given: dict[str, Any] = {}
    try:
        for part in packed.split(",") if packed not in ("", "-") else ():
            key, _, value = part.partition("=")
            given |= _READERS[key](value)
    except (KeyError, ValueError) as exc:
        raise InvalidData(f"broken options of a job: {shown(packed)}") from exc
    return StoredOptions(**given)


_READERS: Mapping[str, Any] = {
    "t": lambda value: {"timeout_ms": int(value)},
    "r": lambda value: {"max_retries": int(value)},
    "b": lambda value: {"backoff_ms": tuple(map(int, value.split(":")))},
    "k": lambda value: {"keep_done_ms": int(value)},
    "x": lambda value: {"expires_ms": int(value)},
    "T": lambda value: {"tick_ms": int(value)},
    "w": lambda value: {"is_result_wanted": value == "1"},
    "i": lambda value: {"input_count": int(value)},
    "I": lambda value: {"input_use": int(value)},
    "g": lambda value: {"batch": value},
    "m": lambda value: {"member": value},
}


def _check_backoff(backoff: Any, where: str) -> tuple[int, ...]:
    if backoff is None:
        return ()
    delays = list(backoff) if isinstance(backoff, list | tuple) else [backoff]
    if not 1 <= len(delays) <= MAX_BACKOFFS or None in delays:
        raise UsageError(
            f"{where}: backoff = {shown(backoff)} is not allowed: a delay, or a list of 1 to {MAX_BACKOFFS} delays"
        )
    return tuple(_milliseconds("max_backoff", each, where, "backoff") or 0 for each in delays)


def _milliseconds(option: str, value: Duration | None, where: str, name: str = "") -> int | None:
    """A duration within the range of a queue's option."""
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    setting = replace(OPTIONS[option], name=name or option)
    return round(float(setting.parse(seconds, where)) * 1000)
