"""Services whose loop hangs are replaced; services in an announced long call are not."""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forq.procs.liveness import LATE_SECONDS, SLICE_SECONDS, AwakeTime, expect_busy, mark_pass
from forq.procs.loop import Loop, service_loop
from forq.services.rpc import RpcServer
from forq.supervisor.child import ChildTable
from forq.supervisor.service import Service
from forq.supervisor.unresponsive import ServiceWatch

Run = Callable[[socket.socket], int]
# Longest pass of the loop while a test waits.
PASS_SECONDS = 0.02


def serve(leash: socket.socket, verbs: dict[str, Callable[[dict[str, object]], object]] | None = None) -> int:
    """The loop of a service."""
    loop = service_loop()
    RpcServer(loop, leash, verbs or {})
    loop.run()
    return 0


class Watched:
    """One service under a real loop. Counts how often it was shown as unresponsive."""

    def __init__(self, run: Run) -> None:
        self.loop = Loop()
        self.children = ChildTable(self.loop, (), None)
        self.children.watch_stops()
        self.service = Service(self.children, "watched", run, on_stop=lambda: self.watch.check_soon())
        self.watch = ServiceWatch(self.loop, lambda: (self.service,))
        self.service.start()
        self.watch.start()
        self.seen_unresponsive = False

    def run_until(self, condition: Callable[[], bool], seconds: float = 30.0) -> float:
        """Returns how long that took, without the time that a loaded machine kept this process waiting: the watch does
        not count that either."""
        began = passed = time.monotonic()
        awake_seconds = 0.0
        while not condition():
            assert time.monotonic() - began < seconds, "the condition was not met in time"
            self.loop.tick(PASS_SECONDS)
            self.seen_unresponsive |= self.service.unresponsive
            now = time.monotonic()
            awake_seconds, passed = awake_seconds + min(now - passed, PASS_SECONDS), now
        return awake_seconds

    def replaced(self) -> bool:
        return self.service.restarts > 0 and self.service.child is not None and not self.service.unresponsive

    def close(self) -> None:
        self.watch.stop()
        self.service.kill()
        self.run_until(lambda: self.service.child is None)
        self.loop.close()


@pytest.fixture
def started() -> Iterator[Callable[[Run], Watched]]:
    all_of_them: list[Watched] = []

    def start(run: Run) -> Watched:
        all_of_them.append(Watched(run))
        return all_of_them[-1]

    yield start
    for one in all_of_them:
        one.close()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = logging.getLogger("forq").level
    logging.getLogger("forq").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("forq").setLevel(before)


def test_an_idle_service_answers_pings_and_is_not_replaced(started: Callable[[Run], Watched]) -> None:
    one = started(serve)
    pid = one.service.child and one.service.child.pid
    until = time.monotonic() + 5
    one.run_until(lambda: time.monotonic() > until)
    assert (one.service.child and one.service.child.pid, one.service.restarts) == (pid, 0)
    assert not one.seen_unresponsive


@pytest.mark.fault("service frozen")
def test_a_service_that_never_returns_to_its_loop_is_replaced(
    started: Callable[[Run], Watched], tmp_path: Path
) -> None:
    def spin(leash: socket.socket) -> int:
        if (tmp_path / "spun").exists():
            return serve(leash)
        (tmp_path / "spun").touch()
        mark_pass()
        while True:
            pass

    one = started(spin)
    one.run_until(lambda: (tmp_path / "spun").exists())
    took = one.run_until(one.replaced)
    assert one.seen_unresponsive
    assert took < 5


def test_a_stopped_service_is_replaced_even_if_it_announced_a_long_call(
    started: Callable[[Run], Watched], tmp_path: Path
) -> None:
    def busy(leash: socket.socket) -> int:
        if (tmp_path / "busy").exists():
            return serve(leash)
        expect_busy(3600)
        (tmp_path / "busy").touch()
        time.sleep(3600)
        return 0

    one = started(busy)
    one.run_until(lambda: (tmp_path / "busy").exists())
    assert one.service.child is not None
    os.kill(one.service.child.pid, signal.SIGSTOP)
    assert one.run_until(one.replaced) < 5
    assert one.seen_unresponsive


def test_a_service_in_an_announced_long_call_is_not_replaced(started: Callable[[Run], Watched], tmp_path: Path) -> None:
    """Longer than a service may be silent without an announcement."""
    seconds = 5.0

    def wait(leash: socket.socket) -> int:
        mark_pass()
        expect_busy(seconds + 1)
        time.sleep(seconds)
        (tmp_path / "back").touch()
        return serve(leash)

    one = started(wait)
    one.run_until(lambda: (tmp_path / "back").exists())
    until = time.monotonic() + 2.5
    one.run_until(lambda: time.monotonic() > until)
    assert one.service.restarts == 0
    assert not one.seen_unresponsive


def test_a_service_that_continues_in_time_is_not_replaced(started: Callable[[Run], Watched]) -> None:
    one = started(serve)
    assert one.service.child is not None
    pid = one.service.child.pid
    os.kill(pid, signal.SIGSTOP)
    one.run_until(lambda: one.service.unresponsive)
    os.kill(pid, signal.SIGCONT)
    one.run_until(lambda: not one.service.unresponsive)
    assert (one.service.child.pid, one.service.restarts) == (pid, 0)


def test_a_throttled_service_is_not_replaced_and_checks_continue(
    started: Callable[[Run], Watched],
) -> None:
    """As cpulimit does, ten times a second. Other services may be stuck meanwhile."""
    one = started(serve)
    one.run_until(one.service.has_passed)
    assert one.service.child is not None
    pid, checks = one.service.child.pid, 0

    def services() -> tuple[Service]:
        nonlocal checks
        checks += 1
        return (one.service,)

    one.watch._services = services
    for _ in range(30):
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(pid, signum)
            until = time.monotonic() + 0.05
            one.run_until(lambda until=until: time.monotonic() > until)  # type: ignore[misc]
    assert (one.service.child.pid, one.service.restarts, one.seen_unresponsive) == (pid, 0, False)
    assert checks >= 10


def test_awake_time_does_not_include_suspended_time() -> None:
    awake = AwakeTime(100.0)
    assert awake.count(100.0 + SLICE_SECONDS) == SLICE_SECONDS
    assert awake.count(100.0 + 3 * SLICE_SECONDS) == SLICE_SECONDS, "a slice that ends late is one slice"
    assert awake.count(200.0) == 0, "the machine slept"
    assert awake.count(200.0 + SLICE_SECONDS) == SLICE_SECONDS
    assert awake.count(200.0 + SLICE_SECONDS + 0.001) == 0, "no slice has passed"
    awake.restart(300.0)
    assert awake.count(300.0 + LATE_SECONDS + SLICE_SECONDS) == 0


def test_a_supervisor_that_was_stopped_replaces_no_service(started: Callable[[Run], Watched]) -> None:
    """Its services were stopped with it, and continue a little later."""
    one = started(serve)
    assert one.service.child is not None
    pid = one.service.child.pid
    os.kill(pid, signal.SIGSTOP)
    one.run_until(lambda: one.service.unresponsive)
    before = one.service.unanswered_seconds
    # The loop does not run meanwhile, as in a stopped supervisor.
    time.sleep(LATE_SECONDS + 1)
    one.loop.tick(0)
    assert one.service.unanswered_seconds == before
    os.kill(pid, signal.SIGCONT)
    one.run_until(lambda: not one.service.unresponsive)
    assert one.service.restarts == 0
