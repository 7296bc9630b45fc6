"""What members of `control_read_group` may ask the control socket: how things stand, and nothing of what jobs hold.

Refused is what changes anything, and what may show the data of a job: its result, the message of an error, a stack, the
output of a handler. The table of verbs that such a client gets is made here, once; the rest of it refuses.
"""

from collections.abc import Callable, Mapping
from typing import Any

from forq.errors import ForqError, PermissionRefused
from forq.supervisor.connection import Request

Verb = Callable[[Request], None]
# request, verb of the clerk, its params, what to do with the answer or error
AskClerk = Callable[[Request, str, dict[str, Any], Callable[[Any], None]], None]

# Of jobs they tell ids and identifiers; `job` tells more (without_data), `why` leaves out the messages of errors.
READ_VERBS = ("status", "jobs", "job", "why", "ping", "version")
OPEN_KEYS = (
    *("id", "identifier", "state", "type", "priority", "retry_count", "stall_count", "timeout_count", "suspect"),
    *("enqueued_at", "run_at", "ended_at", "run_seconds", "blocked_behind", "worker", "fence", "removed"),
)
OPEN_KEYS_OF_ATTEMPTS = ("started_at", "ended_at", "outcome", "cause", "peak_memory")


def verbs_for_readers(table: Mapping[str, Verb], ask_clerk: AskClerk) -> dict[str, Verb]:
    def job(request: Request) -> None:
        def answer(found: Any) -> None:
            if isinstance(found, ForqError):
                request.fail(found)
            else:
                request.reply(without_data(found))

        ask_clerk(request, "job", request.params, answer)

    def why(request: Request) -> None:
        request.params["messages"] = False
        table["why"](request)

    def status(request: Request) -> None:
        request.params["traces"] = False
        table["status"](request)

    allowed = {name: table[name] for name in READ_VERBS}
    return {**dict.fromkeys(table, _refuse), **allowed, "job": job, "why": why, "status": status}


def without_data(job: dict[str, Any]) -> dict[str, Any]:
    """What is told of a job to those who may not see its data. What is not known to be harmless is left out."""
    told = {key: job[key] for key in OPEN_KEYS if key in job}
    if "attempts" in job:
        told["attempts"] = [_open_part(attempt) for attempt in job["attempts"]]
    return told


def _open_part(attempt: Any) -> dict[str, Any]:
    if not isinstance(attempt, dict):
        return {}
    told: dict[str, Any] = {key: attempt[key] for key in OPEN_KEYS_OF_ATTEMPTS if key in attempt}
    error = attempt.get("error")
    if isinstance(error, dict):
        told["error"] = {key: error.get(key) for key in ("name", "kind")}
    return told


def _refuse(request: Request) -> None:
    raise PermissionRefused(
        f"user {request.peer.uid} may not use {request.method}: members of control_read_group may use "
        f"{', '.join(READ_VERBS)}"
    )
