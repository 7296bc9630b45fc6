"""The pages about the system: schedules of all queues, and processes."""

import os
from dataclasses import replace
from typing import Any

from forq.errors import ForqError
from forq.web.page import Page, Visit

PER_PAGE = 200
# Fields that a schedule lacks if its definition is broken or its zone is unknown on this host.
OF_RULES = ("zone", "type", "priority", "overlap", "catch_up", "jitter", "error")


async def schedules(visit: Visit) -> Page:
    found: list[dict[str, Any]] = (await visit.source.redis("schedules"))["schedules"]
    wanted = (visit.text("find") or "").lower()
    matching = [each for each in found if wanted in f"{each['queue']} {each['key']} {each.get('type') or ''}".lower()]
    matching.sort(key=lambda each: (each["next_at"] is None, each["next_at"] or 0, each["queue"], each["key"]))
    shown, number = visit.part(matching, PER_PAGE)
    values = {
        "schedules": shown,
        "matching": len(matching),
        "number": number,
        "per_page": PER_PAGE,
        "find": wanted,
    }
    return Page("schedules.html", "Schedules", values, live=False)


async def schedule(visit: Visit) -> Page:
    """One schedule with its next ticks."""
    queue, key = visit.queue, visit.text("key") or ""
    found = (await visit.source.redis("schedules", name=queue.name, key=key))["schedules"][0]
    data = None
    if visit.text("show") == "data":
        visit.require("job.data", "see the data of a schedule")
        data = visit.shown_data(found.get("data"))
    found = {**dict.fromkeys(OF_RULES), **found}
    values = {"queue": queue, "schedule": found, "data": data}
    return Page("schedule.html", f"Schedule {key}", values, live=False)


async def processes(visit: Visit) -> Page:
    """The process tree, as ps shows it."""
    status = visit.now.status
    values: dict[str, Any] = {"tree": [], "tree_error": "", "queue_of": {}, "stacks": None, "stacks_error": ""}
    if visit.source.has_supervisor:
        root = os.getppid() if status is None else status["supervisor"]["pid"]
        values["tree"] = await visit.source.process_tree(root)
        if "stack" not in visit.permitted:
            # Arguments of programs that jobs start may be data. Titles of forq have none but the id of a job.
            values["tree"] = [
                row if row.title.startswith("forq: ") else replace(row, title=row.name) for row in values["tree"]
            ]
        values["queue_of"] = {
            child["pid"]: queue.name for queue in visit.now.queues.values() for child in queue.children if child["pid"]
        }
    else:
        values["tree_error"] = "Only the dashboard of a supervisor ([web] in its config file) shows its processes."
    wanted = visit.text("stack")
    if wanted is not None and not visit.live:
        visit.require("stack", "see stacks")
        try:
            values["stacks"] = visit.redacted((await visit.source.supervisor("stack", name=wanted))["stacks"])
        except ForqError as exc:
            values["stacks_error"] = str(exc)
    values["stack_of"] = wanted
    return Page("processes.html", "Processes", values)
