"""The command dead: list, show, retry, discard."""

from __future__ import annotations

from forq.ctl.client import connect
from forq.ctl.command import AFTER, NAME, Argument, Command, given
from forq.ctl.output import (
    dead_error,
    field_text,
    iso_time,
    print_json,
    print_next_page,
    print_result,
    print_stack,
    print_table,
    printable,
)
from forq.errors import ForqError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

PAST = {"retry": "retried", "discard": "discarded"}
LABEL_WIDTH = 15


@Command(
    "dead",
    "list, show, retry or discard dead jobs",
    Argument("action", choices=("list", "show", "retry", "discard"), help="the action"),
    NAME,
    Argument("id", nargs="?", metavar="ID", help="the job id (the newest with that id), or id@fence"),
    Argument("--all", action="store_true", help="retry or discard all jobs that are dead now"),
    Argument("--limit", type=int, metavar="N", help="maximum number of jobs listed"),
    AFTER,
    more="A dead job failed for good. retry makes it wait again with its counts reset; discard deletes it.",
    examples=[
        "dead list mails --limit 10  # the ten newest",
        "dead show mails 01JD0Z  # error, attempts and traceback",
        "dead retry mails --all  # retry all of them",
    ],
    json="the result of `dead.list`, `dead.show`, `dead.retry` or `dead.discard`; with --all `retried` or `discarded`, "
    "and `refused`, as numbers",
    exits={1: "some were refused: a live job has the same id", 4: "no such queue or job"},
)
def dead(args: Namespace) -> int:
    if args.action == "list":
        return _list(args)
    if args.limit is not None or args.after is not None:
        raise UsageError("--limit and --after are only for list")
    if args.action == "show":
        return _show(args)
    if (args.id is None) != args.all:
        raise UsageError(f"{args.action} needs ID or --all")
    return _all(args) if args.all else _one(args)


def _list(args: Namespace) -> int:
    if args.id is not None or args.all:
        raise UsageError("list takes neither ID nor --all")
    if args.limit is not None and args.limit < 1:
        raise UsageError("--limit must be at least 1")
    result = connect(args).call("dead.list", {"name": args.name, **given(args, "limit", "after")})
    if args.json:
        print_json(result)
        return 0
    print_table(
        ("ID", "FENCE", "IDENTIFIER", "DIED", "ERROR"),
        [
            (job["id"], str(job["fence"]), job["identifier"], iso_time(job["died_at"]), dead_error(job))
            for job in result["jobs"]
        ],
    )
    if result["next"] is not None:
        print_next_page("dead list", args, result["next"])
    return 0


def _show(args: Namespace) -> int:
    if args.id is None or args.all:
        raise UsageError("show needs an ID")
    result = connect(args).call("dead.show", {"name": args.name, "id": args.id})
    if args.json:
        print_json(result)
        return 0
    error = result.pop("error")
    attempts = result.pop("attempts")
    known = error if isinstance(error, dict) else {"message": error}
    traceback = known.pop("traceback", None)
    for key, value in [*result.items(), *((f"error {key}", value) for key, value in known.items())]:
        print(f"{printable(key):<{LABEL_WIDTH}}{field_text(key, value)}")
    for number, attempt in enumerate(attempts, start=1):
        print(f"{f'attempt {number}':<{LABEL_WIDTH}}{_shown_attempt(attempt)}")
    print_stack([attempt for attempt in attempts if isinstance(attempt, dict)])
    if traceback:
        print()
        for line in str(traceback).splitlines():
            print(printable(line))
    return 0


def _shown_attempt(attempt: Any) -> str:
    if not isinstance(attempt, dict):
        return field_text("data", attempt)
    known = {key: value for key, value in attempt.items() if value is not None and key != "stack"}
    return "  ".join(f"{printable(key)}={field_text(key, value)}" for key, value in known.items())


def _one(args: Namespace) -> int:
    result = connect(args).call(f"dead.{args.action}", {"name": args.name, "id": args.id})
    return print_result(args, result, f"{PAST[args.action]} {printable(result['id'])}")


def _all(args: Namespace) -> int:
    """In chunks, all jobs that were dead at the start. Refused ones stay dead."""
    from forq.progress_line import ProgressLine

    client, progress = connect(args), ProgressLine(lines=not args.json)
    done = refused = 0
    after = None
    try:
        while True:
            params = {"name": args.name, "all": True, **({} if after is None else {"after": after})}
            result = client.call(f"dead.{args.action}", params)
            done, refused, after = done + result["done"], refused + result["refused"], result["next"]
            progress.draw_bar(done + refused, done + refused + result["left"], f"{done} {PAST[args.action]}")
            if after is None:
                break
    except ForqError as exc:
        raise type(exc)(f"{exc}; {PAST[args.action]} so far: {done}") from exc
    finally:
        progress.clear()
    left = f", {refused} refused (a live job has the same id, or the record is broken)" if refused else ""
    text = f"{PAST[args.action]} {done} {'job' if done == 1 else 'jobs'} of {args.name}{left}"
    print_result(args, {PAST[args.action]: done, "refused": refused}, text)
    return 1 if refused else 0
