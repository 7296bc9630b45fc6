"""The payload of a job_assignment, for the bridge and for exec handlers (docs/reference/bridge.md)."""

from typing import Any

from forq.trace_context import TraceContext


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
