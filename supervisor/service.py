"""A service (pulse, scribe, clerk, logger, metrics, bridge) as the supervisor sees it: a child that is replaced."""

import logging
import socket
from collections.abc import Callable
from itertools import count
from typing import Any

from forq import wire
from forq.errors import ForqError, OutcomeUnknown
from forq.supervisor.child import Child, Nursery
from forq.supervisor.loop import Timer
from forq.supervisor.respawn import Respawn
from forq.supervisor.spawn import Exit

log = logging.getLogger("forq")

# Called with the result, or with a ForqError.
Answer = Callable[[Any], None]


class Service:
    """Requests that must not be lost (`repeat`) are sent again to the successor of a service that died."""

    def __init__(
        self,
        nursery: Nursery,
        name: str,
        run: Callable[[socket.socket], int],
        *,
        keep_fds: tuple[int, ...] = (),
        on_event: Callable[[dict[str, Any]], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.child: Child | None = None
        self.restarts = 0
        self._nursery = nursery
        self._run = run
        self._keep_fds = keep_fds
        self._on_event = on_event
        self._on_start = on_start
        self._respawn = Respawn()
        self._ids = count(1)
        self._pending: dict[int, tuple[str, dict[str, Any], Answer | None, bool]] = {}
        self._stopped = False
        self._then: Callable[[], None] | None = None
        self._timer: Timer | None = None

    def start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        try:
            self.child = Child(
                self._nursery,
                self.name,
                self._run,
                keep_fds=self._keep_fds,
                on_line=self._read,
                on_end=self._ended,
            )
        except OSError as exc:
            log.error("cannot start service service=%s error=%s", self.name, exc)
            self._start_later(0.0)
            return
        unanswered, self._pending = self._pending, {}
        for method, params, answer, repeat in unanswered.values():
            self.ask(method, params, answer, repeat=repeat)
        if self._on_start is not None:
            self._on_start()

    def ask(self, method: str, params: dict[str, Any], answer: Answer | None = None, *, repeat: bool = False) -> None:
        number = next(self._ids)
        self._pending[number] = (method, params, answer, repeat)
        if self.child is not None:
            self.child.send(wire.request(number, method, params))

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

    def _read(self, line: bytes) -> None:
        message = wire.decode(line)
        if "event" in message:
            if self._on_event is not None:
                self._on_event(message)
            return
        number, answer = wire.read_answer(line)
        assert isinstance(number, int)
        _, _, answered, _ = self._pending.pop(number)
        if answered is not None:
            try:
                answered(answer)
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
        for number, (_, _, answer, repeat) in list(self._pending.items()):
            if not repeat:
                del self._pending[number]
                if answer is not None:
                    answer(OutcomeUnknown(f"the {self.name} process died before it answered ({ended.text})"))
        self._start_later(lived)

    def _start_later(self, lived_seconds: float) -> None:
        loop = self._nursery.loop
        delay = self._respawn.delay_after_death(lived_seconds)
        self._timer = loop.call_later(delay, lambda: None if self._stopped else self.start())
