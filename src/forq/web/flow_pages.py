"""The pages about jobs that belong together: a flow with the states of its jobs, and a batch."""

from forq.broker.flows import find_flow
from forq.errors import InvalidId, UnknownFlow, UsageError
from forq.web.page import Page, Visit

PER_PAGE = 500
# Dependencies that a row names.
NAMED = 3


async def flow(visit: Visit) -> Page:
    """Not live: all of its jobs would be read every second."""
    queue, flow_id = visit.queue, _id(visit, "flow")
    found = await visit.source.redis("flow", id=flow_id)
    jobs = found["jobs"]
    depths: list[int] = []
    states: dict[str, int] = {}
    for job in jobs:
        depths.append(max((depths[needed] + 1 for needed in job["needs"]), default=0))
        states[job["state"]] = states.get(job["state"], 0) + 1
    rows = [
        job | {"depth": min(depth, 20), "needed": [jobs[needed] for needed in job["needs"][:NAMED]]}
        for job, depth in zip(jobs, depths, strict=True)
    ]
    part, number = visit.part(rows, PER_PAGE)
    values = {
        "queue": queue,
        "id": flow_id,
        "jobs": part,
        "count": len(jobs),
        "states": states,
        "number": number,
        "per_page": PER_PAGE,
        "named": NAMED,
    }
    return Page("flow.html", f"Flow {flow_id}", values, live=False)


async def batch(visit: Visit) -> Page:
    queue, batch_id = visit.queue, _id(visit, "batch")
    info = await visit.source.redis("batch", name=queue.name, id=batch_id)
    return Page("batch.html", f"Batch {batch_id}", {"queue": queue, "id": batch_id, "batch": info})


async def home_of_flow(visit: Visit, flow_id: str) -> str | None:
    """The queue that knows this flow, if any."""
    link, names = visit.source.link, list(visit.now.queues)
    try:
        return await visit.source.run(lambda: find_flow(link(), visit.source.prefix, names, flow_id))
    except (UnknownFlow, InvalidId):
        return None


def _id(visit: Visit, what: str) -> str:
    given = visit.text("id")
    if given is None:
        raise UsageError(f"the parameter id is missing: the id of a {what}")
    return given
