"""Health: whether jobs are consumed, not whether processes exist. Pure: a look goes in, faults come out."""

from dataclasses import dataclass
from typing import Any

from forq.broker.viewing import Counts
from forq.services.metrics_look import Look, Work, queues_of
from forq.settings import WORK

SERVED_STATES = ("running", "starting", "draining")
CONSUMING_STATES = ("running", "starting")


@dataclass(frozen=True)
class Fault:
    """`check`: supervisor, service, redis, state, process or stuck; `queue`: of the last three, which."""

    check: str
    reason: str
    queue: str | None = None

    def describe(self) -> dict[str, str]:
        return {"check": self.check, **({"queue": self.queue} if self.queue else {}), "reason": self.reason}


def faults_in(look: Look, health_seconds: float) -> list[Fault]:
    """Why forq is not healthy; empty when it is."""
    faults = []
    if look.status is None:
        faults.append(Fault("supervisor", look.status_error))
    services = [] if look.status is None else look.status["supervisor"]["services"]
    unresponsive = [service["name"] for service in services if service["state"] == "unresponsive"]
    faults += [Fault("service", f"service {name} is unresponsive") for name in unresponsive]
    if look.round_trip_seconds is None:
        faults.append(Fault("redis", look.redis_error))
    starved = _waiting_for_capacity(look)
    for queue in queues_of(look):
        name, state = queue["name"], queue["state"]
        if state == "stopped" and any(child["pid"] for child in queue["children"]):
            continue  # somebody restarts or replaces it, and its process ends in order
        if state not in SERVED_STATES:
            reason = f"is {state}" + (f": {queue['reason']}" if queue["reason"] else "")
            faults.append(Fault("state", reason, name))
        elif silent := [child["pid"] for child in queue["children"] if child["state"] == "unresponsive"]:
            faults.append(Fault("process", f"process {silent[0]} is unresponsive", name))
        elif state in CONSUMING_STATES and not any(map(_is_live_main, queue["children"])):
            faults.append(Fault("process", "has no main process", name))
        elif state in CONSUMING_STATES and name not in starved:
            faults += _stuck(queue, look, health_seconds)
    return faults


def _is_live_main(child: dict[str, Any]) -> bool:
    return child["role"] == "main" and bool(child["pid"]) and child["state"] != "backoff"


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
