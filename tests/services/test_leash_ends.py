"""The end of a leash, as services see it: end of file, or a reset if the supervisor died with something unread."""

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
    """A process that is called like a queue's child, and does not end by itself."""
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        yield process
        process.kill()


def test_a_reset_is_the_end_of_the_leash() -> None:
    ours, theirs = socket.socketpair()
    loop = service_loop()
    RpcServer(loop, theirs, {}).notify("something", nobody="reads it")
    ours.close()
    loop.run()


def test_a_service_outlives_a_word_to_a_supervisor_that_is_gone() -> None:
    ours, theirs = socket.socketpair()
    loop = service_loop()
    rpc = RpcServer(loop, theirs, {})
    ours.close()
    rpc.notify("too", late=True)
    loop.run()


def test_pulse_kills_stuck_children_also_when_its_leash_is_reset(
    redis_url: str, stuck: subprocess.Popen[bytes]
) -> None:
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
    # It has said that Redis is there, and nobody has read it.
    assert select.select([ours], [], [], 20)[0]
    ours.close()
    assert stuck.wait(20) == -9
    running.join(20)
    assert not running.is_alive()


def test_what_a_service_does_at_the_end_comes_before_timers_that_are_due() -> None:
    ours, theirs = socket.socketpair()
    loop, order = service_loop(), list[str]()
    RpcServer(loop, theirs, {}, lambda: order.append("end"))
    loop.call_later(0.0, lambda: order.append("timer"))
    ours.close()
    loop.run()
    assert order == ["end", "timer"]
