"""kill, stack."""

from __future__ import annotations

from forq.ctl.client import connect
from forq.ctl.tables import printable, show_json, span

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace


def kill(args: Namespace) -> int:
    result = connect(args).call("kill", {"name": args.name, "id": args.id, "retry": args.retry})
    if args.json:
        show_json(result)
        return 0
    then = "it goes back in line" if result["outcome"] == "interrupted" else "it is cancelled"
    others = len(result["others"])
    jobs = "the other job of its process has" if others == 1 else f"{others} other jobs of its process have"
    when = f"when {jobs} ended" if others else "now"
    print(f"killing {printable(result['id'])} (process {result['pid']}) {when}; {then}")
    return 0


def stack(args: Namespace) -> int:
    result = connect(args).call("stack", {"name": args.name})
    if args.json:
        show_json(result)
        return 0
    if not result["stacks"]:
        print("no job is running")
    for entry in result["stacks"]:
        doing = f"job {printable(entry['job'])}, {span(entry['seconds'])}" if entry["job"] else "starting"
        print(f"{entry['role']} process {entry['pid']}: {doing}")
        for line in (entry["stack"] or "  (no stack to be had)").splitlines():
            print(printable(line))
    return 0
