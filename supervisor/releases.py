"""The verbs await, dequeue and ack of the control socket. An awaiter stays as long as its client does.

It is the supervisor that names an awaiter and knows its deadline: so the question can be put again to the successor of
a clerk that died.
"""

from collections.abc import Callable
from typing import Any, Protocol

from forq.errors import UsageError
from forq.job import new_id
from forq.settings import AUTO_RELEASE, ON_REQUEST, OPTIONS
from forq.supervisor.connection import Request
from forq.supervisor.service import Service
from forq.values import check_job_id, check_queue_name, parse_duration, shown

# How long a question may wait for its queue to be opened, whatever it says itself.
LONGEST_OPENING_SECONDS = 86400.0


class AskClerk(Protocol):
    def __call__(
        self, request: Request, verb: str, params: dict[str, Any], *, repeat: bool, patience_seconds: float
    ) -> None: ...


class Releases:
    """`ask`: how a request gets to the clerk and back, once its queue is there."""

    def __init__(self, ask: AskClerk, clerk: Service, now: Callable[[], float]) -> None:
        self._ask = ask
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
        self._ask(request, "ack", params, repeat=True, patience_seconds=0.0)

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
        request.on_gone(lambda: self._clerk.ask("leave", {"name": name, "awaiter": awaiter}, repeat=True))
        patience = LONGEST_OPENING_SECONDS if wait_seconds is None else min(wait_seconds, LONGEST_OPENING_SECONDS)
        self._ask(request, "await", params, repeat=True, patience_seconds=patience)


def _seconds(request: Request, key: str) -> float | None:
    given = request.params.get(key)
    return None if given is None else parse_duration(given)


def _lease_ms(request: Request) -> int | None:
    lease = request.params.get("lease")
    return None if lease is None else round(float(OPTIONS["lease"].parse(lease, "dequeue")) * 1000)
