"""Finds faults in a supervisor's status, for `forqctl status --check`, /healthz and the metrics."""

from __future__ import annotations

# forqctl imports this module at its start: no typing, no dataclasses.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HEALTHY_STATES = ("running", "starting", "paused", "draining", "elsewhere")
CONSUMING_STATES = ("running", "starting")
# A handler whose import takes longer than this counts as stuck.
STARTING_SECONDS = 30.0


class Fault:
    """`check`: supervisor, service, redis, failed_log, app, unserved, ending, state, process, starting or stuck.
    `reason` does not name the queue; `text` does."""

    __slots__ = ("check", "queue", "reason", "text")

    def __init__(self, check: str, reason: str, queue: str | None = None, text: str | None = None) -> None:
        self.check = check
        self.reason = reason
        self.queue = queue
        self.text = text or (reason if queue is None else f"queue {queue} {reason}")

    def describe(self) -> dict[str, str]:
        return {"check": self.check, **({"queue": self.queue} if self.queue else {}), "reason": self.reason}


def faults_of_supervisor(status: dict[str, Any]) -> list[Fault]:
    unwritten = status["supervisor"].get("failed_log", {}).get("errors", {})
    return [
        *(Fault("service", f"service {name} is unresponsive") for name in unresponsive_services(status)),
        *(
            Fault("app", f"app {app['name'] or app['app']} cannot be read: {app['error']['message']}")
            for app in status.get("apps", ())
            if app["state"] == "config_error"
        ),
        *(
            Fault("failed_log", str(error), name, f"failed log of queue {name}: {error}")
            for name, error in unwritten.items()
        ),
    ]


def faults_of_queue(queue: dict[str, Any]) -> list[Fault]:
    name, state, children = queue["name"], queue["state"], queue["children"]
    silent = [child["pid"] for child in children if child["state"] == "unresponsive"]
    faults = [
        Fault("process", f"process {pid} is unresponsive", name, f"process {pid} of queue {name} is unresponsive")
        for pid in silent
    ]
    if state == "unserved":
        if queue["waiting"]:
            faults.append(Fault("unserved", f"is unserved with {queue['waiting']} jobs waiting", name))
    elif state not in HEALTHY_STATES:
        # During a restart the old process ends first, so the queue is stopped for a moment.
        check = "ending" if state == "stopped" and any(child["pid"] for child in children) else "state"
        why = queue.get("reason")
        faults.append(Fault(check, f"is {state}" + (f": {why}" if why else ""), name, f"queue {name} is {state}"))
    elif state in CONSUMING_STATES and not silent and not any(map(_is_live_main, children)):
        faults.append(Fault("process", "has no main process", name))
    elif state == "starting" and (seconds := _starting_seconds(children)) > STARTING_SECONDS:
        faults.append(Fault("starting", f"has been starting for {seconds:.0f}s: the import of its handler hangs", name))
    return faults


def unresponsive_services(status: dict[str, Any]) -> list[str]:
    services = status["supervisor"].get("services", [])
    return [service["name"] for service in services if service.get("state") == "unresponsive"]


def _is_live_main(child: dict[str, Any]) -> bool:
    return child["role"] == "main" and bool(child["pid"]) and child["state"] != "backoff"


def _starting_seconds(children: list[dict[str, Any]]) -> float:
    mains = [child for child in children if child["role"] == "main" and child["state"] in ("starting", "importing")]
    return max((child["uptime_seconds"] for child in mains if child["uptime_seconds"] is not None), default=0.0)
