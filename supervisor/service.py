"""A service (pulse, scribe, clerk, logger, metrics, bridge) as the supervisor sees it: a child that is replaced.

The embedded Redis server: a child that is started first, replaced when it dies, and stopped last.

The warden, as the supervisor sees it: which processes of queues it watches, and whose trees it kills.

It is started when it is needed for the first time.

The FIFOs that the queues' processes write to. Held open here, so that what a process that dies at once has written
is still there when the logger comes to read it, also while there is no logger.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from forq.errors import ForqError, OutcomeUnknown
from forq.output import format as output_pipe
from forq.procs import jsonrpc, liveness
from forq.procs.cgroups import Exceeded, Resources
from forq.procs.loop import Timer
from forq.supervisor import embedded
from forq.supervisor.child import Child, ChildTable, Exit, ProcessHandle, exec_program, reap, signal_child
from forq.supervisor.pacing import Respawn

log = logging.getLogger("forq")

# What a new process may take before it comes round its loop for the first time.
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
    """Requests that must not be lost (`repeat`) are sent again to the successor of a service that died."""

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
        """`needed`: whether it has something to do without being asked; else a status does not tell of it, and nobody
        wakes it to see that it lives."""
        self.name = name
        self.child: Child | None = None
        self.restarts = 0
        # Kept by the watch over all services: whether it is frozen or stuck, for how long it owes an answer, and how
        # often it went on after a stop.
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
        self._then: Callable[[], None] | None = None
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
            log.error("cannot start service service=%s error=%s", self.name, exc)
            self._start_later(0.0)
            return
        unanswered, self._pending = self._pending, {}
        for asked in unanswered.values():
            self._send(asked)
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
        """With `raw` the result is passed on as the bytes in which it comes (jsonrpc.RawResult)."""
        self._send(_PendingRequest(method, params, answer, repeat, raw))

    def _send(self, asked: _PendingRequest) -> None:
        number = next(self._ids)
        self._pending[number] = asked
        if self.child is not None:
            self.child.send(jsonrpc.request(number, asked.method, asked.params))

    def has_passed(self) -> bool:
        """Whether it has come round its loop since its start, or since its last ping."""
        return self._liveness.passed_ns > self._pinged_ns

    def is_busy(self) -> bool:
        """Whether it has said that what it does now may take this long."""
        return self._liveness.busy_until_ns > time.monotonic_ns()

    def ping_if_quiet(self, seconds: float) -> bool:
        """Wakes it if it has not passed its loop for so long; whether it did."""
        now_ns = time.monotonic_ns()
        if self.child is None or not (self._pending or self.needed()):
            return False
        if now_ns - self._liveness.passed_ns < seconds * 1e9:
            return False
        self._pinged_ns = now_ns
        self.child.send(PING)
        return True

    def restart(self, then: Callable[[], None]) -> None:
        """A new process, which starts with what the supervisor knows now."""
        if self.child is not None:
            self._then = then
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
        asked = self._pending.pop(number)
        if asked.answer is not None:
            try:
                asked.answer(answer)
            except Exception:  # the lines behind this one belong to others
                log.exception("answer could not be used service=%s", self.name)
        elif isinstance(answer, ForqError):
            log.error("request failed service=%s error=%s", self.name, answer)

    def _ended(self, ended: Exit) -> None:
        assert self.child is not None
        lived, self.child = self.child.uptime_seconds(), None
        if self._stopped:
            return
        if self._then is not None:
            then, self._then = self._then, None
            self.start()
            then()
            return
        self.restarts += 1
        log.error("service died, starting it again service=%s end=%s", self.name, ended.text)
        for number, asked in list(self._pending.items()):
            if not asked.repeat:
                del self._pending[number]
                if asked.answer is not None:
                    asked.answer(OutcomeUnknown(f"the {self.name} process died before it answered ({ended.text})"))
        self._start_later(lived)

    def _start_later(self, lived_seconds: float) -> None:
        loop = self._children.loop
        delay = self._respawn.delay_after_death(lived_seconds)
        self._timer = loop.call_later(delay, lambda: None if self._stopped else self.start())


STOP_SECONDS = 10.0


class EmbeddedRedis:
    def __init__(self, children: ChildTable, argv: list[str]) -> None:
        self.restarts = 0
        self._children = children
        self._argv = argv
        self._spawned: ProcessHandle | None = None
        self._respawn = Respawn()
        self._started = 0.0
        self._stopped: Callable[[], None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._spawned is None else self._spawned.pid

    def start(self) -> None:
        try:
            # It dies with the supervisor, in order: TERM makes it write what it has.
            with self._children.pids.forking():
                self._spawned = exec_program(
                    self._argv,
                    loop=self._children.loop,
                    keep_fds=self._children.keep_fds,
                    env=embedded.environment(),
                    death_signal=signal.SIGTERM,
                )
                self._children.pids.add(self._spawned.pid)
        except OSError as exc:
            self._start_later(0.0, f"cannot start it: {exc}")
            return
        self._started = self._children.loop.now()
        self._children.loop.watch_child(self._spawned.pidfd, self._ended)

    def stop(self, then: Callable[[], None]) -> None:
        self._stopped = then
        if self._spawned is None:
            then()
            return
        signal_child(self._spawned, signal.SIGTERM)
        self._children.loop.call_later(STOP_SECONDS, self.kill)

    def kill(self) -> None:
        if self._spawned is not None:
            signal_child(self._spawned, signal.SIGKILL)

    def _ended(self) -> None:
        assert self._spawned is not None
        ended = reap(self._spawned)
        self._children.pids.discard(self._spawned.pid)
        self._spawned.close()
        self._spawned = None
        if self._stopped is not None:
            self._stopped()
            return
        self.restarts += 1
        self._start_later(self._children.loop.now() - self._started, "unknown" if ended is None else ended.text)

    def _start_later(self, lived_seconds: float, reason: str) -> None:
        loop = self._children.loop
        delay = self._respawn.delay_after_death(lived_seconds)
        log.error(
            "embedded redis died (see redis/server.log in the state directory) end=%s again_in=%.2fs", reason, delay
        )
        loop.call_later(delay, lambda: None if self._stopped else self.start())


class LimitedProcess(Protocol):
    """A process of a queue, as the watch knows it."""

    slots: tuple[int, ...]
    resources: Resources

    @property
    def pid(self) -> int: ...

    def exceed(self, how: Exceeded) -> None: ...


class WardenClient:
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
        """False: there is no warden to ask at this moment."""
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
        # It may have ended on its own meanwhile.
        if process is not None:
            process.exceed(Exceeded(message["cause"], message["peak"]))


class OutputPipes:
    def __init__(self, logs_dir: Path) -> None:
        self._logs_dir = logs_dir
        self._directory = str(logs_dir)
        self._fds: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        return list(self._fds)

    def open(self, name: str) -> None:
        """Safe to repeat. If it cannot be had, the queue's processes write to our own stdout and stderr."""
        if name in self._fds:
            return
        try:
            self._fds[name] = output_pipe.open_fifo(self._logs_dir / name)
        except ForqError as exc:
            log.error("no log of the queue's output queue=%s error=%s", name, exc)

    def directory(self, name: str) -> str | None:
        """Where the process of a queue finds its FIFO; None if there is none."""
        return f"{self._directory}/{name}" if name in self._fds else None

    def remove(self, name: str) -> None:
        """The queue is deleted. Whoever has the FIFO open can still use it; a queue made later gets another."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            os.close(fd)
            with suppress(OSError):
                os.unlink(self._logs_dir / name / output_pipe.FIFO_NAME)
                # Only if nothing else was kept there.
                os.rmdir(self._logs_dir / name)
