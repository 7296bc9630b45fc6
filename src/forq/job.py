"""A job as its handler sees it: everything but the data, which is an argument of its own."""


class Job:
    __slots__ = (
        "enqueued_at",
        "fence",
        "id",
        "identifier",
        "priority",
        "queue",
        "retry_count",
        "stall_count",
        "timeout_count",
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

    def __repr__(self) -> str:
        return f"Job(queue={self.queue!r}, id={self.id!r}, identifier={self.identifier!r}, fence={self.fence})"
