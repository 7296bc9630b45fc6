"""The embedded Redis server: a child that is started first, replaced when it dies, and stopped last."""

import logging
import signal
from collections.abc import Callable

from forq.supervisor import embedded
from forq.supervisor.child import Nursery
from forq.supervisor.respawn import Respawn
from forq.supervisor.spawn import Spawned, exec_program, reap, signal_child

STOP_SECONDS = 10.0

log = logging.getLogger("forq")


class RedisChild:
    def __init__(self, nursery: Nursery, argv: list[str]) -> None:
        self.restarts = 0
        self._nursery = nursery
        self._argv = argv
        self._spawned: Spawned | None = None
        self._respawn = Respawn()
        self._started = 0.0
        self._stopped: Callable[[], None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._spawned is None else self._spawned.pid

    def start(self) -> None:
        try:
            # It dies with the supervisor, in order: TERM makes it write what it has.
            with self._nursery.pids.forking():
                self._spawned = exec_program(
                    self._argv,
                    loop=self._nursery.loop,
                    keep_fds=self._nursery.keep_fds,
                    env=embedded.environment(),
                    death_signal=signal.SIGTERM,
                )
                self._nursery.pids.add(self._spawned.pid)
        except OSError as exc:
            self._start_later(0.0, f"cannot start it: {exc}")
            return
        self._started = self._nursery.loop.now()
        self._nursery.loop.watch_child(self._spawned.pidfd, self._ended)

    def stop(self, then: Callable[[], None]) -> None:
        self._stopped = then
        if self._spawned is None:
            then()
            return
        signal_child(self._spawned, signal.SIGTERM)
        self._nursery.loop.call_later(STOP_SECONDS, self.kill)

    def kill(self) -> None:
        if self._spawned is not None:
            signal_child(self._spawned, signal.SIGKILL)

    def _ended(self) -> None:
        assert self._spawned is not None
        ended = reap(self._spawned)
        self._nursery.pids.discard(self._spawned.pid)
        self._spawned.close()
        self._spawned = None
        if self._stopped is not None:
            self._stopped()
            return
        self.restarts += 1
        self._start_later(self._nursery.loop.now() - self._started, "unknown" if ended is None else ended.text)

    def _start_later(self, lived_seconds: float, reason: str) -> None:
        loop = self._nursery.loop
        delay = self._respawn.delay_after_death(lived_seconds)
        log.error(
            "embedded redis died (see redis/server.log in the state directory) end=%s again_in=%.2fs", reason, delay
        )
        loop.call_later(delay, lambda: None if self._stopped else self.start())
