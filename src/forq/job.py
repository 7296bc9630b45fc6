"""The trace context of OpenTelemetry that a job takes along: where it was enqueued, in the words of W3C trace context.

Nothing is imported here that the process has not imported itself: without OpenTelemetry this costs one look at a dict.

A job as its handler sees it: everything but the data, which is an argument of its own.

The payload of a job_assignment, for the bridge and for exec handlers (docs/reference/bridge.md).

Ids that never collide and sort by time (UUIDv7).
"""

import os
import random
import sys
import time
from importlib.util import find_spec
from typing import Any, Protocol

from forq.progress import check_progress

TraceContext = dict[str, str]

# What the setting `tracing` may be.
OFF, OTLP, FILE = "off", "otlp", "file:"
_PACKAGES = {OTLP: "opentelemetry.exporter.otlp.proto.http", FILE: "opentelemetry.sdk"}


def current_trace() -> TraceContext | None:
    """The context of the span that is current in this thread or task; None if there is none."""
    tracing = sys.modules.get("opentelemetry.trace")
    # redis-py imports it wherever it is installed: most processes that have it have no span.
    if tracing is None or not tracing.get_current_span().get_span_context().is_valid:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: TraceContext = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier or None


def can_trace(setting: str) -> bool:
    """Whether the packages are there that this setting needs."""
    try:
        return find_spec(_PACKAGES[FILE if setting.startswith(FILE) else setting]) is not None
    except ModuleNotFoundError:
        return False


class Reporter(Protocol):
    """Who is told of a job's progress. `position`: what its worker's slot says while it runs this job."""

    def report(self, position: int, job_id: str, fence: int, fraction: float, text: str) -> None: ...


class Job:
    __slots__ = (
        "_position",
        "_reporter",
        "enqueued_at",
        "fence",
        "id",
        "identifier",
        "priority",
        "queue",
        "retry_count",
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
    ) -> None:
        self.queue = queue
        self.id = id
        self.identifier = identifier
        self.type = type
        self.priority = priority
        self.enqueued_at = enqueued_at
        # Grows with every attempt at any job of the queue. A handler that passes it on with what it writes elsewhere
        # lets that place refuse an attempt that was given up long ago and woke up late.
        self.fence = fence
        self.retry_count, self.stall_count, self.timeout_count = counts
        # Of the span in which it was enqueued, if there was one.
        self.trace = trace
        # Set by the worker that runs it.
        self._reporter: Reporter | None = None
        self._position = 0

    def progress(self, fraction: float, text: str = "") -> None:
        """Says how far this job is, from 0 to 1, and in words if you like (cut at 200 characters).

        From any thread of the handler's process, as often as you like: it waits for nothing, and Redis is told at most
        ten times per second. InvalidData if it is no such number or no text; it never fails because Redis is away.
        In a process that the handler has forked, and after the job, it does nothing.
        """
        checked = check_progress(fraction, text)
        if self._reporter is not None:
            self._reporter.report(self._position, self.id, self.fence, *checked)

    def __reduce__(self) -> tuple[object, ...]:
        """Another process gets the job without who is told of its progress."""
        counts = (self.retry_count, self.stall_count, self.timeout_count)
        about = (self.queue, self.id, self.identifier, self.type, self.priority, self.enqueued_at, self.fence, counts)
        return Job, (*about, self.trace)

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, identifier={self.identifier!r}, fence={self.fence})"


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
) -> dict[str, Any]:
    """`counts`: retries, stalls, timeouts. Data that came through a bridge is there in the bridge's words too."""
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
    }


# Not the module's own generator, which a user may seed. Seeded by the system; a forked process must not go on with the
# numbers of its parent.
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """48 bits of milliseconds, version 7, 74 random bits, as 32 hex digits."""
    bits = _random.getrandbits(74)
    value = (time.time_ns() // 1_000_000) << 80 | 7 << 76 | (bits >> 62) << 64 | 2 << 62 | (bits & (1 << 62) - 1)
    return f"{value:032x}"
