"""The overview of all queues, and the page of one."""

from typing import Any

from forq.charts import minutes_chart, waits_chart
from forq.errors import ForqError
from forq.health import Fault
from forq.settings import OPTIONS
from forq.web.feed import QueueView, View
from forq.web.page import Page, Visit

PER_PAGE = 100
ORDERS = ("name", "waiting", "active", "failed", "dead", "oldest")
TOTALS = ("waiting", "scheduled", "held", "active", "retry", "dead", "failed")
# States that are a problem.
WORST = ("config_error", "flapping", "stopped", "unserved")


async def overview(visit: Visit) -> Page:
    view = visit.now
    order = visit.choice("order", ORDERS)
    find = (visit.text("find") or "").lower()
    queues = [queue for queue in view.queues.values() if find in queue.name.lower()]
    queues.sort(key=lambda queue: _place(queue, order))
    shown, number = visit.part(queues, PER_PAGE)
    values = {
        "queues": shown,
        "matching": len(queues),
        "number": number,
        "per_page": PER_PAGE,
        "order": order,
        "find": find,
        "problems": visit.redacted(problems(view)),
        "totals": {name: view.total(name) for name in TOTALS},
        "rate": _sum(queue.rates.done for queue in view.queues.values()),
        "failure_rate": _sum(queue.rates.failed for queue in view.queues.values()),
    }
    return Page("overview.html", "Overview", values)


async def queue(visit: Visit) -> Page:
    shown = visit.queue
    schedules: list[dict[str, Any]] = []
    schedules_error = ""
    if visit.now.redis_error:
        # Asking again would delay the page by a timeout.
        schedules_error = visit.now.redis_error
    elif "schedules" in visit.permitted:
        try:
            schedules = (await visit.source.redis("schedules", name=shown.name))["schedules"]
        except ForqError as exc:
            schedules_error = str(exc)
    memory = await visit.source.pss(child["pid"] for child in shown.children if child["pid"])
    newest = visit.now.newest_minute
    traces = (shown.traceback, shown.restart_error and shown.restart_error["traceback"])
    values = {
        "queue": shown,
        "reason": visit.redacted(shown.reason),
        "traces": visit.redacted([trace for trace in traces if trace]),
        "memory": memory,
        "problems": visit.redacted([problem for problem in problems(visit.now) if problem["queue"] == shown.name]),
        "throughput": minutes_chart(shown.minutes, newest) if shown.minutes else None,
        "waits": waits_chart(shown.minutes, newest) if shown.minutes else None,
        "schedules": schedules[:PER_PAGE],
        "schedules_left": max(0, len(schedules) - PER_PAGE),
        "schedules_error": schedules_error,
    }
    return Page("queue.html", shown.name, values)


async def options(visit: Visit) -> Page:
    shown = visit.queue
    fields = await visit.source.option_fields(shown.name)
    own = await _options_of_supervisor(visit, shown.name)
    rows = []
    for option in OPTIONS.values():
        if shown.mode not in option.modes:
            continue
        value = option.read_fields(fields) if option.stored else own.get(option.name)
        rows.append(
            {
                "name": option.name,
                "value": None if value is None else option.show(value),
                "default": option.show(option.defaults_in.get(shown.mode or "", option.default)),
                "live": option.live and shown.mode not in option.fixed_in,
                "allowed": option.allowed,
                "help": option.help,
            }
        )
    return Page("options.html", f"Options of {shown.name}", {"queue": shown, "options": rows}, live=False)


async def _options_of_supervisor(visit: Visit, name: str) -> dict[str, Any]:
    """Options that Redis does not store."""
    if not visit.source.has_supervisor:
        return {}
    try:
        answer = await visit.source.supervisor("queue.options", name=name)
    except ForqError:  # another supervisor serves the queue
        return {}
    return dict(answer["options"])


def problems(view: View) -> list[dict[str, Any]]:
    """What is wrong: {"queue" (None: the supervisor), "text", "serious"}, the worst first."""
    found: list[dict[str, Any]] = [
        {"queue": fault.queue, "text": fault.text + _cause(view, fault), "serious": True} for fault in view.faults
    ]
    named = {(problem["queue"]) for problem in found}
    for queue in view.queues.values():
        if queue.state in WORST and queue.name not in named:
            found.append({"queue": queue.name, "text": f"queue {queue.name} is {queue.state}: {queue.reason or ''}",
                          "serious": queue.state != "unserved"})  # fmt: skip
        if queue.restart_error is not None:
            text = f"queue {queue.name} runs older code because a restart failed: {queue.restart_error['message']}"
            found.append({"queue": queue.name, "text": text, "serious": True})
        if queue.counts is not None and queue.counts.dead:
            count = queue.counts.dead
            text = f"queue {queue.name} has {count:,} dead {'job' if count == 1 else 'jobs'}"
            found.append({"queue": queue.name, "text": text, "serious": False, "dead": count})
    for each in view.supervisors:
        if each["duplicates"]:
            text = f"supervisor {each['processor']} on {each['host']} shares its state directory with another"
            found.append({"queue": None, "text": text, "serious": True})
    return sorted(found, key=lambda problem: not problem["serious"])


def _cause(view: View, fault: Fault) -> str:
    """Why a queue is in a state which is a fault."""
    queue = view.queues.get(fault.queue or "")
    known = fault.check == "state" and queue is not None and queue.reason is not None
    return f": {queue.reason}" if known and queue is not None else ""


def _place(queue: QueueView, order: str) -> tuple[object, ...]:
    counts = queue.counts
    if order == "name" or counts is None:
        return (0, queue.name)
    # The figures that the columns show.
    figures = {
        "waiting": counts.waiting,
        "active": counts.active,
        "failed": queue.rates.failed or 0.0,
        "dead": counts.dead,
        "oldest": counts.oldest_waiting_seconds or 0.0,
    }
    return (-figures[order], queue.name)


def _sum(rates: Any) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
