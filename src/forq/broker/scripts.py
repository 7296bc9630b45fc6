"""The Lua library and its replies: the text that Redis loads (FUNCTION LOAD, FCALL), the reply codes, the exception for
each, and the fate of a job after an attempt that did not succeed.

1. The files of lua/ are joined in the order of FILES, after the reply codes as constants; most as blocks of their own.
   Nothing else is changed.
2. The names of the library and its functions contain a hash of the text, so two builds never call each other's.
3. A server that refuses functions gets the same text by EVAL, with the verb as last argument.
"""

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from forq.errors import (
    BatchEnded,
    BeingDeleted,
    Exists,
    Fenced,
    FlowsOff,
    ForqError,
    IncompatibleProtocol,
    InvalidData,
    LeaseLapsed,
    QueueExists,
    QueueFull,
    QueueNotEmpty,
    TooLate,
    TooManyQueues,
    TooManySchedules,
    UnknownBatch,
    UnknownDependency,
    UnknownQueue,
    UnknownSchedule,
    UnknownSupervisor,
    UsageError,
    WrongMode,
)
from forq.settings import shown_option
from forq.version import PROTOCOL

OK = 1
PAUSED = 2
LIMITED = 3
NO_QUEUE = -1
FENCED = -2
OTHER_PROTOCOL = -3
OTHER_MODE = -4
TOO_MANY = -5
DELETING = -6
NOT_EMPTY = -7
FULL = -8
EXISTS = -9
TOO_LARGE = -10
WRONG_MODE = -11
LAPSED = -12
STALE = -13
CHANGED = -14
NOT_IN_MODE = -15
LATE = -16
NOT_SCHEDULED = -17
OTHER_OPTION = -20
BROKEN = -30
NO_SCHEDULE = -40
TOO_MANY_SCHEDULES = -41
KEEPS_NOTHING = -50
NO_SUPERVISOR = -60
TOO_MANY_REQUESTS = -61
FLOWS_OFF = -70
UNKNOWN_DEPENDENCY = -71
RESULT_NOT_KEPT = -72
NO_BATCH = -73
BATCH_ENDED = -74
UNMET = -75

LUA_CONSTANTS = {name: value for name, value in globals().items() if name.isupper() and isinstance(value, int)}
LUA_CONSTANTS.pop("PROTOCOL")

FILES = (
    *("call", "summary", "journal", "records", "hints", "limits", "results", "claims", "failures", "flows", "batches"),
    *("leases", "schedules", "release", "recovery", "control", "queues", "enqueue", "turn", "quick", "verbs"),
)
# Lua allows 200 local variables per function. Those of the other files are their own: each is a block.
SHARED = ("call", "records", "hints", "limits", "results", "claims", "recovery", "flows", "verbs")
# An entry of the table in verbs.lua: name, function, flag.
_VERB = re.compile(r"^  \{ '(\w+)', \w+, '([a-z-]*)' \},$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A verb of the library: the function's name, and the texts for FUNCTION LOAD and EVAL."""

    verb: str
    name: str
    library: str
    # For EVAL; its first line holds the flags.
    source: str


@cache
def script(verb: str) -> Script:
    text, build = _text(), _build()
    flag = flags()[verb]
    return Script(
        verb=verb,
        name=f"forq_{verb}_{build}",
        library=_library(text, build),
        source=_source(text, flag),
    )


def flags() -> dict[str, str]:
    """The flag of each verb; '' if it has none."""
    return dict(_VERB.findall(_read("verbs")))


@cache
def _library(text: str, build: str) -> str:
    return f"#!lua name=forq_{build}\nlocal BUILD, EVAL_KEYS, EVAL_ARGV = '{build}', nil, nil\n{text}"


@cache
def _source(text: str, flag: str) -> str:
    return f"#!lua{flag and f' flags={flag}'}\nlocal BUILD, EVAL_KEYS, EVAL_ARGV = nil, KEYS, ARGV\n{text}"


@cache
def _text() -> str:
    codes = "".join(f"local {name} = {value}\n" for name, value in LUA_CONSTANTS.items())
    return codes + "".join(_read(name) if name in SHARED else f"do\n{_read(name)}end\n" for name in FILES)


@cache
def _build() -> str:
    return hashlib.sha256(_text().encode()).hexdigest()[:16]


@cache
def _read(name: str) -> str:
    return files("forq.broker").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


_MODE_HINTS = {
    "work": "its jobs are run by its handler",
    "auto_release": "its items are released to awaiters at intervals (wait_release, next_release)",
    "on_request": "its items leave when a client dequeues them",
    "external": "its jobs are run by external workers through a bridge",
}


def error_for(queue: str, reply: list[object]) -> ForqError:
    """The exception for a negative reply about `queue`."""
    code = reply[0]
    detail = [part.decode() if isinstance(part, bytes) else part for part in reply[1:]]
    if code == NO_QUEUE:
        return UnknownQueue(f"no queue {queue!r}")
    if code == FENCED:
        return Fenced(f"this worker of queue {queue!r} has been removed")
    if code == STALE:
        return Fenced(f"another process uses the name of this worker of queue {queue!r}")
    if code == OTHER_PROTOCOL:
        return IncompatibleProtocol(f"queue {queue!r} uses protocol {detail[0]}, this forq uses {PROTOCOL}")
    if code == OTHER_MODE:
        return QueueExists(f"queue {queue!r} exists with mode {detail[0]!r}; a queue's mode never changes")
    if code == OTHER_OPTION:
        shown = shown_option(str(detail[0]), str(detail[1]))
        return QueueExists(f"queue {queue!r} exists with {shown}; it is fixed while the queue exists")
    if code == TOO_MANY:
        return TooManyQueues(f"queue {queue!r} was not created: max_queues is reached")
    if code == DELETING:
        return BeingDeleted(f"an earlier queue {queue!r} is still being deleted; try again shortly")
    if code == CHANGED:
        return BeingDeleted(f"queue {queue!r} is being deleted and created by other clients; try again shortly")
    if code == NOT_EMPTY:
        return QueueNotEmpty(f"queue {queue!r} still holds {detail[0]} jobs; delete it with force to drop them")
    if code == FULL:
        return QueueFull(f"queue {queue!r} holds max_items = {detail[0]} jobs; nothing was stored")
    if code == EXISTS:
        return Exists(f"queue {queue!r} already has a job with that id; nothing was stored")
    if code == TOO_LARGE:
        return InvalidData(f"a job for queue {queue!r} is larger than max_data = {detail[1]} bytes; nothing was stored")
    if code == WRONG_MODE:
        return WrongMode(f"queue {queue!r} is of mode {detail[0]}: {_MODE_HINTS.get(str(detail[0]), '')}")
    if code == NOT_IN_MODE:
        return WrongMode(
            f"queue {queue!r} is of mode {detail[0]}: timeout, max_retries, backoff, expires_in and keep_done of one "
            "job need a queue of mode work; nothing was stored"
        )
    if code == FLOWS_OFF:
        return FlowsOff(
            f"queue {queue!r} has flows = off, so its jobs cannot wait for others, or be members of a batch; "
            f"to allow it: forqctl set {queue} flows=auto"
        )
    if code == UNKNOWN_DEPENDENCY:
        since = (
            "it never existed, or its queue did not remember ended jobs before, but does so from now on: if it has "
            "ended, enqueue it again, or both in one call"
        )
        if detail[2]:
            since = "it never existed, or ended before the last 50,000 jobs"
        if detail[2] == 2:
            return UnknownBatch(f"queue {queue!r} has no batch {detail[1]!r} to wait for; nothing was stored")
        return UnknownDependency(f"queue {queue!r} has no job {detail[1]!r} to wait for: {since}; nothing was stored")
    if code == RESULT_NOT_KEPT:
        return UsageError(
            f"the result of job {detail[1]!r} of queue {queue!r} is not kept: enqueue the job that uses it before that "
            f"one runs, or keep results: forqctl set {queue} keep_done=1h; nothing was stored"
        )
    if code == UNMET:
        return UsageError(
            f"what that dead job of queue {queue!r} waits for is not done, and does not run: retry that first, or "
            f"both by its id: forqctl dead retry {queue} ID --with-dependants"
        )
    if code == NO_BATCH:
        return UnknownBatch(f"queue {queue!r} has no such batch: it never existed, or ended more than a day ago")
    if code == BATCH_ENDED:
        return BatchEnded(
            f"that batch of queue {queue!r} takes no more members: it is sealed, cancelled or has ended; a running "
            "member may add some"
        )
    if code == LATE:
        return TooLate(f"the time to repeat an enqueue to queue {queue!r} is over, or the queue was deleted meanwhile")
    if code == LAPSED:
        return LeaseLapsed(f"the item of queue {queue!r} was not acknowledged in time: it is waiting again")
    if code == NOT_SCHEDULED:
        return UsageError(f"that job of queue {queue!r} is {detail[0]}, not scheduled; nothing was changed")
    if code == BROKEN:
        return InvalidData(f"the record of that dead job of queue {queue!r} is broken: it can only be discarded")
    if code == NO_SCHEDULE:
        return UnknownSchedule(f"queue {queue!r} has no schedule with that key")
    if code == TOO_MANY_SCHEDULES:
        return TooManySchedules(f"queue {queue!r} has {detail[0]} schedules already; nothing was set")
    if code == KEEPS_NOTHING:
        return UsageError(
            f"queue {queue!r} keeps no results; to keep them: forqctl set {queue} keep_done=1h, or for one task: "
            '@app.task(keep_done="1h")'
        )
    if code == NO_SUPERVISOR:
        return UnknownSupervisor(f"supervisor {queue} has ended or sends no heartbeats; see: forqctl status --all")
    if code == TOO_MANY_REQUESTS:
        return ForqError(f"{detail[0]} requests wait for supervisor {queue} already; nothing was sent")
    return ForqError(f"unexpected reply {reply!r} about queue {queue!r}")


class Fate(NamedTuple):
    """What happens to a job after an attempt that did not succeed (lua/failures.lua)."""

    kind: str
    wait_ms: int
    attempt: int
    max_attempts: int  # if all attempts end like this one

    @property
    def final(self) -> bool:
        return self.kind == "dead"

    def __str__(self) -> str:
        attempt, retry = f"attempt {self.attempt} of {self.max_attempts}", f"retry {_wait(self.wait_ms)}"
        match self.kind:
            case "dead":
                return f"{attempt}, failed for good"
            case "retried" | "returned":
                return f"{attempt}, {retry}"
            case "lane":
                return f"{attempt}, {retry} once no other job waits"
            case "snoozed":
                return f"attempt {self.attempt}, not counted, again {_wait(self.wait_ms)}"
            case "suspect":
                return f"attempt {self.attempt}, not counted, {retry} alone in its process"
            case "interrupted":
                return f"attempt {self.attempt}, not counted, {retry}"
            case "removed":
                return "no retry, because it was removed while it ran"
            case _:
                return "ignored, because this worker no longer holds the job"


def read_fates(values: Sequence[Any]) -> tuple[Fate, ...]:
    """Reads four values per fate."""
    return tuple(Fate(values[at].decode(), *values[at + 1 : at + 4]) for at in range(0, len(values), 4))


def headline(queue: str, job: str, follows: Fate | str, happened: str, *, of_fail_handler: bool) -> str:
    """A log line: what happened to a job, its fate, and for a dead job the command for details."""
    what = "fail handler" if of_fail_handler else "job"
    final = isinstance(follows, Fate) and follows.final
    see = f" (see: forqctl why {queue} {shlex.quote(job)})" if final else ""
    return f"{what} {happened}: {follows}{see}"


def _wait(wait_ms: int) -> str:
    """Rounded, because the delay includes jitter."""
    if wait_ms <= 0:
        return "at once"
    if wait_ms < 1000:
        return f"in {wait_ms} ms"
    seconds = wait_ms / 1000
    if seconds < 120:
        return f"in {seconds:.3g} s"
    if seconds < 2 * 3600:
        return f"in {seconds / 60:.3g} min"
    return f"in {seconds / 3600:.3g} h" if seconds < 2 * 86400 else f"in {seconds / 86400:.3g} d"
