"""The rows of forqctl top, with rates computed from two statuses, and its plain output: a block of text or a line of
JSON per interval. screen.py draws them on a terminal."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from forq.ctl.client import ControlClient, connect
from forq.ctl.output import iso_time, print_json, print_table, printable, short_duration
from forq.errors import SupervisorUnreachable, TimedOut

if TYPE_CHECKING:
    from argparse import Namespace

HEADER = (
    *("QUEUE", "STATE", "WAITING", "ACTIVE", "SCHEDULED", "DEAD", "DONE/S", "FAILED/S"),
    *("OLDEST", "RUNNING", "RESTARTS", "LIMITS"),
)
# The order when sorted by state.
WORST_STATES_FIRST = ("config_error", "flapping", "stopped", "unserved", "starting", "draining", "paused", "running")


@dataclass(frozen=True, slots=True)
class QueueRow:
    """One queue. None: unknown, because Redis is down or there is no earlier status."""

    name: str
    mode: str | None
    state: str
    reason: str | None
    waiting: int | None
    active: int | None
    scheduled: int | None
    held: int | None
    dead: int | None
    done_per_second: float | None
    failed_per_second: float | None
    oldest_waiting_seconds: float | None
    job: str | None
    job_seconds: float | None
    running: int
    restarts: int
    limits: dict[str, Any] | None
    children: list[dict[str, Any]]


class RunningJob(NamedTuple):
    id: str
    pid: int
    seconds: float | None
    progress: dict[str, Any] | None


def running_jobs(child: dict[str, Any]) -> list[RunningJob]:
    """The jobs that a child of a queue runs: one per busy worker."""
    ids = child.get("jobs") or ([child["job"]] if child["job"] is not None else [])
    ages = child.get("jobs_seconds") or [child.get("job_seconds")]
    progress = child.get("jobs_progress") or [child.get("progress")]
    return [
        RunningJob(job, child["pid"], age, of) for job, age, of in zip_longest(ids, ages, progress) if job is not None
    ]


class QueueStats:
    """Turns statuses into rows; keeps the counters of the last one for the rates."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int, int]] = {}

    def read(self, status: dict[str, Any], now: float) -> list[QueueRow]:
        queues = status["queues"]
        rows = [self._row(queue, now) for queue in queues]
        for gone in self._before.keys() - {queue["name"] for queue in queues}:
            del self._before[gone]
        return rows

    def _row(self, queue: dict[str, Any], now: float) -> QueueRow:
        children = queue["children"]
        running = [job for child in children for job in running_jobs(child)]
        oldest = max(running, key=lambda job: job.seconds or 0.0, default=None)
        done, failed = self._rates(queue, now)
        return QueueRow(
            name=queue["name"],
            mode=queue["mode"],
            state=queue["state"],
            reason=queue.get("reason"),
            waiting=queue["waiting"],
            active=queue["active"],
            scheduled=queue["scheduled"],
            # An older supervisor does not have it.
            held=queue.get("held"),
            dead=queue["dead"],
            done_per_second=done,
            failed_per_second=failed,
            oldest_waiting_seconds=queue["oldest_waiting_seconds"],
            job=oldest.id if oldest else None,
            job_seconds=oldest.seconds if oldest else None,
            running=len(running),
            restarts=sum(child["restarts"] for child in children),
            limits=queue.get("limits"),
            children=children,
        )

    def _rates(self, queue: dict[str, Any], now: float) -> tuple[float | None, float | None]:
        name, done, failed = queue["name"], queue["done"], queue["failed"]
        if done is None or failed is None:
            return None, None
        before = self._before.get(name)
        self._before[name] = (now, done, failed)
        # Lower counters belong to a new queue with the same name.
        if before is None or now <= before[0] or done < before[1] or failed < before[2]:
            return None, None
        seconds = now - before[0]
        return (done - before[1]) / seconds, (failed - before[2]) / seconds


def supervisor_line(status: dict[str, Any]) -> str:
    supervisor = status["supervisor"]
    states = [queue["state"] for queue in status["queues"]]
    counted = [f"{len(states)} {'queue' if len(states) == 1 else 'queues'}"]
    counted += [f"{states.count(state)} {state}" for state in WORST_STATES_FIRST[:-1] if state in states]
    version, up = printable(str(supervisor["version"])), short_duration(supervisor["uptime_seconds"])
    return f"forq {version}, pid {supervisor['pid']}, up {up}: {', '.join(counted)}"


def redis_line(status: dict[str, Any]) -> str:
    redis = status["supervisor"]["redis"]
    where = printable(str(redis.get("url") or ""))
    if not redis["ok"]:
        return f"redis: down: {printable(str(redis['error']))}"
    counts_ms = redis.get("counts_ms")
    return f"redis: ok, counts in {counts_ms:.1f} ms, {where}" if counts_ms is not None else f"redis: ok, {where}"


def capacity_line(status: dict[str, Any]) -> str:
    capacity = status.get("capacity")
    if capacity is None:
        return "capacity: unknown"
    waiting = capacity["waiting"]
    waits = (
        f", {len(waiting)} waiting since {short_duration(max(request['seconds'] for request in waiting))}"
        if waiting
        else ""
    )
    return f"capacity: {capacity['in_use']} of {capacity['units']} units in use, {capacity['free']} free{waits}"


def limits_text(limits: dict[str, Any] | None) -> str | None:
    """`50/1s`, `max 4`, `50/1s max 4`; with `!` while workers wait because of them."""
    if limits is None:
        return None
    parts = [limits["rate"] if limits["rate"] != "off" else "", f"max {limits['max_active']}"]
    text = " ".join(part for part in parts if part and part != "max 0")
    return f"{text} !" if limits["limited_workers"] else text


def job_text(row: QueueRow) -> str | None:
    """The longest-running job, its age, and the number of others."""
    if row.job is None:
        return None
    beside = f" +{row.running - 1}" if row.running > 1 else ""
    age = f" {short_duration(row.job_seconds)}" if row.job_seconds is not None else ""
    return f"{printable(row.job)}{age}{beside}"


def rate_text(per_second: float | None) -> str | None:
    if per_second is None:
        return None
    if 0 < per_second < 10:
        return f"{per_second:.1f}"
    return count_text(round(per_second))


def count_text(count: int | None) -> str | None:
    """At most six characters."""
    if count is None or count < 1_000_000:
        return None if count is None else str(count)
    for unit, size in (("M", 10**6), ("G", 10**9)):
        if count < 1000 * size:
            return f"{count / size:.1f}{unit}"
    return f"{count / 10**12:.1f}T"


def print_blocks(args: Namespace) -> int:
    """Prints --count blocks. An unreachable supervisor is an error at the start; later it reconnects."""
    stats = QueueStats()
    client: ControlClient | None = connect(args)
    left, due = args.count, time.monotonic()
    while True:
        client = _print_one(args, stats, client)
        left = None if left is None else left - 1
        if left == 0:
            return 0
        # At fixed times, unless the last answer took longer than the interval.
        due = max(due + args.interval_seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _print_one(args: Namespace, stats: QueueStats, client: ControlClient | None) -> ControlClient | None:
    """Returns the connection for the next block; None to reconnect."""
    try:
        client = client or connect(args)
        status = client.call("status", {})
    except (SupervisorUnreachable, TimedOut) as exc:
        if client is not None:
            client.close()
        _print_unreachable(args, str(exc))
        return None
    rows = stats.read(status, time.monotonic())
    if args.json:
        print_json(_as_json(status, rows))
    else:
        _print_block(status, rows)
    return client


def _as_json(status: dict[str, Any], rows: list[QueueRow]) -> dict[str, Any]:
    about = {key: status["supervisor"].get(key) for key in ("pid", "version", "uptime_seconds", "redis")}
    return {
        "at": time.time(),
        "reachable": True,
        "supervisor": about,
        "capacity": status.get("capacity"),
        "queues": [asdict(row) for row in rows],
    }


def _print_block(status: dict[str, Any], rows: list[QueueRow]) -> None:
    print(f"{iso_time(time.time())}  {supervisor_line(status)}")
    print(capacity_line(status))
    print(redis_line(status))
    print_table(HEADER, [_cells(row) for row in rows])
    for row in rows:
        if row.reason:
            print(f"{printable(row.name)}: {row.state}: {printable(row.reason)}")
    print(flush=True)


def _cells(row: QueueRow) -> tuple[object, ...]:
    return (
        *(row.name, row.state, row.waiting, row.active, row.scheduled, row.dead),
        *(rate_text(row.done_per_second), rate_text(row.failed_per_second)),
        *(short_duration(row.oldest_waiting_seconds), job_text(row), row.restarts, limits_text(row.limits)),
    )


def _print_unreachable(args: Namespace, reason: str) -> None:
    if args.json:
        print_json({"at": time.time(), "reachable": False, "error": reason})
        return
    sys.stdout.write(f"{iso_time(time.time())}  unreachable, retrying: {printable(reason)}\n\n")
    sys.stdout.flush()
