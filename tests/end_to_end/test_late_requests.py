"""A request reaches the server after its worker has reconnected: the worker's running job stays its own."""

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forq.broker.scripts import STALE
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.faults.namespaces import NEAR, Wire, why_not, wire
from tests.support.faults.proxy import Proxy

STALE_ANSWER = f"*1\r\n:{STALE}\r\n".encode()
# The lane in a turn of a worker of the main child.
OF_MAIN_CHILD = b"\r\nmain\r\n"


@pytest.fixture
def proxy(server: Server, redis_url: str, tmp_path: Path) -> Iterator[Proxy]:
    with Proxy(server.socket, listen=tmp_path / "proxy.sock") as proxy:
        yield proxy


def starts(forq: Forq) -> Counter[str]:
    return Counter(trace.job for trace in forq.traces("start"))


@pytest.mark.fault("request delivered late")
def test_a_late_turn_does_not_take_a_running_job_away(
    server: Server, redis_url: str, proxy: Proxy, tmp_path: Path
) -> None:
    gate, trace = tmp_path / "gate", tmp_path / "trace"
    with running(redis=proxy.url, trace=trace) as first:
        # A job with a result is settled by a turn, even if the worker waits next.
        first.create("work", "wait_for", keep_done="1m")
        first.wait_for_child("work")
        queue = first.client().queue("work")
        proxy.hold_request(OF_MAIN_CHILD, 3600)
        queue.enqueue("", id="short")
        wait_until(lambda: queue.status()["done"] == 1, what="the short one is settled by another turn")
        queue.enqueue(str(gate), id="long")
        wait_until(lambda: starts(first)["long"] == 1, what="the long one runs")
        with running(redis=redis_url, trace=trace) as second:
            second.create("work", "wait_for")
            second.wait_for_child("work")

            proxy.deliver()
            wait_until(lambda: any(proxy.late_answers()), what="the late turn is answered")
            gate.touch()
            wait_until(lambda: queue.status()["done"] == 2, what="the long one is settled")

            assert starts(first) == {"short": 1, "long": 1}
            assert proxy.late_answers() == [STALE_ANSWER]
            assert first.child("work")["restarts"] == 0


PARTITION_SECONDS, JOB_SECONDS = 18, 25
TURN = re.compile(rb'"FCALL" "forq_turn_\w+" "1" "[^"]+" "\d+" "\w+" "(\w+)" "(\d+)"')


class Spy:
    """Records every turn that reaches the server: its worker and its number."""

    def __init__(self, server: Server) -> None:
        self.turns: list[tuple[str, int]] = []
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(server.socket))
        self._connection.sendall(b"MONITOR\r\n")
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Runs until the server ends."""
        with self._connection, self._connection.makefile("rb") as lines:
            for line in lines:
                if found := TURN.search(line):
                    self.turns.append((found[1].decode(), int(found[2])))

    def late(self) -> list[tuple[str, int]]:
        """Turns that arrived after one with a higher number of the same worker."""
        highest: dict[str, int] = {}
        found = []
        for worker, number in list(self.turns):
            if number < highest.get(worker, 0):
                found.append((worker, number))
            highest[worker] = max(number, highest.get(worker, 0))
        return found


class Inside(Forq):
    """A supervisor in a network namespace."""

    before: list[str]

    def program(self) -> list[str]:
        return [*self.before, *super().program()]


class ServerInside(Server):
    before: list[str]

    def _command(self) -> list[str]:
        return [*self.before, *super()._command()]


@contextmanager
def inside(before: list[str], server: Server, trace: Path) -> Iterator[Forq]:
    forq = Inside(redis=f"redis://{NEAR}:{server.port}", settings='expiry = "60s"\n', trace=trace)
    forq.before = before
    try:
        forq.start()
        yield forq
    finally:
        forq.remove()


@contextmanager
def server_on(laid: Wire) -> Iterator[Server]:
    server = ServerInside(port=6379, settings={"bind": NEAR, "protected-mode": "no"})
    server.before = laid.inside(laid.near)
    with server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.fault("request delivered late")
def test_a_job_runs_once_across_a_partition_on_real_tcp(tmp_path: Path) -> None:
    """The turn that settles a short job is sent during a partition. TCP retransmits it even after the worker gave the
    connection up: it arrives some seconds after the partition, while the worker runs a long job that it claimed over
    another connection."""
    if reason := why_not():
        pytest.skip(reason)
    trace = tmp_path / "trace"
    with wire() as laid, server_on(laid) as server, inside(laid.inside(laid.far), server, trace) as first:
        first.create("work", "sleep")
        first.wait_for_child("work")
        with server.connect() as client:
            prefix = f"unix://{server.socket}"
            queue = Forq(redis=prefix).client().queue("work")
            queue.enqueue(1.0, id="short")
            wait_until(lambda: starts(first)["short"] == 1, what="the short one runs")
            laid.cut()
            cut_at = time.monotonic()
            wait_until(lambda: [t for t in first.traces("end") if t.job == "short"], what="it has ended, unreported")
            spy = Spy(server)
            # The length of the partition is the thing tested, not a wait for a condition.
            time.sleep(PARTITION_SECONDS - (time.monotonic() - cut_at))
            assert client.hlen("forq:queue:{work}:active") == 1
            laid.mend()
        wait_until(lambda: queue.status()["done"] == 1, 60, "the short one is settled")
        queue.enqueue(float(JOB_SECONDS), id="long")
        wait_until(lambda: starts(first)["long"] == 1, 30, "the long one runs")
        with inside(laid.inside(laid.near), server, trace) as second:
            second.create("work", "sleep")
            second.wait_for_child("work")
            wait_until(spy.late, 60, "the turn sent during the partition arrives")
            assert not [t for t in first.traces("end") if t.job == "long"], "it arrived during the long job"
            wait_until(lambda: queue.status()["done"] == 2, JOB_SECONDS + 30, "the long one is settled")
            status = queue.status()
            assert starts(first) == {"short": 1, "long": 1}
            assert (status["waiting"], status["active"]) == (0, 0)
            print(f"\nlate turns: {spy.late()}, starts: {dict(starts(first))}")
