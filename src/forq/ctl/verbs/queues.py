"""create, delete, set, pause, resume, drain, restart."""

from __future__ import annotations

import os
import sys
import time

from forq.ctl.client import connect
from forq.ctl.tables import printable, show_json, span
from forq.ctl.waits import Waiting, running_jobs, wait_for
from forq.errors import CannotImport, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

# How long a supervisor waits for an import, unless it is told otherwise.
IMPORT_SECONDS = 60.0
# The exit code of a delete that has left processes behind.
SURVIVED = 3


def create(args: Namespace) -> int:
    handlers = dict(_pair(text, "--type", "T=M:F") for text in args.type)
    if args.mode == "work" and args.handler is None and not handlers:
        raise UsageError("create needs --handler M:F, or --type T=M:F for each type of job")
    params = {
        "name": args.name,
        "handler": args.handler,
        "handlers": handlers,
        "path": [os.path.abspath(path) for path in args.path],
        "options": _options(args),
    }
    if args.mode is not None:
        params["mode"] = args.mode
    if args.fail_handler is not None:
        params["fail_handler"] = args.fail_handler
    try:
        result = _call_and_import(args, "queue.create", params, wait=not args.no_wait)
    except CannotImport as exc:
        return _cannot_import(args, exc, "mend it, then repeat this command; nothing was made or changed")
    joined = isinstance(result, dict) and result.get("created") is False
    return _done(args, result, "joined" if joined else "created")


def delete(args: Namespace) -> int:
    result = connect(args).call("queue.delete", {"name": args.name, "force": args.force})
    _done(args, result, "deleted")
    # A supervisor of an earlier release does not tell.
    survivors = " ".join(map(str, result.get("survivors", ()))) if isinstance(result, dict) else ""
    if not survivors:
        return 0
    print(
        f"forqctl: processes that its handlers have started cannot be killed: pids {survivors}; "
        f"as root: kill -9 {survivors}",
        file=sys.stderr,
    )
    return SURVIVED


def set(args: Namespace) -> int:
    options = _options(args)
    if not options:
        raise UsageError("set needs at least one OPTION=VALUE, such as timeout=30s")
    result = connect(args).call("queue.set", {"name": args.name, "options": options})
    until = " until the supervisor restarts: it is defined in the config file" if "until" in result else ""
    return _done(args, result, f"set {', '.join(f'{name}={value}' for name, value in options.items())} of", until)


def pause(args: Namespace) -> int:
    return _done(args, connect(args).call("queue.pause", {"name": args.name}), "paused")


def resume(args: Namespace) -> int:
    return _done(args, connect(args).call("queue.resume", {"name": args.name}), "resumed")


def restart(args: Namespace) -> int:
    try:
        return _done(args, _call_and_import(args, "queue.restart", {"name": args.name}), "restarted")
    except CannotImport as exc:
        return _cannot_import(args, exc, f"mend it, then: forqctl restart {args.name}")


def _call_and_import(args: Namespace, method: str, params: dict[str, Any], *, wait: bool = True) -> Any:
    """Of a call that waits for the import of a handler, for as long as --wait says, else as an explicit --timeout says,
    else as the supervisor does."""
    if not wait:
        return connect(args).call(method, {**params, "wait": False})
    seconds = args.timeout_seconds
    if args.wait is not None:
        from forq.values import parse_duration

        seconds = parse_duration(args.wait)
    given = {} if seconds is None else {"wait": seconds}
    client = connect(args)
    sent = client.send(method, {**params, **given})
    # Its old process may take as long to end as any answer.
    limit_seconds = client.timeout_seconds + (IMPORT_SECONDS if seconds is None else seconds)
    deadline, name = time.monotonic() + limit_seconds, args.name
    too_late = f"no answer within {limit_seconds:g} s; it goes on: forqctl status {name}"
    return wait_for(client, sent, {"names": [name]}, _tell_of_import, deadline, too_late, lines=not args.json)


def _tell_of_import(waiting: Waiting, status: Any) -> None:
    queue = status["queues"][0]
    name = printable(queue["name"])
    for child in queue["children"]:
        if child["state"] == "importing":
            where = f"(process {child['pid']}, {span(child['uptime_seconds'])}; forqctl stack {name} shows where it is)"
            waiting.say(f"the handler of {name} is being imported {where}")
            return
    if jobs := running_jobs([queue], with_queue=False):
        waiting.say(f"new processes of {name} are ready; the old ones still run: {jobs}")


def _cannot_import(args: Namespace, error: CannotImport, what_to_do: str) -> int:
    if args.json:
        about = {"code": error.code, "message": str(error), "traceback": error.traceback}
        show_json({"name": args.name, "error": about})
    print(f"forqctl: {printable(str(error))}", file=sys.stderr)
    for line in (error.traceback or "").splitlines():
        print(printable(line), file=sys.stderr)
    print(f"forqctl: {what_to_do}", file=sys.stderr)
    return error.exit_code


def drain(args: Namespace) -> int:
    """Waits as long as --wait says, else as an explicit --timeout says, else for ever."""
    limit_seconds = args.timeout_seconds
    if args.wait is not None:
        from forq.values import parse_duration

        limit_seconds = parse_duration(args.wait)
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
    client = connect(args)
    drained = client.send("queue.drain", {"name": args.name})
    too_late = f"queue {args.name} is not drained yet; it goes on draining"
    asked = {"names": [args.name]}
    result = wait_for(client, drained, asked, _tell_of_drain, deadline, too_late, lines=not args.json)
    return _done(args, result, "drained")


def _tell_of_drain(waiting: Waiting, status: Any) -> None:
    queue = status["queues"][0]
    obstacle = _obstacle(queue)
    waiting.note(obstacle)
    if obstacle is None:
        waiting.say(f"queue {printable(queue['name'])} is not drained yet: {_left(queue)}")


def _obstacle(queue: dict[str, Any]) -> str | None:
    """Why nothing of the queue runs now, and what to do about it."""
    name, state = printable(queue["name"]), queue["state"]
    if state == "paused":
        return f"queue {name} is paused, so it does not drain: forqctl resume {name}"
    if state == "flapping":
        return f"queue {name} is flapping, so it may not drain: forqctl logs {name}"
    if state == "config_error":
        reason = printable(str(queue["reason"]))
        return f"queue {name} cannot be served, so it does not drain: {reason}; when mended: forqctl restart {name}"
    return None


def _left(queue: dict[str, Any]) -> str:
    if queue["waiting"] is None:
        return "what is left is unknown while Redis is down"
    jobs = running_jobs([queue], with_queue=False)
    return f"{queue['waiting']} waiting, {queue['active']} active{f': {jobs}' if jobs else ''}"


def _options(args: Namespace) -> dict[str, str]:
    """Those that follow the name and those of --set, in the same form."""
    given: dict[str, str] = {}
    for text in (*args.options, *args.set):
        name, value = _pair(text, "option", "OPTION=VALUE")
        if name in given:
            raise UsageError(f"option {name!a} is given twice: {given[name]!a} and {value!a}")
        given[name] = value
    return given


def _pair(text: str, flag: str, form: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{flag} {text!a}: the form is {form}")
    return key, value


def _done(args: Namespace, result: object, what: str, more: str = "") -> int:
    if args.json:
        show_json(result)
    else:
        print(f"{what} {args.name}{more}", flush=True)
        warnings = result.get("warnings", ()) if isinstance(result, dict) else ()
        for warning in warnings:
            print(f"forqctl: warning: {printable(warning)}", file=sys.stderr)
    return 0
