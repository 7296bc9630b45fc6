"""forq: fork per queue. The public names; each is imported when it is first used, so that forqctl starts fast."""

from forq.version import VERSION as __version__

# Not typing's own: importing typing and importlib would cost forqctl a good part of its start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from forq.client import Client, Queue
    from forq.errors import ForqError, Permanent, RetryAt
    from forq.job import Job

_HOMES = {
    "Client": "forq.client",
    "Queue": "forq.client",
    "ForqError": "forq.errors",
    "Permanent": "forq.errors",
    "RetryAt": "forq.errors",
    "Job": "forq.job",
}

__all__ = ["Client", "ForqError", "Job", "Permanent", "Queue", "RetryAt", "__version__"]


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'forq' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
