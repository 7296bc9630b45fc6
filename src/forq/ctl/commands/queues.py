"""The commands create, delete, set, pause, resume, restart and drain."""

from __future__ import annotations

import os
import sys
import time

from forq.ctl.client import connect, wait_for_answer
from forq.ctl.command import NAME, NO_QUEUE, ON, WAIT, Argument, Command, duration, given
from forq.ctl.output import print_json, print_result, printable, running_jobs_text, short_duration
from forq.errors import CannotImport, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

    from forq.ctl.output import WaitReport

# The supervisor's default time limit for the import of a handler.
IMPORT_SECONDS = 60.0
# Exit code of a delete that left processes behind.
PROCESSES_LEFT = 3
OPTIONS = (
    Argument("options", nargs="*", completes="option", metavar="OPTION=VALUE", help="an option of the queue"),
    Argument(
        "--set", action="append", default=[], completes="option", metavar="OPTION=VALUE", help="the same (repeatable)"
    ),
)
IMPORT_WAIT = duration("--wait", "time limit for importing its handler (default: 60s)")

IMPORTED = "the result of `{}`; if the handler cannot be imported `name` and `error` (`code`, `message`, `traceback`)"


@Command(
    "create",
    "create a queue and start its processes",
    NAME,
    Argument("--handler", metavar="M:F", help="the handler: MODULE:FUNCTION, or exec:PROGRAM"),
    Argument(
        "--type", action="append", default=[], metavar="T=M:F", help="the handler for jobs of type T (repeatable)"
    ),
    Argument(
        "--path",
        action="append",
        default=[],
        completes="dir",
        metavar="DIR",
        help="directory to import handlers from (repeatable)",
    ),
    IMPORT_WAIT,
    Argument(
        "--no-wait", action="store_true", help="create the queue without checking that its handler can be imported"
    ),
    Argument("--fail-handler", metavar="M:F", help="the handler for jobs that failed for good"),
    Argument(
        "--mode",
        choices=("work", "auto_release", "on_request", "external"),
        help="how jobs leave the queue: by a handler (work), released to callers, or by external workers "
        "(default: `mode` of the config file, else work)",
    ),
    *OPTIONS,
    more="The definition is kept in the state directory, so that a restarted supervisor serves the queue again. If the "
    "queue exists, its definition is replaced and its jobs are kept; its mode cannot change.",
    examples=[
        "create mails --handler app.mails:send --path /srv/app --set timeout=30s  # a queue with a Python handler",
        "create video --handler 'exec:/usr/bin/node /srv/video.js' --set concurrency=2"
        "  # a queue whose handler is a program",
    ],
    json=IMPORTED.format("queue.create"),
    exits={1: "refused: another mode, too many queues, or defined in the config file (forqctl apply)"},
)
def create(args: Namespace) -> int:
    handlers = dict(_parse_pair(text, "--type", "T=M:F") for text in args.type)
    if args.mode == "work" and args.handler is None and not handlers:
        raise UsageError("create needs --handler M:F, or --type T=M:F for each job type")
    params = {
        "name": args.name,
        "handler": args.handler,
        "handlers": handlers,
        "path": [os.path.abspath(path) for path in args.path],
        "options": _parse_options(args),
        **given(args, "mode", "fail_handler"),
    }
    try:
        result = _call_with_import(args, "queue.create", params, wait=not args.no_wait)
    except CannotImport as exc:
        return _print_import_error(args, exc, "nothing was changed; fix it, then repeat this command")
    joined = isinstance(result, dict) and result.get("created") is False
    return _print_done(args, result, "joined" if joined else "created")


@Command(
    "delete",
    "stop a queue's processes and remove it",
    NAME,
    Argument("--force", action="store_true", help="delete the queue even if it still has jobs"),
    more="Its remaining jobs are written to its failed log. All descendants of its processes are killed, too.",
    examples=["delete mails --force  # delete a queue with all its jobs"],
    json="queue.delete",
    exits={
        1: "it still has jobs; use --force",
        3: "deleted, but processes started by its handlers cannot be killed",
        **NO_QUEUE,
    },
)
def delete(args: Namespace) -> int:
    result = connect(args).call("queue.delete", {"name": args.name, "force": args.force})
    _print_done(args, result, "deleted")
    # Supervisors of earlier releases do not report survivors.
    survivors = " ".join(map(str, result.get("survivors", ()))) if isinstance(result, dict) else ""
    if not survivors:
        return 0
    print(
        f"forqctl: processes started by its handlers cannot be killed: pids {survivors}; "
        f"run as root: kill -9 {survivors}",
        file=sys.stderr,
    )
    return PROCESSES_LEFT


@Command(
    "set",
    "change options of a running queue",
    NAME,
    *OPTIONS,
    more="The change takes effect at once, for jobs already in the queue too. For a queue defined in the config file "
    "it lasts until the supervisor restarts, or forqctl apply.",
    examples=["set mails timeout=2m max_retries=5"],
    json="queue.set",
    exits=NO_QUEUE,
)
def set(args: Namespace) -> int:
    options = _parse_options(args)
    if not options:
        raise UsageError("set needs at least one OPTION=VALUE, such as timeout=30s")
    result = connect(args).call("queue.set", {"name": args.name, "options": options})
    until = " until the supervisor restarts or applies the config file that defines it" if "until" in result else ""
    return _print_done(args, result, f"set {', '.join(f'{name}={value}' for name, value in options.items())} of", until)


@Command(
    "pause",
    "stop starting new jobs of a queue",
    NAME,
    more="Running jobs continue. Applies to all supervisors, and survives restarts.",
    examples=["pause mails"],
    json="queue.pause",
    exits=NO_QUEUE,
)
def pause(args: Namespace) -> int:
    return _print_done(args, connect(args).call("queue.pause", {"name": args.name}), "paused")


@Command(
    "resume", "start jobs of a paused queue again", NAME, examples=["resume mails"], json="queue.resume", exits=NO_QUEUE
)
def resume(args: Namespace) -> int:
    return _print_done(args, connect(args).call("queue.resume", {"name": args.name}), "resumed")


@Command(
    "restart",
    "replace a queue's processes, for example to load new code",
    Argument("name", nargs="?", metavar="NAME", help="the queue"),
    Argument("--app", metavar="APP", help="read the definitions of this app again, and restart all its queues"),
    IMPORT_WAIT,
    ON,
    more="New processes import the handler and join the queue; then the old ones start no more jobs, and their running "
    "ones get stop_grace to finish. A queue with several main processes replaces one after the other. With --app the "
    "new definitions are read first. If that fails, nothing is stopped. Then new queues are opened, changed options "
    "and schedules take effect, and schedules that the app no longer has are removed. A queue that it no longer has "
    "keeps its jobs; nothing serves it. If only another supervisor serves the queue, that one is asked; it must allow "
    "that (remote_control).",
    examples=["restart mails  # load new code", "restart --app shop  # after a deploy"],
    json=IMPORTED.format("queue.restart").replace(";", ", or with --app of `app.restart`;"),
    exits={4: "no such queue, app or supervisor"},
)
def restart(args: Namespace) -> int:
    if (args.name is None) == (args.app is None):
        raise UsageError("restart needs the name of a queue, or --app APP")
    if args.app is not None:
        return _restart_app(args)
    try:
        return _print_done(
            args, _call_with_import(args, "queue.restart", {"name": args.name, **given(args, "on")}), "restarted"
        )
    except CannotImport as exc:
        return _print_import_error(args, exc, f"fix it, then run: forqctl restart {args.name}")


def _restart_app(args: Namespace) -> int:
    args.name = args.app
    try:
        result = _call_with_import(args, "app.restart", {"name": args.app, **given(args, "on")})
    except CannotImport as exc:
        return _print_import_error(args, exc, f"fix it, then run: forqctl restart --app {args.app}")
    changes = [
        f"{what}: {', '.join(map(printable, result[key]))}"
        for key, what in (("opened", "new"), ("restarted", "restarted"), ("unserved", "no longer served"))
        if result[key]
    ]
    return print_result(args, result, f"restarted app {printable(args.app)} ({'; '.join(changes) or 'no queues'})")


def _call_with_import(args: Namespace, method: str, params: dict[str, Any], *, wait: bool = True) -> Any:
    """Makes a call that waits for a handler's import: for --wait, else --timeout, else the supervisor's default."""
    if not wait:
        return connect(args).call(method, {**params, "wait": False})
    import_seconds = args.timeout_seconds if args.wait_seconds is None else args.wait_seconds
    client = connect(args)
    sent = client.send(method, params if import_seconds is None else {**params, "wait": import_seconds})
    # Ending the old process may take as long as any answer. An app is imported twice: to read it, and by its workers.
    of_app = method == "app.restart"
    imports = (2 if of_app else 1) * (IMPORT_SECONDS if import_seconds is None else import_seconds)
    limit_seconds = client.timeout_seconds + imports
    deadline, names = time.monotonic() + limit_seconds, [] if of_app else [args.name]
    see = " ".join(["forqctl status", *names])
    timeout_message = f"no answer within {limit_seconds:g} s; it continues in the background: {see}"
    return wait_for_answer(
        client, sent, {"names": names}, report_import, deadline, timeout_message, lines=not args.json
    )


def report_import(report: WaitReport, status: Any) -> None:
    for queue in status["queues"]:
        name = printable(queue["name"])
        for child in queue["children"]:
            if child["state"] == "importing":
                age = short_duration(child["uptime_seconds"])
                where = f"(process {child['pid']}, {age}; see: forqctl stack {name})"
                report.update(f"importing the handler of {name} {where}")
                return
    # Of several queues it is not known which ones are being restarted.
    if len(status["queues"]) == 1 and (jobs := running_jobs_text(status["queues"], with_queue=False)):
        name = printable(status["queues"][0]["name"])
        report.update(f"the new processes of {name} are ready; the old ones still run: {jobs}")


def _print_import_error(args: Namespace, error: CannotImport, next_step: str) -> int:
    if args.json:
        about = {"code": error.code, "message": str(error), "traceback": error.traceback}
        print_json({"name": args.name, "error": about})
    print(f"forqctl: {printable(str(error))}", file=sys.stderr)
    for line in (error.traceback or "").splitlines():
        print(printable(line), file=sys.stderr)
    if "forqctl restart --app" not in str(error):
        print(f"forqctl: {next_step}", file=sys.stderr)
    return error.exit_code


@Command(
    "drain",
    "wait until a queue has no waiting or active jobs",
    NAME,
    WAIT,
    more="Jobs may still be pushed meanwhile. Scheduled jobs do not count, and neither do held ones, which wait for "
    "others; it prints how many are left.",
    examples=["drain mails --wait 10m  # before an upgrade"],
    json="queue.drain",
    exits={**NO_QUEUE, 6: "not drained within --wait; draining continues"},
)
def drain(args: Namespace) -> int:
    """Waits for --wait, else an explicit --timeout, else without limit."""
    limit_seconds = args.timeout_seconds if args.wait_seconds is None else args.wait_seconds
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
    client = connect(args)
    drained = client.send("queue.drain", {"name": args.name})
    timeout_message = f"queue {args.name} is not drained yet; draining continues"
    status_params = {"names": [args.name]}
    result = wait_for_answer(
        client, drained, status_params, _report_drain, deadline, timeout_message, lines=not args.json
    )
    # An older supervisor does not say how many are held.
    held = result.get("held") or 0
    left = f"; held jobs left: {held}; see: forqctl jobs {args.name} --state held" if held else ""
    return _print_done(args, result, "drained", left)


def _report_drain(report: WaitReport, status: Any) -> None:
    queue = status["queues"][0]
    obstacle = _drain_obstacle(queue)
    report.warn_once(obstacle)
    if obstacle is None:
        report.update(f"queue {printable(queue['name'])} is not drained yet: {_drain_progress(queue)}")


def _drain_obstacle(queue: dict[str, Any]) -> str | None:
    """Why the queue does not drain, and the command to try."""
    name, state = printable(queue["name"]), queue["state"]
    if state == "paused":
        return f"queue {name} is paused, so it does not drain; run: forqctl resume {name}"
    if state == "flapping":
        return f"queue {name} is flapping, so it may not drain; see: forqctl logs {name}"
    if state == "config_error":
        reason = printable(str(queue["reason"]))
        return (
            f"queue {name} cannot be served, so it does not drain: {reason}; fix it, then run: forqctl restart {name}"
        )
    return None


def _drain_progress(queue: dict[str, Any]) -> str:
    if queue["waiting"] is None:
        return "unknown number of jobs left: Redis is down"
    jobs = running_jobs_text([queue], with_queue=False)
    return f"{queue['waiting']} waiting, {queue['active']} active{f': {jobs}' if jobs else ''}"


def _parse_options(args: Namespace) -> dict[str, str]:
    """The options after the name and those of --set."""
    options: dict[str, str] = {}
    for text in (*args.options, *args.set):
        name, value = _parse_pair(text, "option", "OPTION=VALUE")
        if name in options:
            raise UsageError(f"option {name!a} is given twice: {options[name]!a} and {value!a}")
        options[name] = value
    return options


def _parse_pair(text: str, flag: str, form: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{flag} {text!a} is not allowed: the form is {form}")
    return key, value


def _print_done(args: Namespace, result: object, what: str, more: str = "") -> int:
    print_result(args, result, f"{what} {args.name}{more}")
    for warning in result.get("warnings", ()) if isinstance(result, dict) and not args.json else ():
        print(f"forqctl: warning: {printable(warning)}", file=sys.stderr)
    return 0
