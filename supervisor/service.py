"""One service process and its requests (Service), the warden's requests (WardenClient), and the pipes to the logger."""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from forq.errors import ForqError, OutcomeUnknown
from forq.output.format import FIFO_NAME, open_fifo
from forq.procs import jsonrpc, liveness
from forq.procs.cgroups import Exceeded, Resources
from forq.procs.loop import Timer
from forq.supervisor.child import Child, ChildTable, Exit
from forq.supervisor.pacing import Respawn

log = logging.getLogger("forq")

# How long a new service may take for the first pass of its loop.
FIRST_PASS_SECONDS = 10.0
PING = jsonrpc.notification("ping")

# Called with the result, or with a ForqError.
Answer = Callable[[Any], None]


class _PendingRequest(NamedTuple):
    method: str
    params: dict[str, Any]
    answer: Answer | None
    repeat: bool
    raw: bool


class Service:
    """A service: pulse, scribe, clerk, logger, warden, metrics or a bridge.

    1. Starts its process, and starts it again when it dies.
    2. Sends requests and calls back with the answers. After a death, requests with `repeat` are sent to the new
       process; the others fail with OutcomeUnknown.
    3. Passes events to `on_event`.

    `needed` returns whether it has work besides requests. If not, `status` hides it and it gets no pings.
    """

    def __init__(
        self,
        children: ChildTable,
        name: str,
        run: Callable[[socket.socket], int],
        *,
        keep_fds: tuple[int, ...] = (),
        on_event: Callable[[dict[str, Any]], None] | None = None,
        on_start: Callable[[], None] | None = None,
        on_stop: Callable[[], None] | None = None,
        needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self.name = name
        self.child: Child | None = None
        self.restarts = 0
        # Written by ServiceWatch: whether it hangs, how long a ping is unanswered, and the last seen child.resumed.
        self.unresponsive = False
        self.unanswered_seconds = 0.0
        self.resumed = 0
        self._liveness = liveness.Liveness()
        self._pinged_ns = 0
        self._children = children
        self._run = run
        self._keep_fds = keep_fds
        self._on_event = on_event
        self._on_start = on_start
        self._on_stop = on_stop
        self.needed = needed
        self._respawn = Respawn()
        self._ids = count(1)
        self._pending: dict[int, _PendingRequest] = {}
        self._stopped = False
        self._when_restarted: Callable[[], None] | None = None
        self._timer: Timer | None = None

    def start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._liveness.begin(FIRST_PASS_SECONDS)
        self._pinged_ns, self.unanswered_seconds, self.resumed = time.monotonic_ns(), 0.0, 0
        try:
            self.child = Child(
                self._children,
                self.name,
                self._run_watched,
                keep_fds=self._keep_fds,
                on_line=self._read,
                on_end=self._ended,
                on_stop=self._on_stop,
            )
        except OSError as exc:
            log.error("failed to start service service=%s error=%s", self.name, exc)
            self._start_later(0.0)
            return
        unanswered, self._pending = self._pending, {}
        for pending in unanswered.values():
            self._send(pending)
        if self._on_start is not None:
            self._on_start()

    def request(
        self,
        method: str,
        params: dict[str, Any],
        answer: Answer | None = None,
        *,
        repeat: bool = False,
        raw: bool = False,
    ) -> None:
        """`answer` gets the result or a ForqError; with `raw` the undecoded result (jsonrpc.RawResult)."""
        self._send(_PendingRequest(method, params, answer, repeat, raw))

    def _send(self, pending: _PendingRequest) -> None:
        number = next(self._ids)
        self._pending[number] = pending
        if self.child is not None:
            self.child.send(jsonrpc.request(number, pending.method, pending.params))

    def has_passed(self) -> bool:
        """Whether its loop has completed a pass since its start or the last ping."""
        return self._liveness.passed_ns > self._pinged_ns

    def is_busy(self) -> bool:
        """Whether it is in a call that it announced as long."""
        return self._liveness.busy_until_ns > time.monotonic_ns()

    def ping_if_quiet(self, seconds: float) -> bool:
        """Sends a ping if its loop has not completed a pass within this time. Returns whether it sent one."""
        now_ns = time.monotonic_ns()
        if self.child is None or not (self._pending or self.needed()):
            return False
        if now_ns - self._liveness.passed_ns < seconds * 1e9:
            return False
        self._pinged_ns = now_ns
        self.child.send(PING)
        return True

    def restart(self, then: Callable[[], None]) -> None:
        """Starts a new process with the current context, in place of the old one."""
        if self.child is not None:
            self._when_restarted = then
            self.child.kill()
            return
        self.start()
        then()

    def kill(self) -> None:
        self._stopped = True
        if self.child is not None:
            self.child.kill()

    def _run_watched(self, leash: socket.socket) -> int:
        liveness.publish(self._liveness)
        return self._run(leash)

    def _read(self, line: bytes) -> None:
        raw = jsonrpc.read_raw_answer(line)
        if raw is not None and self._pending[raw[0]].raw:
            self._answered(*raw)
            return
        message = jsonrpc.decode(line)
        if "event" not in message:
            self._answered(*jsonrpc.read_answer(message))
        elif self._on_event is not None:
            self._on_event(message)

    def _answered(self, number: str | int | None, answer: Any) -> None:
        assert isinstance(number, int)
        pending = self._pending.pop(number)
        if pending.answer is not None:
            try:
                pending.answer(answer)
            except Exception:  # the following lines answer other requests
                log.exception("callback for an answer failed service=%s", self.name)
        elif isinstance(answer, ForqError):
            log.error("request failed service=%s error=%s", self.name, answer)

    def _ended(self, ended: Exit) -> None:
        assert self.child is not None
        lived, self.child = self.child.uptime_seconds(), None
        if self._stopped:
            return
        if self._when_restarted is not None:
            then, self._when_restarted = self._when_restarted, None
            self.start()
            then()
            return
        self.restarts += 1
        log.error("service died; restarting it service=%s end=%s", self.name, ended.text)
        for number, pending in list(self._pending.items()):
            if not pending.repeat:
                del self._pending[number]
                if pending.answer is not None:
                    pending.answer(OutcomeUnknown(f"the {self.name} process died before it answered ({ended.text})"))
        self._start_later(lived)

    def _start_later(self, lived_seconds: float) -> None:
        loop = self._children.loop
        delay = self._respawn.delay_after_death(lived_seconds)
        self._timer = loop.call_later(delay, lambda: None if self._stopped else self.start())


class LimitedProcess(Protocol):
    """A process of a queue whose resources the warden limits."""

    slots: tuple[int, ...]
    resources: Resources

    @property
    def pid(self) -> int: ...

    def exceed(self, limit: Exceeded) -> None: ...


class WardenClient:
    """Starts the warden at its first use, sends it the processes to watch, and forwards requests to kill trees."""

    def __init__(self, make_warden: Callable[..., Service]) -> None:
        self._warden = make_warden(
            on_event=self._on_event, on_start=self._send_watched, needed=lambda: bool(self._watched)
        )
        self._started = False
        self._keys = count(1)
        self._watched: dict[int, LimitedProcess] = {}

    @property
    def services(self) -> tuple[Service, ...]:
        return (self._warden,) if self._started else ()

    def add(self, process: LimitedProcess) -> None:
        self._watched[next(self._keys)] = process
        if self._started:
            self._send_watched()
        else:
            self._start()

    def _start(self) -> None:
        self._started = True
        self._warden.start()

    def request(self, verb: str, params: dict[str, Any], answer: Callable[[Any], None]) -> bool:
        """False if there is no warden at the moment."""
        if not self._started:
            self._start()
        if self._warden.child is None or self._warden.child.stopping:
            return False
        self._warden.request(verb, params, answer)
        return True

    def remove(self, process: LimitedProcess) -> None:
        keys = [key for key, watched in self._watched.items() if watched is process]
        for key in keys:
            del self._watched[key]
        if keys:
            self._send_watched()

    def _send_watched(self) -> None:
        processes = [
            {
                "key": key,
                "pid": process.pid,
                "slots": process.slots,
                "memory_bytes": process.resources.memory_bytes,
                "tasks": process.resources.tasks,
            }
            for key, process in self._watched.items()
        ]
        self._warden.request("watch", {"processes": processes})

    def _on_event(self, message: dict[str, Any]) -> None:
        process = self._watched.get(message["key"])
        # The process may have ended in the meantime.
        if process is not None:
            process.exceed(Exceeded(message["cause"], message["peak"]))


class OutputPipes:
    """The FIFOs that the processes of queues write their output to, by queue. Kept open here, so that output of a
    process that dies at once is not lost, even while there is no logger."""

    def __init__(self, logs_dir: Path) -> None:
        self._logs_dir = logs_dir
        self._directory = str(logs_dir)
        self._fds: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self._fds)

    def open(self, name: str) -> None:
        """Idempotent. If it fails, the queue's processes write to the supervisor's stdout and stderr."""
        if name in self._fds:
            return
        try:
            self._fds[name] = open_fifo(self._logs_dir / name)
        except ForqError as exc:
            log.error("failed to open the output FIFO; output is not captured queue=%s error=%s", name, exc)

    def directory(self, name: str) -> str | None:
        """The directory of the queue's FIFO; None if there is none."""
        return f"{self._directory}/{name}" if name in self._fds else None

    def remove(self, name: str) -> None:
        """Processes that have the FIFO open can still use it; a queue created later gets a new one."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)
            with suppress(OSError):
                os.unlink(self._logs_dir / name / FIFO_NAME)
                # Fails, as intended, if other files are there.
                os.rmdir(self._logs_dir / name)
