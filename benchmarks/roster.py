"""The peers: the settings of each, and how its program is started.

A peer's program (peers/NAME_peer.*) implements the verbs described in peers/verbs.py.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import installing
from forq.version import VERSION

PROGRAMS = Path(__file__).parent / "peers"


@dataclass
class Peer:
    """One peer. `install` fills in command, environ and version, or raises Unavailable."""

    name: str
    settings: str
    # Settings with which it loses least when a worker is killed, if they differ.
    durable: str
    # Expected jobs per second of one process: only decides the number of jobs of a trial.
    nominal_rate: int
    install: Callable[["Peer"], None]
    bulk: bool = True
    command: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    version: str = ""
    # TERM lets it clean up outside its own process; others are killed.
    polite: bool = False

    def verb(self, *arguments: object) -> list[str]:
        return [*self.command, *(str(argument) for argument in arguments)]

    def full_environ(self, **more: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("FORQ_", "BENCH_"))}
        return {**clean, **self.environ, **more}


def _python(*packages: str, undeclared: tuple[str, ...] = ()) -> Callable[[Peer], None]:
    """`undeclared`: dependencies that the packages import without declaring them."""

    def install(peer: Peer) -> None:
        python = installing.python_venv(peer.name, [*packages, *undeclared, "redis[hiredis]"])
        peer.command = [str(python), str(PROGRAMS / f"{peer.name}_peer.py")]
        peer.environ = {"PYTHONPATH": str(PROGRAMS)}
        peer.version = installing.python_versions(python, [*packages, "redis"])

    return install


def _forq(peer: Peer) -> None:
    peer.command = [sys.executable, str(PROGRAMS / f"{peer.name.replace(' ', '_')}_peer.py")]
    peer.environ = {"PYTHONPATH": ":".join(filter(None, [str(PROGRAMS), os.environ.get("PYTHONPATH")]))}
    peer.version = f"forq {VERSION}"


def _bullmq(peer: Peer) -> None:
    peer.cwd = installing.node_modules(["bullmq", "ioredis"])
    node = shutil.which("node")
    assert node is not None, "node_modules has looked for it"
    peer.command = [node, str(PROGRAMS / "bullmq_peer.js")]
    version = installing.run([node, "-p", "require('./node_modules/bullmq/package.json').version"], cwd=peer.cwd)
    peer.version = f"bullmq {version.strip()}, node {installing.run([node, '--version']).strip()}"


def _sidekiq(peer: Peer) -> None:
    root = installing.sidekiq_root()
    peer.environ = installing.ruby_environ(root)
    # env sets the library path for Ruby alone: the harness's own programs must not see it.
    assignments = [f"{key}={value}" for key, value in peer.environ.items()]
    ruby = ["env", *assignments, str(root / "usr/bin/ruby")]
    peer.command = [*ruby, str(PROGRAMS / "sidekiq_peer.rb")]
    code = "require 'sidekiq'; puts \"sidekiq #{Sidekiq::VERSION}, ruby #{RUBY_VERSION}\""
    peer.version = installing.run([*ruby, "-e", code]).strip()


def roster() -> list[Peer]:
    same = "the same"
    return [
        Peer("forq", "defaults: journal, fences and counts on", same, 50_000, _forq, polite=True),
        Peer("sidekiq", "10 threads", same, 7_000, _sidekiq),
        Peer("bullmq", "concurrency 50, removeOnComplete", same, 8_000, _bullmq),
        Peer("huey", "4 threads, blocking, no results", same, 5_000, _python("huey"), bulk=False),
        Peer("dramatiq", "8 threads, no middleware but Retries", same, 2_500, _python("dramatiq"), bulk=False),
        Peer(
            "taskiq",
            "list broker, 100 tasks, prefetch 100",
            "stream broker",
            1_000,
            _python("taskiq", "taskiq-redis"),
            bulk=False,
        ),
        Peer(
            "celery",
            "pool solo, prefetch 64, no results, gossip, mingle or heartbeat",
            "prefork, acks_late, reject_on_worker_lost",
            800,
            _python("celery", undeclared=("packaging",)),
            bulk=False,
        ),
        Peer("arq", "max_jobs 100, no results; bulk: 100 calls at a time", same, 500, _python("arq")),
        Peer("rq", "SimpleWorker, result_ttl 0", "Worker (forks per job), Retry(max=3)", 180, _python("rq")),
    ]


def task_roster() -> list[Peer]:
    """A forq task, a forq handler, and the Python peers with typed tasks: the same job with two typed arguments."""
    task = Peer("forq task", "app.task, defaults", "the same", 50_000, _forq, polite=True)
    return [task, *(peer for peer in roster() if peer.name in {"forq", "taskiq", "dramatiq", "celery"})]
