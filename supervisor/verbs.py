"""The control socket's verbs: a flat table from name to function, nothing else is reachable."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from forq.errors import (
    ForqError,
    InvalidOption,
    QueueExists,
    RedisUnavailable,
    TimedOut,
    UnknownJob,
    UnknownQueue,
    UsageError,
)
from forq.queue_spec import QueueSpec
from forq.settings import SHARED_MODES, parse_options
from forq.supervisor.config import capacity_warning, check_size
from forq.supervisor.connection import Request
from forq.supervisor.queue_unit import QueueUnit
from forq.supervisor.reading import verbs_for_readers
from forq.supervisor.releases import Releases
from forq.supervisor.running_jobs import RunningJobs
from forq.supervisor.status import Status
from forq.supervisor.supervisor import Supervisor
from forq.values import check_queue_name, shown
from forq.version import PROTOCOL, VERSION

DRAIN_LOOK_SECONDS = 0.1
# How long a request waits for its queue to be opened after a start.
OPENING_SECONDS = 5.0
# How long a handler's import may take when it is waited for.
IMPORT_SECONDS = 60.0
MAX_IMPORT_SECONDS = 86400.0
Verb = Callable[[Request], None]


class Verbs:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._queues = supervisor.queues
        self._services = supervisor.services
        self._clerk = supervisor.services.clerk

    def table(self) -> dict[str, Verb]:
        return {
            "status": Status(self._supervisor).status,
            **RunningJobs(self._queues).table(),
            "queue.create": self.create,
            "queue.delete": self.delete,
            "queue.pause": lambda request: self._pause(request, paused=True),
            "queue.resume": lambda request: self._pause(request, paused=False),
            "queue.drain": self.drain,
            "queue.set": self.set,
            "why": self.why,
            "queue.restart": self.restart,
            "ping": lambda request: request.reply({"pong": True, "pid": os.getpid()}),
            "version": lambda request: request.reply({"version": VERSION, "protocol": PROTOCOL}),
            "shutdown": self.shutdown,
            **dict.fromkeys(("push", "push_many", "recover", "cancel", "remove", "job", "jobs"), self._pass_on),
            # Whose clerk dies meanwhile asks the next one.
            "watch": lambda request: self._ask_clerk(request, "watch", request.params, repeat=True),
            # Nothing of it is in Redis: it need not wait for that.
            "logs": lambda request: self._clerk.ask("logs", request.params, _answer_to(request), repeat=True, raw=True),
            **Releases(self._ask_clerk, self._clerk, self._supervisor.loop.now).table(),
            **dict.fromkeys(("schedule", "schedules", "unschedule", "trigger"), self._pass_on),
            **dict.fromkeys(("dead.list", "dead.show", "dead.retry", "dead.discard"), self._pass_on),
        }

    def table_for_readers(self) -> dict[str, Verb]:
        return verbs_for_readers(self.table(), self._ask_clerk)

    def create(self, request: Request) -> None:
        params = dict(request.params)
        name = check_queue_name(params.pop("name", None))
        seconds = _import_seconds(params.pop("wait", True))
        spec = QueueSpec.from_mapping(name, params, f"queue {name!r}", self._supervisor.config.mode)
        check_size(spec.options, self._supervisor.config.capacity, f"queue {name!r}")
        unit = self._queues.units.get(name)
        if unit is not None:
            self._change(request, unit, spec, seconds)
            return

        def created(error: ForqError | None) -> None:
            if error is not None:
                request.fail(error)
            else:
                self._save(request, spec, {"name": name, "created": True})

        self._queues.create(spec, seconds, created)

    def _save(self, request: Request, spec: QueueSpec, answer: dict[str, Any]) -> None:
        try:
            self._supervisor.state.save_queue(spec.name, spec.to_mapping())
        except ForqError as exc:
            request.fail(ForqError(f"the queue is served, but not after a restart: {exc}"))
            return
        request.reply(self._warned(spec, answer))

    def _warned(self, spec: QueueSpec, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer, with what its sender should know although nothing was refused."""
        warning = capacity_warning(self._supervisor.config.options_of(spec), self._supervisor.config.capacity)
        return answer if warning is None else {**answer, "warnings": [f"queue {spec.name}: {warning}"]}

    def _change(self, request: Request, unit: QueueUnit, spec: QueueSpec, seconds: float | None) -> None:
        """A queue of that name is served already: the same definition changes nothing, another one replaces it.
        One that cannot be served is tried once more."""
        name = spec.name
        if unit.spec == spec:
            if unit.opening:
                raise QueueExists(f"queue {name!r} is just being created; try again")
            if unit.config_error is not None and seconds is not None:
                self._restart(request, unit, seconds, self._warned(spec, {"name": name, "created": False}))
                return
            request.reply(self._warned(spec, {"name": name, "created": False}))
            return
        served = unit.config_error is None
        if served and unit.spec.mode != spec.mode:
            raise QueueExists(f"queue {name!r} exists with mode {unit.spec.mode!r}; a queue's mode never changes")
        if any(name == declared.name for declared in self._supervisor.config.queues):
            raise QueueExists(
                f"queue {name!r} is defined in {self._supervisor.config.file}: change it there and restart"
            )

        def opened(error: ForqError | None) -> None:
            if error is not None:
                request.fail(error)
            else:
                self._save(request, spec, {"name": name, "created": False})

        if served and spec.mode in SHARED_MODES:
            self._queues.adopt(unit, spec, opened)
        else:
            self._queues.replace(unit, spec, seconds, opened)

    def delete(self, request: Request) -> None:
        name = check_queue_name(request.params.get("name"))

        def deleted(answer: Any) -> None:
            if isinstance(answer, ForqError):
                request.fail(answer)
                return
            self._queues.drop(name, partial(dropped, answer["dropped"]))

        def dropped(jobs: int, survivors: set[int]) -> None:
            purge({"name": name, "dropped": jobs, "survivors": sorted(survivors)})

        def purge(done: dict[str, Any]) -> None:
            self._clerk.ask("purge", {"name": name}, partial(purged, done))

        def purged(done: dict[str, Any], answer: Any) -> None:
            """In slices, so that the clerk can answer others in between."""
            if isinstance(answer, ForqError):
                request.fail(answer)
            elif answer["more"]:
                purge(done)
            else:
                request.reply(done)

        self._clerk.ask("delete", {"name": name, "force": bool(request.params.get("force"))}, deleted)

    def drain(self, request: Request) -> None:
        """Answers when nothing waits or runs any more."""
        unit = self._queues.find(request.params.get("name"))
        name = unit.spec.name
        unit.draining = True

        def ended() -> None:
            unit.draining = False

        def counted(answer: Any) -> None:
            if isinstance(answer, ForqError) or answer[name] is None or request.gone:
                ended()
                request.fail(answer if isinstance(answer, ForqError) else UnknownQueue(f"no queue {name!r}"))
            elif answer[name]["waiting"] + answer[name]["active"] == 0:
                ended()
                request.reply({"name": name})
            else:
                self._supervisor.loop.call_later(DRAIN_LOOK_SECONDS, look)

        def look() -> None:
            self._clerk.ask("counts", {"names": [name]}, counted)

        look()

    def set(self, request: Request) -> None:
        """Changes live options: from the next claim on, whatever is waiting."""
        name = check_queue_name(request.params.get("name"))
        given = request.params.get("options")
        if not isinstance(given, dict) or not given:
            raise UsageError("options is an object with at least one option")
        if "mode" in given:
            raise InvalidOption(f"mode of queue {name!r} cannot be changed: it is fixed for the life of a queue")
        # Whether the queue's mode has them, and may change them, is for the clerk to say, who knows its mode.
        changes = parse_options(given, f"queue {name!r}")
        check_size(changes, self._supervisor.config.capacity, f"queue {name!r}")
        unit = self._queues.units.get(name)

        def changed(answer: Any) -> None:
            if isinstance(answer, ForqError):
                request.fail(answer)
            elif unit is None or self._queues.units.get(name) is not unit:
                request.reply({"name": name, "set": changes})
            else:
                self._queues.redefine(unit, changes)
                declared = any(name == spec.name for spec in self._supervisor.config.queues)
                if unit.found:
                    request.reply({"name": name, "set": changes})
                elif declared:
                    request.reply(self._warned(unit.spec, {"name": name, "set": changes, "until": "restart"}))
                else:
                    self._save(request, unit.spec, {"name": name, "set": changes})

        self._clerk.ask("set", {"name": name, "options": changes}, changed)

    def why(self, request: Request) -> None:
        unit = self._queues.units.get(str(request.params.get("name")))

        def answer(found: Any) -> None:
            state = None if isinstance(found, ForqError) else found["state"]
            # What has ended, never was there or runs elsewhere does not wait for the queue to be served here.
            known = isinstance(found, UnknownJob | UsageError) or state in ("active", "done", "dead")
            if not known and unit is not None and unit.config_error is not None:
                trace = None if request.params.get("messages") is False else unit.traceback
                reason = f"its queue cannot be served: {unit.config_error}"
                request.reply({"state": state, "why": reason, **({"traceback": trace} if trace else {})})
                return
            if state == "waiting":
                found["why"] = self._why_waiting(str(request.params.get("name")), found["why"])
            _answer_to(request)(found)

        unresponsive = {} if unit is None else unit.unresponsive_workers()
        self._ask_clerk(request, "why", {**request.params, "unresponsive": unresponsive}, answer)

    def _why_waiting(self, name: str, in_redis: str) -> str:
        """What Redis knows of a job that waits, and what only its processes here can tell."""
        unit = self._queues.units.get(name)
        trouble = None if unit is None else unit.trouble()
        if trouble is not None:
            return f"on this supervisor {trouble}"
        seconds = self._queues.grants.waiting_seconds(f"{name} main")
        why = in_redis if seconds is None else f"{in_redis}; its queue has waited {seconds:.1f} s for capacity"
        if unit is None or unit.restart_error is None:
            return why
        return (
            f"{why}; its queue runs older code since a restart failed: {unit.restart_error['message']} "
            f"(`forqctl status {name}` shows the traceback)"
        )

    def restart(self, request: Request) -> None:
        unit = self._queues.find(request.params.get("name"))
        seconds = _import_seconds(request.params.get("wait", True))
        if seconds is None:
            raise UsageError("a restart waits for the import: the old process stays if it fails")
        self._restart(request, unit, seconds, {"name": unit.spec.name})

    def _restart(self, request: Request, unit: QueueUnit, seconds: float, answer: dict[str, Any]) -> None:
        def restarted(error: ForqError | None) -> None:
            if error is None:
                request.reply(answer)
            else:
                request.fail(error)

        self._queues.restart(unit, seconds, restarted)

    def shutdown(self, request: Request) -> None:
        now = bool(request.params.get("now"))
        grace_seconds = 0.0 if now else self._queues.longest_grace_seconds()
        request.reply({"stopping": True, "pid": os.getpid(), "grace_seconds": grace_seconds})
        self._supervisor.stop(now=now)

    def _pause(self, request: Request, *, paused: bool) -> None:
        name, reply = check_queue_name(request.params.get("name")), _answer_to(request)

        def answered(answer: Any) -> None:
            if not paused and not isinstance(answer, ForqError) and name in self._queues.units:
                # Suspects may have waited for this.
                self._services.beat(name)
            reply(answer)

        self._ask_clerk(request, "pause", {"name": name, "paused": paused}, answered)

    def _pass_on(self, request: Request) -> None:
        self._ask_clerk(request, request.method, request.params)

    def _ask_clerk(
        self,
        request: Request,
        verb: str,
        params: dict[str, Any],
        answer: Callable[[Any], None] | None = None,
        *,
        repeat: bool = False,
        patience_seconds: float = 0.0,
    ) -> None:
        """Just after a start the request waits until its queue is there. Without `answer` the client gets what the
        clerk says, byte by byte."""
        ask_clerk = partial(
            self._clerk.ask, verb, params, answer or _answer_to(request), repeat=repeat, raw=answer is None
        )
        unit = self._queues.units.get(str(params.get("name")))
        if unit is None or not unit.opening:
            ask_clerk()
            return
        name = unit.spec.name

        def late() -> None:
            if self._services.redis_state["ok"]:
                request.fail(TimedOut(f"queue {name!r} is still being made; try again"))
            else:
                reason = self._services.redis_state["error"] or "Redis has not answered yet"
                request.fail(RedisUnavailable(f"queue {name!r} cannot be reached yet: {reason}"))

        timer = self._supervisor.loop.call_later(max(OPENING_SECONDS, patience_seconds), late)

        def ask() -> None:
            if not request.answered and not request.gone:
                timer.cancel()
                ask_clerk()

        # If it is not opened, Redis knows best what there is of that name.
        unit.when_opened(ask, otherwise=ask)


def _import_seconds(wait: object) -> float | None:
    """How long the import of a handler may take: true is the usual time, a number so many seconds; false: it is not
    waited for."""
    if wait is True:
        return IMPORT_SECONDS
    if wait is False:
        return None
    if not isinstance(wait, int | float) or not 0 < wait <= MAX_IMPORT_SECONDS:
        raise UsageError(f"wait {shown(wait)} is not allowed: true, false, or seconds up to {MAX_IMPORT_SECONDS:g}")
    return float(wait)


def _answer_to(request: Request) -> Callable[[Any], None]:
    return lambda answer: request.fail(answer) if isinstance(answer, ForqError) else request.reply(answer)
