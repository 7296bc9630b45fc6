"""Tests of code that uses forq: jobs in memory, on a private server, or with a real supervisor (docs/guide/testing.md).

Each name is imported at its first use: the pytest plugin imports this package in every run of pytest.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from forq.testing.fake_server import Clock
    from forq.testing.handler_job import job
    from forq.testing.in_memory import Memory, memory
    from forq.testing.in_thread import Server, server
    from forq.testing.processes import CannotStart, Supervisor, supervisor
    from forq.testing.runner import Attempt, LimitReached
    from forq.testing.store import StoredJob

_MODULES = {
    "Attempt": "forq.testing.runner",
    "CannotStart": "forq.testing.processes",
    "Clock": "forq.testing.in_memory",
    "LimitReached": "forq.testing.runner",
    "Memory": "forq.testing.in_memory",
    "Server": "forq.testing.in_thread",
    "StoredJob": "forq.testing.store",
    "Supervisor": "forq.testing.processes",
    "job": "forq.testing.handler_job",
    "memory": "forq.testing.in_memory",
    "server": "forq.testing.in_thread",
    "supervisor": "forq.testing.processes",
}

__all__ = [
    "Attempt",
    "CannotStart",
    "Clock",
    "LimitReached",
    "Memory",
    "Server",
    "StoredJob",
    "Supervisor",
    "job",
    "memory",
    "server",
    "supervisor",
]


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'forq.testing' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
