"""Fuzz: no input makes the control socket or a bridge crash, leak, or delay other clients for long.

A short run; `make fuzz N=1000000` is the long one.
"""

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.fuzz_drive import Driver, open_many
from tests.end_to_end.fuzz_inputs import Inputs
from tests.end_to_end.fuzz_pinger import Pinger, shown
from tests.support.drive.bridge import accepts
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.thorough import examples

COUNT = int(os.environ.get("FORQ_TEST_FUZZ", examples(1500, 4000)))
CONNECTIONS = int(os.environ.get("FORQ_TEST_FUZZ_CONNECTIONS", "1200"))
SEED = int(os.environ.get("FORQ_TEST_SEED", "0")) or random.randrange(1, 10**6)
# Growth of caches and the allocator; a leak of 20 bytes per input shows in a million.
GROWTH_BYTES = 16 * 1024 * 1024
# Opened by the first request that needs them, and kept: leash and pidfd of the warden, subscriptions of the clerk.
LAZY_FDS = {"supervisor": 2, "clerk": 2}
# During a flood that keeps both CPUs busy.
PING_MS = 2000.0

pytestmark = pytest.mark.timeout(120 + COUNT // 100)

JOB: dict[str, Any] = {"name": "box", "id": "a"}
VERBS: dict[str, dict[str, Any]] = {
    "ping": {},
    "version": {},
    "schedules": {},
    "status": {"names": ["box"], "memory": False},
    "jobs": {"name": "box", "state": "waiting", "limit": 10, "after": None},
    **dict.fromkeys(("job", "why", "cancel", "remove", "kill", "dead.show", "dead.retry", "dead.discard"), JOB),
    "push": {**JOB, "data": {"n": 1}, "identifier": "i", "priority": 5, "run_in": 60, "token": "t"},
    "push_many": {"name": "box", "jobs": [{"data": 1}, {"data": 2, "id": "b"}]},
    "recover": {"name": "box", "jobs": [{"data": 1, "id": "c", "token": "c"}]},
    "dequeue": {"name": "box", "wait": 0.001},
    "await": {"name": "gate", "wait": 0.001},
    "ack": {**JOB, "fence": 1, "awaiter": "w"},
    "watch": {**JOB, "wait": 0.001},
    "logs": {"name": "box", "lines": 5},
    "stack": {"name": "box"},
    "schedule": {"name": "box", "key": "k", "every": "1h", "dry_run": True},
    "trigger": {"name": "box", "key": "k"},
    "unschedule": {"name": "box", "key": "k"},
    "dead.list": {"name": "box", "limit": 5},
    "queue.set": {"name": "box", "options": {"max_items": 100}},
    "queue.create": {"name": "box", "mode": "on_request", "options": {}},
    "queue.pause": {"name": "gate"},
    "queue.resume": {"name": "gate"},
    "no.such.verb": {"name": "box"},
}
LISTED: dict[str, Any] = {"queue_name": "fuzz"}
HELD: dict[str, Any] = {"queue_name": "fuzz", "worker_uuid": "w1", "uuid": "a"}
TOLD: dict[str, Any] = {**HELD, "progress": 0.5, "text": "half"}
TOPICS: dict[str, dict[str, Any]] = {
    "add_job": {"queue_name": "fuzz", "uuid": "a", "command": "c", "args": {"x": 1}, "priority": 5},
    "worker_idle": {"queue_name": "fuzz", "worker_uuid": "w1"},
    **dict.fromkeys(("job_accepted", "job_finished", "worker_finished"), HELD),
    **dict.fromkeys(("worker_progress", "worker_busy"), TOLD),
    "job_failed": {**HELD, "error": {"name": "E", "message": "m"}, "kind": "retriable"},
    **dict.fromkeys(("list_jobs", "list_workers", "list_dispatched", "list_progress"), LISTED),
    "del_job": {"queue_name": "fuzz", "uuid": "a"},
    "tick": {},
    "no_such_topic": {},
}


def as_request(method: str, params: Any, random: random.Random) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": random.randrange(10**6), "method": method, "params": params}


def as_message(topic: str, payload: Any, random: random.Random) -> dict[str, Any]:
    return {"topic": topic, "payload": payload}


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


class Fuzzed:
    """Processes under test: their resources before and after."""

    def __init__(self, name: str, pids: dict[str, int], pinger: Pinger) -> None:
        self._name = name
        self._pids = pids
        self._pinger = pinger

    def endure(self, driver: Driver, path: Path) -> None:
        driver.send(max(500, COUNT // 20))
        quiet_fds = self._fds()
        before = self._memory()
        calm = self._pinger.wait_for(50)
        driver.send(COUNT - driver.sent.lines)
        during = self._pinger.take()
        let_in, turned_away = open_many(path, CONNECTIONS)
        meanwhile = self._pinger.take()
        wait_until(lambda: self._none_more_than(quiet_fds), 60, what=f"descriptors are closed, as before: {quiet_fds}")
        grown = {name: after - before[name] for name, after in self._memory().items()}
        print(f"\n{self._name}: seed {SEED}, {driver.sent}; {let_in} connections let in, {turned_away} turned away")
        print(f"  ping before: {shown(calm)}")
        print(f"  ping during the inputs: {shown(during)}")
        print(f"  ping during the connections: {shown(meanwhile)}")
        print(f"  descriptors before {quiet_fds}, after {self._fds()}; memory grown (bytes): {grown}")
        assert driver.sent.lines >= COUNT
        assert let_in > 0
        assert all(growth < GROWTH_BYTES for growth in grown.values()), grown
        assert during[int(len(during) * 0.99)] < PING_MS
        assert meanwhile[-1] < PING_MS * 5

    def _none_more_than(self, before: dict[str, int]) -> bool:
        return all(fds <= before[name] + LAZY_FDS.get(name, 0) for name, fds in self._fds().items())

    def _fds(self) -> dict[str, int]:
        return {name: psutil.Process(pid).num_fds() for name, pid in self._pids.items()}

    def _memory(self) -> dict[str, int]:
        return {name: private_bytes(pid) for name, pid in self._pids.items()}


@contextmanager
def pinging(path: Path, request: dict[str, object], out: Path) -> Iterator[Pinger]:
    pinger = Pinger(path, request, out)
    try:
        pinger.wait_for(1)
        yield pinger
    finally:
        pinger.close()


def test_the_control_socket_survives_any_input(tmp_path: Path) -> None:
    # No third queue: if the inputs happened to create one, its descriptors would rightly stay.
    with running(settings="max_queues = 2\n") as forq:
        forq.ctl("create", "box", "--mode", "on_request", "--set", "max_items=100")
        forq.ctl("create", "gate", "--mode", "auto_release")
        socket = forq.state_dir / "control.sock"
        services = forq.status()["supervisor"]["services"]
        pids = {"supervisor": forq.pid} | {s["name"]: s["pid"] for s in services if s["name"] == "clerk"}
        ask = {"jsonrpc": "2.0", "id": "p", "method": "ping"}
        inputs = Inputs(SEED, VERBS, as_request)

        def question(number: int) -> bytes:
            return json.dumps({**ask, "id": f"sentinel-{number}"}).encode() + b"\n"

        with pinging(socket, dict(ask), tmp_path / "pings") as pinger:
            driver = Driver(socket, inputs, question, lambda number: f'"sentinel-{number}"'.encode(), SEED)
            Fuzzed("control socket", pids, pinger).endure(driver, socket)
        check_unharmed(forq, services)


def check_unharmed(forq: Forq, services: list[dict[str, Any]]) -> None:
    status = forq.status()
    assert status["supervisor"]["services"] == services, "no service has died"
    assert forq.process is not None
    assert forq.process.poll() is None
    said = forq.log
    for trouble in ("Traceback", "verb failed", "request failed", "internal error"):
        at = said.find(trouble)
        assert at < 0, said[max(0, at - 200) : at + 3000]


def test_a_bridge_survives_any_input(tmp_path: Path) -> None:
    path = tmp_path / "bridge.sock"
    with Server() as server, fuzzed_bridge(server.url, path) as (process, complaints):
        ask = {"topic": "list_jobs", "payload": {"queue_name": "calm"}}
        inputs = Inputs(SEED, TOPICS, as_message)

        def question(number: int) -> bytes:
            return json.dumps({"topic": f"sentinel-{number}", "payload": {}}).encode() + b"\n"

        with pinging(path, dict(ask), tmp_path / "pings") as pinger:
            driver = Driver(path, inputs, question, lambda number: f"'sentinel-{number}'".encode(), SEED)
            Fuzzed("bridge", {"bridge": process.pid}, pinger).endure(driver, path)
        assert process.poll() is None
        assert complaints == []


@contextmanager
def fuzzed_bridge(url: str, path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", list[bytes]]]:
    """The bridge, and its stderr lines other than refusals of a line."""
    command = [sys.executable, "-m", "forq.cli", "bridge", "--redis", url, "--listen", str(path), "--max-queues", "3"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    complaints: list[bytes] = []
    reader = threading.Thread(target=_read_complaints, args=(process, complaints.append), daemon=True)
    reader.start()
    try:
        wait_until(lambda: accepts(path), what="it listens")
        yield process, complaints
    finally:
        process.terminate()
        process.wait(30)
        reader.join(10)


def _read_complaints(process: "subprocess.Popen[bytes]", found: Callable[[bytes], None]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if b"Traceback" in line or b" ERROR " in line:
            found(line)
