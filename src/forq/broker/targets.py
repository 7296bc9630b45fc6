"""Where a request has to go: the supervisor that runs a job or serves a queue, and the params for it."""

from dataclasses import dataclass
from typing import Any

from forq.api_types import SupervisorInfo
from forq.broker.supervisors import Supervisors
from forq.errors import UnknownJob
from forq.values import check_job_id, check_queue_name

# The time limit of a supervisor for the import of a handler, if the request has none.
IMPORT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """`work_seconds`: how long carrying out the request may take."""

    supervisor: SupervisorInfo
    params: dict[str, Any]
    work_seconds: float = 0.0


def find_target(
    supervisors: Supervisors, method: str, params: dict[str, Any], *, on: str | None, besides: str | None = None
) -> Target:
    """The target of a request. `on`: a processor or host that a user chose; else the one supervisor that runs the job
    or serves the queue, `besides` one that has neither."""
    if method == "kill":
        return _running(supervisors, params, on, besides)
    if on is not None:
        chosen = supervisors.choose(on)
    else:
        chosen = supervisors.serving(check_queue_name(params.get("name")), besides)
    return Target(chosen, params, _work_seconds(method, params))


def _running(supervisors: Supervisors, params: dict[str, Any], on: str | None, besides: str | None) -> Target:
    """Kills carry the fence of the attempt: a late or repeated one never hits a later attempt."""
    name, job_id = check_queue_name(params.get("name")), check_job_id(params.get("id"))
    chosen = None if on is None else supervisors.choose(on)
    owner, attempt = supervisors.running(name, job_id)
    if chosen is not None and chosen["processor"] != owner["processor"]:
        raise UnknownJob(
            f"supervisor {chosen['processor']} on host {chosen['host']} does not run job {job_id!r} of queue {name!r}: "
            f"{owner['processor']} on host {owner['host']} does; try: forqctl kill {name} {job_id}"
        )
    if on is None and owner["processor"] == besides:
        raise UnknownJob(f"it is just beginning or ending; see: forqctl why {name} {job_id}")
    return Target(owner, {**params, "fence": attempt.fence})


def _work_seconds(method: str, params: dict[str, Any]) -> float:
    if method not in ("queue.restart", "app.restart"):
        return 0.0
    wait = params.get("wait", True)
    given = isinstance(wait, int | float) and not isinstance(wait, bool) and wait > 0
    # An app is imported twice: to read it, and by its workers.
    return (2 if method == "app.restart" else 1) * (float(wait) if given else IMPORT_SECONDS)
