"""create, delete, set, pause, resume, drain, restart."""

from __future__ import annotations

import os
import sys
import time

from forq.errors import ForqError, TimedOut, UsageError
from forq.supervisor.ctl.client import Client, connect
from forq.supervisor.ctl.tables import printable, show_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

POLL_SECONDS = 1.0
# The exit code of a delete that has left processes behind.
SURVIVED = 3
FIRST_POLL_SECONDS = 0.2


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
    result = connect(args).call("queue.create", params)
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
    return _done(args, connect(args).call("queue.restart", {"name": args.name}), "restarted")


def drain(args: Namespace) -> int:
    """Waits as long as --wait says, else as an explicit --timeout says, else for ever."""
    limit_seconds = args.timeout_seconds
    if args.wait is not None:
        from forq.durations import parse_duration

        limit_seconds = parse_duration(args.wait)
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
    result = _watch_drain(connect(args), args.name, deadline)
    return _done(args, result, "drained")


def _watch_drain(client: Client, name: str, deadline: float | None) -> Any:
    """The answer to drain. Meanwhile the queue's state is asked for: what keeps it from draining is said on stderr, and
    on a terminal how much is left."""
    from forq.supervisor.ctl.progress import ProgressLine

    progress = ProgressLine()
    drained = client.send("queue.drain", {"name": name})
    polled = None
    told = None
    # A drain that is over at once needs no look.
    next_poll = time.monotonic() + (0.0 if progress.shown else FIRST_POLL_SECONDS)
    try:
        while True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimedOut(f"queue {name} is not drained yet; it goes on draining")
            if polled is None and now >= next_poll:
                polled = client.send("status", {"names": [name]})
                next_poll = now + POLL_SECONDS
            answer = _next_answer(client, _earliest(deadline, next_poll))
            if answer is None:
                continue
            answered, value = answer
            if answered == drained:
                if isinstance(value, ForqError):
                    raise value
                return value
            if answered == polled:
                polled = None
                if not isinstance(value, ForqError):
                    obstacle = _obstacle(value["queues"][0])
                    if obstacle is not None and obstacle != told:
                        progress.clear()
                        print(f"forqctl: {obstacle}", file=sys.stderr, flush=True)
                    told = obstacle
                    progress.say(_left(value))
    finally:
        progress.clear()


def _next_answer(client: Client, until: float | None) -> tuple[str | int | None, Any] | None:
    try:
        return client.receive(until)
    except TimedOut:
        return None


def _earliest(*moments: float | None) -> float | None:
    return min((moment for moment in moments if moment is not None), default=None)


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


def _left(status: Any) -> str:
    queue = status["queues"][0]
    if queue["waiting"] is None:
        return "left: unknown while Redis is down"
    return f"left: {queue['waiting']} waiting, {queue['active']} active"


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
