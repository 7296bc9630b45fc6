"""The parts of a run: a server, three proxies in front of it, two supervisors, producers.

A fault that needs a part undisturbed by others holds it (`take`, `release`).
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import redis

from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.errors import ExitCode
from tests.chaos.ground import GROUND, Ground
from tests.chaos.producer import COROUTINES, ONCE, REPEATS
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq
from tests.support.drive.wait import wait_until
from tests.support.faults.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
QUEUES = (*ONCE, REPEATS)
PRODUCERS = 3
EXPIRY_SECONDS = 1.5
# Patience with a busy machine.
_OPEN_SECONDS = 90.0
_HASTE_MS = 2 * 3600 * 1000
# Their numbers were reserved that much earlier.
_AGE_MEMBERS = """
local members = redis.call('HGETALL', KEYS[1])
for at = 1, #members, 2 do
  local place, seconds, parent = string.match(members[at + 1], '^(.*) (%d+) (%d+)$')
  redis.call('HSET', KEYS[1], members[at], string.format('%s %d %s', place, seconds - ARGV[1], parent))
end
"""
_UNENDED = (b"open", b"sealed", b"cancelled")

_SETTINGS = f"""
heartbeat = "300ms"
expiry = "{EXPIRY_SECONDS}s"
"""
# The journal keeps everything for the audit; `plain` keeps no done job, `kept` has two main processes, `crowd` runs
# several jobs in one process, and `coroutines` on one event loop.
_QUEUE = """
[queues.{name}]
handler = "chaotic:{handler}"
fail_handler = "chaotic:on_fail"
path = ["{path}"]
timeout = "1s"
max_retries = 2
max_timeouts = 1
min_backoff = "20ms"
max_backoff = "100ms"
fail_min_backoff = "20ms"
fail_max_backoff = "100ms"
stop_grace = "2s"
size = 2
journal_max = "1gb"
done_max = 1000000
dead_max = 1000000
{more}
"""
_MORE = {
    "kept": 'keep_done = "1d"\nprocesses = 2',
    "crowd": 'keep_done = "1d"\nconcurrency = 3',
    COROUTINES: 'keep_done = "1d"\nconcurrency = 3',
    "plain": "retry_lane_retries = 1",
}
_HANDLERS = {COROUTINES: "handle_async"}


class Supervisor(Forq):
    """One of the two: with crash points, connected through its own proxy."""

    def __init__(self, number: int, proxy: Proxy, ground: Ground) -> None:
        queues = [
            _QUEUE.format(name=name, handler=_HANDLERS.get(name, "handle"), path=HANDLERS, more=_MORE.get(name, ""))
            for name in QUEUES
        ]
        super().__init__(redis=proxy.url, settings=_SETTINGS + "".join(queues), trace=ground.trace)
        self.name = f"supervisor {number}"
        self.proxy = proxy
        # Killed by the nemesis and not restarted yet.
        self.down = False
        self._ground = ground

    def program(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.supervisor"]

    def environ(self) -> dict[str, str]:
        return {**super().environ(), GROUND: str(self._ground.directory), "PYTHONPATH": str(ROOT)}

    def start(self, *, ready: bool = True) -> None:
        super().start(ready=ready)
        self.down = False

    def kill(self) -> None:
        assert self.process is not None
        self.down = True
        self.process.kill()
        self.process.wait()

    def children(self) -> list[tuple[int, str]]:
        """(pid, title) of its processes, as `ps` shows them."""
        try:
            found = [(child.pid, " ".join(child.cmdline())) for child in psutil.Process(self.pid).children()]
        except psutil.Error:
            return []
        return [(pid, title.strip()) for pid, title in found if title.startswith("forq: ")]

    def queue_children(self) -> list[tuple[int, str]]:
        return [(pid, title) for pid, title in self.children() if title.split(" ")[1] in QUEUES]


class Stage:
    def __init__(self, directory: Path, seed: int, misdeeds: list[str]) -> None:
        self.ground = Ground(directory)
        self.ground.prepare()
        self.server = Server(appendonly=True)
        # Short paths: a socket's path has at most 107 characters.
        self._sockets = Path(tempfile.mkdtemp(prefix="forq-"))
        self.supervisors: list[Supervisor] = []
        self.proxies: list[Proxy] = []
        self.producers: list[subprocess.Popen[bytes]] = []
        self.exits: list[str] = []
        self._producer_number = 0
        self._seed = seed
        self._misdeeds = misdeeds
        self._taken: set[str] = set()
        self._hastened_at = 0.0

    def open(self) -> None:
        self.server.start()
        for number in range(3):
            self.proxies.append(Proxy(self.server.socket, listen=self._sockets / f"{number}.sock"))
        for number in (1, 2):
            self.supervisors.append(Supervisor(number, self.proxies[number], self.ground))
        for supervisor in self.supervisors:
            supervisor.start(ready=False)
        for supervisor in self.supervisors:
            wait_until(supervisor._is_up, _OPEN_SECONDS, f"{supervisor.name} is up")
        wait_until(self._queues_exist, _OPEN_SECONDS, "every queue exists")
        for _ in range(PRODUCERS):
            self.start_producer()

    def _queues_exist(self) -> bool:
        with self.connect() as client:
            return bool(client.exists(*(f"{DEFAULT_PREFIX}queue:{{{name}}}:options" for name in QUEUES)) == len(QUEUES))

    def start_producer(self) -> None:
        number = self._producer_number
        self._producer_number += 1
        verdicts = self.ground.verdicts / str(number)
        command = [sys.executable, "-m", "tests.chaos.producer", self.proxies[0].url, str(verdicts)]
        command += [str(self._seed * 1000 + number), *self._misdeeds]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.producers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ))

    def connect(self) -> redis.Redis:
        return self.server.connect()

    @contextmanager
    def registry(self) -> Iterator[Registry]:
        link = Link(self.server.url, name="chaos")
        try:
            yield Registry(link, DEFAULT_PREFIX)
        finally:
            link.close()

    def take(self, *parts: str) -> bool:
        """Takes all of them, or none if one is taken."""
        if self._taken & set(parts):
            return False
        self._taken |= set(parts)
        return True

    def release(self, *parts: str) -> bool:
        """Gives them back; returns True, for use in `undo`."""
        self._taken -= set(parts)
        return True

    def any_supervisor(self, chance: random.Random) -> Supervisor | None:
        """A supervisor that is up and not taken."""
        free = [each for each in self.supervisors if not each.down and each.name not in self._taken]
        return chance.choice(free) if free else None

    def watch(self) -> None:
        """Restarts a supervisor that exited, as systemd would, and records its exit code."""
        for supervisor in self.supervisors:
            if not supervisor.down and supervisor.process is not None and supervisor.process.poll() is not None:
                code = supervisor.process.returncode
                if code != ExitCode.EVICTED_TOO_OFTEN:
                    self.exits.append(f"{supervisor.name} ended with {code}: {supervisor.log[-500:]}")
                supervisor.start(ready=False)

    def batches_have_ended(self) -> bool:
        """Lets hours pass, once a second, for what is looked after from time to time: a batch that its producer has not
        sealed is abandoned, and what was never stored is lost. Ended batches are kept."""
        hastens = time.monotonic() > self._hastened_at + 1.0
        if hastens:
            self._hastened_at = time.monotonic()
        open_ones = 0
        with self.connect() as client:
            for name in QUEUES:
                base = queue_base(DEFAULT_PREFIX, name)
                states: dict[bytes, bytes] = client.hgetall(f"{base}:batches")
                unended = {batch for batch, state in states.items() if state.split(b" ")[0] in _UNENDED}
                open_ones += len(unended)
                checks: Any = client.zrange(f"{base}:checks", 0, -1, withscores=True) if hastens else []
                for what, at_ms in checks:
                    if what[:1] == b"j" or what[1:] in unended:
                        client.zadd(f"{base}:checks", {what: at_ms - _HASTE_MS}, xx=True)
                if hastens:
                    client.eval(_AGE_MEMBERS, 1, f"{base}:batch:members", _HASTE_MS // 1000)
        return open_ones == 0

    def heal(self) -> None:
        """Makes everything up and reachable; the producers continue until they are stopped."""
        if self.server.running:
            os.kill(self.server.pid, signal.SIGCONT)
        else:
            self.server.start()
        with self.connect() as client:
            client.config_set("maxmemory", 0)
        for proxy in self.proxies:
            proxy.heal()
        for supervisor in self.supervisors:
            if supervisor.down:
                supervisor.start(ready=False)
        for path in self.ground.armed.iterdir():
            path.unlink(missing_ok=True)
        with self.registry() as registry:
            for name in QUEUES:
                registry.pause(name, paused=False)

    def stop_producers(self) -> None:
        for producer in self.producers:
            if producer.poll() is None:
                producer.terminate()
        for producer in self.producers:
            producer.wait(30)

    def stop_supervisors(self) -> None:
        for supervisor in self.supervisors:
            code = supervisor.stop(60.0)
            if code != ExitCode.STOPPED:
                self.exits.append(f"{supervisor.name} was stopped and ended with {code}")

    def close(self) -> None:
        """Kills by pid whatever is left."""
        for producer in self.producers:
            if producer.poll() is None:
                producer.kill()
                producer.wait()
        for supervisor in self.supervisors:
            supervisor.remove()
        for proxy in self.proxies:
            proxy.close()
        self.server.remove()
        shutil.rmtree(self._sockets, ignore_errors=True)
