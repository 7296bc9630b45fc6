"""The settings and shared memory that every child inherits at its fork."""

from dataclasses import dataclass
from pathlib import Path

from forq.log_format import LogFormat
from forq.procs.cgroups import Cgroups
from forq.procs.orphans import ChildPids, TreeMark
from forq.procs.scoreboard import AttemptStats, Scoreboard


@dataclass(frozen=True, kw_only=True)
class Context:
    url: str
    prefix: str
    # This run of the supervisor, as Redis knows it.
    processor: str
    heartbeat_seconds: float
    expiry_ms: int
    max_queues: int
    control_socket: str
    # What shows up in /healthz: for how long a queue may begin and end nothing while jobs wait.
    health_seconds: float

    scoreboard: Scoreboard
    # None: nobody wants to know how long jobs wait and run.
    stats: AttemptStats | None
    # An eventfd on which workers tell pulse that they hold a batch.
    watch_fd: int

    # The supervisor's own children, which are no orphans.
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
    # Of the embedded server; None: there is none.
    redis_dir: Path | None

    tracing: str
    titles: str
