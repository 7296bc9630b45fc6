"""forqctl's client of the control socket: connects, sends requests and waits for their answers."""

from __future__ import annotations

import _socket
import os
import time

from forq.errors import ForqError, InvalidData, SupervisorUnreachable, TimedOut
from forq.procs import jsonrpc
from forq.procs.lines import LineBuffer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from typing import Any

    from forq.ctl.output import WaitReport

DEFAULT_TIMEOUT_SECONDS = 30.0
# Larger than a request: an answer may contain a job's data, which escapes may have made longer.
MAX_ANSWER_BYTES = 16 << 20
RETRY_CONNECT_SECONDS = 0.02
# Interval of status requests while another request is pending.
POLL_SECONDS = 1.0


class ControlClient:
    """One connection. Requests may overlap: send returns the id with which receive returns the answer."""

    def __init__(self, path: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, also_tried: str = "") -> None:
        self.path = path
        self.timeout_seconds = timeout_seconds
        self._lines = LineBuffer(MAX_ANSWER_BYTES)
        self._last_id = 0
        self._sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._connect(also_tried)

    def call(self, method: str, params: dict[str, Any], *, wait_seconds: float | None = 0.0) -> Any:
        """The result of one request, which may take `wait_seconds` longer than the timeout (None: no limit). Raises the
        supervisor's error, or TimedOut."""
        deadline = None if wait_seconds is None else time.monotonic() + self.timeout_seconds + wait_seconds
        wanted = self.send(method, params)
        while True:
            answered, value = self.receive(deadline)
            if answered == wanted:
                if isinstance(value, ForqError):
                    raise value
                return value

    def send(self, method: str, params: dict[str, Any]) -> int:
        self._last_id += 1
        line = jsonrpc.request(self._last_id, method, params)
        if len(line) > jsonrpc.MAX_LINE_BYTES:
            raise InvalidData(f"the request is too large: at most {jsonrpc.MAX_LINE_BYTES} bytes are allowed")
        self._sock.settimeout(self.timeout_seconds)
        try:
            self._sock.sendall(line)
        except TimeoutError as exc:
            raise self.timed_out() from exc
        except OSError:
            # The supervisor closed the connection early. Its reason, if any, can still be received.
            pass
        return self._last_id

    def receive(self, deadline: float | None) -> tuple[str | int | None, Any]:
        """The next answer: its id, and the result or error. An error without an id is raised."""
        while (line := self._lines.pop()) is None:
            self._receive_bytes(deadline)
        answered, value = jsonrpc.read_answer(line)
        if answered is None and isinstance(value, ForqError):
            raise value
        return answered, value

    def close(self) -> None:
        self._sock.close()

    def fileno(self) -> int:
        """For select."""
        return self._sock.fileno()

    def _receive_bytes(self, deadline: float | None) -> None:
        if deadline is None:
            self._sock.settimeout(None)
        else:
            # Not 0, which means non-blocking: an answer that has already arrived is still read.
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError as exc:
            raise self.timed_out() from exc
        except OSError as exc:
            raise self._unreachable(f"connection lost: {os.strerror(exc.errno or 0)}") from exc
        if not data:
            raise self._unreachable("it closed the connection without an answer")
        self._lines.push(data)

    def _connect(self, also_tried: str) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        self._sock.settimeout(self.timeout_seconds)
        while True:
            try:
                self._sock.connect(self.path)
                return
            except BlockingIOError as exc:
                # The listen backlog is full.
                if time.monotonic() >= deadline:
                    raise self.timed_out() from exc
                time.sleep(RETRY_CONNECT_SECONDS)
            except FileNotFoundError as exc:
                raise self._unreachable(f"no such file{also_tried}") from exc
            except OSError as exc:
                raise self._unreachable((exc.strerror or str(exc)).lower()) from exc

    def timed_out(self) -> TimedOut:
        """The error for an answer that is late."""
        return TimedOut(f"no answer from the supervisor at {self.path} within {self.timeout_seconds:g} s")

    def _unreachable(self, reason: str) -> SupervisorUnreachable:
        return SupervisorUnreachable(f"cannot reach the supervisor at {self.path}: {reason}")


def connect(args: Namespace) -> ControlClient:
    """Connects to the socket that the global arguments name, else to the default one."""
    timeout_seconds = DEFAULT_TIMEOUT_SECONDS if args.timeout_seconds is None else args.timeout_seconds
    if args.socket is not None:
        return ControlClient(os.path.abspath(args.socket), timeout_seconds)
    from forq.paths import control_socket, control_socket_candidates

    path = control_socket()
    others = [candidate for candidate in control_socket_candidates() if candidate != path]
    return ControlClient(path, timeout_seconds, f" (also tried {', '.join(others)})" if others else "")


def wait_for_answer(
    client: ControlClient,
    request_id: int,
    status_params: dict[str, Any],
    report: Callable[[WaitReport, Any], None],
    deadline: float | None,
    timeout_message: str,
    *,
    lines: bool,
) -> Any:
    """The answer to the request `request_id`. Meanwhile `report` gets the answers to `status` with `status_params`.
    TimedOut with `timeout_message` after the deadline, or if the supervisor does not answer `status` in time."""
    from forq.ctl.output import WaitReport

    waiting = WaitReport(lines=lines)
    polled = None
    # When to send the next status request; while one is pending, its deadline.
    next_step = time.monotonic() + waiting.first_poll_seconds()
    try:
        while True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimedOut(timeout_message)
            if now >= next_step:
                if polled is not None:
                    raise client.timed_out()
                polled, next_step = client.send("status", status_params), now + client.timeout_seconds
            answer = _next_answer(client, next_step if deadline is None else min(deadline, next_step))
            if answer is None:
                continue
            answered, value = answer
            if answered == request_id:
                if isinstance(value, ForqError):
                    raise value
                return value
            if answered == polled:
                polled, next_step = None, time.monotonic() + POLL_SECONDS
                if not isinstance(value, ForqError):
                    report(waiting, value)
    finally:
        waiting.end()


def _next_answer(client: ControlClient, until: float) -> tuple[str | int | None, Any] | None:
    try:
        return client.receive(until)
    except TimedOut:
        return None
