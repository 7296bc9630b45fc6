"""top without a screen: one block of text, or one JSON object on a line, per interval."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from forq.ctl.client import Client, connect
from forq.ctl.tables import moment, printable, show_json, show_table, span
from forq.ctl.top.figures import (
    Figures,
    Row,
    about_capacity,
    about_redis,
    about_supervisor,
    shown_job,
    shown_limits,
    shown_rate,
)
from forq.errors import SupervisorUnreachable, TimedOut

if TYPE_CHECKING:
    from argparse import Namespace

HEADER = (
    *("QUEUE", "STATE", "WAITING", "ACTIVE", "SCHEDULED", "DEAD", "DONE/S", "FAILED/S"),
    *("OLDEST", "RUNNING", "RESTARTS", "LIMITS"),
)


def run(args: Namespace, interval_seconds: float) -> int:
    """Ends after --count blocks. Who cannot be reached at all is an error; who goes away later is tried again."""
    figures = Figures()
    client: Client | None = connect(args)
    left, due = args.count, time.monotonic()
    while True:
        client = _show_one(args, figures, client)
        left = None if left is None else left - 1
        if left == 0:
            return 0
        # From a fixed raster, unless the last answer took longer than that.
        due = max(due + interval_seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _show_one(args: Namespace, figures: Figures, client: Client | None) -> Client | None:
    """The connection for the next time; None if it has to be made anew."""
    try:
        client = client or connect(args)
        status = client.call("status", {})
    except (SupervisorUnreachable, TimedOut) as exc:
        if client is not None:
            client.close()
        _show_lost(args, str(exc))
        return None
    rows = figures.read(status, time.monotonic())
    if args.json:
        show_json(_document(status, rows))
    else:
        _show_block(status, rows)
    return client


def _document(status: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    about = {key: status["supervisor"].get(key) for key in ("pid", "version", "uptime_seconds", "redis")}
    return {
        "at": time.time(),
        "reachable": True,
        "supervisor": about,
        "capacity": status.get("capacity"),
        "queues": [asdict(row) for row in rows],
    }


def _show_block(status: dict[str, Any], rows: list[Row]) -> None:
    print(f"{moment(time.time())}  {about_supervisor(status)}")
    print(about_capacity(status))
    print(about_redis(status))
    show_table(HEADER, [_cells(row) for row in rows])
    for row in rows:
        if row.reason:
            print(f"{printable(row.name)}: {row.state}: {printable(row.reason)}")
    print(flush=True)


def _cells(row: Row) -> tuple[object, ...]:
    return (
        *(row.name, row.state, row.waiting, row.active, row.scheduled, row.dead),
        *(shown_rate(row.done_per_second), shown_rate(row.failed_per_second)),
        *(span(row.oldest_waiting_seconds), shown_job(row), row.restarts, shown_limits(row.limits)),
    )


def _show_lost(args: Namespace, reason: str) -> None:
    if args.json:
        show_json({"at": time.time(), "reachable": False, "error": reason})
        return
    sys.stdout.write(f"{moment(time.time())}  not reachable, trying again: {printable(reason)}\n\n")
    sys.stdout.flush()
