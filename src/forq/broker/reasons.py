"""Why a job is not running, in one sentence."""

from collections.abc import Mapping
from typing import Any

from forq.broker.keys import pending_key, queue_base, suspects_key, swept_key
from forq.broker.link import Link
from forq.broker.registry import now_ms
from forq.broker.viewing import Counts, Viewer
from forq.progress import show_progress
from forq.settings import EXTERNAL, RELEASE_MODES
from forq.values import show_time

# How far down its list a job's place is looked for.
LOOKED_AT = 10_000


def why(
    link: Link,
    prefix: str,
    name: str,
    job_id: str,
    *,
    messages: bool = True,
    unresponsive: Mapping[str, int] | None = None,
) -> tuple[str, str]:
    """The job's state and the reason; raises UnknownJob if the queue has no job of that id.

    Without `messages` nothing is told that may quote the job's data: of an error only its name. `unresponsive`: workers
    that run nothing and whose process does not answer, with its pid.
    """
    viewer = Viewer(link, prefix, name)
    job = viewer.job(job_id)
    if not messages:
        _drop_messages(job)
    pid = (unresponsive or {}).get(str(job.get("worker")))
    if job["state"] == "active" and pid is not None:
        return job["state"], (
            f"worker {job['worker']} has claimed it and has not begun it: its process {pid} is unresponsive; "
            "the job goes back in line, uncounted, and the process is replaced"
        )
    return job["state"], _reason(link, prefix, viewer, job)


def _reason(link: Link, prefix: str, viewer: Viewer, job: dict[str, Any]) -> str:
    name, job_id, state = viewer.name, job["id"], job["state"]
    counts = viewer.counts()
    if state == "active" and counts.mode in RELEASE_MODES:
        return f"it was handed to awaiter {job['worker']}, who has not acknowledged it yet"
    if state == "active" and counts.mode == EXTERNAL:
        return _with_worker(link, queue_base(prefix, name), job)
    if state == "active":
        marked = ", and will be forgotten when it ends" if job["removed"] else ""
        far = job["progress"] and show_progress(job["progress"]["fraction"], job["progress"]["text"])
        return f"it is running now (worker {job['worker']}){f': {far}' if far else ''}{marked}"
    if state == "done":
        return f"it is done since {show_time(job['ended_at'])}"
    if state == "dead":
        return f"it failed for good: {_error(job['error'])}; `forqctl dead retry {name} {job_id}` runs it again"
    if counts.paused:
        return "its queue is paused; `forqctl resume` goes on"
    if state == "scheduled":
        return f"it waits for its time, {show_time(job['run_at'])}{_last_attempt(job)}"
    if state == "retry":
        return (
            f"it has used up its retries and gets another chance when nothing else waits ({counts.waiting} jobs wait)"
        )
    return _waiting(link, prefix, name, job, counts)


def _waiting(link: Link, prefix: str, name: str, job: dict[str, Any], counts: Counts) -> str:
    base = queue_base(prefix, name)
    if counts.mode != EXTERNAL and not link.call("ZCOUNT", f"{base}:processors", now_ms(link, base), "+inf"):
        return f"no supervisor serves its queue; `forqctl status {name}` says what to do"
    if job.get("suspect"):
        return _suspect(link, base, job)
    priority = job["priority"]
    own = pending_key(base, priority)
    first = [pending_key(base, before) for before in range(priority)]
    lists = [("LLEN", each) for place in first for each in (place, swept_key(place))]
    places = [("LPOS", each, job["id"], "MAXLEN", LOOKED_AT) for each in (swept_key(own), own)]
    *lengths, swept, ahead, behind = link.pipeline([*lists, ("LLEN", swept_key(own)), *places])
    if ahead is None and behind is not None:
        ahead = swept + behind
    before = sum(lengths) + (LOOKED_AT if ahead is None else ahead)
    at_least = "" if ahead is not None else "at least "
    if counts.mode == EXTERNAL:
        idle = "1 worker is idle" if counts.awaiters == 1 else f"{counts.awaiters} workers are idle"
        return f"it waits for a worker: {at_least}{before} come before it, {idle}"
    if counts.mode in RELEASE_MODES:
        others = "1 awaits an item" if counts.awaiters == 1 else f"{counts.awaiters} await an item"
        return f"it waits to be released: {at_least}{before} come before it, {others} of its queue"
    held_up = _held_up(counts)
    if before == 0:
        return f"it is the next one; its queue runs {counts.active} jobs now{held_up}"
    jobs = "1 job comes" if before == 1 else f"{before} jobs come"
    return f"it waits in line: {at_least}{jobs} before it, {counts.active} run now{held_up}"


def _held_up(counts: Counts) -> str:
    if counts.limits is None or counts.limits["may_begin"] > 0:
        return ""
    if 0 < counts.limits["max_active"] <= counts.active:
        return f", and no more than max_active = {counts.limits['max_active']} may"
    return f", and no more may begin now (rate = {counts.limits['rate']})"


def _with_worker(link: Link, base: str, job: dict[str, Any]) -> str:
    marked = ", and will be forgotten when it ends" if job["removed"] else ""
    if link.call("ZSCORE", f"{base}:accepted", job["id"]) is None:
        return f"it was assigned to worker {job['worker']}, which has not accepted it yet{marked}"
    return f"worker {job['worker']} runs it now{marked}"


def _suspect(link: Link, base: str, job: dict[str, Any]) -> str:
    ahead = link.call("ZRANK", suspects_key(base), job["id"])
    others = {0: "it is the next one", 1: "1 such job comes before it", None: "it is about to begin"}
    before = others.get(ahead, f"{ahead} such jobs come before it")
    return (
        "its process died while several jobs ran there, and nobody knows which of them did it: "
        f"it waits to run alone, in a process of its own; {before}"
    )


def _last_attempt(job: dict[str, Any]) -> str:
    if not job["attempts"]:
        return ""
    last = job["attempts"][-1]
    return f", after attempt {job['retry_count']} {last['outcome']}: {_error(last['error']) or last['cause']}"


def _drop_messages(job: dict[str, Any]) -> None:
    for told in (job, *(attempt for attempt in job.get("attempts", ()) if isinstance(attempt, dict))):
        if isinstance(error := told.get("error"), dict):
            told["error"] = {"name": error.get("name")}


def _error(error: Any) -> str:
    if not isinstance(error, dict):
        return ""
    return f"{error.get('name')}: {error['message']}" if "message" in error else str(error.get("name"))
