"""The parent process: which queues it serves, the services it needs for that, and its own start and stop.

1. Boot: embedded Redis (if none is configured), pulse, scribe, clerk, control socket; then each queue is made in Redis
   and its children are started. Nothing waits for Redis but the queues themselves.
2. Run: one loop (loop.py); it never opens Redis, never imports a handler, never waits.
3. Stop: queues in order, then what they held is recovered, then the services, the server last.
"""

import hashlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from forq import exits
from forq.cgroup import Cgroup, Cgroups
from forq.errors import ForqError, IncompatibleProtocol, IncompatibleServer, RedisUnavailable, UnknownQueue
from forq.options import QueueSpec, Value
from forq.scoreboard import Role, Scoreboard
from forq.supervisor import embedded, entry_points
from forq.supervisor.child import Nursery
from forq.supervisor.config import Config, shown_url
from forq.supervisor.loop import Loop, Timer
from forq.supervisor.queue_unit import QueueUnit, Surroundings
from forq.supervisor.redis_child import RedisChild
from forq.supervisor.service import Service
from forq.supervisor.statedir import StateDir

RETRY_SECONDS = 0.25
# How long a stop waits for Redis to take what the children held; after that the next start recovers it.
LAST_RECOVERY_SECONDS = 3.0
TITLE_SECONDS = 0.2
FLAPPING_LOOK_SECONDS = 5.0

log = logging.getLogger("forq")


class Supervisor:
    def __init__(self, config: Config, state: StateDir, loop: Loop) -> None:
        self.config = config
        self.state = state
        self.loop = loop
        self.units: dict[str, QueueUnit] = {}
        self.redis_state: dict[str, Any] = {"ok": None, "error": None}
        self.exit_code = exits.STOPPED
        self.stopping = False
        self.started = loop.now()
        self.redis_url = config.redis or f"unix://{state.redis_socket}"
        self.scoreboard = Scoreboard.create()
        self._watch_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._cgroups = _cgroups(config, state)
        self.nursery = Nursery(loop, (state.tree_lock_fd, self._watch_fd), self._cgroups)
        self.processor, self._predecessor = state.take_processor()
        self.redis = self._redis_child() if config.redis is None else None
        self.pulse = Service(
            self.nursery, "pulse", self._run_pulse, on_event=self._pulse_event, on_start=self._tell_services
        )
        self.scribe = Service(
            self.nursery, "scribe", self._run_scribe, on_event=self._scribe_event, on_start=self._scribe_started
        )
        # queue -> why its failed log cannot be written
        self.failed_log_errors: dict[str, str] = {}
        self.clerk = Service(self.nursery, "clerk", self._run_clerk)
        self._unrecovered = 0
        self._leaving: set[QueueUnit] = set()
        self._rejoining = False
        self._around = Surroundings(
            nursery=self.nursery,
            scoreboard=self.scoreboard,
            run_child=self._run_child,
            recover=self._recover,
            queue_gone=self.queue_gone,
            evicted=self.rejoin,
            changed=self._changed,
            processor=lambda: self.processor,
        )
        self._title_timer: Timer | None = None

    def start(self) -> None:
        """Starts everything; returns at once."""
        if self.redis is not None:
            self.redis.start()
        self._changed()
        self.pulse.start()
        self.scribe.start()
        self.clerk.start()
        for signum in (signal.SIGTERM, signal.SIGINT):
            self.loop.on_signal(signum, lambda: self.stop(now=self.stopping))
        self.loop.on_signal(signal.SIGHUP, self._refuse_reload)
        self._check_server()

    def add_queue(self, spec: QueueSpec) -> QueueUnit:
        unit = QueueUnit(spec, self.config.options_of(spec), self._around)
        self.units[spec.name] = unit
        self._changed()
        return unit

    def serves(self, unit: QueueUnit) -> bool:
        return self.units.get(unit.spec.name) is unit and not self.stopping

    def open_queue(
        self, unit: QueueUnit, then: Callable[[ForqError | None], None] | None = None, *, reopening: bool = False
    ) -> None:
        """Makes the queue in Redis or joins it, then starts its children. Tried again while Redis is down.

        `reopening`: the queue existed before; if somebody has deleted it meanwhile it is dropped here too.
        """
        name = unit.spec.name

        def made(answer: Any) -> None:
            error = answer if isinstance(answer, ForqError) else None
            if not self.serves(unit):
                error = UnknownQueue(f"queue {name!r} was deleted meanwhile")
            elif error is None:
                unit.start()
                self._tell_services()
            if then is not None:
                then(error)
            if error is not None and self.serves(unit):
                self._cannot_open(unit, error, reopening=reopening)

        if not self.serves(unit):
            made(None)
            return
        params = {
            "name": name,
            "mode": unit.spec.mode,
            "options": dict(unit.options),
            "fail_handler": unit.spec.fail_handler is not None,
            "reopening": reopening,
        }
        self.clerk.ask("create", params, made)

    def _cannot_open(self, unit: QueueUnit, error: ForqError, *, reopening: bool) -> None:
        name = unit.spec.name
        if isinstance(error, RedisUnavailable):
            self.loop.call_later(RETRY_SECONDS, lambda: self.open_queue(unit, reopening=reopening))
        elif isinstance(error, UnknownQueue):
            log.warning("queue was deleted by another supervisor queue=%s", name)
            self.drop_queue(name, lambda: None)
        else:
            log.error("queue cannot be served queue=%s reason=%s", name, error)
            unit.config_error = str(error)
            if isinstance(error, IncompatibleProtocol):
                self.fail(exits.INCOMPATIBLE, str(error))

    def replace_queue(self, old: QueueUnit, spec: QueueSpec, then: Callable[[ForqError | None], None]) -> None:
        """Another definition for a queue that is served: its children end in order, then the new ones start."""
        unit = self.add_queue(spec)
        self._leaving.add(old)

        def ended() -> None:
            self._leaving.discard(old)
            self.open_queue(unit, then)

        old.stop(ended)

    def redefine(self, unit: QueueUnit, changes: Mapping[str, Value]) -> None:
        """Options that were changed while the queue is served."""
        unit.spec = replace(unit.spec, options={**unit.spec.options, **changes})
        unit.options = self.config.options_of(unit.spec)

    def drop_queue(self, name: str, then: Callable[[], None]) -> None:
        """Ends the queue's processes at once, with everything below them, and forgets its definition."""
        unit = self.units.pop(name, None)
        self._changed()
        self._tell_services()
        leaving = [other for other in (unit, *self._leaving) if other is not None and other.spec.name == name]
        self._leaving.update(leaving)
        left = set(leaving)

        def gone(one: QueueUnit) -> None:
            left.discard(one)
            self._leaving.discard(one)
            if not left:
                then()

        for one in leaving:
            one.stop(partial(gone, one), now=True)
        if not leaving:
            then()
        self.state.drop_queue(name)

    def queue_gone(self, name: str, *, deleted: bool = False) -> None:
        """A child or pulse found that the queue is not in Redis any more: deleted elsewhere, or lost with its data."""
        unit = self.units.get(name)
        if unit is None or self.stopping or not unit.wanted:
            return
        if deleted:
            log.warning("queue was deleted by another supervisor queue=%s", name)
            self.drop_queue(name, lambda: None)
        else:
            unit.stop(lambda: self.open_queue(unit, reopening=True), now=True)

    def rejoin(self) -> None:
        """This processor has been evicted: its children end at once, and it starts afresh under a new name."""
        if self.stopping or self._rejoining:
            return
        self._rejoining = True
        log.error("this processor was removed from Redis, starting afresh processor=%s", self.processor)
        evicted = self.processor
        self.processor, _ = self.state.take_processor()
        units = [unit for unit in self.units.values() if unit.wanted]
        left = set(units)

        def one_ended(unit: QueueUnit) -> None:
            left.discard(unit)
            if not left:
                self.pulse.restart(lambda: self._reopen(units, evicted))

        for unit in units:
            unit.stop(partial(one_ended, unit), now=True)

    def _reopen(self, units: list[QueueUnit], evicted: str) -> None:
        self._rejoining = False
        self._evict(evicted, "evicted")
        self.scribe.restart(lambda: None)
        for unit in units:
            self.open_queue(unit, reopening=True)

    def stop(self, *, now: bool = False) -> None:
        """Ends everything in order, or at once."""
        if not self.stopping:
            log.info("stopping queues=%s", len(self.units))
        self.stopping = True
        units = [*self.units.values(), *self._leaving]
        left = set(units)

        def one_stopped(unit: QueueUnit) -> None:
            left.discard(unit)
            if not left:
                self._stop_services()

        for unit in units:
            unit.stop(partial(one_stopped, unit), now=now)
        if not units:
            self._stop_services()

    def close(self) -> None:
        """After the loop has ended: leaves nothing behind but the state directory."""
        if self._cgroups is not None:
            self._cgroups.remove()

    def status_of_redis(self) -> dict[str, Any]:
        return {"url": shown_url(self.redis_url), "embedded": self.redis is not None, **self.redis_state}

    def _check_server(self) -> None:
        def checked(answer: Any) -> None:
            if self.stopping:
                return
            if isinstance(answer, IncompatibleServer):
                self.fail(exits.CONFIG, str(answer))
            elif isinstance(answer, ForqError):
                if self.config.require_redis:
                    self.fail(exits.NO_REDIS, str(answer))
                else:
                    self.redis_state = {"ok": False, "error": str(answer)}
                    self.loop.call_later(RETRY_SECONDS, self._check_server)
            else:
                self.redis_state = {"ok": True, "error": None, "server": answer["server"]}
                self._open_all()

        self.clerk.ask("check", {}, checked)

    def _open_all(self) -> None:
        if self._predecessor is not None:
            self._evict(self._predecessor, "supervisor_lost")
            self._predecessor = None
        declared = {spec.name for spec in self.config.queues}
        for unit in self.units.values():
            if not unit.wanted:
                self.open_queue(unit, reopening=unit.spec.name not in declared)

    def fail(self, code: int, message: str) -> None:
        """A condition that this process cannot outlive."""
        log.critical("%s", message)
        self.exit_code = code
        self.stop(now=True)

    def _stop_services(self) -> None:
        """All children of queues are gone; pulse still has to hand back what they held."""
        deadline = self.loop.now() + LAST_RECOVERY_SECONDS

        def when_recovered() -> None:
            if self._unrecovered and self.redis_state["ok"] and self.loop.now() < deadline:
                self.loop.call_later(0.02, when_recovered)
                return
            for service in (self.pulse, self.scribe, self.clerk):
                service.kill()
            if self.redis is not None:
                self.redis.stop(self.loop.stop)
            else:
                self.loop.stop()

        self._evict(self.processor, "stopped")
        when_recovered()

    def _recover(self, params: dict[str, Any], then: Callable[[], None]) -> None:
        self._insist("recover", params, then)

    def _evict(self, processor: str, cause: str) -> None:
        """Takes a processor that is gone out of every queue, at once and not after its expiry."""
        self._insist("evict", {"processor": processor, "cause": cause, "queues": list(self.units)}, lambda: None)

    def _insist(self, verb: str, params: dict[str, Any], then: Callable[[], None]) -> None:
        """Asks pulse until Redis has taken it."""
        self._unrecovered += 1

        def done(answer: Any) -> None:
            if isinstance(answer, RedisUnavailable):
                self.loop.call_later(RETRY_SECONDS, ask)
                return
            if isinstance(answer, ForqError):
                log.error("pulse was refused verb=%s error=%s", verb, answer)
            self._unrecovered -= 1
            then()

        def ask() -> None:
            self.pulse.ask(verb, params, done, repeat=True)

        ask()

    def _tell_services(self) -> None:
        served = [unit for unit in self.units.values() if unit.wanted]
        failing = [unit.spec.name for unit in served if unit.spec.fail_handler is not None]
        for service in (self.pulse, self.scribe):
            service.ask("serve", {"queues": [unit.spec.name for unit in served], "with_fail_queue": failing})

    def _scribe_started(self) -> None:
        self.failed_log_errors.clear()
        self._tell_services()

    def _scribe_event(self, message: dict[str, Any]) -> None:
        if message["error"] is None:
            self.failed_log_errors.pop(message["queue"], None)
        else:
            self.failed_log_errors[message["queue"]] = f"{message['error']} (tried {message['failures']} times)"

    def _pulse_event(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "redis":
            self.redis_state = {**self.redis_state, "ok": message["ok"], "error": message["error"]}
        elif event == "queue_gone":
            self.queue_gone(message["queue"], deleted=message["deleted"])
        elif event == "evicted":
            self.rejoin()

    def _changed(self) -> None:
        """The title follows soon, however many things change at once."""
        if self._title_timer is None:
            self._title_timer = self.loop.call_later(TITLE_SECONDS, self._show_title)

    def _show_title(self) -> None:
        self._title_timer = None
        states = [unit.state for unit in self.units.values()]
        troubles = [f"{states.count(state)} {state}" for state in ("flapping", "config_error") if state in states]
        setproctitle(f"forq: supervisor ({', '.join([f'{len(states)} queues', *troubles])})")
        if "flapping" in states:
            # It ends by itself.
            self._title_timer = self.loop.call_later(FLAPPING_LOOK_SECONDS, self._show_title)

    def _refuse_reload(self) -> None:
        log.warning("SIGHUP: settings are read at start only; restart forq to change them")

    def _redis_child(self) -> RedisChild:
        program = embedded.find_server(self.config.embedded_server)
        self.state.redis_dir.mkdir(mode=0o700, exist_ok=True)
        return RedisChild(self.nursery, embedded.command(program, self.state))

    def _run_child(self, spec: QueueSpec, role: Role, slots: tuple[int, ...], leash: socket.socket) -> int:
        return entry_points.run_child(
            entry_points.ChildSettings(
                spec=spec,
                role=role,
                url=self.redis_url,
                prefix=self.config.prefix,
                processor=self.processor,
                expiry_ms=round(self.config.expiry_seconds * 1000),
                scoreboard=self.scoreboard,
                slots=slots,
                leash=leash,
                watch_fd=self._watch_fd,
            )
        )

    def _run_pulse(self, leash: socket.socket) -> int:
        return entry_points.run_pulse(
            entry_points.PulseSettings(
                url=self.redis_url,
                prefix=self.config.prefix,
                processor=self.processor,
                heartbeat_seconds=self.config.heartbeat_seconds,
                expiry_ms=round(self.config.expiry_seconds * 1000),
                scoreboard=self.scoreboard,
                leash=leash,
                watch_fd=self._watch_fd,
                cgroups=self._cgroups,
            )
        )

    def _run_scribe(self, leash: socket.socket) -> int:
        return entry_points.run_scribe(
            entry_points.ScribeSettings(
                url=self.redis_url,
                prefix=self.config.prefix,
                processor=self.processor,
                expiry_ms=round(self.config.expiry_seconds * 1000),
                logs_dir=Path(self.state.path) / "logs",
                failed_log_max=self.config.failed_log_max,
                leash=leash,
            )
        )

    def _run_clerk(self, leash: socket.socket) -> int:
        return entry_points.run_clerk(
            entry_points.ClerkSettings(
                url=self.redis_url,
                prefix=self.config.prefix,
                max_queues=self.config.max_queues,
                logs_dir=Path(self.state.path) / "logs",
                leash=leash,
                failed_log_max=self.config.failed_log_max,
            )
        )


def _cgroups(config: Config, state: StateDir) -> Cgroups | None:
    """The control groups of this state directory; what an earlier run left in them is killed."""
    if config.cgroup == "off":
        return None
    name = "forq-" + hashlib.sha256(os.fsencode(state.path)).hexdigest()[:16]
    earlier = Cgroups.find(name)
    if earlier is None:
        return None
    Cgroup(earlier.path).kill()
    earlier.remove()
    return Cgroups.find(name)
