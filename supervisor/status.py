"""The verb `status`: processes and states from the supervisor, and counts from Redis if it answers in time."""

import os
from collections.abc import Callable
from typing import Any

from forq.errors import ForqError, TimedOut, UnknownQueue, UsageError
from forq.supervisor.control import Request
from forq.supervisor.queue import ServedQueue
from forq.supervisor.supervisor import Supervisor
from forq.values import check_queue_name
from forq.version import VERSION

# After this time `status` answers without counts.
COUNTS_SECONDS = 1.0
COUNTS = (
    "waiting",
    "scheduled",
    "blocked",
    "held",
    "retry",
    "active",
    "dead",
    "kept",
    "fail_jobs",
    "done",
    "failed",
    "dropped",
    "overdue",
    "in_flight",
    "oldest_waiting_seconds",
    "journal",
    "awaiters",
    "next_due_seconds",
    "limits",
)


def _restart_error(queue: ServedQueue, *, traces: bool) -> dict[str, Any] | None:
    error = queue.restart_error
    return error if error is None or traces else {**error, "traceback": None}


def _describe_other(
    name: str, counts: dict[str, Any], apps: list[str], *, unserved: bool, items: bool
) -> dict[str, Any]:
    """A queue that this supervisor, which serves these apps, does not serve."""
    how = f"`forqctl create {name} --handler MODULE:FUNCTION --path DIR` makes this one serve it"
    if unserved and apps:
        app = apps[0] if len(apps) == 1 else "APP"
        how = f"if it is new in the code of an app: `forqctl restart --app {app}`; else {how}"
    return {
        "name": name,
        "mode": counts["mode"],
        "app": None,
        "state": "unserved" if unserved else "elsewhere",
        "reason": f"no supervisor serves it; {how}" if unserved else f"another supervisor serves it; {how}, too",
        "traceback": None,
        "restart_error": None,
        **{key: counts[key] for key in COUNTS},
        "children": [],
        **({"items": counts.get("items")} if items else {}),
    }


class StatusVerb:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._queues = supervisor.queues
        self._services = supervisor.services
        self._clerk = supervisor.services.clerk

    def status(self, request: Request) -> None:
        wanted = request.params.get("names") or []
        if not isinstance(wanted, list):
            raise UsageError("names must be a list of queue names")
        served = sorted(self._queues.by_name)
        others = [name for name in wanted if check_queue_name(name) not in served]
        if others and request.params.get("counts") is False:
            raise UnknownQueue(f"this supervisor serves no queue {others[0]!r}")
        requested_at = self._supervisor.loop.now()
        counted = False

        def answer(counts: Any) -> None:
            nonlocal counted
            timer.cancel()
            # Late counts: the answer without them may still be waiting for the memory.
            if counted:
                return
            counted = True
            counts_ms = round((self._supervisor.loop.now() - requested_at) * 1000, 3)
            known, unserved = ({}, []) if isinstance(counts, ForqError) else (counts["counts"], counts["unserved"])
            if missing := [name for name in others if known.get(name) is None]:
                down = f": {counts}" if isinstance(counts, ForqError) else ""
                request.fail(UnknownQueue(f"no queue {missing[0]!r}{down}"))
                return
            # A queue without counts is being created or deleted.
            names = wanted or [*served, *(name for name in unserved if known.get(name) is not None)]
            traces = request.params.get("traces") is not False
            apps = [app.label for app in self._supervisor.apps.all]
            queues = [
                self._describe(name, known.get(name), items=bool(wanted), traces=traces)
                if name in served
                else _describe_other(name, known[name], apps, unserved=name in unserved, items=bool(wanted))
                for name in names
            ]
            described = {
                "queues": queues,
                "apps": [app.describe(traces=traces) for app in self._supervisor.apps.all],
                "capacity": self._queues.grants.describe(),
                "supervisor": self._describe_supervisor(counts, counts_ms),
            }
            if request.params.get("memory"):
                self._with_memory(described, request.reply)
            else:
                request.reply(described)

        late = TimedOut(f"no answer from Redis within {COUNTS_SECONDS} s")
        timer = self._supervisor.loop.call_later(COUNTS_SECONDS, lambda: answer(late))
        if request.params.get("counts") is False:
            answer({"counts": {}, "unserved": []})
        elif self._services.redis_state["ok"]:
            self._clerk.request("overview", {"names": wanted, "served": served}, answer)
        else:
            answer(ForqError(self._services.redis_state["error"] or "not reached yet"))

    def _with_memory(self, described: dict[str, Any], then: Callable[[Any], None]) -> None:
        """The clerk reads it: that takes milliseconds per process."""
        children = [child for queue in described["queues"] for child in queue["children"]]

        def read(memory: Any) -> None:
            for child in children:
                child["pss_bytes"] = None if isinstance(memory, ForqError) else memory.get(str(child["pid"]))
            then(described)

        self._clerk.request("memory", {"pids": [child["pid"] for child in children if child["pid"]]}, read)

    def _describe(self, name: str, counts: dict[str, Any] | None, *, items: bool, traces: bool) -> dict[str, Any]:
        queue = self._queues.by_name.get(name)
        state = queue.state if queue is not None else "stopped"
        if state in ("running", "starting", "draining") and counts is not None and counts["paused"]:
            state = "paused"
        described = {
            "name": name,
            "mode": queue.spec.mode if queue is not None else None,
            "app": of_app.app if (of_app := self._queues.of_apps.get(name)) is not None else None,
            "state": state,
            "reason": queue.config_error if queue is not None else None,
            "traceback": queue.traceback if queue is not None and traces else None,
            "restart_error": None if queue is None else _restart_error(queue, traces=traces),
            **{key: None if counts is None else counts[key] for key in COUNTS},
            "children": queue.describe_children() if queue is not None else [],
        }
        if items:
            described["items"] = None if counts is None else counts.get("items")
        return described

    def _describe_supervisor(self, counts: Any, counts_ms: float) -> dict[str, Any]:
        supervisor = self._supervisor
        # counts_ms is the whole time of the request through the clerk, not a bare round trip to Redis.
        redis = self._services.status_of_redis() | {"counts_ms": counts_ms}
        if isinstance(counts, ForqError) and self._clerk.unresponsive:
            # The clerk is at fault and listed as unresponsive; Redis may be fine.
            redis |= {"counts_ms": None}
        elif isinstance(counts, ForqError):
            redis |= {"ok": False, "error": str(counts), "counts_ms": None}
        return {
            "pid": os.getpid(),
            "uptime_seconds": round(supervisor.loop.now() - supervisor.started, 3),
            "version": VERSION,
            "processor": self._services.processor,
            "redis": redis,
            "services": [
                {
                    "name": service.name,
                    "pid": service.child.pid if service.child is not None else None,
                    "restarts": service.restarts,
                    "state": "unresponsive" if service.unresponsive else "running" if service.child else "starting",
                }
                for service in self._services.all
                if service.needed()
            ],
            "failed_log": {
                "ok": not self._services.failed_log_errors,
                "errors": dict(self._services.failed_log_errors),
            },
        }
