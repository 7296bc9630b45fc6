"""A supervisor whose log nobody reads: it answers, its queues work, and it reports the lines it dropped."""

import fcntl
import os
import pty
import signal
import socket
import threading
import time
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.fuzz_pinger import Pinger, shown
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until

PING_MS = 50.0
# More than the buffer holds.
LINES = 6000

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["pipe", "terminal", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A descriptor to read from, and a stderr that accepts nothing more."""
    if request.param == "pipe":
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    elif request.param == "terminal":
        reading, writing = pty.openpty()
        tty.setraw(writing)
    else:
        ours, theirs = socket.socketpair()
        reading, writing = ours.detach(), theirs.detach()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"." * 100)
    except BlockingIOError:
        os.set_blocking(writing, True)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_an_unread_log_blocks_nobody(ends: tuple[int, int], tmp_path: Path) -> None:
    reading, writing = ends
    forq = Forq()
    pinger = None
    try:
        forq.stderr = writing
        forq.start()
        control = forq.state_dir / "control.sock"
        pinger = Pinger(control, {"jsonrpc": "2.0", "id": 1, "method": "ping"}, tmp_path / "pings")
        pinger.wait_for(20)
        forq.create("loud", "noop")
        for _ in range(LINES):
            # One line each, unless they come so close together that the supervisor sees several as one.
            os.kill(forq.pid, signal.SIGHUP)
            time.sleep(0.0005)
        forq.client().queue("loud").enqueue_many([1] * 100)
        wait_until(lambda: forq.queue_status("loud")["done"] == 100, what="its queue works")
        pings = pinger.take()
        pinger.close()
        print(f"\n{shown(pings)}")
        assert pings[int(len(pings) * 0.9)] < PING_MS
        assert pings[-1] < 20 * PING_MS
        assert os.get_blocking(writing), "others write there, too"
        assert "dropped log lines" in read_until(reading, b"dropped log lines")
        os.kill(forq.pid, signal.SIGHUP)
        assert "SIGHUP" in read_until(reading, b"SIGHUP")
        drain = threading.Thread(target=read_until, args=(reading, b" stopped\n"))
        drain.start()
        assert forq.stop() == 0
        drain.join(20)
        assert not drain.is_alive(), "its last line was read"
    finally:
        if pinger is not None:
            pinger.close()
        forq.remove()


def test_a_supervisor_whose_log_is_unread_can_be_stopped(ends: tuple[int, int]) -> None:
    _, writing = ends
    forq = Forq()
    try:
        forq.stderr = writing
        forq.start()
        forq.create("quiet", "noop")
        assert forq.stop(20) == 0
    finally:
        forq.remove()


def read_until(fd: int, text: bytes) -> str:
    got = b""
    while text not in got.replace(b"\r", b""):
        got += os.read(fd, 1 << 16)
    return got.decode()
