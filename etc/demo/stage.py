"""The stage of the tour: a supervisor in a temporary directory, commands printed as typed, and checks."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
PATIENCE_SECONDS = 30.0
STOP_SECONDS = 15.0


class CheckFailed(Exception):
    """A check of the tour failed."""


class Note(NamedTuple):
    queue: str
    job: str
    event: str
    pid: int
    time: float


class Stage:
    """Stops everything it started at its end, also after Ctrl-C."""

    def __init__(self, fast: bool) -> None:
        self._fast = fast
        self._bold = "\x1b[1m{}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else "{}"
        self.directory = Path(tempfile.mkdtemp(prefix="forq-tour-"))
        self.state_dir = self.directory / "state"
        self._notes = self.directory / "notes"
        clean = {key: value for key, value in os.environ.items() if not key.startswith("FORQ_")}
        self._environ = {**clean, "FORQ_STATE_DIR": str(self.state_dir), "DEMO_NOTES": str(self._notes)}
        self._supervisor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A second Ctrl-C must not interrupt the cleanup.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._stop()
            shutil.rmtree(self.directory, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def supervisor_pid(self) -> int:
        assert self._supervisor is not None
        return self._supervisor.pid

    def start(self) -> None:
        """Runs `forq run` in its own session: a Ctrl-C in this terminal reaches only the tour."""
        self.show_command("forq run &")
        with open(self.directory / "log", "ab") as log:
            self._supervisor = subprocess.Popen(
                [str(BIN / "forq"), "run"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                start_new_session=True,
            )
        self.wait_for("the supervisor answers", self._is_up)

    def explain(self, text: str) -> None:
        print(f"\n{text}", flush=True)
        self.pause(1.5 + len(text) / 40)

    def title(self, text: str) -> None:
        print(f"\n{self._bold.format(f'== {text} ==')}", flush=True)

    def pause(self, seconds: float) -> None:
        """Time to read."""
        if not self._fast:
            time.sleep(seconds)

    def show_command(self, command: str) -> None:
        print(self._bold.format(f"$ {command}"), flush=True)

    def show_code(self, source: str) -> None:
        for line in source.strip().splitlines():
            print(f"    {line}".rstrip(), flush=True)
        print(flush=True)
        self.pause(1.5 + len(source) / 60)

    def ctl(self, *arguments: str, code: int = 0) -> str:
        """Runs forqctl; prints the command and its output."""
        return self.run("forqctl", *arguments, code=code)

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Runs any program; prints the command and its output, and its stderr if it does not exit with 0."""
        self.show_command(" ".join([program, *map(_typed, arguments)]))
        beside = BIN / program
        done = subprocess.run(
            [str(beside) if beside.exists() else program, *arguments],
            capture_output=True,
            text=True,
            env=self._environ,
            cwd=self.directory,
            check=False,
        )
        for line in (done.stdout + (done.stderr if done.returncode else "")).splitlines():
            print(f"  {line}".rstrip(), flush=True)
        if done.returncode != code:
            raise CheckFailed(f"{program} {' '.join(arguments)} ended with {done.returncode} instead of {code}")
        self.pause(1.5)
        return done.stdout

    def query(self, *arguments: str) -> Any:
        """Runs forqctl --json without printing anything; returns its result."""
        done = subprocess.run(
            [str(BIN / "forqctl"), "--json", *arguments], capture_output=True, text=True, env=self._environ, check=False
        )
        return json.loads(done.stdout) if done.returncode == 0 else None

    def queue(self, name: str) -> dict[str, Any]:
        status = self.query("status", name)
        if status is None:
            raise CheckFailed(f"there is no queue {name}")
        found: dict[str, Any] = status["queues"][0]
        return found

    def notes(self, queue: str, event: str) -> list[Note]:
        if not self._notes.exists():
            return []
        lines = [line.split() for line in self._notes.read_text().splitlines()]
        found = [Note(line[0], line[1], line[2], int(line[3]), float(line[4])) for line in lines]
        return [note for note in found if (note.queue, note.event) == (queue, event)]

    def check(self, text: str, holds: object) -> None:
        if not holds:
            raise CheckFailed(text)
        print(f"  checked: {text}", flush=True)

    def wait_for(self, text: str, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise CheckFailed(f"{text} (waited {PATIENCE_SECONDS:g} s)")
            time.sleep(0.02)
        return value

    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _is_up(self) -> bool:
        assert self._supervisor is not None
        if self._supervisor.poll() is not None:
            raise CheckFailed(f"forq run ended with {self._supervisor.returncode}")
        status = self.query("status")
        return status is not None and bool(status["supervisor"]["redis"]["ok"])

    def _stop(self) -> None:
        if self._supervisor is None or self._supervisor.poll() is not None:
            return
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            self._supervisor.send_signal(number)
            try:
                self._supervisor.wait(STOP_SECONDS)
                return
            except subprocess.TimeoutExpired:
                continue
        self._supervisor.wait()


def _typed(argument: str) -> str:
    return shlex.quote(argument.replace(str(HERE), "etc/demo"))
