"""How services handle the end of their leash: end of file, or a reset if the supervisor died with unread data."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from forq.procs.loop import service_loop
from forq.procs.scoreboard import Scoreboard, State
from forq.services.pulse import Pulse
from forq.services.rpc import RpcServer
from tests.support.drive.contexts import context

STUCK = """
import signal
from setproctitle import setproctitle
setproctitle("forq: stuck main")
print("there", flush=True)
signal.pause()
"""


@pytest.fixture
def stuck() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the title of a queue's child that never exits."""
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        yield process
        process.kill()


def test_a_connection_reset_ends_the_leash() -> None:
    ours, theirs = socket.socketpair()
    loop = service_loop()
    RpcServer(loop, theirs, {}).notify("something", nobody="reads it")
    ours.close()
    loop.run()


def test_a_service_survives_a_send_to_a_dead_supervisor() -> None:
    ours, theirs = socket.socketpair()
    loop = service_loop()
    rpc = RpcServer(loop, theirs, {})
    ours.close()
    rpc.notify("too", late=True)
    loop.run()


def test_pulse_kills_stuck_children_when_its_leash_is_reset(redis_url: str, stuck: subprocess.Popen[bytes]) -> None:
    ours, theirs = socket.socketpair()
    board = Scoreboard.create()
    slot = board.slot(board.take())
    slot.state, slot.pid = State.IDLE, stuck.pid
    given = context(
        url=redis_url,
        prefix="forq",
        processor="p",
        heartbeat_seconds=1.0,
        expiry_ms=10_000,
        scoreboard=board,
        watch_fd=os.eventfd(0, os.EFD_NONBLOCK),
    )
    running = threading.Thread(target=Pulse(given, theirs).run)
    running.start()
    # Pulse has sent that Redis is up; nobody has read it.
    assert select.select([ours], [], [], 20)[0]
    ours.close()
    assert stuck.wait(20) == -9
    running.join(20)
    assert not running.is_alive()


def test_shutdown_work_runs_before_timers_that_are_due() -> None:
    ours, theirs = socket.socketpair()
    loop, order = service_loop(), list[str]()
    RpcServer(loop, theirs, {}, lambda: order.append("end"))
    loop.call_later(0.0, lambda: order.append("timer"))
    ours.close()
    loop.run()
    assert order == ["end", "timer"]
