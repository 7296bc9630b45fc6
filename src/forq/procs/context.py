"""The settings and shared memory that every child inherits at its fork."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forq.log_format import LogFormat
from forq.procs.cgroups import Cgroups
from forq.procs.minutes import MinuteRings
from forq.procs.orphans import ChildPids, TreeMark
from forq.procs.scoreboard import AttemptStats, Scoreboard


@dataclass(frozen=True, kw_only=True)
class Context:
    url: str
    prefix: str
    # Name of this run of the supervisor in Redis.
    processor: str
    # What other supervisors and clients see of this one (broker/supervisors.py): host, pid, version …
    about: Mapping[str, Any]
    heartbeat_seconds: float
    expiry_ms: int
    max_queues: int
    control_socket: str
    # /healthz reports a queue in which jobs wait and none has started or ended for this long.
    health_seconds: float

    scoreboard: Scoreboard
    # None: metrics and dashboard are disabled.
    stats: AttemptStats | None
    # None: the dashboard is disabled.
    rings: MinuteRings | None
    # An eventfd: a worker that starts a batch wakes pulse.
    watch_fd: int

    # The supervisor's children, as opposed to adopted orphans.
    child_pids: ChildPids
    cgroups: Cgroups | None
    tree_lock_fd: int
    tree_mark: TreeMark | None

    logs_dir: Path
    log_max: int
    failed_log_max: int
    log_format: LogFormat
    log_level: str
    redact: tuple[str, ...]
    # Data of the embedded server; None: there is none.
    redis_dir: Path | None

    tracing: str
    titles: str
