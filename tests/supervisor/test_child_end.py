"""How a child's end looks from the supervisor's side of its leash."""

import logging
import os
import socket
import time

import psutil
import pytest

from forq.supervisor.child import Child, Nursery
from forq.supervisor.loop import Loop
from forq.supervisor.spawn import Exit
from forq.treekill import become_subreaper


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_child_that_ends_without_reading_its_leash_ends_like_any_other(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    """Its end of the leash has unread lines when it is closed, which the supervisor sees as ECONNRESET."""
    become_subreaper()
    gate_read, gate_write = os.pipe()
    ends: list[Exit] = []
    heard: list[bytes] = []

    def run(leash: socket.socket) -> int:
        leash.sendall(b"{}\n")
        os.read(gate_read, 1)
        return 0

    # The server of other tests is a child of this process, too, and none of a dead one's.
    others = {process.pid for process in psutil.Process().children()}
    child = Child(
        *(Nursery(loop, (gate_read,), None, pids=others), "test", run),
        on_line=heard.append,
        on_end=ends.append,
    )
    child.send(b"unread\n")
    os.write(gate_write, b"x")
    with caplog.at_level(logging.DEBUG):
        deadline = time.monotonic() + 20.0
        while not ends and time.monotonic() < deadline:
            loop.tick(0.05)
    assert (ends, heard) == ([Exit(0, None)], [b"{}"])
    assert caplog.records == []
    for fd in (gate_read, gate_write):
        os.close(fd)
