"""The command apply."""

from __future__ import annotations

import os
import sys

from forq.ctl.client import connect, wait_for_answer
from forq.ctl.command import Argument, Command, duration
from forq.ctl.commands.queues import report_import
from forq.ctl.output import print_json, print_result, print_table, printable
from forq.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

# Exit code of --dry-run if there are changes.
DIFFERENT = 3
NOT_CONFIRMED = 1
EFFECTS = {
    "live": "live",
    "new_processes": "new processes",
    "created": "created",
    "unserved": "no longer served",
    "read": "read",
    "refused": "refused",
}


@Command(
    "apply",
    "apply a changed config file without a restart of the supervisor",
    Argument(
        "file",
        nargs="?",
        completes="file",
        metavar="FILE",
        help="the config file (default: the one that the supervisor was started with)",
    ),
    Argument("--dry-run", action="store_true", help="only show the changes"),
    Argument("--yes", action="store_true", help="apply them without asking"),
    duration("--wait", "time limit for each import of a handler or an app (default: 60s)"),
    more="Shows how the file differs from what the supervisor serves, asks, and changes only that. Options marked live "
    "change in the running processes. For the others, and for another handler, new processes import the code first, "
    "then the old ones finish their jobs; if the import fails, the old ones stay. A queue that the file no longer has "
    "keeps its jobs; nothing serves it. Options changed with forqctl set go back to those of the file. Queues made "
    "with forqctl create stay as they are. Settings of the supervisor itself are only named: they need a restart.",
    examples=[
        "apply  # after a change of the config file",
        "apply --dry-run  # check whether the config file is applied",
        "apply --yes --json  # in a deploy",
    ],
    json="the result of `config.apply`; with --dry-run that of `config.plan`",
    exits={
        0: "applied, or nothing to do; settings that need a restart are named",
        1: "the file is invalid, a change has failed (the others are applied), or not confirmed",
        3: "--dry-run: there are changes",
    },
)
def apply(args: Namespace) -> int:
    client = connect(args)
    chosen = {} if args.file is None else {"file": os.path.abspath(args.file)}
    plan = client.call("config.plan", chosen)
    changes = plan["changes"]
    if not args.json:
        _print_plan(plan)
    elif args.dry_run:
        print_json(plan)
    elif not changes:
        others = {"settings": plan["settings"], "warnings": plan["warnings"]}
        print_json({"file": plan["file"], "applied": [], "failed": [], **others})
    if args.dry_run or not changes:
        return DIFFERENT if changes else 0
    if not args.yes and not _confirmed(args):
        print("forqctl: nothing was applied", file=sys.stderr)
        return NOT_CONFIRMED
    import_seconds = args.timeout_seconds if args.wait_seconds is None else args.wait_seconds
    wait = {} if import_seconds is None else {"wait": import_seconds}
    sent = client.send("config.apply", {**chosen, "hash": plan["hash"], **wait})
    # Without a deadline: many queues import a few at a time. An unresponsive supervisor is noticed by its status.
    result = wait_for_answer(client, sent, {"counts": False}, report_import, None, "", lines=not args.json)
    return _print_result(args, result, len(changes))


def _confirmed(args: Namespace) -> bool:
    if args.json or not sys.stdin.isatty():
        reason = "with --json" if args.json else "without a terminal"
        raise UsageError(f"{reason} nothing is applied unless --yes is given (--dry-run only shows the changes)")
    print("apply these changes? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_plan(plan: dict[str, Any]) -> None:
    changes = plan["changes"]
    if changes:
        print_table(("CHANGE", "OLD", "NEW", "EFFECT"), [_row(change) for change in changes])
    else:
        print(f"{printable(plan['file'])}: nothing to do")
    sys.stdout.flush()
    for setting in plan["settings"]:
        old, new = (printable(str(setting[part] or "-")) for part in ("old", "new"))
        name = printable(setting["name"])
        print(f"forqctl: warning: {name} is read at start only: {old} → {new} needs a restart", file=sys.stderr)
    for warning in plan["warnings"]:
        print(f"forqctl: warning: {printable(warning)}", file=sys.stderr)


def _row(change: dict[str, Any]) -> tuple[object, ...]:
    """`queue mails timeout`, `schedule mails nightly`, `app shop path`, `task shop send`."""
    what = " ".join(part for part in (change["kind"], change["name"], change["key"]) if part)
    effect = EFFECTS.get(change["effect"], change["effect"])
    note = f": {change['note']}" if change["note"] else ""
    return what, change["old"], change["new"], effect + note


def _print_result(args: Namespace, result: dict[str, Any], planned: int) -> int:
    failed, applied = result["failed"], len(result["applied"])
    number = f"{applied} of {planned}" if failed else str(applied)
    print_result(args, result, f"applied {number} change{'' if planned == 1 else 's'}")
    for failure in failed:
        print(f"forqctl: {printable(failure['message'])}", file=sys.stderr)
        for line in (failure["traceback"] or "").splitlines():
            print(printable(line), file=sys.stderr)
    if failed:
        print("forqctl: fix it, then run again: forqctl apply", file=sys.stderr)
    return 1 if failed else 0
