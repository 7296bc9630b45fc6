"""Writes lines to a stderr that may have no reader."""

import os
import socket
import time
from pathlib import Path

from forq.output.forwarding import MAX_WAITING_BYTES, Forwarder


def test_an_unread_pipe_blocks_nobody_and_continues_where_it_stopped() -> None:
    reading, writing = os.pipe()
    forwarder = Forwarder(writing)
    began = time.monotonic()
    for number in range(10_000):
        forwarder.send(f"{number} {'x' * 90}\n".encode())
        forwarder.flush()
    assert time.monotonic() - began < 5
    assert os.get_blocking(writing), "others write there, too"
    data = b""
    while forwarder.waiting:
        data += os.read(reading, 65536)
        forwarder.flush()
    os.set_blocking(reading, False)
    data += os.read(reading, 1 << 20)
    numbers = [int(line.split()[0]) for line in data.splitlines()]
    assert numbers == list(range(len(numbers)))
    assert all(len(line) >= 92 for line in data.splitlines())
    assert forwarder.take_dropped() == 10_000 - len(numbers)
    assert MAX_WAITING_BYTES < len(data) < MAX_WAITING_BYTES + (1 << 17)


def test_an_unread_socket_blocks_nobody() -> None:
    ours, theirs = socket.socketpair()
    forwarder = Forwarder(theirs.fileno())
    for _ in range(20_000):
        forwarder.send(b"y" * 99 + b"\n")
        forwarder.flush()
    assert forwarder.waiting
    assert ours.recv(100) == b"y" * 99 + b"\n"
    assert theirs.getblocking()


def test_a_file_is_written_at_its_shared_offset(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    forwarder = Forwarder(fd)
    os.write(fd, b"one\n")
    forwarder.send(b"two\n")
    forwarder.flush()
    os.write(fd, b"three\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nthree\n"


def test_a_closed_reader_is_not_an_error() -> None:
    reading, writing = os.pipe()
    forwarder = Forwarder(writing)
    os.close(reading)
    forwarder.send(b"to nobody\n")
    forwarder.flush()
    assert (forwarder.waiting, forwarder.take_dropped()) == (False, 1)
