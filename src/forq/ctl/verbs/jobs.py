"""jobs, job, why, remove, cancel."""

from __future__ import annotations

from forq.ctl.client import connect
from forq.ctl.tables import moment, printable, show_json, show_more, show_stack, show_table
from forq.errors import UnknownJob, UsageError
from forq.progress import show_progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any


def jobs(args: Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise UsageError("--limit is at least 1")
    given = {"state": args.state, "limit": args.limit, "after": args.after}
    params = {"name": args.name, **{key: value for key, value in given.items() if value is not None}}
    result = connect(args).call("jobs", params)
    if args.json:
        show_json(result)
        return 0
    show_table(("ID", "STATE", "IDENTIFIER"), [(job["id"], job["state"], job["identifier"]) for job in result["jobs"]])
    if result["next"] is not None:
        show_more("jobs", args, result["next"])
    return 0


def why(args: Namespace) -> int:
    result = connect(args).call("why", {"name": args.name, "id": args.id})
    if args.json:
        show_json(result)
    else:
        print(printable(result["why"]))
        for line in (result.get("traceback") or "").splitlines():
            print(printable(line))
    return 0


def job(args: Namespace) -> int:
    result = connect(args).call("job", {"name": args.name, "id": args.id})
    if args.json:
        show_json(result)
        return 0
    for key, value in result.items():
        if key != "attempts":
            print(f"{key:<16}{_shown(key, value)}")
    if result.get("attempts"):
        print()
        _show_attempts(result["attempts"])
        show_stack(result["attempts"])
    return 0


def _show_attempts(attempts: list[dict[str, Any]]) -> None:
    """With the most memory that each was seen with, if any was ended because of what it took of the machine."""
    header: tuple[str, ...] = ("STARTED", "ENDED", "OUTCOME", "CAUSE")
    rows: list[tuple[object, ...]] = [
        (moment(attempt["started_at"]), moment(attempt["ended_at"]), attempt["outcome"], attempt["cause"])
        for attempt in attempts
    ]
    if any(attempt.get("peak_memory") for attempt in attempts):
        header = (*header, "PEAK")
        peaks = [attempt.get("peak_memory") for attempt in attempts]
        rows = [(*row, f"{peak / 1e6:.1f}MB" if peak else None) for row, peak in zip(rows, peaks, strict=True)]
    show_table(header, rows)


def remove(args: Namespace) -> int:
    return _take_out(args, "remove", "removed")


def cancel(args: Namespace) -> int:
    return _take_out(args, "cancel", "cancelled")


def _take_out(args: Namespace, method: str, done: str) -> int:
    result = connect(args).call(method, {"name": args.name, "id": args.id})
    if args.json:
        show_json(result)
    if not result[done]:
        raise UnknownJob(f"queue {args.name} has no job {args.id} to {method}: `forqctl why {args.name} {args.id}`")
    if not args.json:
        print(f"{done} {printable(args.id)}")
    return 0


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key == "progress":
        return f"{printable(show_progress(value['fraction'], value['text']))} ({moment(value['at'])})"
    if key.endswith("_at"):
        return moment(value) or "-"
    if isinstance(value, str) and key not in ("data", "result"):
        return printable(value)
    from forq.procs.wire import encode

    return printable(encode(value).decode())
