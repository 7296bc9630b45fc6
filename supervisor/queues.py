"""The queues that this supervisor serves: opens, replaces and drops them, and restarts all after an eviction."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from forq.errors import (
    BackPressure,
    CannotImport,
    ExitCode,
    ForqError,
    IncompatibleProtocol,
    QueueExists,
    RedisUnavailable,
    UnknownQueue,
)
from forq.procs.loop import Loop
from forq.queue_spec import QueueSpec
from forq.settings import WORK, Value
from forq.supervisor.capacity import Grants
from forq.supervisor.config import PIPELINE_QUEUE, Config, Pipeline
from forq.supervisor.pacing import Admission
from forq.supervisor.process import ProcessDeps
from forq.supervisor.queue import Change, ServedQueue
from forq.supervisor.services import RETRY_SECONDS, Services
from forq.supervisor.statedir import StateDir
from forq.values import check_queue_name

# If this processor is evicted more often than this within REJOIN_SECONDS, the supervisor exits.
MAX_REJOINS = 5
REJOIN_SECONDS = 600.0

log = logging.getLogger("forq")


@dataclass(frozen=True)
class AppQueue:
    """The name of the app that defines a queue, and its schedules for it."""

    app: str
    schedules: Mapping[str, Mapping[str, Any]]


class Queues:
    """All queues, by name.

    1. Opens each: creates or joins it in Redis through the clerk, then starts its processes; retries while Redis is
       down.
    2. Carries out create, replace, restart and drop for the control socket.
    3. Handles reports of pulse: deleted, lost and found queues, suspects, fail jobs, the eviction of this processor.

    `fail` stops the supervisor with an exit code and a message.
    """

    def __init__(
        self,
        config: Config,
        state: StateDir,
        loop: Loop,
        services: Services,
        *,
        changed: Callable[[], None],
        fail: Callable[[int, str], None],
    ) -> None:
        self.by_name: dict[str, ServedQueue] = {}
        # By queue; written by Apps.
        self.of_apps: dict[str, AppQueue] = {}
        self.grants = Grants(loop, services.scoreboard, config.capacity, config.capacity_aging_seconds)
        self._admission = Admission(loop)
        self._config = config
        self._state = state
        self._loop = loop
        self._services = services
        self._changed = changed
        self._fail = fail
        self._stopping = False
        self._declared = frozenset(spec.name for spec in config.queues)
        # Whether the server check has succeeded.
        self._may_open = False
        # Replaced or dropped queues whose processes have not ended yet.
        self._leaving: set[ServedQueue] = set()
        self._rejoining = False
        self._rejoined: list[float] = []
        self._deps = ProcessDeps(
            children=services.children,
            scoreboard=services.scoreboard,
            grants=self.grants,
            admission=self._admission,
            child_main=services.child_main,
            recover=services.recover,
            queue_gone=self.gone,
            heartbeat=services.beat,
            changed=changed,
            processor=lambda: services.processor,
            check_unread=lambda name: services.pulse.request("check_unread", {"queue": name}),
            warden=services.warden,
            stats=services.context.stats,
        )

    def use_config(self, config: Config) -> None:
        """The queues and schedules of a changed config file; queues that are served stay as they are."""
        self._config = config
        self._declared = frozenset(spec.name for spec in config.queues)

    def served(self) -> tuple[list[str], list[str]]:
        """Names of the served queues, and of those among them that have a fail queue."""
        served = [queue.spec for queue in self.by_name.values() if queue.wanted]
        return [spec.name for spec in served], [spec.name for spec in served if spec.fail_handler is not None]

    def probe(self, slots: list[int], *, unread: bool) -> None:
        """Checks whether the processes of these slots respond."""
        numbers = set(slots)
        for queue in self.by_name.values():
            queue.probe(numbers, unread=unread)

    def add(self, spec: QueueSpec, *, found: bool = False) -> ServedQueue:
        self._services.output_pipes.open(spec.name)
        queue = ServedQueue(spec, self._config.options_of(spec), self._deps, found=found)
        self.by_name[spec.name] = queue
        self._changed()
        return queue

    def find(self, name: object) -> ServedQueue:
        queue = self.by_name.get(check_queue_name(name))
        if queue is None:
            raise UnknownQueue(f"this supervisor serves no queue {name!r}")
        return queue

    def running_jobs(self) -> int:
        return sum(queue.running_jobs() for queue in (*self.by_name.values(), *self._leaving))

    def longest_grace_seconds(self) -> float:
        graces = [float(queue.options["stop_grace"]) for queue in (*self.by_name.values(), *self._leaving)]
        return max(graces, default=0.0)

    def serves(self, queue: ServedQueue) -> bool:
        return self.by_name.get(queue.spec.name) is queue and not self._stopping

    def found(self, name: str, mode: str) -> None:
        """Pulse found a queue of a release mode that another supervisor created. Every supervisor serves those. It is
        not saved in the state directory."""
        if name in self.by_name or self._stopping:
            return
        log.info("found a queue created elsewhere queue=%s mode=%s", name, mode)
        queue = self.add(QueueSpec(name, mode, None, {}, (), {}), found=True)
        if self._may_open:
            self.open(queue, reopening=True)

    def open_all(self) -> None:
        self._may_open = True
        self._services.end_predecessor(list(self.by_name))
        for queue in self.by_name.values():
            # `create` opens a queue itself when its successors have imported the handler.
            if not queue.wanted and not queue.has_successors:
                self.open(queue, reopening=not self.is_declared(queue.spec.name))
        if self._config.pipeline is not None:
            self.by_name[PIPELINE_QUEUE].when_opened(partial(self._begin_pipeline, self._config.pipeline))

    def is_declared(self, name: str) -> bool:
        """Whether the config file or an app defines the queue."""
        return name in self._declared or name in self.of_apps

    def add_declared(self, spec: QueueSpec) -> None:
        """Serves a queue that is defined outside the state directory, from when Redis is up."""
        queue = self.add(spec)
        if self._may_open:
            self.open(queue)

    def _begin_pipeline(self, pipeline: Pipeline) -> None:
        """Enqueues the pipeline's one job, which re-enqueues itself. Pushing it again updates its settings."""
        data = {"history": pipeline.history, "every_seconds": pipeline.every_seconds, "prefix": self._config.prefix}
        job = {"name": PIPELINE_QUEUE, "id": "ingest", "data": data}

        def pushed(answer: Any) -> None:
            if isinstance(answer, RedisUnavailable):
                self._loop.call_later(RETRY_SECONDS, lambda: self._begin_pipeline(pipeline))
            elif isinstance(answer, ForqError):
                log.error("failed to start the pipeline error=%s", answer)

        self._services.clerk.request("push", job, pushed)

    def open(
        self, queue: ServedQueue, then: Callable[[ForqError | None], None] | None = None, *, reopening: bool = False
    ) -> None:
        """Creates or joins the queue in Redis, then starts its processes. Retries while Redis is down.

        `reopening`: the queue existed before; if it was deleted in the meantime, it is dropped here, too.
        """
        name = queue.spec.name

        def made(answer: Any) -> None:
            error = answer if isinstance(answer, ForqError) else None
            if self._stopping:
                made_it = error is None and answer is not None
                error = error or ForqError(
                    f"queue {name!r} is not served: this supervisor is stopping"
                    + (" (Redis has the queue)" if made_it else "")
                    + f"; when it runs again: forqctl create {name} …"
                )
            elif not self.serves(queue):
                error = UnknownQueue(f"queue {name!r} was deleted in the meantime")
            elif error is None and queue.stopping:
                # An eviction, for example. Its processes are started when the old ones are gone.
                queue.stop(lambda: self.open(queue, then, reopening=True), now=True)
                return
            elif error is None:
                if answer is not None and answer["unscheduled"]:
                    log.warning(
                        "removed schedules that the config file no longer has queue=%s unscheduled=%s",
                        *(name, answer["unscheduled"]),
                    )
                queue.start()
                self._services.send_served()
                if then is not None:
                    self._watch_new(queue, then)
                return
            if then is not None:
                then(error)
            if error is not None and self.serves(queue):
                self._cannot_open(queue, error, reopening=reopening)

        def answered(answer: Any) -> None:
            if isinstance(answer, ForqError):
                made(answer)
            else:
                self._admission.submit(lambda: made(answer))

        if not self.serves(queue):
            made(None)
            return
        self._services.clerk.request(
            "create", self._creation(queue.spec, reopening=reopening, joining=queue.found), answered
        )

    def _watch_new(self, queue: ServedQueue, then: Callable[[ForqError | None], None]) -> None:
        """Calls `then` when pulse watches the queue: otherwise the caller's first delayed jobs could be due before."""
        name = queue.spec.name

        def watched() -> None:
            then(None if self.serves(queue) else UnknownQueue(f"queue {name!r} was deleted in the meantime"))

        self._services.serve_new(name, with_fail_queue=queue.spec.fail_handler is not None, then=watched)

    def _creation(self, spec: QueueSpec, *, reopening: bool, joining: bool) -> dict[str, Any]:
        """Parameters of the clerk's `create`. A queue of a release mode may have been created elsewhere: only options
        given here are set."""
        return {
            "name": spec.name,
            "mode": spec.mode,
            "options": self._config.options_of(spec) if spec.mode == WORK else dict(spec.options),
            "fail_handler": spec.fail_handler is not None,
            "reopening": reopening,
            "joining": joining,
            "schedules": self._config.schedules.get(spec.name),
            "app_schedules": self.app_schedules(spec.name),
        }

    def app_schedules(self, name: str) -> dict[str, Mapping[str, Any]]:
        """The schedules that an app defines for this queue, without those that the config file replaces."""
        own = self.of_apps.get(name)
        in_file = self._config.schedules.get(name, {})
        return {} if own is None else {key: fields for key, fields in own.schedules.items() if key not in in_file}

    def _cannot_open(self, queue: ServedQueue, error: ForqError, *, reopening: bool) -> None:
        name = queue.spec.name
        if isinstance(error, RedisUnavailable | BackPressure):
            self._loop.call_later(RETRY_SECONDS, lambda: self.open(queue, reopening=reopening))
        elif isinstance(error, UnknownQueue):
            log.warning("queue was deleted by another supervisor queue=%s", name)
            self.drop(name, lambda survivors: None)
        else:
            log.error("cannot serve queue queue=%s reason=%s", name, error)
            queue.config_error = str(error)
            queue.abandon()
            queue.stop(now=True)
            if isinstance(error, IncompatibleProtocol):
                self._fail(ExitCode.INCOMPATIBLE, str(error))

    def create(self, spec: QueueSpec, seconds: float | None, then: Callable[[ForqError | None], None]) -> None:
        """Creates a queue. Its processes import the handler first; if that fails or takes longer than `seconds`,
        nothing is created. With `seconds` None the queue is created at once, without waiting for the import."""
        queue = self.add(spec)

        def opened(error: ForqError | None) -> None:
            if error is not None and self.by_name.get(spec.name) is queue:
                self._discard(queue)
            then(error)

        def imported(error: ForqError | None) -> None:
            if error is None:
                self.open(queue, opened)
            else:
                opened(self._explained(f"queue {spec.name!r} is not created", error, queue))

        if seconds is None or self._stopping:
            self.open(queue, opened)
        else:
            queue.start_successors(spec, queue.options, seconds, imported)

    def _discard(self, queue: ServedQueue) -> None:
        """Removes a queue whose creation failed."""
        del self.by_name[queue.spec.name]
        self._leaving.add(queue)
        queue.abandon()
        queue.stop(lambda: self._leaving.discard(queue), now=True)
        self._services.output_pipes.remove(queue.spec.name)
        self._changed()

    def replace(
        self, old: ServedQueue, spec: QueueSpec, seconds: float | None, then: Callable[[ForqError | None], None]
    ) -> None:
        """Changes the definition of a queue. If its processes run, it is restarted with the new definition. Otherwise,
        and with `seconds` None, the old processes end before the new ones start."""
        name = spec.name
        if self._stopping or old.stopping:
            raise QueueExists(f"queue {name!r} is being stopped; try again")
        if old.has_successors:
            raise QueueExists(f"queue {name!r} is being restarted or changed by another request; try again")
        if seconds is not None and old.wanted:
            self._change(old, spec, seconds, then)
            return

        def imported(error: ForqError | None) -> None:
            if error is None:
                exchange()
            else:
                then(self._explained(f"queue {name!r} is not changed", error, old))

        def exchange() -> None:
            queue = self.add(spec)
            old.hand_successors_to(queue)
            old.abandon()
            self._leaving.add(old)
            old.stop(partial(ended, queue))

        def ended(queue: ServedQueue) -> None:
            self._leaving.discard(old)
            self.open(queue, then)

        if seconds is None:
            exchange()
        else:
            old.start_successors(spec, self._config.options_of(spec), seconds, imported)

    def _change(
        self, queue: ServedQueue, spec: QueueSpec, seconds: float, then: Callable[[ForqError | None], None]
    ) -> None:
        name = spec.name

        def accept(answer: Callable[[ForqError | None], None]) -> None:
            def made(created: Any) -> None:
                answer(created if isinstance(created, ForqError) else None)

            self._services.clerk.request("create", self._creation(spec, reopening=True, joining=False), made)

        def changed(error: ForqError | None) -> None:
            if error is not None:
                then(self._explained(f"queue {name!r} is not changed", error, queue))
                return
            self._services.send_served()
            self._watch_new(queue, then)

        queue.restart(seconds, changed, Change(spec, self._config.options_of(spec), accept))

    def adopt(self, queue: ServedQueue, spec: QueueSpec, then: Callable[[ForqError | None], None]) -> None:
        """Changes the definition of a queue of a release mode, if Redis accepts it. Its process needs no new code."""

        def made(answer: Any) -> None:
            if isinstance(answer, ForqError):
                then(answer)
                return
            queue.spec, queue.options, queue.found = spec, self._config.options_of(spec), False
            then(None)

        self._services.clerk.request("create", self._creation(spec, reopening=False, joining=False), made)

    def restart(self, queue: ServedQueue, seconds: float, then: Callable[[ForqError | None], None]) -> None:
        """Starts new processes, also for a queue that could not be served so far. If their import fails or takes longer
        than `seconds`, the old processes stay."""
        failed = f"queue {queue.spec.name!r} is not restarted"
        if self._stopping:
            then(ForqError(f"{failed}: this supervisor is stopping"))
            return
        if queue.stopping or (not queue.wanted and queue.config_error is None):
            then(ForqError(f"{failed}: it is being opened or stopped; try again"))
            return

        def restarted(error: ForqError | None) -> None:
            if error is None:
                self._services.send_served()
            then(None if error is None else self._explained(failed, error, queue))

        def imported(error: ForqError | None) -> None:
            if error is None:
                self.open(queue, then)
            else:
                restarted(error)

        if queue.refused and not queue.has_successors:
            queue.start_successors(queue.spec, queue.options, seconds, imported)
        elif queue.refused and queue.successors_ending:
            # Those of an earlier restart, which Redis refused as well.
            queue.stop(lambda: self.restart(queue, seconds, then), now=True)
        else:
            queue.restart(seconds, restarted)

    def _explained(self, failed: str, error: ForqError, queue: ServedQueue) -> ForqError:
        """Adds to the error what failed, and which process still serves the queue."""
        if self._stopping:
            return ForqError(f"{failed}: this supervisor is stopping")
        if not self.serves(queue):
            return UnknownQueue(f"{failed}: it was deleted in the meantime")
        pid = queue.main_pid()
        remains = ""
        if not queue.opening:
            remains = f"; its old process keeps running (pid {pid})" if pid else "; nothing serves it now"
        if isinstance(error, CannotImport):
            return CannotImport(f"{failed}: {error}{remains}", error.traceback)
        return type(error)(f"{failed}: {error}{remains}")

    def redefine(self, queue: ServedQueue, changes: Mapping[str, Value]) -> None:
        self.set_definition(queue, replace(queue.spec, options={**queue.spec.options, **changes}))

    def set_definition(self, queue: ServedQueue, spec: QueueSpec) -> None:
        """For new processes. Running ones stay as they are; only their number may change."""
        queue.spec, queue.options = spec, self._config.options_of(spec)
        queue.options_changed()

    def drop(self, name: str, then: Callable[[set[int]], None]) -> None:
        """Kills the queue's processes with their descendants, and forgets its definition. `then` gets the pids that
        could not be killed."""
        queue = self.by_name.pop(name, None)
        if queue is not None:
            queue.abandon()
        self._services.output_pipes.remove(name)
        self._changed()
        self._services.send_served()
        leaving = [other for other in (queue, *self._leaving) if other is not None and other.spec.name == name]
        self._leaving.update(leaving)
        left = set(leaving)

        def gone(one: ServedQueue) -> None:
            left.discard(one)
            self._leaving.discard(one)
            if not left:
                all_gone()

        def all_gone() -> None:
            if self._services.context.stats is not None:
                self._services.context.stats.forget(name)
            then({pid for one in leaving for pid in one.survivors})

        for one in leaving:
            one.stop(partial(gone, one), now=True)
        if not leaving:
            all_gone()
        self._state.drop_queue(name)

    def stop_serving(self, name: str, then: Callable[[], None]) -> None:
        """Ends the queue's processes within the grace period. The queue stays in Redis with its jobs."""
        queue = self.by_name.pop(name)
        queue.abandon()
        self._leaving.add(queue)
        self._changed()
        self._services.send_served()

        def stopped() -> None:
            self._leaving.discard(queue)
            if name not in self.by_name:
                self._services.output_pipes.remove(name)
            then()

        queue.stop(stopped)

    def gone(self, name: str, *, deleted: bool = False) -> None:
        """The queue is no longer in Redis: deleted by another supervisor, or lost with the server's data."""
        queue = self.by_name.get(name)
        if queue is None or self._stopping or not queue.wanted:
            return
        if deleted:
            log.warning("queue was deleted by another supervisor queue=%s", name)
            self.drop(name, lambda survivors: None)
        else:
            lost = UnknownQueue(f"queue {name!r} was deleted, or lost with its data")
            queue.stop(lambda: self.open(queue, reopening=True), now=True, reason=lost)

    def suspects_wait(self, name: str, number: int) -> None:
        queue = self.by_name.get(name)
        if queue is not None and not self._stopping:
            queue.suspects_wait(number)

    def fail_jobs_wait(self, name: str) -> None:
        queue = self.by_name.get(name)
        if queue is not None and not self._stopping:
            queue.fail_jobs_wait()

    def rejoin(self) -> None:
        """This processor was evicted: kills all processes of queues and starts them anew under a new name."""
        if self._stopping or self._rejoining:
            return
        now = self._loop.now()
        self._rejoined = [at for at in self._rejoined if now - at < REJOIN_SECONDS] + [now]
        if len(self._rejoined) > MAX_REJOINS:
            self._fail(
                ExitCode.EVICTED_TOO_OFTEN,
                f"this processor was evicted {len(self._rejoined)} times within {REJOIN_SECONDS:.0f} s: its heartbeats "
                "reach Redis too late; check the load of this machine and of Redis, or raise expiry",
            )
            return
        evicted = self._services.new_processor()
        self._rejoining = True
        log.error("this processor was evicted; restarting all queues under a new name processor=%s", evicted)
        wanted = [queue for queue in self.by_name.values() if queue.wanted]
        _stop_all({*wanted, *self.by_name.values(), *self._leaving}, lambda: self._restart(wanted, evicted), now=True)

    def _restart(self, queues: list[ServedQueue], evicted: str) -> None:
        self._services.pulse.restart(lambda: self._reopen(queues, evicted))

    def _reopen(self, queues: list[ServedQueue], evicted: str) -> None:
        self._rejoining = False
        self._services.evict(evicted, "evicted", list(self.by_name))
        self._services.scribe.restart(lambda: None)
        for queue in queues:
            self.open(queue, reopening=True)

    def stop(self, then: Callable[[], None], *, now: bool) -> None:
        """Stops all processes of all queues; `then` is called when they are gone."""
        self._stopping = True
        _stop_all({*self.by_name.values(), *self._leaving}, then, now=now)


def _stop_all(queues: set[ServedQueue], then: Callable[[], None], *, now: bool) -> None:
    """Calls `then` once, when the processes of all queues are gone."""
    left = set(queues)

    def one_stopped(queue: ServedQueue) -> None:
        left.discard(queue)
        if not left:
            then()

    for queue in queues:
        queue.stop(partial(one_stopped, queue), now=now)
    if not queues:
        then()
