"""forq: fork per queue. The public names, each imported at its first use so that forqctl starts fast."""

from forq.version import VERSION as __version__

# typing.TYPE_CHECKING would import typing, which costs forqctl 10 ms of its start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from forq.app.app import App
    from forq.app.completion import as_completed
    from forq.app.flow import Flow, Node
    from forq.app.tasks import JobRef
    from forq.async_batch import AsyncBatch
    from forq.async_client import AsyncClient, AsyncQueue
    from forq.batch import Batch
    from forq.client import Client, Queue
    from forq.errors import ForqError, Permanent, Reschedule, RetryAt, Snooze
    from forq.job import Job, current_job

_MODULES = {
    "App": "forq.app.app",
    "AsyncBatch": "forq.async_batch",
    "AsyncClient": "forq.async_client",
    "AsyncQueue": "forq.async_client",
    "Batch": "forq.batch",
    "Client": "forq.client",
    "Flow": "forq.app.flow",
    "Node": "forq.app.flow",
    "Queue": "forq.client",
    "ForqError": "forq.errors",
    "Permanent": "forq.errors",
    "Reschedule": "forq.errors",
    "RetryAt": "forq.errors",
    "Snooze": "forq.errors",
    "Job": "forq.job",
    "JobRef": "forq.app.tasks",
    "as_completed": "forq.app.completion",
    "current_job": "forq.job",
}

__all__ = [
    "App",
    "AsyncBatch",
    "AsyncClient",
    "AsyncQueue",
    "Batch",
    "Client",
    "Flow",
    "ForqError",
    "Job",
    "JobRef",
    "Node",
    "Permanent",
    "Queue",
    "Reschedule",
    "RetryAt",
    "Snooze",
    "__version__",
    "as_completed",
    "current_job",
]


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'forq' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
