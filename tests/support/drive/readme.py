"""Runs the commands of an example project's README as a reader would type them, in a copy of the project.

A `sh` block prepares the project or starts a server; a `console` block has commands after `$ ` and their output, in
which `…` stands for any text. The packages are those of the tests. Ports are replaced by free ones.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forq.ctl.client import ControlClient
from forq.errors import SupervisorUnreachable, TimedOut
from tests.docs.pages import ROOT, Block, blocks
from tests.support.drive.wait import wait_until

EXAMPLES = ROOT / "etc/examples"
# Not run: the tests have the packages already.
PREPARATION = re.compile(r"python3 -m venv \.venv|\.venv/bin/pip install ")
_PORT = re.compile(r"(?:localhost:|127\.0\.0\.1:|--port )(\d{4})\b")
_TEXTS = {".md", ".py", ".toml"}
_MARK = "--- end of a command ---"
_START_SECONDS = 60.0
_END_SECONDS = 30.0
_COMMAND_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Project:
    """A copy of an example, and the servers that were started there."""

    def __init__(self, name: str) -> None:
        # Short, since the paths of sockets are.
        self.directory = Path(tempfile.mkdtemp(prefix="forq-"))
        self.home = self.directory / name
        self.state_dir = self.directory / "state"
        self._servers: list[tuple[str, subprocess.Popen[bytes]]] = []
        # What each program has printed until its end.
        self.printed: dict[str, str] = {}
        shutil.copytree(EXAMPLES / name, self.home, ignore=shutil.ignore_patterns("__pycache__", ".venv"))
        (self.home / ".venv").symlink_to(sys.prefix)
        self._choose_ports()

    def _choose_ports(self) -> None:
        texts = {file: file.read_text() for file in self.home.rglob("*") if file.suffix in _TEXTS and file.is_file()}
        ports = {port: str(free_port()) for text in texts.values() for port in _PORT.findall(text)}
        for file, text in texts.items():
            for port, free in ports.items():
                text = re.sub(rf"\b{port}\b", free, text)
            file.write_text(text)

    def environ(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("FORQ_")}
        return {**clean, "FORQ_STATE_DIR": str(self.state_dir)}

    @property
    def log(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(self.directory.glob("*.log")))

    def log_of(self, program: str) -> str:
        return "".join(file.read_text() for file in sorted(self.directory.glob(f"*-{program}.log")))

    def follow(self) -> None:
        """Runs every command of the README."""
        for block in blocks(self.home / "README.md"):
            if block.language == "sh":
                for line in block.text.replace("\\\n", " ").splitlines():
                    self._prepare_or_start(line)
            elif block.language == "console":
                self._run_session(block)

    def _prepare_or_start(self, line: str) -> None:
        if PREPARATION.match(line):
            if (self.home / "requirements.txt").exists():
                check_installed(self.home / "requirements.txt")
            return
        words, environ = shlex.split(line), self.environ()
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            environ[name] = value
        program = Path(words[0]).name if not words[0].endswith("python") else Path(words[1]).stem
        with open(self.directory / f"{len(self._servers)}-{program}.log", "wb") as log:
            process = subprocess.Popen(
                words, cwd=self.home, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._servers.append((program, process))
        port = re.search(r"(?:127\.0\.0\.1:|--port )(\d+)\b(?!.*forq run)", line)
        is_up = self._serves_queues if program == "forq" else lambda: port is not None and _listens(int(port[1]))

        def ready() -> bool:
            assert process.poll() is None, f"{line} ended with {process.returncode}: {self.log}"
            return is_up()

        wait_until(ready, _START_SECONDS, f"{line} is up")

    def _serves_queues(self) -> bool:
        try:
            control = ControlClient(str(self.state_dir / "control.sock"), 30.0)
            status = control.call("status", {})
            control.close()
        except (SupervisorUnreachable, TimedOut):
            return False
        return bool(status["queues"]) and all(queue["state"] == "running" for queue in status["queues"])

    def _run_session(self, block: Block) -> None:
        """All commands of a block run in one shell, so that later ones see its variables."""
        commands = commands_with_output(block.text)
        done = subprocess.run(
            ["bash", "-c", "\n".join(f"{command}\necho; echo {_MARK}" for command, _ in commands)],
            cwd=self.home,
            env=self.environ(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        for (command, expected), printed in zip(commands, done.stdout.split(f"{_MARK}\n"), strict=False):
            pattern = ".*".join(map(re.escape, expected.split("…")))
            assert re.fullmatch(pattern, printed.strip(), re.DOTALL), (
                f"line {block.line}: {command}\nprinted: {printed}\nexpected: {expected}\n{self.log}"
            )

    def remove(self) -> list[tuple[str, int]]:
        """Stops the servers, the last one first; the programs and their exit codes."""
        codes = []
        for program, process in reversed(self._servers):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                codes.append((program, process.wait(_END_SECONDS)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        self.printed = {program: self.log_of(program) for program, _ in self._servers}
        shutil.rmtree(self.directory)
        return codes


def commands_with_output(session: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for line in session.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            command, output = found[-1]
            found[-1] = (command, f"{output}\n{line}".strip())
    return found


def check_installed(requirements: Path) -> None:
    """Fails if a requirement of an example is not a package of the tests."""
    for line in requirements.read_text().splitlines():
        found = re.match(r"[A-Za-z0-9_.-]+", line)
        if found is not None and not found[0].startswith("forq"):
            importlib.metadata.distribution(found[0])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def example(name: str) -> Iterator[Project]:
    project = Project(name)
    try:
        yield project
    finally:
        codes = project.remove()
    assert {code for program, code in codes if program == "forq"} == {0}
