"""The verbs of the control socket: the table from name to function, and the reduced table for control_read_group."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from forq.errors import (
    ForqError,
    InvalidOption,
    PermissionRefused,
    QueueExists,
    RedisUnavailable,
    TimedOut,
    UnknownJob,
    UnknownQueue,
    UsageError,
)
from forq.job import new_id
from forq.open_parts import details_without_messages, without_data
from forq.queue_spec import QueueSpec
from forq.settings import AUTO_RELEASE, ON_REQUEST, OPTIONS, SHARED_MODES, parse_options
from forq.supervisor.apply import ConfigChanges
from forq.supervisor.config import capacity_warning, check_size
from forq.supervisor.control import Request
from forq.supervisor.plan import Plan
from forq.supervisor.process import QueueProcess
from forq.supervisor.queue import ServedQueue
from forq.supervisor.queues import Queues
from forq.supervisor.remote import OtherSupervisors
from forq.supervisor.service import Service
from forq.supervisor.status import StatusVerb
from forq.supervisor.supervisor import Supervisor
from forq.values import check_job_id, check_queue_name, parse_duration, shown
from forq.version import PROTOCOL, VERSION

Verb = Callable[[Request], None]
# Request, verb of the clerk, its params, callback with the answer or error.
ForwardForReader = Callable[[Request, str, dict[str, Any], Callable[[Any], None]], None]

# `job` and the details of `jobs` are reduced (open_parts.py), `why` omits error messages.
READ_VERBS = ("status", "jobs", "job", "why", "flow", "batch", "ping", "version", "supervisors")


def verbs_for_readers(table: Mapping[str, Verb], send: ForwardForReader) -> dict[str, Verb]:
    """Verbs for members of `control_read_group`. Refuses all changes, and all output that may contain data of a job:
    results, error messages, stacks, output of handlers."""

    def job(request: Request) -> None:
        def answer(found: Any) -> None:
            if isinstance(found, ForqError):
                request.fail(found)
            else:
                request.reply(without_data(found))

        send(request, "job", request.params, answer)

    def jobs(request: Request) -> None:
        def answer(found: Any) -> None:
            if isinstance(found, ForqError):
                request.fail(found)
            else:
                request.reply({**found, "jobs": [details_without_messages(job) for job in found["jobs"]]})

        wanted = request.params.get("filter")
        # The key of a group is a hash of the error message.
        if isinstance(wanted, dict) and (wanted.get("error"), wanted.get("group")) != (None, None):
            raise PermissionRefused(
                f"user {request.peer.uid} may not filter jobs by error, which would show parts of error messages: a "
                "member of control_group may"
            )
        send(request, "jobs", request.params, answer)

    def why(request: Request) -> None:
        request.params["messages"] = False
        table["why"](request)

    def status(request: Request) -> None:
        request.params["traces"] = False
        table["status"](request)

    allowed = {name: table[name] for name in READ_VERBS if name in table}
    return {**dict.fromkeys(table, _refuse), **allowed, "job": job, "jobs": jobs, "why": why, "status": status}


def _refuse(request: Request) -> None:
    raise PermissionRefused(
        f"user {request.peer.uid} may not use {request.method}: members of control_read_group may use "
        f"{', '.join(READ_VERBS)}"
    )


class RunningJobVerbs:
    """`kill` and `stack`: for jobs that run in processes of this supervisor."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def table(self) -> dict[str, Callable[[Request], None]]:
        return {"kill": self.kill, "stack": self.stack}

    def kill(self, request: Request) -> None:
        """Ends a running job; it is cancelled, or with `retry` returned to its queue without counting an attempt.

        `at`: only if the worker is still at this position, which identifies the attempt (requests from elsewhere)."""
        queue, job_id = self._queues.find(request.params.get("name")), check_job_id(request.params.get("id"))
        found = queue.running_job(job_id)
        if found is None:
            raise UnknownJob(f"queue {queue.spec.name!r} runs no job {job_id!r} in a process of this supervisor")
        process, slot, position = found
        if "at" in request.params and request.params["at"] != {"worker": slot.worker, "position": position}:
            raise UnknownJob(
                f"that attempt of job {job_id!r} of queue {queue.spec.name!r} has ended; nothing was killed"
            )
        outcome = "interrupted" if request.params.get("retry") else "cancelled"
        # The process is killed after these have ended. It continues if the job can be cancelled.
        others = [] if slot.lenience_ms else [other for other in process.busy() if other.number != slot.number]
        process.kill_job(slot, position, outcome, "killed")
        about = {"id": job_id, "pid": process.pid, "outcome": outcome}
        request.reply({**about, "others": [other.job.decode("utf-8", "replace") for other in others]})

    def stack(self, request: Request) -> None:
        """The stack of each running job of the queue."""
        processes = self._queues.find(request.params.get("name")).busy_processes()
        stacks: list[dict[str, Any]] = []
        left = set(processes)

        def dumped(process: QueueProcess, dump: str) -> None:
            stacks.extend(_read_dump(process, dump))
            left.discard(process)
            if not left:
                request.reply({"stacks": stacks})

        for process in processes:
            process.stacks.take(lambda dump, process=process: dumped(process, dump))  # type: ignore[misc]
        if not processes:
            request.reply({"stacks": []})


def _read_dump(process: QueueProcess, dump: str) -> list[dict[str, Any]]:
    """One entry per running job; for a process that is still starting, one for its main thread."""
    now_ns = time.monotonic_ns()
    common = {"role": process.role.name.lower(), "pid": process.pid}
    if process.importing:
        return [{**common, "job": None, "seconds": None, "stack": dump.strip() or None}]
    return [
        {
            **common,
            "job": slot.job.decode("utf-8", "replace"),
            "seconds": round((now_ns - slot.started_ns) / 1e9, 3),
            "stack": process.stack_of(slot, dump) or None,
        }
        for slot in process.busy()
    ]


# Upper limit for the time that `await` and `dequeue` wait for their queue to be opened.
LONGEST_OPENING_SECONDS = 86400.0


class ForwardToClerk(Protocol):
    def __call__(
        self, request: Request, verb: str, params: dict[str, Any], *, repeat: bool, patience_seconds: float
    ) -> None: ...


class ReleaseVerbs:
    """`await`, `dequeue` and `ack`. An awaiter stays as long as its client is connected.

    The supervisor chooses the awaiter's name and deadline, so that the request can be repeated to a new clerk.
    """

    def __init__(self, forward: ForwardToClerk, clerk: Service, now: Callable[[], float]) -> None:
        self._forward = forward
        self._clerk = clerk
        self._now = now

    def table(self) -> dict[str, Callable[[Request], None]]:
        return {"await": self.await_release, "dequeue": self.dequeue, "ack": self.ack}

    def await_release(self, request: Request) -> None:
        self._wait(request, AUTO_RELEASE, _seconds(request, "wait"), None)

    def dequeue(self, request: Request) -> None:
        self._wait(request, ON_REQUEST, _seconds(request, "wait") or 0.0, _lease_ms(request))

    def ack(self, request: Request) -> None:
        fence = request.params.get("fence")
        if not isinstance(fence, int) or isinstance(fence, bool):
            raise UsageError(f"fence {shown(fence)} is not a whole number")
        params = {
            "name": check_queue_name(request.params.get("name")),
            "id": check_job_id(request.params.get("id")),
            "fence": fence,
            "awaiter": check_job_id(request.params.get("awaiter"), "awaiter"),
        }
        self._forward(request, "ack", params, repeat=True, patience_seconds=0.0)

    def _wait(self, request: Request, mode: str, wait_seconds: float | None, lease_ms: int | None) -> None:
        name, wanted = check_queue_name(request.params.get("name")), request.params.get("id")
        awaiter = new_id()
        params = {
            "name": name,
            "id": None if wanted is None else check_job_id(wanted),
            "awaiter": awaiter,
            "mode": mode,
            "until": None if wait_seconds is None else self._now() + wait_seconds,
            "lease_ms": lease_ms,
        }
        request.on_gone(lambda: self._clerk.request("leave", {"name": name, "awaiter": awaiter}, repeat=True))
        patience = LONGEST_OPENING_SECONDS if wait_seconds is None else min(wait_seconds, LONGEST_OPENING_SECONDS)
        self._forward(request, "await", params, repeat=True, patience_seconds=patience)


def _seconds(request: Request, key: str) -> float | None:
    given = request.params.get(key)
    return None if given is None else parse_duration(given)


def _lease_ms(request: Request) -> int | None:
    lease = request.params.get("lease")
    return None if lease is None else round(float(OPTIONS["lease"].parse(lease, "dequeue")) * 1000)


DRAIN_CHECK_SECONDS = 0.1
# How long a request waits for its queue to be opened after a start.
OPENING_SECONDS = 5.0
# Default limit for the import of a handler.
IMPORT_SECONDS = 60.0
MAX_IMPORT_SECONDS = 86400.0


class Verbs:
    """All verbs. Those about Redis are forwarded to the clerk; the others are answered here."""

    def __init__(self, supervisor: Supervisor, changes: ConfigChanges) -> None:
        self._supervisor = supervisor
        self._changes = changes
        self._queues = supervisor.queues
        self._services = supervisor.services
        self._clerk = supervisor.services.clerk

    def table(self) -> dict[str, Verb]:
        """For the control socket. Some verbs are forwarded if another supervisor runs the queue or job."""
        elsewhere = OtherSupervisors(self._services)
        return {**self._table(), **elsewhere.forwarding(self._table()), "supervisors": elsewhere.list_all}

    def table_from_elsewhere(self) -> dict[str, dict[str, Verb]]:
        """For requests that came through Redis, by level. They are never forwarded again."""
        everything = self._table()
        return {"read": verbs_for_readers(everything, self._forward_to_clerk), "full": everything}

    def _table(self) -> dict[str, Verb]:
        return {
            "status": StatusVerb(self._supervisor).status,
            **RunningJobVerbs(self._queues).table(),
            "queue.create": self.create,
            "queue.delete": self.delete,
            "queue.pause": lambda request: self._pause(request, paused=True),
            "queue.resume": lambda request: self._pause(request, paused=False),
            "queue.drain": self.drain,
            "queue.set": self.set,
            "queue.options": self.options,
            "why": self.why,
            "queue.restart": self.restart,
            "app.restart": self.restart_app,
            "config.plan": lambda request: request.reply(self._plan(request).describe()),
            "config.apply": self.apply,
            "ping": lambda request: request.reply({"pong": True, "pid": os.getpid()}),
            "version": lambda request: request.reply({"version": VERSION, "protocol": PROTOCOL}),
            "shutdown": self.shutdown,
            **dict.fromkeys(
                ("push", "push_many", "recover", "cancel", "remove", "job", "job.run", "jobs"), self._forward
            ),
            **dict.fromkeys(("flow", "batch", "batch.cancel"), self._forward),
            # Repeated to the new clerk if the clerk dies.
            "watch": lambda request: self._forward_to_clerk(request, "watch", request.params, repeat=True),
            # Needs no Redis, so it does not wait for the queue to be opened.
            "logs": lambda request: self._clerk.request(
                "logs", request.params, _answer_to(request), repeat=True, raw=True
            ),
            **ReleaseVerbs(self._forward_to_clerk, self._clerk, self._supervisor.loop.now).table(),
            **dict.fromkeys(("schedule", "schedules", "unschedule", "trigger"), self._forward),
            **dict.fromkeys(("schedule.pause", "schedule.resume"), self._forward),
            **dict.fromkeys(("dead.list", "dead.groups", "dead.show", "dead.retry", "dead.discard"), self._forward),
        }

    def table_for_readers(self) -> dict[str, Verb]:
        return verbs_for_readers(self.table(), self._forward_to_clerk)

    def create(self, request: Request) -> None:
        params = dict(request.params)
        name = check_queue_name(params.pop("name", None))
        seconds = _import_seconds(params.pop("wait", True))
        spec = QueueSpec.from_mapping(name, params, f"queue {name!r}", self._supervisor.config.mode)
        check_size(spec.options, self._supervisor.config.capacity, f"queue {name!r}")
        queue = self._queues.by_name.get(name)
        if queue is not None:
            self._change(request, queue, spec, seconds)
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
            request.fail(ForqError(f"the queue is served now, but its definition is lost at the next restart: {exc}"))
            return
        request.reply(self._warned(spec, answer))

    def _warned(self, spec: QueueSpec, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer, with warnings: the capacity is too small for the queue's concurrency, or tasks override an option
        that was set."""
        few = capacity_warning(self._supervisor.config.options_of(spec), self._supervisor.config.capacity)
        warnings = [] if few is None else [f"queue {spec.name}: {few}"]
        overriding = {name: self._supervisor.apps.tasks_overriding(spec.name, name) for name in answer.get("set", ())}
        warnings += [
            f"{name} has no effect on tasks that set their own: {', '.join(tasks)}"
            for name, tasks in overriding.items()
            if tasks
        ]
        return {**answer, "warnings": warnings} if warnings else answer

    def _change(self, request: Request, queue: ServedQueue, spec: QueueSpec, seconds: float | None) -> None:
        """A queue of this name is served already: the same definition changes nothing, another one replaces it. If the
        queue cannot be served, tries again."""
        name = spec.name
        if queue.definition == spec:
            if queue.opening:
                raise QueueExists(f"queue {name!r} is being created; try again")
            if queue.config_error is not None and seconds is not None:
                self._restart(request, queue, seconds, self._warned(spec, {"name": name, "created": False}))
                return
            request.reply(self._warned(spec, {"name": name, "created": False}))
            return
        served = queue.config_error is None
        if served and queue.spec.mode != spec.mode:
            raise QueueExists(f"queue {name!r} exists with mode {queue.spec.mode!r}; a queue's mode never changes")
        if (of_app := self._queues.of_apps.get(name)) is not None:
            raise QueueExists(
                f"queue {name!r} is defined by app {of_app.app!r}: change its code, then run: forqctl restart --app "
                f"{of_app.app}; or change [queues.{name}] of the config file, then run: forqctl apply"
            )
        if self._queues.is_declared(name):
            raise QueueExists(
                f"queue {name!r} is defined in {self._supervisor.config.file}: change it there, then run: forqctl apply"
            )

        def opened(error: ForqError | None) -> None:
            if error is not None:
                request.fail(error)
            else:
                self._save(request, spec, {"name": name, "created": False})

        if served and spec.mode in SHARED_MODES:
            self._queues.adopt(queue, spec, opened)
        else:
            self._queues.replace(queue, spec, seconds, opened)

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
            self._clerk.request("purge", {"name": name}, partial(purged, done))

        def purged(done: dict[str, Any], answer: Any) -> None:
            """In slices, so that the clerk can answer other requests in between."""
            if isinstance(answer, ForqError):
                request.fail(answer)
            elif answer["more"]:
                purge(done)
            else:
                request.reply(done)

        self._clerk.request("delete", {"name": name, "force": bool(request.params.get("force"))}, deleted)

    def drain(self, request: Request) -> None:
        """Answers when no job is waiting or active, with the number of held jobs: what these wait for may be scheduled,
        or end elsewhere."""
        queue = self._queues.find(request.params.get("name"))
        name = queue.spec.name
        queue.draining = True

        def ended() -> None:
            queue.draining = False

        def counted(answer: Any) -> None:
            if isinstance(answer, ForqError) or answer[name] is None or request.gone:
                ended()
                request.fail(answer if isinstance(answer, ForqError) else UnknownQueue(f"no queue {name!r}"))
            elif answer[name]["waiting"] + answer[name]["active"] == 0:
                ended()
                request.reply({"name": name, "held": answer[name]["held"]})
            else:
                self._supervisor.loop.call_later(DRAIN_CHECK_SECONDS, check)

        def check() -> None:
            self._clerk.request("counts", {"names": [name]}, counted)

        check()

    def options(self, request: Request) -> None:
        """The options of a queue as this supervisor serves it, including those that Redis does not store."""
        queue = self._queues.find(request.params.get("name"))
        options = self._supervisor.config.options_of(queue.spec)
        request.reply({"name": queue.spec.name, "mode": queue.spec.mode, "options": dict(options)})

    def set(self, request: Request) -> None:
        """Changes live options; they apply from the next claim on."""
        name = check_queue_name(request.params.get("name"))
        given = request.params.get("options")
        if not isinstance(given, dict) or not given:
            raise UsageError("options must be an object with at least one option")
        if "mode" in given:
            raise InvalidOption(f"mode of queue {name!r} cannot be changed: it is fixed while the queue exists")
        # The clerk knows the queue's mode and checks whether it has these options and may change them.
        changes = parse_options(given, f"queue {name!r}")
        check_size(changes, self._supervisor.config.capacity, f"queue {name!r}")
        queue = self._queues.by_name.get(name)

        def changed(answer: Any) -> None:
            if isinstance(answer, ForqError):
                request.fail(answer)
            elif queue is None or self._queues.by_name.get(name) is not queue:
                request.reply({"name": name, "set": changes})
            else:
                self._queues.redefine(queue, changes)
                if queue.found:
                    request.reply({"name": name, "set": changes})
                elif self._queues.is_declared(name):
                    request.reply(self._warned(queue.spec, {"name": name, "set": changes, "until": "restart"}))
                else:
                    self._save(request, queue.spec, {"name": name, "set": changes})

        self._clerk.request("set", {"name": name, "options": changes}, changed)

    def why(self, request: Request) -> None:
        queue = self._queues.by_name.get(str(request.params.get("name")))

        def answer(found: Any) -> None:
            state = None if isinstance(found, ForqError) else found["state"]
            # Jobs that have ended, do not exist or run elsewhere do not wait for this supervisor.
            known = isinstance(found, UnknownJob | UsageError) or state in ("active", "done", "dead")
            if not known and queue is not None and queue.config_error is not None:
                trace = None if request.params.get("messages") is False else queue.traceback
                reason = f"its queue cannot be served: {queue.config_error}"
                request.reply({"state": state, "why": reason, **({"traceback": trace} if trace else {})})
                return
            if state == "waiting":
                found["why"] = self._why_waiting(str(request.params.get("name")), found["why"])
            _answer_to(request)(found)

        unresponsive = {} if queue is None else queue.unresponsive_workers()
        self._forward_to_clerk(request, "why", {**request.params, "unresponsive": unresponsive}, answer)

    def _why_waiting(self, name: str, in_redis: str) -> str:
        """Why a job waits: the reason from Redis, and reasons that only this supervisor knows."""
        queue = self._queues.by_name.get(name)
        trouble = None if queue is None else queue.trouble()
        if trouble is not None:
            return f"on this supervisor {trouble}"
        seconds = self._queues.grants.waiting_seconds(name)
        why = in_redis if seconds is None else f"{in_redis}; its queue has waited {seconds:.1f} s for capacity"
        if queue is None or queue.restart_error is None:
            return why
        return (
            f"{why}; its queue runs older code because a restart failed: {queue.restart_error['message']} "
            f"(`forqctl status {name}` shows the traceback)"
        )

    def restart(self, request: Request) -> None:
        queue = self._queues.find(request.params.get("name"))
        seconds = _import_seconds(request.params.get("wait", True))
        if seconds is None:
            raise UsageError("wait = false is not allowed: a restart always waits for the import")
        self._restart(request, queue, seconds, {"name": queue.spec.name})

    def _restart(self, request: Request, queue: ServedQueue, seconds: float, answer: dict[str, Any]) -> None:
        def restarted(error: ForqError | None) -> None:
            if error is None:
                request.reply(answer)
            else:
                request.fail(error)

        self._queues.restart(queue, seconds, restarted)

    def restart_app(self, request: Request) -> None:
        app = self._supervisor.apps.find(request.params.get("name"))
        seconds = _import_seconds(request.params.get("wait", True))
        if seconds is None:
            raise UsageError("wait = false is not allowed: a restart always waits for the import")
        self._supervisor.apps.restart(app, seconds, _answer_to(request))

    def _plan(self, request: Request) -> Plan:
        file = request.params.get("file")
        if file is not None and (not isinstance(file, str) or not os.path.isabs(file) or "\0" in file):
            raise UsageError(f"file {shown(file)} is not allowed: an absolute path")
        return self._changes.plan(file)

    def apply(self, request: Request) -> None:
        """Applies the plan with this hash, and nothing else."""
        seconds = _import_seconds(request.params.get("wait", True))
        if seconds is None:
            raise UsageError("wait = false is not allowed: changed queues always wait for the import")
        self._changes.check_idle()
        plan = self._plan(request)
        self._changes.check_hash(plan, request.params.get("hash"))
        self._changes.apply(plan, seconds, request.reply)

    def shutdown(self, request: Request) -> None:
        now = bool(request.params.get("now"))
        grace_seconds = 0.0 if now else self._queues.longest_grace_seconds()
        request.reply({"stopping": True, "pid": os.getpid(), "grace_seconds": grace_seconds})
        self._supervisor.stop(now=now)

    def _pause(self, request: Request, *, paused: bool) -> None:
        name, reply = check_queue_name(request.params.get("name")), _answer_to(request)

        def answered(answer: Any) -> None:
            if not paused and not isinstance(answer, ForqError) and name in self._queues.by_name:
                # Suspects may be waiting.
                self._services.beat(name)
            reply(answer)

        self._forward_to_clerk(request, "pause", {"name": name, "paused": paused}, answered)

    def _forward(self, request: Request) -> None:
        self._forward_to_clerk(request, request.method, request.params)

    def _forward_to_clerk(
        self,
        request: Request,
        verb: str,
        params: dict[str, Any],
        answer: Callable[[Any], None] | None = None,
        *,
        repeat: bool = False,
        patience_seconds: float = 0.0,
    ) -> None:
        """Forwards a request to the clerk; just after a start, when its queue is open. Without `answer` the client gets
        the clerk's result unchanged, as bytes."""
        send = partial(
            self._clerk.request, verb, params, answer or _answer_to(request), repeat=repeat, raw=answer is None
        )
        queue = self._queues.by_name.get(str(params.get("name")))
        if queue is None or not queue.opening:
            send()
            return
        name = queue.spec.name

        def late() -> None:
            if self._services.redis_state["ok"]:
                request.fail(TimedOut(f"queue {name!r} is still being created; try again"))
            else:
                reason = self._services.redis_state["error"] or "Redis has not answered yet"
                request.fail(RedisUnavailable(f"queue {name!r} cannot be reached yet: {reason}"))

        timer = self._supervisor.loop.call_later(max(OPENING_SECONDS, patience_seconds), late)

        def opened() -> None:
            if not request.answered and not request.gone:
                timer.cancel()
                send()

        # If it will not be opened, the clerk's answer explains why.
        queue.when_opened(opened, otherwise=opened)


def _import_seconds(wait: object) -> float | None:
    """Limit for the import of a handler: true is the default, a number is seconds; None (false) does not wait."""
    if wait is True:
        return IMPORT_SECONDS
    if wait is False:
        return None
    if not isinstance(wait, int | float) or not 0 < wait <= MAX_IMPORT_SECONDS:
        raise UsageError(f"wait {shown(wait)} is not allowed: true, false, or seconds up to {MAX_IMPORT_SECONDS:g}")
    return float(wait)


def _answer_to(request: Request) -> Callable[[Any], None]:
    return lambda answer: request.fail(answer) if isinstance(answer, ForqError) else request.reply(answer)
