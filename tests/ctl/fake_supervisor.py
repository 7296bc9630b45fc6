"""A control server that gives fake answers, and forqctl as a real process that connects to it."""

import os
import pty
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from forq import errors
from forq.procs.loop import Loop
from forq.supervisor.control import ControlServer, Request

FORQCTL = [sys.executable, "-m", "forq.ctl.main"]
METHODS = (
    *(f"queue.{verb}" for verb in ("create", "delete", "pause", "resume", "drain", "restart", "set")),
    *("status", "jobs", "job", "push", "push_many", "recover", "remove", "cancel", "ping", "version", "shutdown"),
    *(f"dead.{verb}" for verb in ("list", "show", "retry", "discard")),
    *(
        "config.plan",
        "config.apply",
        "await",
        "dequeue",
        "ack",
        "watch",
        "logs",
        "schedule",
        "schedules",
        "unschedule",
        "trigger",
        "schedule.pause",
        "schedule.resume",
        "job.run",
        "dead.groups",
        "why",
        "flow",
        "batch",
        "batch.cancel",
    ),
)
# Answered as null.
NOTHING = object()


def queue_status(**changes: Any) -> dict[str, Any]:
    child = {"role": "main", "pid": 11, "state": "busy", "job": "01J", "uptime_seconds": 99.5, "restarts": 2}
    parked = {"role": "retry", "pid": 12, "state": "parked", "job": None, "uptime_seconds": 4000, "restarts": 0}
    queue = {
        "name": "emails",
        "mode": "work",
        "state": "running",
        "waiting": 12,
        "scheduled": 4,
        "blocked": 0,
        "active": 1,
        "retry": 0,
        "fail_jobs": 0,
        "dead": 2,
        "done": 41207,
        "failed": 3,
        "oldest_waiting_seconds": 75.4,
        "children": [child, parked],
    }
    return {**queue, **changes}


def busy_queue(jobs: int) -> dict[str, Any]:
    child = {"role": "main", "pid": 11, "state": "busy", "job": "j0", "uptime_seconds": 99.5, "restarts": 2}
    child |= {
        "jobs": [f"j{number}" for number in range(jobs)],
        "jobs_seconds": [3.5 * number for number in range(jobs)],
    }
    return queue_status(children=[child], active=jobs)


def whole_status(*queues: dict[str, Any], redis_error: str | None = None) -> dict[str, Any]:
    redis = {"ok": redis_error is None, "error": redis_error, "url": "unix:///r.sock"}
    supervisor = {"pid": 10, "uptime_seconds": 100, "version": "0.1.0", "redis": redis}
    return {"queues": list(queues), "supervisor": supervisor}


class FakeSupervisor:
    """Records every call and answers it from `answers`: a value, an error, NOTHING, or None for no answer."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self._loop = Loop()
        self._server = ControlServer(self._loop, path, dict.fromkeys(METHODS, self._answer))
        self._wakeup = socket.socketpair()
        self._loop.add_reader(self._wakeup[0].fileno(), self._loop.stop)
        self._thread = threading.Thread(target=self._loop.run, daemon=True)
        self._thread.start()

    def _answer(self, request: Request) -> None:
        self.calls.append((request.method, request.params))
        answer = self.answers.get(request.method)
        if callable(answer):
            answer = answer(request.params)
        if isinstance(answer, errors.ForqError):
            raise answer
        if answer is not None:
            request.reply(None if answer is NOTHING else answer)

    def close(self) -> None:
        """May be called twice: by a test and by the fixture."""
        if self._wakeup[1].fileno() < 0:
            return
        self._wakeup[1].send(b"x")
        self._thread.join(10)
        self._server.close()
        self._loop.close()
        for end in self._wakeup:
            end.close()


def environment(fake: FakeSupervisor | None, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORQ_", "XDG_", "STATE_"))}
    return {**kept, **({"FORQ_SOCKET": fake.path} if fake else {}), **more}


def forqctl(
    fake: FakeSupervisor | None, *args: str, stdin: bytes = b"", cwd: Path | None = None, **env: str
) -> tuple[int, str, str]:
    done = subprocess.run(
        [*FORQCTL, *args], input=stdin, capture_output=True, timeout=30, cwd=cwd, env=environment(fake, **env)
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def on_a_terminal(fake: FakeSupervisor, *args: str, **env: str) -> str:
    """The output of forqctl on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*FORQCTL, *args], stdout=theirs, stderr=theirs, env=environment(fake, **env))
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 20
    try:
        while time.monotonic() < deadline and select.select([ours], [], [], 20)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown.decode()
