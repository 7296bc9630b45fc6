"""What the supervisor gives every process that it starts: made once, inherited with the fork.

How much memory a process has.

What a child and its supervisor agree on about stacks: which signal asks for one, and how it reads.
"""

import re
import signal
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


def pss_bytes(pid: int | str = "self") -> int:
    """The memory of a process, each shared page counted in parts; 0 if it cannot be told."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as rollup:
            for line in rollup:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


# A real-time signal: handlers have their own uses for SIGUSR1 and SIGUSR2.
STACK_SIGNAL = signal.SIGRTMIN + 5
STACK_FILE = "forq-stack"
MAX_STACK = 8000

# From here on outwards it is forq's own code.
_ATTEMPT = re.compile(r"^  File \"[^\"\n]*workers/attempt\.py\", line \d+ in attempt$", re.MULTILINE)
_IMPORT = re.compile(r"^  File \"[^\"\n]*workers/handlers\.py\", line \d+ in load_handler$", re.MULTILINE)
_IMPORTLIB = re.compile(r"^  File \"(?:<frozen importlib|[^\"\n]*/importlib/__init__\.py\")")
_HEAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n", re.MULTILINE)


def stack_of_thread(dump: str, thread: int) -> str:
    """The frames of the handler that one thread of the dump runs, the innermost first; all of it if it is not there."""
    heads = list(_HEAD.finditer(dump))
    ends = [head.start() for head in heads[1:]] + [len(dump)]
    for head, end in zip(heads, ends, strict=False):
        if int(head[1], 16) == thread:
            frames = dump[head.end() : end]
            return _ATTEMPT.split(frames)[0].rstrip()[:MAX_STACK]
    return dump.strip()[:MAX_STACK]


def stack_of_import(dump: str) -> str:
    """The frames of a handler's import, the innermost first, without importlib's own; empty if none is under way."""
    for thread in _HEAD.split(dump)[2::2]:
        frames = _IMPORT.split(thread)
        if len(frames) > 1:
            return "\n".join(line for line in frames[0].splitlines() if not _IMPORTLIB.match(line))[:MAX_STACK]
    return ""
