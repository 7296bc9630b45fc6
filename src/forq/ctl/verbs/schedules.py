"""schedule, schedules, unschedule, trigger."""

from __future__ import annotations

import os

from forq.ctl.client import connect
from forq.ctl.tables import moment, printable, show_json, show_table
from forq.errors import UsageError
from forq.procs import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

LABEL_WIDTH = 10
_FIELDS = ("every", "cron", "zone", "priority", "type", "overlap", "catch_up", "jitter")


def schedule(args: Namespace) -> int:
    if (args.every is None) == (args.cron is None):
        raise UsageError("schedule needs either --every D or --cron EXPR")
    params: dict[str, Any] = {"name": args.name, "key": args.key}
    params |= {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    if args.data is not None:
        params["data"] = wire.decode(os.fsencode(args.data))
    if args.dry_run:
        params["dry_run"] = True
    result = connect(args).call("schedule", params)
    if args.json:
        show_json(result)
    elif args.dry_run:
        _show_upcoming(result)
    else:
        print(f"scheduled {args.key} of {args.name}: {printable(result['rule'])}")
        _show_upcoming(result)
    return 0


def schedules(args: Namespace) -> int:
    given = {"name": args.name, "key": args.key}
    result = connect(args).call("schedules", {name: value for name, value in given.items() if value is not None})
    found = result["schedules"]
    if args.json:
        show_json(result)
    elif args.key is not None:
        for shown in found:
            _show_one(shown)
    else:
        show_table(
            ("QUEUE", "KEY", "RULE", "ZONE", "NEXT", "LAST RUN", "RUNS", "SKIPPED", "MISSED"),
            [
                (
                    *(each["queue"], each["key"], each["rule"] or each["error"], each.get("zone")),
                    *(moment(each["next_at"]), moment(each["last_at"])),
                    *(each["runs"], each["skipped"], each["missed"]),
                )
                for each in found
            ],
        )
    return 0


def unschedule(args: Namespace) -> int:
    result = connect(args).call("unschedule", {"name": args.name, "key": args.key})
    if args.json:
        show_json(result)
    else:
        until = " until the next start: it is in the config file" if result["origin"] == "config" else ""
        print(f"unscheduled {args.key} of {args.name}{until}")
    return 0


def trigger(args: Namespace) -> int:
    result = connect(args).call("trigger", {"name": args.name, "key": args.key})
    if args.json:
        show_json(result)
    else:
        print(printable(result["id"]))
    return 0


def _show_one(shown: dict[str, Any]) -> None:
    for name, value in shown.items():
        if name in ("next_at", "last_at"):
            print(f"{name:<{LABEL_WIDTH}}{moment(value) or '-'}")
        elif name != "upcoming":
            text = value if isinstance(value, str) and name != "data" else wire.encode(value).decode()
            print(f"{name:<{LABEL_WIDTH}}{'-' if value is None and name != 'data' else printable(text)}")
    _show_upcoming(shown)


def _show_upcoming(result: dict[str, Any]) -> None:
    for tick in result["upcoming"]:
        print(f"  {printable(tick['local'])}")
