"""The job argument of handlers, new job ids, the trace context of a job, and the payload of a job_assignment."""

import os
import random
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from forq.errors import NoResult, UsageError
from forq.values import check_progress

if TYPE_CHECKING:
    from forq.batch import Children

TraceContext = dict[str, str]

# Values of the setting `tracing`.
OFF, OTLP, FILE = "off", "otlp", "file:"
_PACKAGES = {OTLP: "opentelemetry.exporter.otlp.proto.http", FILE: "opentelemetry.sdk"}


def current_trace() -> TraceContext | None:
    """The W3C trace context of the current OpenTelemetry span; None if there is none.

    Imports nothing unless the process uses OpenTelemetry: otherwise it costs one dict lookup.
    """
    context = sys.modules.get("opentelemetry.context")
    # redis-py imports it wherever it is installed, so most processes have the module but no span.
    if context is None:
        return None
    try:
        current = context.get_current()
    except AttributeError:  # another thread is importing it
        return None
    if not current:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: TraceContext = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier or None


def can_trace(setting: str) -> bool:
    """Whether the packages for this setting are installed."""
    try:
        return find_spec(_PACKAGES[FILE if setting.startswith(FILE) else setting]) is not None
    except ModuleNotFoundError:
        return False


# The job that runs in this context.
RUNNING: "ContextVar[Job]" = ContextVar("forq_job")


def current_job() -> "Job":
    """The job of the task that runs here; LookupError outside a task. Works in coroutines, and in threads that copy the
    context (asyncio.to_thread)."""
    try:
        return RUNNING.get()
    except LookupError:
        raise LookupError("no task of a forq.App runs here, so there is no current job") from None


class TaskResult(NamedTuple):
    """What a task returned, and the function that packs it. Packed only if the queue keeps results; a result that
    cannot be packed does not fail the job."""

    value: Any
    pack: Callable[[Any], Any]


class Inputs(NamedTuple):
    """The results of the jobs that a job has waited for. `use`: how it gets them (broker/dependencies.py). `packed`:
    'HOW RESULT' of each; RESULT is JSON, '!' and the reason why there is none, or '' for a job that is not done."""

    total: int
    use: int
    packed: tuple[bytes, ...] = ()


_new = object.__new__

# How a job ended that has succeeded.
_SUCCESS = (b"done", b"released")


def _read_input(job_id: str, number: int, packed: bytes) -> Any:
    how, _, result = packed.partition(b" ")
    if how not in _SUCCESS:
        return None
    if result[:1] in (b"", b"!"):
        reason = result[1:].decode(errors="replace") or "it was lost"
        raise NoResult(
            f"dependency {number} of job {job_id!r} succeeded, but has no result: {reason}; let its handler return a "
            "JSON value that is not longer than max_data"
        )
    import orjson

    try:
        return orjson.loads(result)
    except ValueError as exc:
        raise NoResult(f"the result of dependency {number} of job {job_id!r} is not JSON: {exc}") from exc


class Reporter(Protocol):
    """Reports a job's progress. `position`: the worker's slot position while it runs this job."""

    def report(self, position: int, job_id: str, fence: int, fraction: float, text: str) -> None: ...


class Attempts(Protocol):
    """The worker that runs a job. `position`: as for Reporter."""

    def should_stop(self, position: int) -> bool: ...

    def max_retries(self) -> int | None:
        """Retries allowed for the running job; None: unknown."""


class Job:
    """Everything about a job except its data, which the handler gets as its first argument."""

    __slots__ = (
        "_attempts",
        "_children",
        "_head",
        "_inputs",
        "_member",
        "_position",
        "_reporter",
        "_tick_ms",
        "batch",
        "fence",
        "id",
        "identifier",
        "queue",
        "retry_count",
        "snoozes",
        "stall_count",
        "timeout_count",
        "trace",
        "type",
    )

    def __init__(
        self,
        queue: str,
        id: str,
        identifier: str,
        type: str | None,
        priority: int,
        enqueued_at: float,
        fence: int,
        counts: tuple[int, int, int] = (0, 0, 0),
        trace: TraceContext | None = None,
        snoozes: int = 0,
        tick_ms: int | None = None,
        inputs: Inputs | None = None,
        batch: str = "",
        member: str = "",
    ) -> None:
        self.queue = queue
        self.id = id
        self.identifier = identifier
        self.type = type
        # Priority and time of the enqueue; or the line of the record that holds them, until one of them is read.
        self._head: bytes | tuple[int, float] = (priority, enqueued_at)
        # Grows with every attempt in the queue. A handler can pass it to another store, which can then refuse writes of
        # a stale attempt.
        self.fence = fence
        self.retry_count, self.stall_count, self.timeout_count = counts
        # Of the span that enqueued the job, if any.
        self.trace = trace
        # How often it was snoozed.
        self.snoozes = snoozes
        # Of the schedule that made the job: epoch ms.
        self._tick_ms = tick_ms
        # None: it uses no results of other jobs.
        self._inputs = inputs
        # Id of the batch whose callback it is; None if it is none.
        self.batch = batch or None
        # HOME:BATCH:NUMBER of the batch that it belongs to (job_options.py).
        self._member = member
        # Set by the worker.
        self._attempts: Attempts | None = None
        # Set by Client.batch_of.
        self._children: Children | None = None
        self._reporter: Reporter | None = None
        self._position = 0

    @property
    def priority(self) -> int:
        return self._read_head()[0]

    @priority.setter
    def priority(self, value: int) -> None:
        self._head = value, self.enqueued_at

    @property
    def enqueued_at(self) -> float:
        return self._read_head()[1]

    @enqueued_at.setter
    def enqueued_at(self, value: float) -> None:
        self._head = self.priority, value

    def _read_head(self) -> tuple[int, float]:
        head = self._head
        if isinstance(head, bytes):
            # FLAG PRIORITY ' ' ENQUEUED_US (broker/record.py). The worker has checked it.
            self._head = head = head[1] - 48, int(head[3:]) / 1e6
        return head

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1. Snoozed and interrupted attempts are not counted."""
        return self.retry_count + self.stall_count + self.timeout_count + 1

    @property
    def is_last(self) -> bool:
        """Whether the job will be dead if this attempt fails."""
        allowed = None if self._attempts is None else self._attempts.max_retries()
        return allowed is not None and self.retry_count >= allowed

    @property
    def should_stop(self) -> bool:
        """Whether the handler should end soon: its process is stopping, the job was killed or has ended, or little of
        its timeout is left (a tenth, at most 5 seconds). Costs less than a microsecond: meant for tight loops."""
        return self._attempts is not None and self._attempts.should_stop(self._position)

    @property
    def run_id(self) -> str:
        """Identifies one run of the job: the same in all its attempts, another one after a retry of the dead job or a
        new dispatch with the same id."""
        return f"{self.id}@{round(self.enqueued_at * 1e6)}"

    @property
    def tick(self) -> datetime | None:
        """The time for which a schedule made this job, in UTC; None if none did."""
        return None if self._tick_ms is None else datetime.fromtimestamp(self._tick_ms / 1000, UTC)

    def results(self) -> list[Any]:
        """The results of the jobs that this one has waited for, in the order of `after`; None for one that has not
        succeeded.

        NoResult if one has succeeded without a result that can be used; UsageError if this job was enqueued without
        with_results=True.
        """
        if self._inputs is None:
            raise UsageError(
                f"job {self.id!r} has no results of other jobs: enqueue it with after=… and with_results=True"
            )
        return [_read_input(self.id, number, packed) for number, packed in enumerate(self._inputs.packed, 1)]

    @property
    def membership(self) -> tuple[str, str, int] | None:
        """The queue and id of the batch that the job belongs to, and its number there; None if it belongs to none."""
        if not self._member:
            return None
        home, batch, number = self._member.split(":")
        return home or self.queue, batch, int(number)

    def progress(self, fraction: float, text: str = "") -> None:
        """Reports the job's progress: a fraction from 0 to 1, and an optional text (cut at 200 characters).

        May be called from any thread of the handler's process, at any rate: it never blocks, and Redis is updated at
        most ten times per second. InvalidData if an argument is invalid; an outage of Redis raises nothing. Does
        nothing in a process forked by the handler, or after the job has ended.
        """
        checked = check_progress(fraction, text)
        if self._reporter is not None:
            self._reporter.report(self._position, self.id, self.fence, *checked)

    def __reduce__(self) -> tuple[object, ...]:
        """Without the reporter, which belongs to this process."""
        counts = (self.retry_count, self.stall_count, self.timeout_count)
        about = (self.queue, self.id, self.identifier, self.type, self.priority, self.enqueued_at, self.fence, counts)
        return Job, (*about, self.trace, self.snoozes, self._tick_ms, self._inputs, self.batch or "", self._member)

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, identifier={self.identifier!r}, fence={self.fence})"


def claimed_job(queue: str, id: str, identifier: str, type: str | None, head: bytes, fence: int) -> Job:
    """The job of a plain record, of which `head` is the first line. Made for every job that a worker runs, so it does
    without `Job.__init__`, whose fourteen arguments take longer than all the rest."""
    job = _new(Job)
    job.queue = queue
    job.id = id
    job.identifier = identifier
    job.type = type
    job._head = head
    job.fence = fence
    job.retry_count = job.stall_count = job.timeout_count = job.snoozes = 0
    job.trace = job._tick_ms = job._inputs = job.batch = job._attempts = job._children = job._reporter = None
    job._member = ""
    job._position = 0
    return job


def assignment_payload(
    data: Any,
    *,
    uuid: str,
    queue: str,
    worker: str,
    identifier: str,
    type: str | None,
    priority: int,
    counts: tuple[int, int, int],
    enqueued_at: float,
    fence: int,
    trace: TraceContext | None = None,
    results: list[Any] | None = None,
) -> dict[str, Any]:
    """The payload for the bridge and exec handlers (docs/reference/bridge.md). `counts`: retries, stalls, timeouts.
    `results`: of the jobs that it has waited for; None: it uses none.

    The fields of data that came through a bridge are repeated under the bridge's names.
    """
    payload: dict[str, Any] = {"uuid": uuid, "queue_name": queue, "worker_uuid": worker}
    if isinstance(data, dict) and "command" in data:
        payload |= {key: data[key] for key in ("command", "args", "reference_uuid") if key in data}
    retries, stalls, timeouts = counts
    return payload | {
        "identifier": identifier,
        "type": type,
        "priority": priority,
        "attempt": sum(counts) + 1,
        "retry_count": retries,
        "stall_count": stalls,
        "timeout_count": timeouts,
        "enqueued_at": enqueued_at,
        "fence": fence,
        "data": data,
        **({"trace": trace} if trace else {}),
        **({} if results is None else {"results": results}),
    }


# Not the module's generator, which a user may seed.
_random = random.Random()
# The hex digit that holds the variant of a UUID, for each random byte.
_VARIANTS = bytes(b"89ab"[byte & 3] for byte in range(256))
# The positions of the other digits in the random part of an id.
_RANDOM_DIGITS = (0, 1, 2, *range(4, 19))
# Random parts that were made in advance: one by one, each takes five times as long.
_parts: list[str] = []
_PARTS_IN_ADVANCE = 50
# The last millisecond, and the first digits of its ids: making them takes as long as the rest of an id.
_last_time = (0, "")


def _forget_random() -> None:
    """A child must not repeat the parent's numbers."""
    _parts.clear()
    _random.seed()


os.register_at_fork(after_in_child=_forget_random)


def new_id() -> str:
    """A UUIDv7 as 32 hex digits: sorts by time. 48 bits of milliseconds, version 7, 74 random bits."""
    try:
        part = _parts.pop()
    except IndexError:
        part, *others = _random_parts(_PARTS_IN_ADVANCE).split()
        _parts.extend(others)
    return _time_part() + part


def new_ids(count: int) -> list[str]:
    """Several ids of the same millisecond."""
    time_part = _time_part()
    return (time_part + _random_parts(count).replace(" ", f" {time_part}")).split()


def _time_part() -> str:
    """The first 13 digits of an id: the millisecond and the version."""
    global _last_time
    last, now_ms = _last_time, time.time_ns() // 1_000_000
    if last[0] != now_ms:
        last = _last_time = now_ms, f"{now_ms:012x}7"
    return last[1]


def _random_parts(count: int) -> str:
    """The last 19 digits of ids, separated by spaces. They are set position by position, all at once."""
    made = bytearray(b"0000000000000000000 " * count)
    digits = _random.randbytes(len(_RANDOM_DIGITS) * count // 2).hex().encode()
    for number, position in enumerate(_RANDOM_DIGITS):
        made[position::20] = digits[number * count : (number + 1) * count]
    made[3::20] = _random.randbytes(count).translate(_VARIANTS)
    return made.decode().rstrip()
