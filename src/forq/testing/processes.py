"""A private Redis server and a real supervisor for tests, both ended with this process (see leash.py).

The server is the one that a supervisor embeds, without persistence, on a Unix socket. The supervisor is started with
`forq run` and has the queues of apps.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from forq.app.app import App
from forq.broker.inspect import Counts, counts_of
from forq.broker.keys import fail_queue, queue_base
from forq.broker.link import Link
from forq.client import Queue
from forq.ctl.client import ControlClient
from forq.errors import ForqError, RedisUnavailable, SupervisorUnreachable, TimedOut, UsageError, WaitTimeout
from forq.paths import DEFAULT_PREFIX, SOCKET_NAME
from forq.supervisor.embedded import find_server
from forq.testing import leash
from forq.testing.store import LIVE, JobStore
from forq.testing.targets import Target, environment, path_of, read_apps, redirected

START_SECONDS = 30.0
# Longer than the leash needs in the worst case.
STOP_SECONDS = sum(leash.STOP_SECONDS) + 10.0
POLL_SECONDS = 0.005
_SHOWN_CHARACTERS = 4000
# The database of the server that a supervisor uses. `Server` uses 0, and empties it.
DATABASE = 1
DRAIN_SECONDS = 30.0
_ANSWER_SECONDS = 30.0


class CannotStart(ForqError):
    """A server or a supervisor for tests did not start. The message contains the end of its log."""

    code = "cannot_start"


class Leashed:
    """A program with a directory of its own. Both are gone after `stop`, and also if this process is killed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._process: subprocess.Popen[bytes] | None = None
        # Short: the path of a Unix socket has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="forq-testing-"))

    @property
    def log(self) -> str:
        file = self.directory / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self, command: Sequence[str], environment: Mapping[str, str], is_ready: Callable[[], bool]) -> None:
        """Returns when `is_ready` returns true. CannotStart if the program ends, or is not ready in time."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", leash.__file__, str(self.directory), *command],
            stdin=subprocess.PIPE,
            env=dict(environment),
            # Ctrl-C is for pytest alone.
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        try:
            while not is_ready():
                ended = self.directory / "ended"
                if ended.exists():
                    raise CannotStart(f"{self._what} ended with exit status {ended.read_text()}: {self._end_of_log()}")
                if time.monotonic() > deadline:
                    raise CannotStart(f"{self._what} is not ready after {START_SECONDS:g} s: {self._end_of_log()}")
                time.sleep(POLL_SECONDS)
        except BaseException:
            self.stop()
            raise

    def _end_of_log(self) -> str:
        return self.log[-_SHOWN_CHARACTERS:].strip() or "it has logged nothing"

    def stop(self) -> None:
        """Waits until the program has ended."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        # Not only by closing: a process that was forked here may hold a copy.
        with suppress(BrokenPipeError):
            os.write(process.stdin.fileno(), b".")
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class ServerProcess:
    """A server that ends with this process."""

    def __init__(self) -> None:
        self._leashed = Leashed("the Redis server for tests")
        self.socket = self._leashed.directory / "redis.sock"
        settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self._leashed.directory),
            "daemonize": "no",
            "save": "",
            "appendonly": "no",
            "proc-title-template": "forq: redis {unixsocket} (tests)",
        }
        command = [find_server(None), *(part for name, value in settings.items() for part in (f"--{name}", value))]
        self._leashed.start(command, os.environ, self._answers)

    def url(self, database: int = 0) -> str:
        return f"unix://{self.socket}" + (f"?db={database}" if database else "")

    def flush(self, database: int = 0) -> None:
        """Removes all data of a database."""
        link = Link(self.url(database), name="forq-testing")
        try:
            link.call("FLUSHDB")
        finally:
            link.close()

    def stop(self) -> None:
        self._leashed.stop()

    def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        link = Link(self.url(), name="forq-testing")
        try:
            return bool(link.call("PING"))
        except RedisUnavailable:
            return False
        finally:
            link.close()


class SupervisorProcess:
    """A supervisor with the queues of these apps, on this server. `settings`: the text of a config file."""

    def __init__(self, apps: Sequence[str], server: ServerProcess, settings: str = "") -> None:
        self.url = server.url(DATABASE)
        server.flush(DATABASE)
        self._leashed = Leashed("the supervisor for tests")
        self.state_dir = self._leashed.directory / "state"
        self.socket = self.state_dir / SOCKET_NAME
        config = self._leashed.directory / "forq.toml"
        config.write_text(settings)
        # A supervisor refuses a file that others may change.
        config.chmod(0o600)
        command = [sys.executable, "-m", "forq.cli", "run", "--config", str(config), "--state-dir", str(self.state_dir)]
        command += ["--redis", self.url, *(part for app in apps for part in ("--app", app))]
        self._expected = len(apps)
        self._leashed.start(command, _environment(), self._is_ready)

    @property
    def log(self) -> str:
        return self._leashed.log

    def call(self, method: str, **params: Any) -> Any:
        control = ControlClient(str(self.socket), _ANSWER_SECONDS)
        try:
            return control.call(method, params)
        finally:
            control.close()

    def stop(self) -> None:
        self._leashed.stop()

    def _is_ready(self) -> bool:
        if not self.socket.exists():
            return False
        try:
            status = self.call("status")
        except (SupervisorUnreachable, TimedOut):
            return False
        for app in status["apps"]:
            if app["error"] is not None:
                trace = app["error"]["traceback"]
                raise CannotStart(f"{app['error']['message']}\n{trace or ''}".rstrip())
        for queue in status["queues"]:
            if queue["state"] == "config_error":
                raise CannotStart(f"queue {queue['name']!r}: {queue['reason']}\n{queue['traceback'] or ''}".rstrip())
            if queue["state"] == "flapping":
                raise CannotStart(f"the processes of queue {queue['name']!r} do not start:\n{self.log.strip()}")
        running = {queue["name"] for queue in status["queues"] if queue["state"] == "running"}
        read = [app for app in status["apps"] if app["state"] == "running" and running.issuperset(app["queues"])]
        return len(read) == self._expected and len(running) == len(status["queues"])


def _environment() -> dict[str, str]:
    """Without the variables of forq; with the import path of this process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FORQ_")}
    return {**clean, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


class Supervisor(JobStore):
    """What `supervisor()` yields. Its processes run jobs as soon as they are enqueued."""

    def __init__(self, process: SupervisorProcess, apps: Sequence[App]) -> None:
        super().__init__(process.url, DEFAULT_PREFIX, apps)
        self.process = process

    @property
    def log(self) -> str:
        """The log of the supervisor. `ctl("logs", QUEUE)` prints the output of jobs."""
        return self.process.log

    @property
    def socket(self) -> Path:
        """The control socket."""
        return self.process.socket

    def call(self, method: str, **params: Any) -> Any:
        """Sends a request to the control socket (docs/reference/protocol.md) and returns its result."""
        return self.process.call(method, **params)

    def ctl(self, *arguments: str) -> str:
        """Runs forqctl and returns its output. UsageError, with its message, if it fails."""
        command = [sys.executable, "-m", "forq.ctl.main", "--socket", str(self.socket), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
        if done.returncode:
            raise UsageError(f"forqctl {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def drain(self, timeout: float = DRAIN_SECONDS) -> None:
        """Waits until no job is due: none is waiting, active or in the retry lane, and no fail handler has to run.
        Jobs that are scheduled for later do not count. WaitTimeout, with the jobs that are left, after `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        while left := self._unfinished():
            if time.monotonic() > deadline:
                jobs = "\n".join(f"  {job}" for name in left for job in self.jobs(name))
                raise WaitTimeout(f"queues {', '.join(left)} are not drained within {timeout:g} s\n{jobs}".rstrip())
            time.sleep(POLL_SECONDS)

    def _unfinished(self) -> list[str]:
        return [name for name in self.client.queues() if self._is_unfinished(name)]

    def _is_unfinished(self, name: str) -> bool:
        counts = self._counts(name)
        if counts is None:
            return False
        fails = self._counts(fail_queue(name)) if counts.fail_jobs else None
        busy = counts.waiting + counts.active + counts.retry + counts.overdue
        if not busy and counts.held:
            # Pulse tells them that those jobs have ended that they wait for.
            busy = self.client.link().call("EXISTS", f"{queue_base(self.client.prefix, name)}:resolving")
        return bool(busy or (fails is not None and fails.waiting + fails.active))

    def _counts(self, name: str) -> Counts | None:
        return counts_of(self.client.link(), self.client.prefix, [name])[name]

    def clear(self) -> None:
        """Removes all jobs, results and tokens, and schedules that tests have made; resumes paused queues. Running jobs
        are killed. Options stay."""
        for name in self.client.queues():
            queue = self.queue(name)
            queue.resume()
            for schedule in queue.schedules():
                if schedule["origin"] != "app":
                    queue.unschedule(schedule["key"])
            self._remove_jobs(queue)
            queue.discard_dead(all=True)
            self._remove_kept(name)
        self.drain()

    def _remove_jobs(self, queue: Queue) -> None:
        # Held jobs first: the end of another one could let them run.
        for state in dict.fromkeys(("held", *LIVE)):
            for id in self._ids(queue.name, state):
                if state == "active":
                    self._kill(queue.name, id)
                queue.remove(id)

    def _kill(self, queue: str, id: str) -> None:
        # It may have ended meanwhile.
        with suppress(ForqError):
            self.call("kill", name=queue, id=id)

    def _remove_kept(self, name: str) -> None:
        """Done jobs, tokens and how jobs ended, for which there is no call."""
        link, base = self.client.link(), queue_base(self.client.prefix, name)
        kept = [f"{base}:{key}" for key in ("done", "done:own", "done:jobs", "ends", "ends:old")]
        link.call("DEL", *kept, *_tokens(link, base))


def _tokens(link: Link, base: str) -> list[bytes]:
    found: list[bytes] = []
    cursor = b"0"
    while True:
        cursor, keys = link.call("SCAN", cursor, "MATCH", f"{base}:token:*", "COUNT", 1000)
        found += keys
        if cursor == b"0":
            return found


@contextmanager
def supervisor(*targets: Target, settings: str = "", process: SupervisorProcess | None = None) -> Iterator[Supervisor]:
    """Starts a supervisor with the queues of these apps, on a private server: the apps use it until the end of the
    block, and its processes run their jobs. An app must be an attribute of a module that the supervisor can import.
    `settings`: the text of a config file, for other queues and settings. `process`: a supervisor that runs already; its
    jobs are removed."""
    apps, redirect = read_apps(targets)
    with ExitStack() as stack:
        if process is None:
            server = ServerProcess()
            stack.callback(server.stop)
            process = SupervisorProcess([path_of(app) for app in apps], server, settings)
            stack.callback(process.stop)
            fresh = True
        else:
            fresh = False
        place = Supervisor(process, apps)
        stack.callback(place.client.close)
        stack.enter_context(redirected(redirect, place.url, DEFAULT_PREFIX))
        stack.enter_context(environment(FORQ_STATE_DIR=str(process.state_dir), FORQ_SOCKET=str(process.socket)))
        if not fresh:
            place.clear()
        yield place
