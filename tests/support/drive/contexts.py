"""The context that a supervisor gives its processes, for a process that a test runs without one."""

from pathlib import Path
from typing import Any

from forq.broker.keys import DEFAULT_PREFIX
from forq.job import OFF
from forq.log_format import LogFormat
from forq.procs.context import Context
from forq.procs.orphans import ChildPids
from forq.procs.scoreboard import Scoreboard


def context(**changes: Any) -> Context:
    usual: dict[str, Any] = {
        "url": "unix:///nowhere",
        "prefix": DEFAULT_PREFIX,
        "processor": "p",
        "about": {},
        "heartbeat_seconds": 10.0,
        "expiry_ms": 30_000,
        "max_queues": 10,
        "control_socket": "/nowhere",
        "health_seconds": 60.0,
        "stats": None,
        "rings": None,
        "watch_fd": -1,
        "cgroups": None,
        "tree_lock_fd": -1,
        "tree_mark": None,
        "logs_dir": Path("/nowhere"),
        "log_max": 64 * 1024,
        "failed_log_max": 10**6,
        "log_format": LogFormat(json=False),
        "log_level": "info",
        "redact": (),
        "redis_dir": None,
        "tracing": OFF,
        "titles": "full",
    }
    if "scoreboard" not in changes:
        usual["scoreboard"] = Scoreboard.create(4)
    return Context(**{"child_pids": ChildPids(), **usual, **changes})
