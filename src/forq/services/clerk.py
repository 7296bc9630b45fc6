"""The clerk: handles requests of the control socket that need Redis, so that the supervisor never blocks on it."""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from forq.api_types import OwnOptions
from forq.broker.dead import DeadChunk, DeadJobs
from forq.broker.enqueue import NewJob, Producer, Update, new_job
from forq.broker.explain import unknown_job, why
from forq.broker.inspect import Inspector, counts_of
from forq.broker.leases import Leases
from forq.broker.link import Link, check_server
from forq.broker.registry import Dropped, Registry
from forq.broker.schedules import Schedules
from forq.broker.scripts import script
from forq.errors import BeingDeleted, ExitCode, UnknownJob, UnknownQueue, UsageError
from forq.procs.context import Context
from forq.procs.liveness import DISK_SECONDS, expect_busy
from forq.procs.loop import Loop, service_loop
from forq.schedules import APP, CONFIG, Schedule
from forq.services.elsewhere import Elsewhere
from forq.services.rpc import RpcServer
from forq.services.scribe import append_lines
from forq.services.waiting import Awaiters, Followers, Watchers
from forq.settings import WORK, changed_for_fail_queue, check_changes, stored, stored_defaults, stored_for_fail_queue
from forq.values import check_queue_name, shown

CALL_TIMEOUT_SECONDS = 3.0
Answer = TypeVar("Answer")
_JOB_FIELDS = {
    *("data", "id", "identifier", "priority", "type", "token", "run_at", "run_in"),
    *OwnOptions.__annotations__,
}
_UPDATE_FIELDS = ("if_exists", "update_data", "update_run_at", "reset_counts")


def run_clerk(context: Context, leash: socket.socket) -> int:
    loop = service_loop()
    clerk = Clerk(context, loop)
    RpcServer(loop, leash, clerk.verbs())
    loop.run(clerk.after_pass)
    return ExitCode.STOPPED


class Clerk:
    def __init__(self, context: Context, loop: Loop) -> None:
        self._context = context
        self._link = Link(context.url, name="forq-clerk", timeout_seconds=CALL_TIMEOUT_SECONDS)
        self._registry = Registry(self._link, context.prefix)
        self.awaiters = Awaiters(self._link, context.prefix, loop)
        self.watchers = Watchers(self._link, context.prefix, loop)
        self.followers = Followers(context.logs_dir)
        self.elsewhere = Elsewhere(self._link, context.prefix, loop)

    def after_pass(self) -> float | None:
        """Serves waiting clients. Returns the seconds until the next one is due, or None."""
        waits = [one.tick() for one in (self.awaiters, self.watchers, self.followers)]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def verbs(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "offer": self.offer,
            "create": self.create,
            "delete": self.delete,
            "purge": self.purge,
            "repair": self.repair,
            "pause": self.pause,
            "set": self.set,
            "why": self.why,
            "push": self.push,
            "push_many": self.push_many,
            "recover": self.recover,
            "cancel": self.cancel,
            "remove": self.remove,
            "job": self.job,
            "jobs": self.jobs,
            "dead.list": self.dead_list,
            "dead.show": lambda params: self._dead(params).show(params.get("id", "")),
            "dead.retry": lambda params: _apply_to_dead(
                params, self._dead(params).retry, self._dead(params).retry_some
            ),
            "dead.discard": lambda params: _apply_to_dead(
                params, self._dead(params).discard, self._dead(params).discard_some
            ),
            "await": self.awaiters.wait_for_item,
            "leave": self.awaiters.leave,
            "watch": self.watchers.watch,
            "logs": self.followers.read_logs,
            "ack": self.ack,
            "schedule": self.schedule,
            "schedules": self.schedules,
            "unschedule": self.unschedule,
            "set_app_schedules": self.set_app_schedules,
            "set_config_schedules": lambda params: {"unscheduled": self._set_schedules(params)},
            "trigger": lambda params: {"id": self._schedules(params).trigger(params.get("key", ""))},
            "counts": self.counts,
            "overview": self.overview,
            "memory": self.memory,
            "supervisors": self.elsewhere.supervisors,
            "elsewhere": self.elsewhere.ask,
        }

    def check(self, params: dict[str, Any]) -> object:
        """Raises if the server cannot be used."""
        return {"server": check_server(self._link)}

    def offer(self, params: dict[str, Any]) -> object:
        """Loads the functions into the server, since clients may lack the right."""
        self._link.load_library(script("enqueue"))
        return {}

    def create(self, params: dict[str, Any]) -> object:
        try:
            made = self._create(params)
        except BeingDeleted:
            # The client that deleted it may have died half way: finish that first.
            while self._purge(params["name"]):
                pass
            made = self._create(params)
        # In the same call, so that a retry also sets them.
        return {"created": made, "unscheduled": self._set_schedules(params)}

    def _set_schedules(self, params: dict[str, Any]) -> list[str]:
        """Sets the schedules of the config file and those of an app that the file does not replace. Drops those that an
        earlier version of the file had set; returns these."""
        given = params.get("schedules")
        dropped = [] if given is None else self._schedules(params).apply(given, CONFIG)
        if params.get("app_schedules"):
            self._schedules(params).apply(params["app_schedules"], APP, remove=False)
        return dropped

    def set_app_schedules(self, params: dict[str, Any]) -> object:
        """Sets the schedules of an app for one queue, and drops those that an earlier version of its code had set."""
        return {"unscheduled": self._schedules(params).apply(params["schedules"], APP)}

    def _create(self, params: dict[str, Any]) -> bool:
        mode, options = params["mode"], params["options"]
        return self._registry.create(
            params["name"],
            mode,
            self._context.max_queues,
            stored_defaults(mode),
            stored(options) | ({"fail_handler": int(params["fail_handler"])} if mode == WORK else {}),
            fail_options=stored_for_fail_queue(options) if params["fail_handler"] else None,
            reopening=params["reopening"],
            joining=params["joining"],
        )

    def delete(self, params: dict[str, Any]) -> object:
        return {"dropped": self._registry.delete(params["name"], force=bool(params.get("force")))}

    def purge(self, params: dict[str, Any]) -> object:
        """Moves a slice of a deleted queue's jobs to its failed log."""
        return {"more": self._purge(check_queue_name(params["name"]))}

    def repair(self, params: dict[str, Any]) -> object:
        """Completes the deletion of a queue that was left half created or half deleted, in slices like `purge`."""
        name = check_queue_name(params["name"])
        return {"more": self._log_dropped(name, self._registry.repair)}

    def _purge(self, name: str) -> bool:
        return self._log_dropped(name, self._registry.purge)

    def _log_dropped(self, name: str, drop: Callable[[str, Callable[[list[Dropped]], None]], bool]) -> bool:
        directory, max_bytes = self._context.logs_dir / name, self._context.failed_log_max
        expect_busy(DISK_SECONDS)
        return drop(name, lambda jobs: append_lines(directory, jobs, max_bytes))

    def pause(self, params: dict[str, Any]) -> object:
        self._registry.pause(check_queue_name(params["name"]), paused=params["paused"])
        return {}

    def set(self, params: dict[str, Any]) -> object:
        name, options = check_queue_name(params["name"]), params["options"]
        check_changes(options, self._registry.mode(name), f"queue {name!r}")
        self._registry.configure(name, stored(options), changed_for_fail_queue(options))
        return {}

    def why(self, params: dict[str, Any]) -> object:
        name = check_queue_name(params.get("name"))
        messages = params.get("messages") is not False
        unresponsive = params.get("unresponsive")

        def explain() -> tuple[str, str]:
            return why(
                *(self._link, self._context.prefix, name, params.get("id", "")),
                messages=messages,
                unresponsive=unresponsive if isinstance(unresponsive, dict) else {},
            )

        state, reason = self._or_explain_unknown(params, explain)
        return {"state": state, "why": reason}

    def _or_explain_unknown(self, params: dict[str, Any], read: Callable[[], Answer]) -> Answer:
        """Calls `read`; if the job is unknown, explains it from the journal. Too slow for clients that poll."""
        try:
            return read()
        except UnknownJob:
            expect_busy()
            error = unknown_job(self._link, self._context.prefix, params["name"], params["id"])
        try:
            return read()
        except UnknownJob:
            raise error from None

    def push(self, params: dict[str, Any]) -> object:
        fields = {key: value for key, value in params.items() if key not in ("name", "durable", *_UPDATE_FIELDS)}
        ids = self._producer(params).enqueue([_read_job(fields)], _read_update(params), params.get("durable"))
        return {"id": ids[0]}

    def push_many(self, params: dict[str, Any]) -> object:
        jobs = _read_jobs(params)
        return {"ids": self._producer(params).enqueue_many(jobs, _read_update(params), params.get("durable"))}

    def recover(self, params: dict[str, Any]) -> object:
        back = self._producer(params).restore(_read_jobs(params))
        return {"recovered": back.stored, "known": back.known, "left": back.skipped}

    def cancel(self, params: dict[str, Any]) -> object:
        return {"cancelled": self._producer(params).cancel(params.get("id", ""))}

    def remove(self, params: dict[str, Any]) -> object:
        return {"removed": self._producer(params).remove(params.get("id", ""))}

    def job(self, params: dict[str, Any]) -> object:
        return self._or_explain_unknown(params, lambda: self._inspector(params).job(params.get("id", "")))

    def jobs(self, params: dict[str, Any]) -> object:
        return asdict(self._inspector(params).jobs(params.get("state"), _limit(params), params.get("after")))

    def ack(self, params: dict[str, Any]) -> object:
        Leases(self._link, self._context.prefix, params["name"]).ack(params["awaiter"], params["id"], params["fence"])
        return {"id": params["id"]}

    def schedule(self, params: dict[str, Any]) -> object:
        fields = {name: value for name, value in params.items() if name not in ("name", "key", "dry_run")}
        schedule, schedules = Schedule.from_mapping(params.get("key"), fields), self._schedules(params)
        if params.get("dry_run"):
            return {"upcoming": schedules.preview(schedule)}
        schedules.set(schedule)
        return schedules.one(schedule.key)

    def schedules(self, params: dict[str, Any]) -> object:
        """The schedules of one queue or of all; with `key` one of them, with its next ticks."""
        if params.get("key") is not None:
            return {"schedules": [self._schedules(params).one(params["key"])]}
        if params.get("name") is not None:
            return {"schedules": self._schedules(params).all()}
        found: list[dict[str, Any]] = []
        for name in sorted(self._registry.names()):
            with suppress(UnknownQueue):  # being created or deleted
                found += self._schedules({"name": name}).all()
        return {"schedules": found}

    def unschedule(self, params: dict[str, Any]) -> object:
        schedules, key = self._schedules(params), params.get("key", "")
        origin = schedules.one(key)["origin"]
        return {"key": key, "removed": schedules.drop(key), "origin": origin}

    def dead_list(self, params: dict[str, Any]) -> object:
        return asdict(self._dead(params).page(_limit(params), params.get("after")))

    def counts(self, params: dict[str, Any]) -> object:
        """Counts by queue (null: it is gone); for queues in `items` also their first jobs."""
        names = [check_queue_name(name) for name in params["names"]]
        found = counts_of(self._link, self._context.prefix, names)
        answer: dict[str, Any] = {name: None if counts is None else asdict(counts) for name, counts in found.items()}
        for name in params.get("items") or ():
            if answer.get(name) is not None:
                page = Inspector(self._link, self._context.prefix, name).jobs(limit=100)
                answer[name]["items"] = [{"id": job["id"], "identifier": job["identifier"]} for job in page.jobs]
        return answer

    def overview(self, params: dict[str, Any]) -> object:
        """Counts of the named queues; without names, of those served here and of those that no supervisor serves."""
        served, named = params["served"], params["names"]
        unserved = self._registry.queues_without_supervisor(served)
        names = named or [*served, *unserved]
        return {"counts": self.counts({"names": names, "items": named}), "unserved": unserved}

    def memory(self, params: dict[str, Any]) -> object:
        """PSS of each process in bytes. Processes that have ended are left out."""
        # Not at the top: the supervisor would load it too, and each fork would copy more page tables.
        import psutil

        found: dict[str, int] = {}
        for pid in params["pids"]:
            expect_busy()
            with suppress(psutil.Error):
                found[str(pid)] = psutil.Process(pid).memory_full_info().pss
        return found

    def _producer(self, params: dict[str, Any]) -> Producer:
        return Producer(self._link, self._context.prefix, check_queue_name(params.get("name")))

    def _dead(self, params: dict[str, Any]) -> DeadJobs:
        return DeadJobs(self._link, self._context.prefix, check_queue_name(params.get("name")))

    def _schedules(self, params: dict[str, Any]) -> Schedules:
        return Schedules(self._link, self._context.prefix, check_queue_name(params.get("name")))

    def _inspector(self, params: dict[str, Any]) -> Inspector:
        return Inspector(self._link, self._context.prefix, check_queue_name(params.get("name")))


def _limit(params: dict[str, Any]) -> int:
    limit = params.get("limit") or 100
    if not isinstance(limit, int):
        raise UsageError(f"limit {shown(limit)} is not a whole number")
    return limit


def _apply_to_dead(
    params: dict[str, Any], to_one: Callable[[str], str], to_some: Callable[[str | None], DeadChunk]
) -> dict[str, Any]:
    """Applies `to_one` to the dead job `id`; with `all`, `to_some` to the next dead jobs."""
    if bool(params.get("all")) == (params.get("id") is not None):
        raise UsageError("either id or all is required")
    return asdict(to_some(params.get("after"))) if params.get("all") else {"id": to_one(params["id"])}


def _read_update(params: dict[str, Any]) -> Update:
    given = {key: params[key] for key in _UPDATE_FIELDS if params.get(key) is not None}
    for key in ("update_data", "reset_counts"):
        if not isinstance(given.get(key, True), bool):
            raise UsageError(f"{key} {shown(given[key])} is not allowed: true or false")
    return Update(**given)


def _read_jobs(params: dict[str, Any]) -> list[NewJob]:
    jobs = params.get("jobs")
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise UsageError("jobs must be a list of objects")
    return [_read_job(job) for job in jobs]


def _read_job(fields: dict[str, Any]) -> NewJob:
    unknown = set(fields) - _JOB_FIELDS
    if unknown:
        raise UsageError(f"unknown job field {shown(min(unknown))}; allowed: {', '.join(sorted(_JOB_FIELDS))}")
    if "data" not in fields:
        raise UsageError("a job must have data (null is allowed)")
    return new_job(**{key: value for key, value in fields.items() if key == "data" or value is not None})
