"""Runs a Dockerfile without Docker: its instructions in namespaces, its command as PID 1. Packages are those of the
tests, so `pip install` is left out."""

import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.docs.pages import ROOT
from tests.support.drive.wait import wait_until

BOOT = Path(__file__).with_name("container_boot.sh")
TOOLS = ("unshare", "nsenter", "setpriv", "chroot", "useradd")
_COMMAND_SECONDS = 60.0


def why_not() -> str | None:
    """The reason why there can be no container here, or None."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        return f"{', '.join(missing)} is missing (on Debian: apt install util-linux coreutils passwd)"
    try_overlay = (
        'mount -t tmpfs tmpfs "$0" && mkdir "$0/up" "$0/work" "$0/root" && '
        'mount -t overlay overlay -o "lowerdir=/,upperdir=$0/up,workdir=$0/work" "$0/root"'
    )
    with tempfile.TemporaryDirectory() as room:
        command = ["unshare", "--pid", "--fork", "--mount", "sh", "-c", try_overlay, room]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


class Instruction(NamedTuple):
    name: str
    value: str


def instructions(dockerfile: Path) -> list[Instruction]:
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


class Image(NamedTuple):
    """What the instructions of all stages make. `build`: a shell script for RUN, COPY and ENV."""

    build: str
    environ: Mapping[str, str]
    workdir: str
    user: str
    volume: str
    health: list[str]
    command: list[str]

    @classmethod
    def read(cls, context: Path) -> "Image":
        build, environ, last = ["cd /"], {"PATH": "/usr/local/bin:/usr/bin:/bin"}, {}
        for name, value in instructions(context / "Dockerfile"):
            last[name] = value
            if name == "FROM":
                environ = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
            elif name == "ENV":
                key, _, text = value.partition("=")
                environ[key] = text.replace("$PATH", environ["PATH"])
            elif name == "COPY" and not value.startswith("--from"):
                source, target = value.split()
                build.append(_copy(context / source, target))
            elif name == "RUN":
                build.append(_without_network(value))
        health = json.loads(last["HEALTHCHECK"].partition(" CMD ")[2])
        command = json.loads(last["CMD"])
        volume, workdir, user = last["VOLUME"], last["WORKDIR"], last["USER"]
        return cls("\n".join(build), environ, workdir, user, volume, health, command)


def _copy(source: Path, target: str) -> str:
    folder = f"mkdir -p {shlex.quote(target if target.endswith('/') else os.path.dirname(target) or '.')}"
    return f"{folder}; [ ! -e {source} ] || cp -r --no-preserve=all {source} {target}"


def _without_network(command: str) -> str:
    """The packages of the tests instead of those of an index."""
    if re.fullmatch(r"python -m venv \S+", command):
        return f"{sys.executable} -m venv --without-pip {command.split()[-1]}"
    installed = re.fullmatch(r"(\S+)/bin/pip install .*-r requirements.txt", command)
    if installed is None:
        return command
    venv = installed[1]
    packages = f"{venv}/lib/python3.{sys.version_info.minor}/site-packages/tests.pth"
    paths = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    programs = "".join(
        f"sed '1s|.*|#!{venv}/bin/python|' {Path(sys.executable).parent / name} > {venv}/bin/{name}\n"
        f"chmod 755 {venv}/bin/{name}\n"
        for name in ("forq", "forqctl", "uvicorn")
    )
    return f"cat > {packages} <<'END'\n{paths}END\n{programs}"


class Container:
    """PID 1 and its namespaces."""

    def __init__(self, image: Image, context: Path, environ: Mapping[str, str], volume_options: str) -> None:
        self.image = image
        self.environ = {**image.environ, **environ}
        self._directory = Path(tempfile.mkdtemp(prefix="forq-"))
        room = self._directory / "room"
        room.mkdir()
        self.log_file = self._directory / "log"
        shared = {str(context), str(ROOT), sys.prefix, sys.base_prefix}
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                # Ends with the test, even if the test is killed.
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    str(BOOT),
                    str(room),
                    image.build,
                    image.user,
                    image.volume,
                    *self._prefix(),
                    *image.command,
                ],
                env={**os.environ, "SHARED": " ".join(sorted(shared)), "VOLUME_OPTIONS": volume_options},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _prefix(self) -> list[str]:
        settings = [f"{name}={value}" for name, value in self.environ.items()]
        return ["env", "-i", f"--chdir={self.image.workdir}", *settings]

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def pid(self) -> int:
        """Of its PID 1, outside."""
        (init,) = psutil.Process(self.process.pid).children()
        return init.pid

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Like `docker exec`."""
        return subprocess.run(
            [*self._entering(), *command], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )

    def begin(self, *command: str) -> "subprocess.Popen[bytes]":
        """Like `docker exec`, beside the test. `end` ends it."""
        with open(self.log_file, "ab") as log:
            return subprocess.Popen([*self._entering(), *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def end(self, begun: "subprocess.Popen[bytes]") -> None:
        """Ends the command itself; nsenter waits for it."""
        for process in psutil.Process(begun.pid).children():
            process.terminate()
        begun.wait(_COMMAND_SECONDS)

    def _entering(self) -> list[str]:
        user, _, group = self.image.user.partition(":")
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-r", "-S", user, "-G", group or user, *self._prefix()]

    def wait_until_healthy(self) -> None:
        def is_healthy() -> bool:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.log}"
            children = psutil.Process(self.process.pid).children()
            return bool(children) and self.run(*self.image.health).returncode == 0

        wait_until(is_healthy, 60.0, "the container is healthy")

    def processes(self) -> dict[int, tuple[str, str]]:
        """State and title of all its processes, by their pids outside."""
        found: dict[int, tuple[str, str]] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                state = process.status()
                # A zombie has no command line.
                title = process.name() if state == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
                found[process.pid] = (state, title)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self) -> None:
        """Kills PID 1, and with it all others end."""
        if self.process.poll() is None:
            for init in psutil.Process(self.process.pid).children():
                init.kill()
            self.process.wait(_COMMAND_SECONDS)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self._directory)


@contextmanager
def container(context: Path, environ: Mapping[str, str], *, volume_options: str = "") -> Iterator[Container]:
    """`volume_options`: of the mounted volume; by default it has the owner and the mode of its directory."""
    started = Container(Image.read(context), context, environ, volume_options)
    try:
        yield started
    finally:
        started.remove()
