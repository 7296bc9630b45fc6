"""External workers in two languages, and the bridge, killed and frozen at random: no job is lost or run twice."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forq.broker.enqueue import new_job
from forq.broker.journal import Event, read_entry
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.models.journal_replay import Replay
from tests.support.thorough import examples

JOBS = int(os.environ.get("FORQ_TEST_BRIDGE_JOBS", examples(250, 600)))
SEED = int(os.environ.get("FORQ_TEST_SEED", "0"))
EXAMPLES = Path(__file__).parent.parent.parent / "etc" / "examples"
BRIDGE = f"{sys.executable} -m forq.cli bridge"
# Long enough that most kills hit a running job.
JOB_SECONDS = 0.02 if JOBS < 5000 else 0.01
SECONDS = 60 + JOBS / 10

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


class Worker:
    """A worker process in one language, restarted when it has ended."""

    def __init__(self, command: list[str], environ: dict[str, str], log: Path) -> None:
        self._command = command
        self._environ = environ
        self._log = log
        self.frozen_until = 0.0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ, process_group=0
            )

    def look(self) -> None:
        if self.frozen_until and time.monotonic() > self.frozen_until:
            self._signal(signal.SIGCONT)
            self.frozen_until = 0.0
        if self.process.poll() is not None:
            self.process = self._start()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self.frozen_until = 0.0

    def freeze(self, seconds: float) -> None:
        self._signal(signal.SIGSTOP)
        self.frozen_until = time.monotonic() + seconds

    def _signal(self, signum: int) -> None:
        """Signals only the worker; its programs must notice its death, as after an OOM kill."""
        if self.process.poll() is None:
            self.process.send_signal(signum)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def five_workers(forq: Forq, log: Path) -> Iterator[list[Worker]]:
    environ = {**os.environ, "TICK_SECONDS": "0.2", "FORQ_REDIS": forq.url, "FORQ_BRIDGE": f"{BRIDGE} --tick 300ms"}
    node = ["node", str(EXAMPLES / "external_worker.js"), str(forq.directory / "bridge.sock"), "q"]
    shell = ["sh", str(EXAMPLES / "external_worker.sh"), "q"]
    workers = [Worker(command, environ, log) for command in (node, node, node, shell, shell)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


def make_trouble(forq: Forq, workers: list[Worker], chance: random.Random) -> None:
    worker = chance.choice(workers)
    what = chance.random()
    if what < 0.4:
        worker.kill()
    elif what < 0.95:
        worker.freeze(chance.uniform(0.05, 1.5))
    else:
        bridges = [service["pid"] for service in forq.status()["supervisor"]["services"] if "bridge" in service["name"]]
        if bridges[0]:
            os.kill(bridges[0], signal.SIGKILL)


def check_priorities(events: list[Event], priorities: dict[str, int]) -> None:
    """Each assignment took a job of the first priority that had any waiting."""
    waiting: Counter[int] = Counter()
    waits: set[str] = set()

    def enter(job: str) -> None:
        if job not in waits:
            waits.add(job)
            waiting[priorities[job]] += 1

    def leave(job: str) -> None:
        if job in waits:
            waits.remove(job)
            waiting[priorities[job]] -= 1

    for event in events:
        if event.job is None:
            continue
        if event.verb in ("enqueued", "returned", "promoted"):
            enter(event.job)
        elif event.verb == "retried" or event.verb == "scheduled":
            leave(event.job)
        elif event.verb == "claimed":
            first = min(priority for priority, count in waiting.items() if count)
            assert priorities[event.job] == first, event
            leave(event.job)


@pytest.mark.timeout(int(SECONDS) * 2)
@pytest.mark.spec("P2", "P3", "P7", "P21")
def test_workers_that_die_or_freeze_lose_no_job_and_run_none_twice(
    server: Server, redis_url: str, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    log = tmp_path / "workers.log"
    settings = '[[bridge]]\nlisten = "bridge.sock"\ntick = "300ms"\n'
    with running(redis=redis_url, settings=settings) as forq:
        options: dict[str, Any] = {
            "lease": 0.9,
            "max_stalls": 10_000,
            "max_retries": 2,
            "min_backoff": 0.1,
            "journal_max": 1 << 34,
        }
        queue = forq.client().create_queue("q", mode="external", **options)
        priorities = {f"j{n}": chance.randrange(10) for n in range(JOBS)}
        failing = {job for job in priorities if chance.random() < 0.03}
        queue.enqueue_jobs(
            new_job(
                {"command": "sh", "args": "exit 1" if job in failing else f"sleep {JOB_SECONDS}"},
                id=job,
                priority=priority,
            )
            for job, priority in priorities.items()
        )
        with five_workers(forq, log) as workers:
            deadline = time.monotonic() + SECONDS
            trouble_at = time.monotonic()

            def ended() -> bool:
                nonlocal trouble_at
                for worker in workers:
                    worker.look()
                if time.monotonic() > trouble_at:
                    make_trouble(forq, workers, chance)
                    trouble_at = time.monotonic() + chance.uniform(0.1, 0.8)
                status = queue.status()
                return bool(status["done"] + status["dead"] == JOBS)

            wait_until(ended, seconds=deadline - time.monotonic(), what=f"all jobs ended: {queue.status()}")
        status = queue.status()
        left = [status[state] for state in ("waiting", "scheduled", "active", "retry", "blocked")]
        assert left == [0, 0, 0, 0, 0]
        with server.connect() as redis:
            entries = [fields for _, fields in redis.xrange(f"{queue_base(DEFAULT_PREFIX, 'q')}:events")]
    Replay().read_all(entries)
    events = [event for fields in entries for event in read_entry(fields)]
    check_priorities(events, priorities)

    done = Counter(event.job for event in events if event.verb == "done")
    dead = Counter(event.job for event in events if event.verb == "dead")
    assert set(done) == set(priorities) - failing
    assert set(dead) == failing
    assert set(done.values()) == {1}

    lines = [line.split() for line in log.read_text(errors="replace").splitlines()]
    accepted = Counter(
        (job, int(fence)) for word, job, fence in (line for line in lines if len(line) == 3) if word == "accepted"
    )
    assert set(accepted.values()) == {1}, "no assignment was accepted twice"
    by_fence = {(event.job, event.fence) for event in events if event.verb == "done"}
    assert by_fence <= set(accepted), "a worker finished a job that it had not accepted"
    stalls = Counter(event.cause for event in events if event.verb == "stalled")
    returned = sum(event.verb == "returned" for event in events)
    print(f"jobs={JOBS} done={len(done)} dead={len(dead)} stalled={dict(stalls)} returned={returned}")
    assert stalls["silent"] > 0
