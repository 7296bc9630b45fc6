"""The peers: the settings of each, and how its program is started.

A peer's program (peers/NAME_peer.*) implements the verbs described in peers/verbs.py.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from benchmarks import installing, released
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
    # The server that keeps its jobs: a name of servers.py.
    database: str = "redis"
    command: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    version: str = ""
    released: date | None = None
    # What readers must know about its version.
    note: str = ""
    # TERM lets it clean up outside its own process; others are killed.
    polite: bool = False

    def verb(self, *arguments: object) -> list[str]:
        return [*self.command, *(str(argument) for argument in arguments)]

    def full_environ(self, **more: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("FORQ_", "BENCH_"))}
        return {**clean, **self.environ, **more}


def _python(
    *packages: str, undeclared: tuple[str, ...] = (), driver: str = "redis", **environ: str
) -> Callable[[Peer], None]:
    """`packages`: the queue first. `undeclared`: dependencies that the packages import without declaring them.
    `driver`: the client library of its server. `environ`: settings that the queue reads from its environment."""

    def install(peer: Peer) -> None:
        drivers = ["redis[hiredis]"] if driver == "redis" else [driver]
        python = installing.python_venv(peer.name, [*packages, *undeclared, *drivers])
        peer.command = [str(python), str(PROGRAMS / f"{peer.name}_peer.py")]
        peer.environ = {"PYTHONPATH": str(PROGRAMS), **environ}
        peer.version = installing.python_versions(python, [*packages, driver])
        name, version = peer.version.partition(",")[0].split()
        peer.released = released.on_pypi(name, version)

    return install


_streaq = _python("streaq", "uvloop", driver="coredis")


def _procrastinate(peer: Peer) -> None:
    programs, environ = installing.postgres_programs()
    _python("procrastinate", "uvloop", driver="psycopg[binary,pool]")(peer)
    assignments = [f"{key}={value}" for key, value in environ.items()]
    version = installing.run(["env", *assignments, str(programs / "postgres"), "--version"])
    peer.version += f", PostgreSQL {version.split()[2]}"


def _forq(peer: Peer) -> None:
    peer.command = [sys.executable, str(PROGRAMS / f"{peer.name.replace(' ', '_')}_peer.py")]
    peer.environ = {"PYTHONPATH": ":".join(filter(None, [str(PROGRAMS), os.environ.get("PYTHONPATH")]))}
    peer.version = f"forq {VERSION}"
    peer.note = "this commit"


def _bullmq(peer: Peer) -> None:
    peer.cwd = installing.node_modules(["bullmq", "ioredis"])
    node = shutil.which("node")
    assert node is not None, "node_modules has looked for it"
    peer.command = [node, str(PROGRAMS / "bullmq_peer.js")]
    code = "['bullmq', 'ioredis'].map((name) => require(`./node_modules/${name}/package.json`).version).join(' ')"
    bullmq, ioredis = installing.run([node, "-p", code], cwd=peer.cwd).split()
    peer.version = f"bullmq {bullmq}, ioredis {ioredis}, node {installing.run([node, '--version']).strip()}"
    peer.released = released.on_npm(shutil.which("npm") or "npm", "bullmq", bullmq)


def _sidekiq(peer: Peer) -> None:
    root = installing.sidekiq_root()
    peer.environ = installing.ruby_environ(root)
    # env sets the library path for Ruby alone: the harness's own programs must not see it.
    assignments = [f"{key}={value}" for key, value in peer.environ.items()]
    ruby = ["env", *assignments, str(root / "usr/bin/ruby")]
    peer.command = [*ruby, str(PROGRAMS / "sidekiq_peer.rb")]
    code = "require 'sidekiq'; puts \"sidekiq #{Sidekiq::VERSION}, ruby #{RUBY_VERSION}\""
    peer.version = installing.run([*ruby, "-e", code]).strip()
    peer.released = released.in_debian(root, "ruby-sidekiq")
    peer.note = "Debian's package; newer versions are only on rubygems.org"


def roster() -> list[Peer]:
    same = "the same"
    at_once = "bulk: 20 calls at a time"
    return [
        Peer("forq", "defaults: journal, fences and counts on", same, 50_000, _forq, polite=True),
        Peer("sidekiq", "5 threads, hiredis", same, 9_000, _sidekiq),
        Peer("bullmq", "concurrency 100, removeOnComplete", same, 8_000, _bullmq),
        Peer("huey", "2 threads, blocking, no results", same, 5_000, _python("huey"), bulk=False),
        Peer(
            "dramatiq",
            "8 threads, prefetch 100, no middleware but Retries",
            same,
            4_000,
            _python("dramatiq", dramatiq_queue_prefetch="100"),
            bulk=False,
        ),
        Peer(
            "taskiq",
            f"uvloop, list broker, 100 tasks, prefetch 100; {at_once}",
            "stream broker",
            2_500,
            _python("taskiq", "taskiq-redis", "uvloop"),
        ),
        Peer(
            "docket",
            "uvloop, 500 tasks, minimum_check_interval 50 ms, execution_ttl 0",
            "redelivery_timeout 10 s",
            1_000,
            _python("pydocket", "uvloop"),
        ),
        Peer("streaq", "uvloop, optimized coredis, 32 tasks, no results", same, 2_000, _streaq),
        Peer(
            "saq",
            f"uvloop, 50 jobs, ttl -1; {at_once}",
            "heartbeat and sweep 10 s",
            1_000,
            _python("saq", "uvloop", undeclared=("typing_extensions",)),
        ),
        Peer(
            "celery",
            "pool solo, prefetch 64, no results, gossip, mingle, heartbeat or rate limits",
            "prefork, acks_late, reject_on_worker_lost",
            1_000,
            _python("celery", undeclared=("packaging",)),
            bulk=False,
        ),
        Peer(
            "arq",
            f"uvloop, max_jobs 100, poll_delay 0.05, no results; {at_once}",
            same,
            1_000,
            _python("arq", "uvloop"),
        ),
        Peer("rq", "SimpleWorker, JSON, result_ttl 0", "Worker (forks per job), Retry(max=3)", 250, _python("rq")),
        Peer(
            "procrastinate",
            "PostgreSQL without fsync, uvloop, 10 jobs, 11 connections, done jobs deleted",
            "stalled jobs retried every minute",
            300,
            _procrastinate,
            database="postgres",
        ),
    ]


def task_roster() -> list[Peer]:
    """A forq task, a forq handler, and the Python peers with typed tasks: the same job with two typed arguments."""
    task = Peer("forq task", "app.task, defaults", "the same", 50_000, _forq, polite=True)
    return [task, *(peer for peer in roster() if peer.name in {"forq", "taskiq", "dramatiq", "celery"})]
