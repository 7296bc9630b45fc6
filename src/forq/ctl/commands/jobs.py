"""The commands jobs, job, why, remove, cancel, run-now, kill and stack; and dead for dead jobs: list, groups, show,
retry, discard."""

from __future__ import annotations

import sys

from forq.ctl.client import connect
from forq.ctl.command import AFTER, ID, NAME, NO_QUEUE, ON, Argument, Command, elsewhere, given
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
    short_duration,
)
from forq.errors import ForqError, UnknownJob, UsageError
from forq.values import parse_duration, show_progress, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

PAST = {"retry": "retried", "discard": "discarded"}
LABEL_WIDTH = 16
DEAD_LABEL_WIDTH = 15
FILTERS = ("type", "identifier", "error", "since", "until")
# Of the request `jobs`.
DEFAULT_LIMIT = 100
NO_JOB = {4: "no such queue or job; the message says what is known about the job"}


@Command(
    "jobs",
    "list the jobs of a queue",
    NAME,
    Argument(
        "--state",
        choices=("waiting", "scheduled", "active", "blocked", "held", "retry", "done", "dead"),
        help="only jobs in this state",
    ),
    Argument("--type", metavar="TYPE", help="only jobs of this type"),
    Argument("--identifier", metavar="TEXT", help="only jobs with this text in their identifier"),
    Argument("--error", metavar="TEXT", help="only jobs with this text in the name or message of their last error"),
    Argument("--since", metavar="TIME", help="only jobs enqueued (dead: died, done: ended) since then"),
    Argument("--until", metavar="TIME", help="only jobs enqueued (dead: died, done: ended) until then"),
    Argument("--limit", type=int, metavar="N", help="maximum number of jobs"),
    AFTER,
    more="In the order in which they will run, without data (see job). If there are more, the command for the next "
    "page is printed on stderr. --type, --identifier, --error, --since and --until need --state (--error: dead, "
    "scheduled or retry), and list dead jobs newest first. TIME is a duration before now (2h), or an ISO 8601 time.",
    examples=[
        "jobs mails --state waiting --limit 10  # the next ten",
        "jobs mails --state dead --error Timeout --since 2h  # what timed out in the last two hours",
    ],
    json="jobs",
    exits=NO_QUEUE,
)
def jobs(args: Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise UsageError("--limit must be at least 1")
    params = {"name": args.name, **given(args, "state", "limit", "after")}
    wanted = given(args, "type", "identifier", "error")
    wanted |= {name: _moment(value) for name, value in given(args, "since", "until").items()}
    if wanted and args.state is None:
        raise UsageError(f"--{next(iter(wanted))} needs --state")
    result = _find_jobs(args, params, wanted) if wanted else connect(args).call("jobs", params)
    if args.json:
        print_json(result)
        return 0
    print_table(("ID", "STATE", "IDENTIFIER"), [(job["id"], job["state"], job["identifier"]) for job in result["jobs"]])
    if result["next"] is not None:
        flags = {f"--{name}": value for name, value in given(args, *FILTERS).items()}
        print_next_page("jobs", args, result["next"], flags)
    return 0


def _find_jobs(args: Namespace, params: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Repeats the request, which scans a limited number of jobs, until the page is full or all are scanned."""
    client, limit = connect(args), params.get("limit", DEFAULT_LIMIT)
    found: list[dict[str, Any]] = []
    scanned, after = 0, params.get("after")
    while True:
        part = {**params, "limit": limit - len(found), "filter": wanted, **({"after": after} if after else {})}
        result = client.call("jobs", part)
        found += result["jobs"]
        scanned, after = scanned + result["scanned"], result["next"]
        if after is None or len(found) >= limit:
            return {"jobs": found, "next": after, "scanned": scanned}


def _moment(text: str) -> float:
    """Epoch seconds of a duration before now, or of an ISO 8601 time (local without a zone)."""
    from datetime import datetime
    from time import time

    try:
        return time() - parse_duration(text)
    except ForqError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageError(
            f"time {shown(text)} is not allowed: a duration before now (2h), or an ISO 8601 time (2026-01-31T12:00Z)"
        ) from None


@Command(
    "why",
    "explain why a job is not running",
    NAME,
    ID,
    more="For a job that is not in the queue, it shows what the journal knows about it.",
    examples=["why mails 01JD0Z"],
    json="why",
    exits=NO_JOB,
)
def why(args: Namespace) -> int:
    result = connect(args).call("why", {"name": args.name, "id": args.id})
    lines = [result["why"], *(result.get("traceback") or "").splitlines()]
    return print_result(args, result, "\n".join(map(printable, lines)))


@Command(
    "job",
    "show one job",
    NAME,
    ID,
    more="Shows its data, its counts and its last ten unsuccessful attempts. For a job that is not in the queue, it "
    "shows what the journal knows about it: when it was done or cancelled, or that it never existed.",
    examples=["job mails 01JD0Z"],
    json="job",
    exits=NO_JOB,
)
def job(args: Namespace) -> int:
    result = connect(args).call("job", {"name": args.name, "id": args.id})
    if args.json:
        print_json(result)
        return 0
    for key, value in result.items():
        if key != "attempts":
            print(f"{key:<{LABEL_WIDTH}}{_field_text(key, value)}")
    if result.get("attempts"):
        print()
        _print_attempts(result["attempts"])
        print_stack(result["attempts"])
    return 0


def _print_attempts(attempts: list[dict[str, Any]]) -> None:
    """With the peak memory, if it is known for any attempt."""
    header: tuple[str, ...] = ("STARTED", "ENDED", "OUTCOME", "CAUSE")
    rows: list[tuple[object, ...]] = [
        (iso_time(attempt["started_at"]), iso_time(attempt["ended_at"]), attempt["outcome"], attempt["cause"])
        for attempt in attempts
    ]
    if any(attempt.get("peak_memory") for attempt in attempts):
        header = (*header, "PEAK")
        peaks = [attempt.get("peak_memory") for attempt in attempts]
        rows = [(*row, f"{peak / 1e6:.1f}MB" if peak else None) for row, peak in zip(rows, peaks, strict=True)]
    print_table(header, rows)


@Command(
    "remove",
    "remove a job; a running one is dropped when it ends",
    NAME,
    ID,
    examples=["remove mails 01JD0Z"],
    json="remove",
    exits={4: "no such queue or job"},
)
def remove(args: Namespace) -> int:
    return _remove(args, "remove", "removed")


@Command(
    "cancel",
    "cancel a job that has not started",
    NAME,
    ID,
    examples=["cancel mails 01JD0Z"],
    json="cancel",
    exits={4: "no such queue, or the job is not waiting"},
)
def cancel(args: Namespace) -> int:
    return _remove(args, "cancel", "cancelled")


@Command(
    "run-now",
    "run a scheduled job before its time",
    NAME,
    ID,
    more="For a job that was enqueued with a time ahead, and for one that waits for its retry. It goes to the end of "
    "its line, and its counts stay.",
    examples=["run-now mails 01JD0Z"],
    json="job.run",
    exits=NO_JOB,
)
def run_now(args: Namespace) -> int:
    result = connect(args).call("job.run", {"name": args.name, "id": args.id})
    return print_result(args, result, f"{printable(args.id)} is ready")


def _remove(args: Namespace, method: str, done: str) -> int:
    result = connect(args).call(method, {"name": args.name, "id": args.id})
    if args.json:
        print_json(result)
    if not result[done]:
        raise UnknownJob(f"queue {args.name} has no job {args.id} to {method}; see: forqctl why {args.name} {args.id}")
    if not args.json:
        print(f"{done} {printable(args.id)}")
    return 0


def _field_text(key: str, value: Any) -> str:
    if key == "options":
        return ", ".join(
            f"{name} = {' '.join(each) if isinstance(each, list) else each}" for name, each in value.items()
        )
    if key == "waits_for":
        return ", ".join(map(_dependency_text, value))
    if key == "member_of":
        return f"batch {printable(value['id'])} of queue {printable(value['queue'])}, number {value['number']}"
    if key == "dependants":
        return ", ".join(map(printable, value))
    if key == "tick":
        return iso_time(value) or "-"
    if key == "progress" and value is not None:
        return f"{printable(show_progress(value['fraction'], value['text']))} ({iso_time(value['at'])})"
    return field_text(key, value)


def _dependency_text(dependency: dict[str, Any]) -> str:
    """`a (active)`, `b (scheduled for 2026-01-31T12:00:00.000Z)`, `batch c`, `job d of queue other`."""
    if dependency["state"] is None:
        elsewhere = f" of queue {dependency['queue']}" if "queue" in dependency else ""
        return f"{dependency['kind']} {printable(dependency['id'])}{elsewhere}"
    due = f" for {iso_time(dependency['run_at'])}" if "run_at" in dependency else ""
    return f"{printable(dependency['id'])} ({dependency['state']}{due})"


@Command(
    "kill",
    "kill a running job; it is cancelled",
    NAME,
    ID,
    Argument("--retry", action="store_true", help="put it back in line instead, without counting the attempt"),
    ON,
    more="The job is killed as after a timeout. The command does not wait for its end. If another supervisor runs the "
    "job, that one is asked; it must allow that (remote_control).",
    examples=["kill mails 01JD0Z --retry"],
    json="kill",
    exits={4: "no such queue or supervisor, or the job is not running"},
)
def kill(args: Namespace) -> int:
    params = {"name": args.name, "id": args.id, "retry": args.retry, **elsewhere(args)}
    result = connect(args).call("kill", params)
    then = "it goes back in line" if result["outcome"] == "interrupted" else "it is cancelled"
    others = len(result["others"])
    jobs = "the other job of its process has" if others == 1 else f"{others} other jobs of its process have"
    when = f"when {jobs} ended" if others else "now"
    return print_result(args, result, f"killing {printable(result['id'])} (process {result['pid']}) {when}; {then}")


@Command(
    "stack",
    "show the stacks of a queue's running jobs",
    NAME,
    ON,
    more="The innermost frame comes first. The jobs are not disturbed. If only another supervisor serves the queue, "
    "that one is asked; it must allow that (remote_control).",
    examples=["stack mails"],
    json="stack",
    exits=NO_QUEUE,
)
def stack(args: Namespace) -> int:
    result = connect(args).call("stack", {"name": args.name, **elsewhere(args)})
    if args.json:
        print_json(result)
        return 0
    if not result["stacks"]:
        print("no job is running")
    for entry in result["stacks"]:
        doing = f"job {printable(entry['job'])}, {short_duration(entry['seconds'])}" if entry["job"] else "starting"
        print(f"{entry['role']} process {entry['pid']}: {doing}")
        for line in (entry["stack"] or "  (no stack available)").splitlines():
            print(printable(line))
    if cut := result.get("cut"):
        print(f"forqctl: too much to send: {cut} stacks are cut or missing; run it on that host", file=sys.stderr)
    return 0


@Command(
    "dead",
    "list, group, show, retry or discard dead jobs",
    Argument("action", choices=("list", "groups", "show", "retry", "discard"), help="the action"),
    NAME,
    Argument("id", nargs="?", metavar="ID", help="the job id (the newest with that id), or id@fence"),
    Argument("--all", action="store_true", help="retry or discard all jobs that are dead now"),
    Argument("--with-dependants", action="store_true", help="also retry those that are dead because of it"),
    Argument("--limit", type=int, metavar="N", help="maximum number of jobs listed"),
    AFTER,
    more="A dead job failed for good. retry makes it wait again with its counts reset; discard deletes it. groups "
    "counts them by error, type and message, with '#' for the numbers and ids in a message.",
    examples=[
        "dead list mails --limit 10  # the ten newest",
        "dead groups mails  # what they died of",
        "dead show mails 01JD0Z  # error, attempts and traceback",
        "dead retry mails --all  # retry all of them",
        "dead retry mails 01JD0Z --with-dependants  # with the jobs that waited for it",
    ],
    json="the result of `dead.list`, `dead.groups`, `dead.show`, `dead.retry` or `dead.discard`; with --all `retried` "
    "or `discarded`, and `refused`, as numbers",
    exits={1: "some were refused: a live job has the same id", 4: "no such queue or job"},
)
def dead(args: Namespace) -> int:
    if args.action == "list":
        return _list_dead(args)
    if args.limit is not None or args.after is not None:
        raise UsageError("--limit and --after are only for list")
    if args.action == "show":
        return _show_dead(args)
    if args.action == "groups":
        return _group_dead(args)
    if (args.id is None) != args.all:
        raise UsageError(f"{args.action} needs ID or --all")
    if args.with_dependants:
        return _retry_with_dependants(args)
    return _apply_to_all(args) if args.all else _apply_to_one(args)


def _retry_with_dependants(args: Namespace) -> int:
    if args.action != "retry" or args.all:
        raise UsageError("--with-dependants is for retry ID")
    params = {"name": args.name, "id": args.id, "with_dependants": True}
    result = connect(args).call("dead.retry", params)
    jobs = "1 job" if result["done"] == 1 else f"{result['done']} jobs"
    lines = [f"retried {jobs} of {args.name}", *(f"{job}: {why}" for job, why in result["refused"].items())]
    print_result(args, result, "\n".join(map(printable, lines)))
    return 1 if result["refused"] else 0


def _list_dead(args: Namespace) -> int:
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


def _group_dead(args: Namespace) -> int:
    """Adds up the groups of all pages; a group's newest job is in the first page that has the group."""
    if args.id is not None or args.all:
        raise UsageError("groups takes neither ID nor --all")
    client = connect(args)
    groups: dict[str, dict[str, Any]] = {}
    after, scanned = None, 0
    while True:
        result = client.call("dead.groups", {"name": args.name, **({} if after is None else {"after": after})})
        for group in result["groups"]:
            known = groups.setdefault(group["key"], {**group, "count": 0})
            known["count"] += group["count"]
        after, scanned = result["next"], scanned + result["scanned"]
        if after is None:
            break
    found = sorted(groups.values(), key=lambda group: -group["count"])
    if args.json:
        print_json({"groups": found, "next": None, "scanned": scanned})
        return 0
    print_table(
        ("COUNT", "TYPE", "NEWEST", "SAMPLE", "ERROR"),
        [
            (
                *(group["count"], group["type"], iso_time(group["newest_died_at"]), group["sample"]),
                ": ".join(part for part in (group["error"], group["pattern"]) if part),
            )
            for group in found
        ],
    )
    return 0


def _show_dead(args: Namespace) -> int:
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
        print(f"{printable(key):<{DEAD_LABEL_WIDTH}}{field_text(key, value)}")
    for number, attempt in enumerate(attempts, start=1):
        print(f"{f'attempt {number}':<{DEAD_LABEL_WIDTH}}{_shown_attempt(attempt)}")
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


def _apply_to_one(args: Namespace) -> int:
    result = connect(args).call(f"dead.{args.action}", {"name": args.name, "id": args.id})
    return print_result(args, result, f"{PAST[args.action]} {printable(result['id'])}")


def _apply_to_all(args: Namespace) -> int:
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
