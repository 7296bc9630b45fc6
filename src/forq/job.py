"""A job as its handler sees it: everything but the data, which is an argument of its own."""

from typing import Protocol

from forq.progress import check_progress
from forq.trace_context import TraceContext


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
