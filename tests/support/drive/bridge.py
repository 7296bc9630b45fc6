"""Starts `forq bridge`, on its stdin and stdout or at a socket, and clients that exchange lines with it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.drive.supervisor import BIN
from tests.support.drive.wait import wait_until

Message = dict[str, Any]


def encode(topic: str, payload: Message) -> bytes:
    return json.dumps({"topic": topic, "payload": payload}).encode() + b"\n"


class LineClient:
    """Sends messages and keeps those that it receives: (topic, payload), in order."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Message]] = []
        self.envelopes: list[Message] = []

    def send(self, topic: str, **payload: Any) -> None:
        self.write(encode(topic, payload))

    def write(self, data: bytes) -> None:
        raise NotImplementedError

    def receive_from(self, stream: Any) -> None:
        """Reads until the stream ends; every line has to be a whole message."""
        for line in stream:
            message = json.loads(line)
            self.envelopes.append(message)
            self.received.append((message["topic"], message["payload"]))

    def of(self, topic: str) -> list[Message]:
        return [payload for said, payload in self.received if said == topic]

    def request(self, topic: str, answer: str, **payload: Any) -> Message:
        """Sends a message and returns the answer."""
        known = len(self.of(answer))
        self.send(topic, **payload)
        return self.wait_for(answer, known + 1)

    def wait_for(self, topic: str, count: int = 1) -> Message:
        """Returns the count-th message of that topic."""
        wait_until(lambda: len(self.of(topic)) >= count, what=f"{count} of {topic} in {self.received}")
        return self.of(topic)[count - 1]


class BridgeProcess(LineClient):
    def __init__(self, url: str, *arguments: str) -> None:
        super().__init__()
        command = [sys.executable, "-m", "forq.cli", "bridge", "--redis", url, *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=self.receive_from, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for thread in self._readers:
            thread.start()

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    def end(self, seconds: float = 20.0) -> int:
        """Sends EOF; returns the exit code once all output is read."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(seconds)
        for thread in self._readers:
            thread.join(10)
        return code

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.process.send_signal(signum)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for thread in self._readers:
            thread.join(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.decode(errors="replace"))


class Client(LineClient):
    """A connection to a bridge that listens."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        threading.Thread(target=self.receive_from, args=(self.socket.makefile("rb"),), daemon=True).start()

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@contextmanager
def bridge(url: str, *arguments: str) -> Iterator[BridgeProcess]:
    process = BridgeProcess(url, *arguments)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def listening(url: str, path: Path, *arguments: str) -> Iterator[BridgeProcess]:
    with bridge(url, "--listen", str(path), *arguments) as process:
        wait_until(lambda: accepts(path), what=f"the bridge listens at {path}: {process.log}")
        yield process


def accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return os.path.exists(path) and probe.connect_ex(str(path)) == 0


__all__ = ["BIN", "BridgeProcess", "Client", "LineClient", "accepts", "bridge", "encode", "listening"]
