"""The commands status, ping, version, shutdown and completion."""

from __future__ import annotations

import os
import sys
import time

from forq.ctl.client import ControlClient, connect, wait_for_answer
from forq.ctl.command import EXIT_CODES, ON, Argument, Command, elsewhere
from forq.ctl.output import (
    cell_text,
    iso_time,
    print_json,
    print_result,
    print_table,
    printable,
    role_text,
    running_jobs_text,
    short_duration,
)
from forq.errors import SupervisorUnreachable, TimedOut, UsageError
from forq.health import faults_of_queue, faults_of_supervisor, unresponsive_services
from forq.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence
    from typing import Any

    from forq.ctl.output import WaitReport

NOT_HEALTHY = 3
MAX_CHILDREN_SHOWN = 4
MAX_ITEMS_SHOWN = 20
# Rows of the capacity table: a supervisor may have a thousand queues.
MAX_HOLDERS_SHOWN = 20
# Time between the end of the connection and the end of the process.
EXIT_SECONDS = 10.0
MAX_QUEUES_SHOWN = 5
# Characters of a processor's name; --on accepts them.
SHOWN_PROCESSOR = 12
_COLUMNS: tuple[tuple[str, str], ...] = (
    ("QUEUE", "name"),
    ("STATE", "state"),
    ("WAITING", "waiting"),
    ("SCHEDULED", "scheduled"),
    ("ACTIVE", "active"),
    ("DEAD", "dead"),
    ("DONE", "done"),
    ("FAILED", "failed"),
)


@Command(
    "status",
    "show the queues, or some of them in detail",
    Argument("names", nargs="*", metavar="NAME", help="a queue"),
    Argument("--check", action="store_true", help="exit with 3 if anything is not healthy"),
    Argument("--memory", action="store_true", help="also show the memory (PSS) of each process"),
    Argument("--all", action="store_true", help="show all supervisors on this Redis instead"),
    ON,
    more="While Redis is down, counts are shown as -. docs/design/states.md explains the states. With --all, NOTE "
    "marks supervisors on the same host with the same state directory or config file (duplicate), and those older than "
    "another one (version skew); --check then exits with 3.",
    examples=[
        "status --check  # for monitoring",
        "status --all  # every supervisor on this Redis",
        "status mails  # one queue in detail",
    ],
    json="the result of `status`; with --all of `supervisors`",
    exits={3: "with --check: not healthy", 4: "no such queue or supervisor"},
)
def status(args: Namespace) -> int:
    if args.all:
        return _show_supervisors(args)
    params: dict[str, Any] = {**({"names": args.names} if args.names else {}), **elsewhere(args)}
    if args.memory:
        params["memory"] = True
    result = connect(args).call("status", params)
    if args.json:
        print_json(result)
    else:
        _print_status(result, in_detail=bool(args.names))
    if not args.check:
        return 0
    faults = [printable(fault) for fault in health_problems(result)]
    if faults:
        sys.stdout.flush()
        print(f"forqctl: not healthy: {'; '.join(faults)}", file=sys.stderr)
    return NOT_HEALTHY if faults else 0


def _show_supervisors(args: Namespace) -> int:
    if args.names or args.memory or args.on is not None:
        raise UsageError("--all shows every supervisor: leave out NAME, --memory and --on")
    result = connect(args).call("supervisors", {})
    found = result["supervisors"]
    if args.json:
        print_json(result)
    else:
        print_table(
            (
                *("PROCESSOR", "HOST", "PID", "VERSION", "PROTOCOL", "QUEUES", "PROCESSES"),
                *("HEARTBEAT", "REMOTE", "NOTE"),
            ),
            [
                (
                    *(each["processor"][:SHOWN_PROCESSOR], each["host"], each["pid"], each["version"]),
                    *(each["protocol"], len(each["queues"]), each["processes"]),
                    f"{short_duration(each['heartbeat_age_seconds'])} ago",
                    *(each["remote_control"], _note(each)),
                )
                for each in found
            ],
        )
    return NOT_HEALTHY if args.check and any(_note(each) for each in found) else 0


def _note(supervisor: dict[str, Any]) -> str:
    names = ", ".join(name[:SHOWN_PROCESSOR] for name in supervisor["duplicates"])
    notes = [*([f"duplicate of {names}"] if names else []), *(["version skew"] if supervisor["version_skew"] else [])]
    return "; ".join(notes)


def health_problems(status: dict[str, Any]) -> list[str]:
    """The reasons why it is not healthy; empty if it is."""
    redis = status["supervisor"]["redis"]
    found = [*faults_of_supervisor(status), *(fault for queue in status["queues"] for fault in faults_of_queue(queue))]
    return [*([] if redis["ok"] else [f"redis is down: {redis['error']}"]), *(fault.text for fault in found)]


def _print_status(status: dict[str, Any], in_detail: bool) -> None:
    queues = status["queues"]
    columns = columns_for(queues)
    print_table(
        (*(title for title, _ in columns), "OLDEST", "CHILDREN"),
        [
            (
                *(queue.get(key) for _, key in columns),
                short_duration(queue["oldest_waiting_seconds"]),
                _children_text(queue["children"]),
            )
            for queue in queues
        ],
    )
    for queue in status["queues"]:
        if queue.get("reason"):
            print(f"{printable(queue['name'])}: {queue['state']}: {printable(queue['reason'])}")
            _print_traceback(queue.get("traceback"), in_detail)
        if failed := queue.get("restart_error"):
            when, why = iso_time(failed["at"]), printable(failed["message"])
            print(f"{printable(queue['name'])}: still runs older code: restart failed at {when}: {why}")
            _print_traceback(failed["traceback"], in_detail)
        if queue.get("limits") and (in_detail or queue["limits"]["limited_workers"]):
            print(f"{printable(queue['name'])}: {_limits_text(queue['limits'])}")
    for app in status.get("apps", ()):
        name = printable(app["name"] or app["app"])
        if error := app["error"]:
            runs = "its queues run the old code: " if app["state"] == "running" else ""
            print(f"app {name}: could not be read at {iso_time(error['at'])}: {runs}{printable(error['message'])}")
            _print_traceback(error["traceback"], in_detail=True)
        elif app["state"] == "reading":
            print(f"app {name}: is being imported; its queues start after that")
    if in_detail:
        for queue in status["queues"]:
            _print_queue(queue)
    if "capacity" in status:
        _print_capacity(status["capacity"], [queue["name"] for queue in queues] if in_detail else [])
    redis = status["supervisor"]["redis"]
    for name, error in status["supervisor"].get("failed_log", {}).get("errors", {}).items():
        print(f"{printable(name)}: failed log: {printable(error)}")
    for name in unresponsive_services(status):
        print(f"{name}: unresponsive: the service does not answer and is being replaced")
    if not redis["ok"]:
        print(f"redis: down: {cell_text(redis['error'])}")


def columns_for(queues: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """The title and key of each column; the title of a count is its key in upper case."""
    columns = _COLUMNS
    if any(queue["mode"] not in (None, "work") for queue in queues):
        columns = (*_COLUMNS[:1], ("MODE", "mode"), *_COLUMNS[1:], ("AWAITERS", "awaiters"))
    if any(queue.get("app") for queue in queues):
        columns = (*columns[:1], ("APP", "app"), *columns[1:])
    if any(queue.get("held") for queue in queues):
        columns = (*columns, ("HELD", "held"))
    if any(queue.get("kept") for queue in queues):
        columns = (*columns, ("KEPT", "kept"))
    return columns


def _print_traceback(traceback: str | None, in_detail: bool) -> None:
    for line in (traceback or "").splitlines() if in_detail else ():
        print(f"  {printable(line)}")


def _limits_text(limits: dict[str, Any]) -> str:
    most = f", at most {limits['max_active']} active" if limits["max_active"] else ""
    tokens, waiting = limits["may_begin"], limits["limited_workers"]
    tokens_left = f"{tokens} {'token' if tokens == 1 else 'tokens'} left"
    return f"rate {limits['rate']}{most}: {tokens_left}, {waiting} {'worker' if waiting == 1 else 'workers'} waiting"


def _print_capacity(capacity: dict[str, Any], names: Sequence[str]) -> None:
    """Prints the capacity if a worker waits for it, or if queues were named. A queue may have hundreds of workers:
    those of one process in the same state share a row. The named queues come first."""
    if not names and not capacity["waiting"]:
        return
    print(f"\ncapacity: {capacity['in_use']} of {capacity['units']} units in use, {capacity['free']} free")
    held = [("runs" if grant["in_use"] else "keeps", grant) for grant in capacity["held"]]
    waits = [("waits", request) for request in capacity["waiting"]]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for doing, worker in held + waits:
        groups.setdefault((worker["worker"], doing, worker["priority"]), []).append(worker)
    if not groups:
        return
    named_first = sorted(groups.items(), key=lambda group: group[0][0].rpartition(" ")[0] not in names)
    print_table(
        ("PROCESS", "", "WORKERS", "UNITS", "PRIORITY", "FOR"),
        [
            (
                *(process, doing, len(workers), sum(worker["units"] for worker in workers), priority),
                short_duration(max(worker["seconds"] for worker in workers)),
            )
            for (process, doing, priority), workers in named_first[:MAX_HOLDERS_SHOWN]
        ],
    )
    if (more := len(groups) - MAX_HOLDERS_SHOWN) > 0:
        print(f"and {more} more rows; all workers: forqctl status --json")


def _children_text(children: list[dict[str, Any]]) -> str:
    """Only the first few: while suspects run there may be dozens. `status NAME` shows all."""
    more = len(children) - MAX_CHILDREN_SHOWN
    return ", ".join(map(_child_text, children[:MAX_CHILDREN_SHOWN])) + (f", {more} more" if more > 0 else "")


def _child_text(child: dict[str, Any]) -> str:
    memory = f"{child['pss_bytes'] / 1e6:.1f}MB" if child.get("pss_bytes") else None
    return " ".join(str(part) for part in (child["pid"], child["state"], child["job"], memory) if part is not None)


def _progress_text(child: dict[str, Any]) -> str | None:
    from forq.values import show_progress

    progress = child.get("progress")
    return None if progress is None else show_progress(progress["fraction"], progress["text"])


def _print_queue(queue: dict[str, Any]) -> None:
    if queue.get("next_due_seconds") is not None:
        print(f"{printable(queue['name'])}: next job or tick due in {short_duration(queue['next_due_seconds'])}")
    if queue["children"]:
        _print_processes(queue)
    if queue.get("items"):
        shown = queue["items"][:MAX_ITEMS_SHOWN]
        print(f"\n{printable(queue['name'])}: items")
        print_table(("ID", "IDENTIFIER"), [(item["id"], item["identifier"]) for item in shown])
        if len(queue["items"]) > len(shown):
            print(f"more: forqctl jobs {printable(queue['name'])}")


def _print_processes(queue: dict[str, Any]) -> None:
    print(f"\n{printable(queue['name'])}: processes")
    has_progress = any(child.get("progress") for child in queue["children"])
    print_table(
        ("ROLE", "PID", "STATE", "JOB", "UPTIME", "RESTARTS", *(("PROGRESS",) if has_progress else ())),
        [
            (
                role_text(child, queue["children"]),
                child["pid"],
                child["state"],
                child["job"],
                short_duration(child["uptime_seconds"]),
                child["restarts"],
                *((_progress_text(child),) if has_progress else ()),
            )
            for child in queue["children"]
        ],
    )


@Command("ping", "check whether the supervisor answers", examples=["ping --timeout 2s"], json="ping")
def ping(args: Namespace) -> int:
    result = connect(args).call("ping", {})
    return print_result(args, result, f"pong from pid {result['pid']}")


@Command(
    "version",
    "show the versions of forqctl and the supervisor",
    examples=["version --json"],
    json="the result of `version`, and `forqctl`: the version of forqctl",
)
def version(args: Namespace) -> int:
    result = connect(args).call("version", {})
    release, protocol = printable(str(result["version"])), printable(str(result["protocol"]))
    text = f"forqctl {VERSION}\nsupervisor {release}, protocol {protocol}"
    return print_result(args, {"forqctl": VERSION, **result}, text)


@Command(
    "shutdown",
    "stop the supervisor, and wait until it has stopped",
    Argument("--now", action="store_true", help="kill running jobs instead of letting them finish"),
    Argument("--no-wait", action="store_true", help="return at once"),
    more="Running jobs get stop_grace to finish; after that they are killed and go back in line, without counting the "
    "attempt. While it waits, it lists the running jobs on stderr. Ctrl-C stops only the waiting.",
    examples=["shutdown"],
    json="the result of `shutdown`, and `stopped`: false with --no-wait",
    exits={6: "not stopped within --timeout; stopping continues"},
)
def shutdown(args: Namespace) -> int:
    """Waits until the supervisor has stopped, unless --no-wait; for at most an explicit --timeout."""
    deadline = None if args.timeout_seconds is None else time.monotonic() + args.timeout_seconds
    client = connect(args)
    result = client.call("shutdown", {"now": args.now})
    if not args.no_wait:
        _wait_until_stopped(client, result, deadline, lines=not args.json)
    text = "the supervisor is stopping" if args.no_wait else "the supervisor has stopped"
    return print_result(args, result | {"stopped": not args.no_wait}, text)


def _wait_until_stopped(client: ControlClient, result: dict[str, Any], deadline: float | None, *, lines: bool) -> None:
    """Waits until it has closed its connections, and then until its process, which holds the lock, has ended."""
    from select import select

    grace_seconds = result["grace_seconds"]

    def report_progress(report: WaitReport, status: Any) -> None:
        report.update(_shutdown_progress(status["queues"], grace_seconds))

    try:
        process: int | None = os.pidfd_open(result["pid"])
    except OSError:
        # It is in another PID namespace, or gone.
        process = None
    try:
        timeout_message = "the supervisor has not stopped yet; stopping continues"
        # No request has this id: the wait ends when the supervisor closes the connection.
        wait_for_answer(client, 0, {"counts": False}, report_progress, deadline, timeout_message, lines=lines)
    except SupervisorUnreachable:
        if process is not None and not select([process], [], [], EXIT_SECONDS)[0]:
            raise TimedOut(
                f"the supervisor has closed its socket, but its process {result['pid']} is still running"
            ) from None
    finally:
        if process is not None:
            os.close(process)


def _shutdown_progress(queues: list[dict[str, Any]], grace_seconds: float) -> str:
    jobs = running_jobs_text(queues, with_queue=True)
    if jobs:
        return f"waiting for running jobs, at most {short_duration(grace_seconds)}: {jobs}"
    names = [printable(queue["name"]) for queue in queues if any(child["pid"] for child in queue["children"])]
    if names:
        more = f", {len(names) - MAX_QUEUES_SHOWN} more" if len(names) > MAX_QUEUES_SHOWN else ""
        return f"waiting for the processes of {', '.join(names[:MAX_QUEUES_SHOWN])}{more}"
    return "waiting for the supervisor's services"


@Command(
    "completion",
    "print the shell completion script",
    Argument("shell", choices=("bash", "zsh", "fish"), help="the shell"),
    more="Needs no supervisor.",
    examples=["completion bash > /etc/bash_completion.d/forqctl  # for all users"],
    json="nothing: it always prints the script",
    common_exits={code: EXIT_CODES[code] for code in (0, 2)},
)
def completion(args: Namespace) -> int:
    folder = os.path.join(os.path.dirname(os.path.dirname(__file__)), "completion")
    with open(os.path.join(folder, f"forqctl.{args.shell}"), encoding="utf-8") as script:
        print(script.read(), end="")
    return 0
