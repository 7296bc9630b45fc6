"""Tests of code that uses forq: jobs in memory, on a private server, or with a real supervisor (docs/guide/testing.md).

Each name is imported at its first use: the pytest plugin imports this package in every run of pytest.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from forq.testing.clock import Clock
    from forq.testing.memory import Memory, memory
    from forq.testing.runner import Attempt, LimitReached
    from forq.testing.store import StoredJob

_MODULES = {
    "Attempt": "forq.testing.runner",
    "Clock": "forq.testing.clock",
    "LimitReached": "forq.testing.runner",
    "Memory": "forq.testing.memory",
    "StoredJob": "forq.testing.store",
    "memory": "forq.testing.memory",
}

__all__ = ["Attempt", "Clock", "LimitReached", "Memory", "StoredJob", "memory"]


def __getattr__(name: str) -> "Any":
    if name not in _MODULES:
        raise AttributeError(f"module 'forq.testing' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
