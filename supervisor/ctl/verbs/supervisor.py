"""ping, version, shutdown: about the supervisor itself."""

from __future__ import annotations

from forq.supervisor.ctl.client import connect
from forq.supervisor.ctl.tables import printable, show_json
from forq.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace


def ping(args: Namespace) -> int:
    result = connect(args).call("ping", {})
    if args.json:
        show_json(result)
    else:
        print(f"pong from pid {result['pid']}")
    return 0


def version(args: Namespace) -> int:
    result = connect(args).call("version", {})
    if args.json:
        show_json({"forqctl": VERSION, **result})
    else:
        print(f"forqctl {VERSION}")
        print(f"supervisor {printable(str(result['version']))}, protocol {printable(str(result['protocol']))}")
    return 0


def shutdown(args: Namespace) -> int:
    result = connect(args).call("shutdown", {"now": args.now})
    if args.json:
        show_json(result)
    else:
        print("the supervisor is stopping")
    return 0
