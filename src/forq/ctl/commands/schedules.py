"""The commands schedule, schedules, pause-schedule, resume-schedule, unschedule and trigger, for periodic jobs."""

from __future__ import annotations

import os

from forq.ctl.client import connect
from forq.ctl.command import NAME, NO_QUEUE, PRIORITY, TYPE, Argument, Command, given
from forq.ctl.output import as_json, iso_time, print_json, print_result, print_table, printable
from forq.errors import UsageError
from forq.procs import jsonrpc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

LABEL_WIDTH = 10
KEY = Argument("key", metavar="KEY", help="the schedule")
NO_SCHEDULE = {4: "no such queue or schedule"}
# Of a schedule in the column of its next tick.
PAUSED = "paused"
_FIELDS = ("every", "cron", "zone", "priority", "type", "overlap", "catch_up", "jitter")


@Command(
    "schedule",
    "enqueue a job periodically: at an interval, or at the times of a cron expression",
    NAME,
    KEY,
    Argument("--every", metavar="D", help="interval (30s, 5m, 1d); the first job runs now"),
    Argument("--cron", metavar="EXPR", help="times: minute hour day month weekday"),
    Argument("--zone", metavar="Z", help="the time zone of the cron expression (default: UTC)"),
    Argument("--data", metavar="JSON", help="the data of the jobs (default: null)"),
    PRIORITY,
    TYPE,
    Argument(
        "--overlap",
        choices=("skip", "queue"),
        help="what a tick does while the previous job is unfinished (default: skip)",
    ),
    Argument(
        "--catch-up",
        choices=("once", "all", "none"),
        help="jobs to enqueue for ticks missed while no supervisor ran (default: once)",
    ),
    Argument("--jitter", metavar="D", help="random delay of each job, up to this (default: 0)"),
    Argument("--dry-run", action="store_true", help="only show the next five ticks"),
    more="Replaces a schedule with the same key; if the rule is the same, its next tick stays.",
    examples=[
        'schedule mails digest --every 5m --data \'{"kind": "digest"}\'  # every five minutes',
        "schedule mails nightly --cron '30 2 * * *' --zone Europe/Berlin  # every night at 02:30 in Berlin",
    ],
    json="schedule",
    exits=NO_QUEUE,
)
def schedule(args: Namespace) -> int:
    if (args.every is None) == (args.cron is None):
        raise UsageError("schedule needs --every D or --cron EXPR, and not both")
    params = {"name": args.name, "key": args.key, **given(args, *_FIELDS)}
    if args.data is not None:
        params["data"] = jsonrpc.decode(os.fsencode(args.data))
    if args.dry_run:
        params["dry_run"] = True
    result = connect(args).call("schedule", params)
    if args.json:
        print_json(result)
        return 0
    if not args.dry_run:
        print(f"scheduled {args.key} of {args.name}: {printable(result['rule'])}")
    _print_upcoming(result)
    return 0


@Command(
    "schedules",
    "list schedules, or show one with its next five ticks",
    Argument("name", nargs="?", metavar="NAME", help="the queue"),
    Argument("key", nargs="?", metavar="KEY", help="the schedule"),
    examples=["schedules mails nightly"],
    json="schedules",
    exits=NO_SCHEDULE,
)
def schedules(args: Namespace) -> int:
    result = connect(args).call("schedules", given(args, "name", "key"))
    found = result["schedules"]
    if args.json:
        print_json(result)
    elif args.key is not None:
        for shown in found:
            _print_one(shown)
    else:
        print_table(
            ("QUEUE", "KEY", "RULE", "ZONE", "NEXT", "LAST RUN", "RUNS", "SKIPPED", "MISSED"),
            [
                (
                    *(each["queue"], each["key"], each["rule"] or each["error"], each.get("zone")),
                    *(PAUSED if each.get("paused") else iso_time(each["next_at"]), iso_time(each["last_at"])),
                    *(each["runs"], each["skipped"], each["missed"]),
                )
                for each in found
            ],
        )
    return 0


@Command(
    "pause-schedule",
    "pause a schedule: it enqueues no jobs until it is resumed",
    NAME,
    KEY,
    more="It stays paused over restarts, and if its definition changes. trigger still works.",
    examples=["pause-schedule mails nightly"],
    json="schedule.pause",
    exits=NO_SCHEDULE,
)
def pause_schedule(args: Namespace) -> int:
    result = connect(args).call("schedule.pause", {"name": args.name, "key": args.key})
    done = "paused" if result["paused"] else "was paused before"
    return print_result(args, result, f"{args.key} of {args.name} {done}")


@Command(
    "resume-schedule",
    "resume a paused schedule",
    NAME,
    KEY,
    more="Its next tick is the first one from now on; those of the pause are not caught up.",
    examples=["resume-schedule mails nightly"],
    json="schedule.resume",
    exits=NO_SCHEDULE,
)
def resume_schedule(args: Namespace) -> int:
    result = connect(args).call("schedule.resume", {"name": args.name, "key": args.key})
    done = "resumed" if result["resumed"] else "was not paused"
    return print_result(args, result, f"{args.key} of {args.name} {done}")


@Command(
    "unschedule",
    "remove a schedule, but not its jobs",
    NAME,
    KEY,
    examples=["unschedule mails nightly"],
    json="unschedule",
    exits=NO_SCHEDULE,
)
def unschedule(args: Namespace) -> int:
    result = connect(args).call("unschedule", {"name": args.name, "key": args.key})
    sources = {"config": "the config file", "app": "the code of an app"}
    source = sources.get(result["origin"])
    until = "" if source is None else f" until the next start: it is defined in {source}"
    return print_result(args, result, f"unscheduled {args.key} of {args.name}{until}")


@Command(
    "trigger",
    "enqueue a job of a schedule now, and print its id",
    NAME,
    KEY,
    examples=["trigger mails nightly"],
    json="trigger",
    exits=NO_SCHEDULE,
)
def trigger(args: Namespace) -> int:
    result = connect(args).call("trigger", {"name": args.name, "key": args.key})
    return print_result(args, result, printable(result["id"]))


def _print_one(shown: dict[str, Any]) -> None:
    for name, value in shown.items():
        if name in ("next_at", "last_at"):
            print(f"{name:<{LABEL_WIDTH}}{iso_time(value) or '-'}")
        elif name != "upcoming":
            text = printable(value) if isinstance(value, str) and name != "data" else as_json(value)
            print(f"{name:<{LABEL_WIDTH}}{'-' if value is None and name != 'data' else text}")
    _print_upcoming(shown)


def _print_upcoming(result: dict[str, Any]) -> None:
    for tick in result["upcoming"]:
        print(f"  {printable(tick['local'])}")
