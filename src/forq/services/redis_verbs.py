"""The requests that need Redis and nothing else of the machine. The clerk answers them for the supervisor."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

from forq.api_types import OwnOptions
from forq.batch import Batch
from forq.broker.batches import check_batch_id
from forq.broker.bulk import BulkChanges, DeadPart, check_ids, messages_of
from forq.broker.chunks import NewJob
from forq.broker.dead import DeadChanged, DeadChunk, DeadJobs
from forq.broker.dead_groups import dead_groups
from forq.broker.enqueue import Producer, Update, new_job
from forq.broker.explain import unknown_job, why
from forq.broker.filters import JobFilter
from forq.broker.flows import find_flow, read_flow
from forq.broker.inspect import Inspector, counts_of
from forq.broker.leases import Leases
from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.broker.schedules import Schedules
from forq.broker.search import JobSearch
from forq.errors import UnknownJob, UnknownQueue, UsageError
from forq.procs.liveness import expect_busy
from forq.schedules import APP, CONFIG, Schedule
from forq.services.rpc import Verb
from forq.settings import changed_for_fail_queue, check_changes, stored
from forq.values import check_queue_name, shown

# Longest request that scans many jobs.
SCAN_SECONDS = 20.0
Answer = TypeVar("Answer")
_JOB_FIELDS = {
    *("data", "id", "identifier", "priority", "type", "token", "run_at", "run_in", "after", "when", "with_results"),
    *OwnOptions.__annotations__,
}
_UPDATE_FIELDS = ("if_exists", "update_data", "update_run_at", "reset_counts")


class RedisVerbs:
    """Keeps no state between requests. For use by several threads, make one for each, with a link of its own."""

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix
        self._registry = Registry(link, prefix)

    def table(self) -> dict[str, Verb]:
        return {
            "pause": self.pause,
            "set": self.set,
            "why": self.why,
            "push": self.push,
            "push_many": self.push_many,
            "recover": self.recover,
            "cancel": self.cancel,
            "remove": self.remove,
            "job": self.job,
            "job.run": self.job_run,
            "jobs": self.jobs,
            "dead.list": self.dead_list,
            "dead.show": lambda params: self._dead(params).show(params.get("id", "")),
            "dead.groups": self.dead_groups,
            "dead.retry": self.dead_retry,
            "dead.discard": self.dead_discard,
            "flow": self.flow,
            "batch": lambda params: self._batch(params).info(),
            "batch.cancel": self.batch_cancel,
            "ack": self.ack,
            "schedule": self.schedule,
            "schedules": self.schedules,
            "schedule.pause": lambda params: {"paused": self._schedules(params).pause(params.get("key", ""))},
            "schedule.resume": lambda params: {"resumed": self._schedules(params).resume(params.get("key", ""))},
            "unschedule": self.unschedule,
            "set_app_schedules": self.set_app_schedules,
            "set_config_schedules": lambda params: {"unscheduled": self.set_schedules(params)},
            "trigger": lambda params: {"id": self._schedules(params).trigger(params.get("key", ""))},
            "counts": self.counts,
            "overview": self.overview,
        }

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
                *(self._link, self._prefix, name, params.get("id", "")),
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
            error = unknown_job(self._link, self._prefix, params["name"], params["id"])
        try:
            return read()
        except UnknownJob:
            raise error from None

    def flow(self, params: dict[str, Any]) -> object:
        names, flow_id = sorted(self._registry.names()), params.get("id")
        queue = find_flow(self._link, self._prefix, names, check_batch_id(flow_id, "flow"))
        return {"id": flow_id, "queue": queue, "jobs": read_flow(self._link, self._prefix, queue, str(flow_id))}

    def batch_cancel(self, params: dict[str, Any]) -> object:
        """A part of the members: the caller repeats it while there are more."""
        cancelled, more = self._batch(params).cancel_part()
        return {"cancelled": cancelled, "more": more}

    def _batch(self, params: dict[str, Any]) -> Batch:
        return Batch(lambda: self._link, self._prefix, check_queue_name(params.get("name")), params.get("id", ""))

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
        """The job `id`, the jobs `ids`, or those that match a `filter` in a `state`."""
        match _one_of(params, "id", "ids", "filter"):
            case "ids":
                return asdict(self._bulk(params).cancel_ids(params["ids"]))
            case "filter":
                expect_busy(SCAN_SECONDS)
                wanted = JobFilter.from_mapping(params["filter"], params.get("state"))
                return asdict(self._bulk(params).cancel_matching(params.get("state"), wanted, params.get("after")))
        return {"cancelled": self._producer(params).cancel(params.get("id", ""))}

    def remove(self, params: dict[str, Any]) -> object:
        return {"removed": self._producer(params).remove(params.get("id", ""))}

    def job(self, params: dict[str, Any]) -> object:
        return self._or_explain_unknown(params, lambda: self._inspector(params).job(params.get("id", "")))

    def job_run(self, params: dict[str, Any]) -> object:
        self._or_explain_unknown(params, lambda: self._producer(params).run_now(params.get("id", "")))
        return {"id": params["id"]}

    def jobs(self, params: dict[str, Any]) -> object:
        state, details = params.get("state"), bool(params.get("details"))
        if params.get("filter") is None and not details:
            return asdict(self._inspector(params).jobs(state, _limit(params), params.get("after")))
        expect_busy(SCAN_SECONDS)
        wanted = None if params.get("filter") is None else JobFilter.from_mapping(params["filter"], state)
        search = JobSearch(self._link, self._prefix, check_queue_name(params.get("name")))
        found = asdict(search.page(state, _limit(params), params.get("after"), wanted))
        if not details:
            found["jobs"] = [{name: job[name] for name in ("id", "identifier", "state")} for job in found["jobs"]]
        return found

    def ack(self, params: dict[str, Any]) -> object:
        Leases(self._link, self._prefix, params["name"]).ack(params["awaiter"], params["id"], params["fence"])
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

    def set_schedules(self, params: dict[str, Any]) -> list[str]:
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

    def dead_list(self, params: dict[str, Any]) -> object:
        return asdict(self._dead(params).page(_limit(params), params.get("after")))

    def dead_groups(self, params: dict[str, Any]) -> object:
        expect_busy(SCAN_SECONDS)
        name = check_queue_name(params.get("name"))
        return asdict(dead_groups(self._link, self._prefix, name, params.get("after")))

    def dead_retry(self, params: dict[str, Any]) -> object:
        dead, bulk = self._dead(params), self._bulk(params)
        if params.get("with_dependants"):
            if _one_of(params, "id", "all", "ids", "filter") != "id":
                raise UsageError("with_dependants needs the id of one dead job: all jobs are retried with all")
            expect_busy(SCAN_SECONDS)
            changed = dead.retry_with_dependants(params["id"])
            return {"done": changed.done, "refused": messages_of(changed)}
        return _apply_to_dead(params, dead.retry, dead.retry_some, dead.retry_many, bulk.retry_matching)

    def dead_discard(self, params: dict[str, Any]) -> object:
        dead, bulk = self._dead(params), self._bulk(params)
        return _apply_to_dead(params, dead.discard, dead.discard_some, dead.discard_many, bulk.discard_matching)

    def counts(self, params: dict[str, Any]) -> object:
        """Counts by queue (null: it is gone); for queues in `items` also their first jobs."""
        names = [check_queue_name(name) for name in params["names"]]
        found = counts_of(self._link, self._prefix, names)
        answer: dict[str, Any] = {name: None if counts is None else asdict(counts) for name, counts in found.items()}
        for name in params.get("items") or ():
            if answer.get(name) is not None:
                page = Inspector(self._link, self._prefix, name).jobs(limit=100)
                answer[name]["items"] = [{"id": job["id"], "identifier": job["identifier"]} for job in page.jobs]
        return answer

    def overview(self, params: dict[str, Any]) -> object:
        """Counts of the named queues; without names, of those served here and of those that no supervisor serves."""
        served, named = params["served"], params["names"]
        unserved = self._registry.queues_without_supervisor(served)
        names = named or [*served, *unserved]
        return {"counts": self.counts({"names": names, "items": named}), "unserved": unserved}

    def _producer(self, params: dict[str, Any]) -> Producer:
        return Producer(self._link, self._prefix, check_queue_name(params.get("name")))

    def _dead(self, params: dict[str, Any]) -> DeadJobs:
        return DeadJobs(self._link, self._prefix, check_queue_name(params.get("name")))

    def _bulk(self, params: dict[str, Any]) -> BulkChanges:
        return BulkChanges(self._link, self._prefix, check_queue_name(params.get("name")))

    def _schedules(self, params: dict[str, Any]) -> Schedules:
        return Schedules(self._link, self._prefix, check_queue_name(params.get("name")))

    def _inspector(self, params: dict[str, Any]) -> Inspector:
        return Inspector(self._link, self._prefix, check_queue_name(params.get("name")))


def _limit(params: dict[str, Any]) -> int:
    limit = params.get("limit") or 100
    if not isinstance(limit, int):
        raise UsageError(f"limit {shown(limit)} is not a whole number")
    return limit


def _apply_to_dead(
    params: dict[str, Any],
    to_one: Callable[[str], str],
    to_some: Callable[[str | None], DeadChunk],
    to_named: Callable[[list[str]], DeadChanged],
    to_matching: Callable[[JobFilter, object], DeadPart],
) -> dict[str, Any]:
    """Applies the one that the params ask for: to the dead job `id`, to all (the next of them), to `ids`, or to those
    that match a `filter` (among the next of them)."""
    after = params.get("after")
    match _one_of(params, "id", "all", "ids", "filter"):
        case "all":
            return asdict(to_some(after))
        case "ids":
            expect_busy(SCAN_SECONDS)
            changed = to_named(check_ids(params["ids"]))
            return {"done": changed.done, "refused": messages_of(changed)}
        case "filter":
            expect_busy(SCAN_SECONDS)
            return asdict(to_matching(JobFilter.from_mapping(params["filter"], "dead"), after))
    return {"id": to_one(params["id"])}


def _one_of(params: dict[str, Any], *names: str) -> str:
    """The one of these params that is given; UsageError if there is none, or more than one."""
    given = [name for name in names if params.get(name) not in (None, False)]
    if len(given) != 1:
        raise UsageError(f"exactly one of {', '.join(names)} is required")
    return given[0]


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
    after, with_results = fields.get("after"), fields.get("with_results")
    if after is not None and not isinstance(after, str | list):
        raise UsageError(f"after {shown(after)} is not allowed: the id of a job of the same queue, or a list of ids")
    if with_results is not None and not isinstance(with_results, bool):
        raise UsageError(f"with_results {shown(with_results)} is not allowed: true or false")
    return new_job(**{key: value for key, value in fields.items() if key == "data" or value is not None})
