"""Whether jobs are consumed, not only whether processes exist: the judgement of a status, and of what else was seen."""

from typing import Any

from forq.broker.inspect import Counts
from forq.health import CONSUMING_STATES, Fault, faults_of_queue, faults_of_supervisor
from forq.services.metrics_look import Look, Work, queues_of
from forq.settings import WORK

# A failed log that cannot be written stops no job, and a queue that is not served here is not this supervisor's.
CHECKS = ("service", "state", "process")


def faults_in(look: Look, health_seconds: float) -> list[Fault]:
    """Why forq is not healthy; empty when it is."""
    faults = []
    if look.status is None:
        faults.append(Fault("supervisor", look.status_error))
    else:
        faults += [fault for fault in faults_of_supervisor(look.status) if fault.check in CHECKS]
    if look.round_trip_seconds is None:
        faults.append(Fault("redis", look.redis_error))
    starved = _waiting_for_capacity(look)
    for queue in queues_of(look):
        found = [fault for fault in faults_of_queue(queue) if fault.check in CHECKS]
        faults += found
        if queue["state"] in CONSUMING_STATES and queue["name"] not in starved and not found:
            faults += _stuck(queue, look, health_seconds)
    return faults


def _waiting_for_capacity(look: Look) -> set[str]:
    """Queues of which a process waits for units: others hold them, and their jobs are judged by themselves."""
    waiting = [] if look.status is None else look.status["capacity"]["waiting"]
    return {wish["worker"].rpartition(" ")[0] for wish in waiting}


def _stuck(queue: dict[str, Any], look: Look, health_seconds: float) -> list[Fault]:
    name = queue["name"]
    counts = look.counts.get(name)
    if counts is None or not _should_consume(queue, counts, health_seconds):
        return []
    work = look.work.get(name, Work())
    if any(seconds < (limit or health_seconds) for seconds, limit in work.running):
        return []
    tallied = look.tallied.get(name)
    last_ns = max(work.started_ns, tallied.last_ns if tallied is not None else 0)
    quiet = (look.now_ns - last_ns) / 1e9 if last_ns else None
    if quiet is not None and quiet < health_seconds:
        return []
    since = "yet" if quiet is None else f"for {quiet:.0f} s"
    number = counts.waiting + counts.retry + counts.overdue
    waits = f"{number} jobs wait, the oldest for {counts.oldest_waiting_seconds:.0f} s"
    return [Fault("stuck", f"{waits}, and nothing has begun or ended {since}", name)]


def _should_consume(queue: dict[str, Any], counts: Counts, health_seconds: float) -> bool:
    """Whether something waits, in whatever way, that nothing holds back."""
    if queue["mode"] != WORK or counts.paused:
        return False
    if counts.oldest_waiting_seconds is None or counts.oldest_waiting_seconds < health_seconds:
        return False
    if counts.limits is not None and (counts.limits["limited_workers"] or counts.limits["may_begin"] == 0):
        return False
    return not any(
        child["role"] == "main" and child["state"] == "starting" and child["uptime_seconds"] < health_seconds
        for child in queue["children"]
    )
