"""The process of a queue: its workers, and the minder beside them."""

import logging
import os
import socket
import threading
from dataclasses import dataclass

import orjson

from forq import exits
from forq.broker.consuming import Consumer
from forq.broker.keys import fail_queue
from forq.errors import ConfigError, Fenced, IncompatibleProtocol, UnknownQueue
from forq.ids import new_id
from forq.options import QueueSpec
from forq.scoreboard import Role, Scoreboard, Slot, State
from forq.workers.attempt import Attempts, FailAttempts
from forq.workers.handlers import Handlers, load_fail_handler, load_handlers
from forq.workers.loop import MAX_BATCH, TurnNumbers, WorkerLoop
from forq.workers.minder import Minder
from forq.workers.retry_loop import RetryLoop

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


def run_child(settings: ChildSettings) -> int:
    """The entry point: returns the process's exit code."""
    name = f"{settings.spec.name} {settings.role.name.lower()}"
    minder = Minder(name=name, url=settings.url, leash_fd=settings.leash.fileno())
    minder.start()
    try:
        handlers = load_handlers(settings.spec)
        fail_handler = load_fail_handler(settings.spec)
    except ConfigError as exc:
        tell_supervisor(settings.leash, {"error": str(exc)})
        return exits.CONFIG
    loops: list[WorkerLoop | RetryLoop]
    if settings.role == Role.MAIN:
        loops = [
            _worker(settings, _slot(settings, number), Attempts(settings.spec.name, handlers), minder)
            for number in settings.slots
        ]
    else:
        loops = [_retry_worker(settings, handlers, fail_handler, minder)]
    minder.mind(loops)
    return _Crew(loops, settings.leash, minder).run()


def _slot(settings: ChildSettings, number: int) -> Slot:
    slot = settings.scoreboard.slot(number)
    slot.worker = new_id()
    slot.queue = settings.spec.name
    slot.role = settings.role
    slot.pid = os.getpid()
    slot.state = State.STARTING
    return slot


def _retry_worker(settings: ChildSettings, handlers: Handlers, fail: Handlers | None, minder: Minder) -> RetryLoop:
    name, slot, numbers = settings.spec.name, _slot(settings, settings.slots[0]), TurnNumbers()
    lane = _worker(settings, slot, Attempts(name, handlers), minder, numbers=numbers)
    if fail is None:
        return RetryLoop(lane, None)
    fails = _worker(settings, slot, FailAttempts(name, fail), minder, numbers=numbers, queue=fail_queue(name))
    return RetryLoop(lane, fails)


def _worker(
    settings: ChildSettings,
    slot: Slot,
    attempts: Attempts,
    minder: Minder,
    *,
    numbers: TurnNumbers | None = None,
    queue: str | None = None,
) -> WorkerLoop:
    scoreboard, watch_fd = settings.scoreboard, settings.watch_fd

    def on_batch(count: int) -> None:
        minder.rouse()
        if count > 1 and not scoreboard.watching:
            os.eventfd_write(watch_fd, 1)

    where = (settings.url, settings.prefix, queue or settings.spec.name, settings.processor, slot.worker)
    main = settings.role == Role.MAIN
    return WorkerLoop(
        Consumer(*where, lane="main" if main else "retry"),
        attempts,
        slot,
        expiry_ms=settings.expiry_ms,
        on_batch=on_batch,
        numbers=numbers,
        # What the retry child does is seldom and may be slow: it takes nothing ahead of time.
        max_batch=MAX_BATCH if main else 1,
        resting_state=State.IDLE if main else State.PARKED,
    )


class _Crew:
    """The workers of one process: one runs in the main thread (where handlers may use signals), several in threads."""

    def __init__(self, loops: list[WorkerLoop | RetryLoop], leash: socket.socket, minder: Minder) -> None:
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

    def _serve(self, loop: WorkerLoop | RetryLoop) -> None:
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
