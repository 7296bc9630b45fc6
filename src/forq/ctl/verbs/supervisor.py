"""ping, version, shutdown: about the supervisor itself."""

from __future__ import annotations

import os
import time

from forq.ctl.client import Client, connect
from forq.ctl.tables import printable, show_json, span
from forq.errors import SupervisorUnreachable, TimedOut
from forq.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

    from forq.ctl.waits import Waiting

# From the end of the connection to that of the process.
LAST_SECONDS = 10.0
MOST_QUEUES = 5


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
    """Waits until it has ended, unless --no-wait; at most as long as an explicit --timeout says."""
    deadline = None if args.timeout_seconds is None else time.monotonic() + args.timeout_seconds
    client = connect(args)
    result = client.call("shutdown", {"now": args.now})
    if not args.no_wait:
        _wait_for_the_end(client, result, deadline, lines=not args.json)
    if args.json:
        show_json(result | {"stopped": not args.no_wait})
    else:
        print("the supervisor is stopping" if args.no_wait else "the supervisor has stopped")
    return 0


def _wait_for_the_end(client: Client, result: dict[str, Any], deadline: float | None, *, lines: bool) -> None:
    """It closes its connections at its end. Its process goes on a little, with the lock of its state directory."""
    from select import select

    from forq.ctl.waits import wait_for

    grace_seconds = result["grace_seconds"]

    def tell(waiting: Waiting, status: Any) -> None:
        waiting.say(_awaited(status["queues"], grace_seconds))

    try:
        process: int | None = os.pidfd_open(result["pid"])
    except OSError:
        # In another namespace of processes, or gone.
        process = None
    try:
        too_late = "the supervisor has not stopped yet; it goes on stopping"
        # No answer has this number: only the end of the connection ends the wait.
        wait_for(client, 0, {"counts": False}, tell, deadline, too_late, lines=lines)
    except SupervisorUnreachable:
        if process is not None and not select([process], [], [], LAST_SECONDS)[0]:
            raise TimedOut(f"the supervisor has closed its socket, but its process {result['pid']} is there") from None
    finally:
        if process is not None:
            os.close(process)


def _awaited(queues: list[dict[str, Any]], grace_seconds: float) -> str:
    from forq.ctl.waits import running_jobs

    jobs = running_jobs(queues, with_queue=True)
    if jobs:
        return f"the supervisor waits for running jobs, {span(grace_seconds)} at most: {jobs}"
    names = [printable(queue["name"]) for queue in queues if any(child["pid"] for child in queue["children"])]
    if names:
        more = f", {len(names) - MOST_QUEUES} more" if len(names) > MOST_QUEUES else ""
        return f"the supervisor waits for the processes of {', '.join(names[:MOST_QUEUES])}{more}"
    return "the supervisor waits for its services"
