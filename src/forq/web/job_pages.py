"""The pages about jobs: lists by state with search, one job, and dead jobs grouped by error."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, get_args

from forq.api_types import State
from forq.broker.inspect import find_job
from forq.errors import ForqError, UnknownJob, UsageError
from forq.open_parts import details_without_messages, without_data
from forq.web.flow_pages import home_of_flow
from forq.web.page import Page, Visit

PER_PAGE = 100
STATES = ("waiting", "active", "scheduled", "retry", "blocked", "held", "dead", "done")
assert set(STATES) == set(get_args(State))
FILTERS = ("id", "identifier", "type", "error", "group", "text", "since", "until")
# In how many queues the page of an id looks for dead jobs.
MAX_DEAD_QUEUES = 50
# One page of dead groups reads at most this many pages of 10,000 jobs.
GROUP_PAGES = 10


async def jobs(visit: Visit) -> Page:
    queue = visit.queue
    state = visit.choice("state", STATES)
    given = job_filter(visit)
    if "error" in given or "group" in given:
        visit.require("dead", "filter by error")
    if state == "dead":
        visit.require("dead", "see dead jobs")
    title = f"{state} jobs of {queue.name}"
    if visit.live:
        # Only the counts of the states are live: the search would be repeated every second.
        return Page("jobs.html", title, {"queue": queue, "state": state, "states": STATES})
    found = await visit.source.redis(
        "jobs", name=queue.name, state=state, limit=PER_PAGE, after=visit.text("after"), details=True, filter=given
    )
    values = {
        "queue": queue,
        "state": state,
        "states": STATES,
        "jobs": [_listed(visit, job) for job in found["jobs"]],
        "next": found["next"],
        "scanned": found.get("scanned", 0),
        "filter": {name: visit.text(name) for name in FILTERS if visit.text(name)},
        # Times as seconds, for actions on all matching jobs.
        "filter_fields": given,
        "actions": ACTIONS_OF[state],
    }
    return Page("jobs.html", title, values)


# The actions on selected jobs of a state.
ACTIONS_OF = {
    "waiting": ("job.cancel",),
    "active": ("job.kill",),
    "scheduled": ("job.run", "job.cancel"),
    "retry": ("job.cancel",),
    "blocked": ("job.cancel",),
    "held": ("job.cancel",),
    "dead": ("job.retry", "job.discard"),
    "done": (),
}


def job_filter(visit: Visit) -> dict[str, Any]:
    given: dict[str, Any] = {name: visit.text(name) for name in FILTERS if visit.text(name) is not None}
    for name in ("since", "until"):
        if name in given:
            given[name] = read_time(name, given[name])
    return given


def read_time(name: str, text: str) -> float:
    """Epoch seconds of an ISO time. Without a zone it is UTC, which the form says."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{name} = {text[:80]!a} is not allowed: a time such as 2026-11-18T09:30") from None
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


async def job(visit: Visit) -> Page:
    queue, source = visit.queue, visit.source
    job_id = visit.text("id")
    if job_id is None:
        raise UsageError("the parameter id is missing: the id of a job")
    fence = visit.text("fence")
    found: dict[str, Any] | None
    unknown = ""
    try:
        if fence is not None:
            visit.require("dead", "see dead jobs")
            found = await source.redis("dead.show", name=queue.name, id=f"{job_id}@{fence}")
        else:
            found = await source.redis("job", name=queue.name, id=job_id)
    except UnknownJob as exc:
        found, unknown = None, str(exc)
    values: dict[str, Any] = {
        "queue": queue,
        "id": job_id,
        "job": found,
        "unknown": unknown,
        "running": None,
        "why": None,
        "stack": None,
        "stack_error": "",
        "log": None,
        "log_error": "",
        "data": None,
        "result": None,
        "show": visit.text("show"),
    }
    await asyncio.gather(_explain(visit, values), _read_log(visit, values), _read_stack(visit, values))
    if found is not None:
        if found["state"] == "active":
            values["running"] = next((each for each in queue.running if each["id"] == job_id), None)
        _choose_parts(visit, values, found)
    return Page("job.html", f"Job {job_id}", values)


async def _explain(visit: Visit, values: dict[str, Any]) -> None:
    """Explains why the job does not run; with error messages for users who may see dead jobs."""
    job = values["job"]
    if job is None or job["state"] in ("done", "dead", "active"):
        return
    try:
        params = {"name": values["queue"].name, "id": values["id"], "messages": "dead" in visit.permitted}
        ask = visit.source.supervisor if visit.source.has_supervisor else visit.source.redis
        values["why"] = visit.redacted((await ask("why", **params))["why"])
    except ForqError as exc:
        values["why"] = visit.redacted(str(exc))


async def _read_stack(visit: Visit, values: dict[str, Any]) -> None:
    # On demand: a live page does not take it again and again.
    if values["show"] != "stack" or visit.live:
        return
    visit.require("stack", "see stacks")
    try:
        stacks = (await visit.source.supervisor("stack", name=values["queue"].name))["stacks"]
    except ForqError as exc:
        values["stack_error"] = str(exc)
        return
    stacks = visit.redacted(stacks)
    mine = [stack for stack in stacks if stack["job"] == values["id"]]
    values["stack"] = mine[0] if mine else None
    values["stack_error"] = "" if mine else "the job is not running in a process of that supervisor now"


async def _read_log(visit: Visit, values: dict[str, Any]) -> None:
    if "logs" not in visit.permitted:
        return
    try:
        values["log"] = await visit.source.job_log(values["queue"].name, values["id"])
    except ForqError as exc:
        values["log_error"] = str(exc)


def _choose_parts(visit: Visit, values: dict[str, Any], job: dict[str, Any]) -> None:
    """Data and result only on demand, and only for those who may see them; messages for those who may see dead jobs."""
    data, result = job.pop("data", None), job.pop("result", None)
    if values["show"] in ("data", "result"):
        visit.require("job.data", f"see the {values['show']} of a job")
        values[values["show"]] = visit.shown_data(data if values["show"] == "data" else result)
    if "dead" not in visit.permitted:
        job = without_data(job)
    job["error"] = _readable_error(visit, job.get("error"))
    attempts = job.get("attempts")
    job["attempts"] = [_readable_attempt(visit, attempt) for attempt in attempts] if isinstance(attempts, list) else []
    values["job"] = job


def _readable_error(visit: Visit, error: object) -> dict[str, Any] | None:
    """An error as the pages expect it. Broken ones are text."""
    if error is None:
        return None
    known = error if isinstance(error, dict) else {"message": str(error)}
    parts = {name: known.get(name) for name in ("name", "message", "kind", "traceback")}
    return {name: None if part is None else visit.redacted(str(part)) for name, part in parts.items()}


def _readable_attempt(visit: Visit, attempt: object) -> dict[str, Any]:
    known = attempt if isinstance(attempt, dict) else {"error": str(attempt)}
    times = {name: known.get(name) if isinstance(known.get(name), int | float) else None for name in ATTEMPT_FIGURES}
    stack = known.get("stack")
    return {
        **times,
        "outcome": str(known.get("outcome") or "unknown"),
        "cause": str(known.get("cause") or ""),
        "error": _readable_error(visit, known.get("error")),
        "stack": visit.redacted(stack) if isinstance(stack, str) else None,
    }


ATTEMPT_FIGURES = ("started_at", "ended_at", "peak_memory")
# Fields of a job in a list. A job whose record is broken lacks most of them.
LISTED = (
    *("type", "priority", "enqueued_at", "run_at", "retry_count", "ended_at", "run_seconds"),
    *("died_at", "error", "message", "attempts", "fence", "record_error", "waits_for_count"),
)


def _listed(visit: Visit, job: dict[str, Any]) -> dict[str, Any]:
    shown = job if "dead" in visit.permitted else details_without_messages(job)
    complete = {**dict.fromkeys(LISTED), **shown}
    return complete | {name: visit.redacted(complete[name]) for name in ("message", "record_error")}


async def dead(visit: Visit) -> Page:
    """The dead jobs of a queue, grouped by error."""
    queue = visit.queue
    groups: dict[str, dict[str, Any]] = {}
    after, pages, scanned = None, 0, 0
    while pages < GROUP_PAGES:
        answer = await visit.source.redis("dead.groups", name=queue.name, after=after)
        for group in answer["groups"]:
            known = groups.setdefault(group["key"], group)
            if known is not group:
                known["count"] += group["count"]
        after, pages, scanned = answer["next"], pages + 1, scanned + answer["scanned"]
        if after is None:
            break
    for group in groups.values():
        group |= {name: visit.redacted(group[name]) for name in ("message", "pattern")}
    ordered = sorted(groups.values(), key=lambda group: (-group["count"], group["key"]))
    values = {"queue": queue, "groups": ordered, "scanned": scanned, "more": after is not None}
    return Page("dead.html", f"Dead jobs of {queue.name}", values, live=False)


async def all_dead(visit: Visit) -> Page:
    """Queues with dead jobs."""
    queues = [queue for queue in visit.now.queues.values() if queue.counts is not None and queue.counts.dead]
    queues.sort(key=lambda queue: -(queue.counts.dead if queue.counts else 0))
    return Page("all_dead.html", "Dead jobs", {"queues": queues})


async def find(visit: Visit) -> Page:
    """A job or flow by id, in all queues."""
    job_id = visit.text("id")
    found: list[dict[str, str]] = []
    flow = None
    if job_id is not None:
        link, names = visit.source.link, list(visit.now.queues)
        places = await visit.source.run(lambda: find_job(link(), visit.source.prefix, names, job_id))
        found = [{"queue": name, "state": state} for name, state in places]
        if "dead" in visit.permitted:
            found += await _find_dead(visit, job_id)
        if "flow" in visit.permitted:
            flow = await home_of_flow(visit, job_id)
    return Page("find.html", "Find a job", {"id": job_id, "found": found, "flow": flow}, live=False)


async def _find_dead(visit: Visit, job_id: str) -> list[dict[str, str]]:
    """A scan per queue, so only in the first queues that have dead jobs."""
    dead = [queue.name for queue in visit.now.queues.values() if queue.counts is not None and queue.counts.dead]
    found = []
    for name in dead[:MAX_DEAD_QUEUES]:
        with suppress(UnknownJob):
            await visit.source.redis("dead.show", name=name, id=job_id)
            found.append({"queue": name, "state": "dead"})
    return found
