"""The process of a queue: its workers, and the minder beside them."""

import logging
import os
import socket
import threading
from dataclasses import dataclass

import orjson

from forq import exits
from forq.broker.consuming import Consumer
from forq.errors import ConfigError, Fenced, IncompatibleProtocol, UnknownQueue
from forq.ids import new_id
from forq.options import QueueSpec
from forq.scoreboard import Role, Scoreboard, State
from forq.workers.attempt import Attempts
from forq.workers.handlers import load_handlers
from forq.workers.loop import WorkerLoop
from forq.workers.minder import Minder

log = logging.getLogger("forq")


@dataclass(frozen=True)
class ChildSettings:
    """What the supervisor gives a queue's child at its fork."""

    spec: QueueSpec
    role: Role
    url: str
    prefix: str
    processor: str
    expiry_ms: int
    scoreboard: Scoreboard
    slots: tuple[int, ...]
    leash: socket.socket
    watch_fd: int

    @property
    def source(self) -> str:
        """The list on which the workers block."""
        return "pending" if self.role == Role.MAIN else "failed"

    @property
    def resting_state(self) -> State:
        return State.IDLE if self.role == Role.MAIN else State.PARKED


def run_child(settings: ChildSettings) -> int:
    """The entry point: returns the process's exit code."""
    name = f"{settings.spec.name} {settings.role.name.lower()}"
    minder = Minder(name=name, url=settings.url, leash_fd=settings.leash.fileno())
    minder.start()
    try:
        handlers = load_handlers(settings.spec)
    except ConfigError as exc:
        tell_supervisor(settings.leash, {"error": str(exc)})
        return exits.CONFIG
    loops = [_worker(settings, number, Attempts(settings.spec.name, handlers), minder) for number in settings.slots]
    minder.mind(loops)
    return _Crew(loops, settings.leash, minder).run()


def _worker(settings: ChildSettings, slot_number: int, attempts: Attempts, minder: Minder) -> WorkerLoop:
    slot = settings.scoreboard.slot(slot_number)
    worker = new_id()
    slot.worker = worker
    slot.queue = settings.spec.name
    slot.role = settings.role
    slot.pid = os.getpid()
    slot.state = State.STARTING
    scoreboard, watch_fd = settings.scoreboard, settings.watch_fd

    def on_batch(count: int) -> None:
        minder.rouse()
        if count > 1 and not scoreboard.watching:
            os.eventfd_write(watch_fd, 1)

    return WorkerLoop(
        Consumer(settings.url, settings.prefix, settings.spec.name, settings.processor, worker, settings.source),
        attempts,
        slot,
        expiry_ms=settings.expiry_ms,
        on_batch=on_batch,
        claims=settings.role == Role.MAIN,
        resting_state=settings.resting_state,
    )


class _Crew:
    """The workers of one process: one runs in the main thread (where handlers may use signals), several in threads."""

    def __init__(self, loops: list[WorkerLoop], leash: socket.socket, minder: Minder) -> None:
        self._loops = loops
        self._leash = leash
        self._minder = minder
        self._code = exits.STOPPED
        self._ready = 0
        self._lock = threading.Lock()

    def run(self) -> int:
        if len(self._loops) == 1:
            self._serve(self._loops[0])
        else:
            threads = [threading.Thread(target=self._serve, args=(loop,), daemon=True) for loop in self._loops]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return self._code

    def _serve(self, loop: WorkerLoop) -> None:
        try:
            loop.run(self._one_ready)
        except UnknownQueue:
            self._end(exits.QUEUE_GONE, None)
        except Fenced as exc:
            self._end(exits.FENCED, exc)
        except IncompatibleProtocol as exc:
            self._end(exits.INCOMPATIBLE, exc)
        except Exception as exc:  # a fault of ours: the process ends, the supervisor recovers and starts another
            log.exception("worker failed queue=%s", loop.consumer.queue)
            self._end(exits.FAILED, exc)

    def _one_ready(self) -> None:
        with self._lock:
            self._ready += 1
            if self._ready == len(self._loops):
                tell_supervisor(self._leash, {"ready": True})
                self._minder.show()

    def _end(self, code: int, exc: Exception | None) -> None:
        """One worker cannot go on: all stop, and the process says why."""
        with self._lock:
            self._code = self._code or code
        if exc is not None:
            tell_supervisor(self._leash, {"error": f"{type(exc).__name__}: {exc}"})
        for loop in self._loops:
            loop.stop()
        # The others may be blocked in Redis: the minder unblocks them.
        self._minder.rouse()


def tell_supervisor(leash: socket.socket, message: dict[str, object]) -> None:
    """One line of JSON; if the supervisor is gone there is nobody to tell."""
    try:
        leash.sendall(orjson.dumps(message) + b"\n")
    except OSError as exc:
        log.warning("cannot tell the supervisor error=%s", exc)
