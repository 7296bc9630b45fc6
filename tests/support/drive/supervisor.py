"""Starts a supervisor in a fresh state directory and drives it with forqctl or its control socket."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from forq import Client
from forq.ctl.client import ControlClient
from forq.errors import SupervisorUnreachable, TimedOut
from forq.services.snapshot import request_status
from tests.support.drive.wait import wait_until, whole_lines

HANDLERS = Path(__file__).resolve().parent.parent / "handlers"
BIN = Path(sys.executable).parent
# Enough for a heavily loaded machine.
_START_SECONDS = 60.0
_ANSWER_SECONDS = 30.0
_KILL_SECONDS = 15.0
# An idle supervisor stops in a fraction of this.
_END_SECONDS = 2.0


class Trace(NamedTuple):
    queue: str
    job: str
    fence: int
    pid: int
    event: str
    time: float
    stalls: int


class Forq:
    """One supervisor."""

    def __init__(
        self,
        *,
        redis: str | None = None,
        settings: str = "",
        trace: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="forq-"))
        self.state_dir = self.directory / "state"
        self.config = self.directory / "forq.toml"
        self.trace_file = trace or self.directory / "trace"
        self.redis = redis
        self.environment = dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None
        # Receives the log instead of a file.
        self.stderr: int | None = None
        # More arguments of `forq run`, and the directory it is started in.
        self.arguments: list[str] = []
        self.cwd: Path | None = None
        self.config.write_text(settings)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def url(self) -> str:
        return self.redis or f"unix://{self.state_dir}/redis.sock"

    def environ(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("FORQ_")}
        ours = {"FORQ_STATE_DIR": str(self.state_dir), "FORQ_TEST_TRACE": str(self.trace_file)}
        return {**clean, **ours, **self.environment}

    def program(self) -> list[str]:
        return [str(BIN / "forq")]

    def start(self, *, ready: bool = True) -> None:
        command = [*self.program(), "run", "--config", str(self.config), "--state-dir", str(self.state_dir)]
        command += self.arguments
        if self.redis is not None:
            command += ["--redis", self.redis]
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log if self.stderr is None else self.stderr,
                env=self.environ(),
                cwd=self.cwd,
            )
        if ready:
            wait_until(self._is_up, _START_SECONDS, f"supervisor up ({self.log})")

    def _is_up(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"forq ended with {self.process.returncode}: {self.log}")
        try:
            return bool(self.status()["supervisor"]["redis"]["ok"])
        except (SupervisorUnreachable, TimedOut):
            return False

    def call(self, method: str, **params: object) -> Any:
        """Sends one request to the control socket, at a fraction of the cost of starting forqctl."""
        control = ControlClient(str(self.state_dir / "control.sock"), _ANSWER_SECONDS)
        try:
            return control.call(method, params)
        finally:
            control.close()

    def run_ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "forqctl"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=self.environ(), timeout=60, check=False)

    def ctl(self, *arguments: str) -> str:
        done = self.run_ctl(*arguments)
        assert done.returncode == 0, f"forqctl {arguments} ended with {done.returncode}: {done.stderr}"
        return done.stdout.strip()

    def begin_ctl(self, *arguments: str) -> "subprocess.Popen[str]":
        """Starts a forqctl that runs beside the test."""
        command = [str(BIN / "forqctl"), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environ())

    def create(self, name: str, function: str = "noop", **options: object) -> None:
        settings = [f"--set={key}={value}" for key, value in options.items()]
        self.ctl("create", name, "--handler", f"traced:{function}", "--path", str(HANDLERS), *settings)

    def status(self, *names: str) -> dict[str, Any]:
        return self.call("status", **({"names": names} if names else {}))  # type: ignore[no-any-return]

    def queue_status(self, name: str) -> dict[str, Any]:
        return self.status(name)["queues"][0]  # type: ignore[no-any-return]

    def child_states(self, name: str) -> dict[int, str]:
        """The states of a queue's processes by pid. The supervisor reports them without Redis."""
        status = request_status(str(self.state_dir / "control.sock"), _ANSWER_SECONDS)
        queue = next(queue for queue in status["queues"] if queue["name"] == name)
        return {child["pid"]: child["state"] for child in queue["children"]}

    def awaiters(self, name: str) -> int:
        return int(self.queue_status(name)["awaiters"])

    def child(self, name: str, role: str = "main") -> dict[str, Any]:
        return next(child for child in self.queue_status(name)["children"] if child["role"] == role)

    def wait_for_child(self, name: str, state: str = "idle", role: str = "main", not_pid: int = 0) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            child = self.child(name, role)
            return child if child["state"] == state and child["pid"] != not_pid else None

        return wait_until(found, what=f"{role} child of {name} is {state}")  # type: ignore[no-any-return]

    def client(self) -> Client:
        return Client(self.url)

    def traces(self, event: str | None = None) -> list[Trace]:
        found = []
        for line in whole_lines(self.trace_file):
            queue, job, fence, pid, what, at, stalls = line.split(" ")
            if event is None or what == event:
                found.append(Trace(queue, job, int(fence), int(pid), what, float(at), int(stalls)))
        return found

    def processes(self) -> list[psutil.Process]:
        """The supervisor and every process below it."""
        top = psutil.Process(self.pid)
        return [top, *top.children(recursive=True)]

    def stop(self, seconds: float = 30.0) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def remove(self) -> None:
        """Stops the supervisor, and soon its running jobs; kills by pid whatever is left."""
        if self.process is not None and self.process.poll() is None:
            # A second signal makes the supervisor kill what still runs.
            for seconds in (_END_SECONDS, _KILL_SECONDS):
                self.process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
                    break
            else:
                for process in reversed(self.processes()):
                    process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def running(
    *,
    redis: str | None = None,
    settings: str = "",
    trace: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Forq]:
    forq = Forq(redis=redis, settings=settings, trace=trace, environment=environment)
    try:
        forq.start()
        yield forq
    finally:
        forq.remove()
