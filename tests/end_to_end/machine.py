"""A small machine for tests: systemd in its own namespaces, with forq installed from this tree as the docs say."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forq.procs.cgroups import Cgroup
from tests.support.drive.supervisor import HANDLERS
from tests.support.drive.wait import wait_until

ROOT = Path(__file__).parent.parent.parent
BOOT = Path(__file__).parent / "systemd_boot.sh"
TOOLS = ("unshare", "nsenter", "setpriv", "systemctl", "systemd-sysusers", "systemd-tmpfiles")
COMMAND_SECONDS = 60
PATH = "/opt/forq/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# For the test only: a readable log, the trace of the handlers, a short watchdog, and the present location of this
# Python's library (it looks where it was installed, then takes the distribution's).
DROP_IN = """[Service]
StandardOutput=append:/var/log/forq.log
StandardError=append:/var/log/forq.log
Environment=FORQ_TEST_TRACE=/var/lib/forq/trace
Environment=LD_LIBRARY_PATH=/opt/python/lib
WatchdogSec=3s
"""


def why_not() -> str | None:
    """The reason why no such machine can boot here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not Path("/lib/systemd/systemd").exists():
        return f"systemd is not installed here: {', '.join(missing) or '/lib/systemd/systemd'} is missing"
    if _cgroup_mount() is None:
        return "no cgroup v2 is mounted here"
    if subprocess.run(["unshare", "--pid", "--fork", "--mount", "--cgroup", "true"], check=False).returncode:
        return "namespaces are not allowed here"
    return None


class Machine:
    def __init__(self, config: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="forq-machine-"))
        mount = _cgroup_mount()
        assert mount is not None
        self._cgroup = mount / f"forq-test-{os.getpid()}-{time.monotonic_ns()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0
        try:
            install(self._directory / "stage", config)
            self._boot()
        except BaseException:
            self.remove()
            raise

    def run(self, *command: str, check: bool = True, show: bool = True) -> str:
        """Runs a command inside; prints and returns its output."""
        done = self._enter(*command)
        output = (done.stdout + done.stderr).strip()
        shown = output.splitlines() if show else []
        print(f"# {' '.join(command)}", *(f"  {line}" for line in shown), sep="\n", flush=True)
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}: {output}"
        return output

    def show(self, *properties: str, unit: str = "forq.service") -> dict[str, str]:
        """Properties of a unit. Not printed, because tests poll it."""
        done = self._enter("systemctl", "show", unit, *(f"--property={name}" for name in properties))
        assert done.returncode == 0, done.stderr
        return dict(line.split("=", 1) for line in done.stdout.splitlines())

    def wait_for(self, **wanted: str) -> None:
        """Waits until each property matches its pattern, then prints them."""

        def reached() -> dict[str, str] | None:
            shown = self.show(*wanted)
            return shown if all(re.search(pattern, shown[name]) for name, pattern in wanted.items()) else None

        try:
            shown: dict[str, str] = wait_until(reached, 30.0, f"{wanted}")
        except AssertionError as exc:
            raise AssertionError(f"{exc}; shown: {self.show(*wanted)}; log: {self.log()}") from exc
        print(*(f"- {name}={value}" for name, value in shown.items()), sep="\n", flush=True)

    def main_pid(self) -> int:
        return int(self.show("MainPID")["MainPID"])

    def log(self) -> str:
        return self.read("/var/log/forq.log")

    def read(self, path: str) -> str:
        file = self._root() / path.lstrip("/")
        return file.read_text(errors="replace") if file.exists() else ""

    def write(self, path: str, text: str, *, show: bool = True) -> None:
        print(f"# cat > {path}", *(f"  {line}" for line in text.splitlines() if show), sep="\n", flush=True)
        (self._root() / path.lstrip("/")).write_text(text)

    def processes(self) -> dict[int, str]:
        """Every process inside except systemd's own and zombies: pid outside -> command line."""
        found = {}
        for file in [self._cgroup / "cgroup.procs", *self._cgroup.glob("**/cgroup.procs")]:
            for pid in map(int, file.read_text().split()):
                if self._process is not None and pid not in (self._process.pid, self._init):
                    found[pid] = _command_line(pid)
        return {pid: line for pid, line in found.items() if line}

    def remove(self) -> None:
        """Kills the machine with everything inside."""
        if self._cgroup.exists():
            Cgroup(self._cgroup).kill()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._cgroup.exists():
            assert Cgroup(self._cgroup).remove(), f"processes are left in {self._cgroup}"
        shutil.rmtree(self._directory)

    def _boot(self) -> None:
        self._cgroup.mkdir()
        # Ends with the test, even if the test is killed.
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            str(BOOT),
            str(self._cgroup),
            str(self._directory),
            sys.base_prefix,
        ]
        with open(self._directory / "boot.log", "wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._init = wait_until(self._find_init, what="systemd as PID 1")
        wait_until(self._is_up, what="systemd up")
        # Each with one file: those of the distribution would create its users and empty its directories.
        self.run("systemd-sysusers", "/etc/sysusers.d/forq.conf")
        self.run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/forq.conf")

    def _find_init(self) -> int:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"no boot: {(self._directory / 'boot.log').read_text()}")
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return next((int(child) for child in children if _command(child) == "systemd"), 0)

    def _is_up(self) -> bool:
        return self._enter("systemctl", "is-active", "basic.target").returncode == 0

    def _root(self) -> Path:
        """Its file system. Once the machine has ended, its pid may belong to another process."""
        assert self._process is not None
        assert self._process.poll() is None, "the machine has ended"
        return Path(f"/proc/{self._init}/root")

    def _enter(self, *command: str) -> "subprocess.CompletedProcess[str]":
        assert self._root().is_dir()
        inside = ["nsenter", "-t", str(self._init), "-a", "--", "env", "-i", f"PATH={PATH}", *command]
        return subprocess.run(inside, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)


def install(stage: Path, config: str) -> None:
    """Installs as docs/guide/systemd.md says: a virtual environment in /opt/forq, and the files of etc/."""
    packages = stage / "opt/forq/lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    shutil.copytree(ROOT / "src/forq", packages / "forq", ignore=shutil.ignore_patterns("__pycache__"))
    for name in _requirements("forq"):
        _copy_distribution(name, packages)
    programs = stage / "opt/forq/bin"
    programs.mkdir()
    (programs / "python").symlink_to(f"/opt/python/bin/python3.{sys.version_info.minor}")
    (stage / "opt/forq/pyvenv.cfg").write_text("home = /opt/python/bin\ninclude-system-site-packages = false\n")
    for name, module in (("forq", "forq.cli"), ("forqctl", "forq.ctl.main")):
        program = programs / name
        program.write_text(f"#!/opt/forq/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        program.chmod(0o755)
    shutil.copytree(HANDLERS, stage / "srv/handlers", ignore=shutil.ignore_patterns("__pycache__"))
    for source, target in (
        ("forq.service", "run/units/forq.service"),
        ("forq.socket", "run/units/forq.socket"),
        ("forq.sysusers.conf", "etc/sysusers.d/forq.conf"),
        ("forq.tmpfiles.conf", "etc/tmpfiles.d/forq.conf"),
    ):
        _write(stage / target, (ROOT / "etc" / source).read_text())
    _write(stage / "run/units/forq.service.d/test.conf", DROP_IN)
    _write(stage / "etc/forq/forq.toml", config)
    _write(stage / "var/log/forq.log", "")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _requirements(name: str) -> set[str]:
    """The distributions that `name` needs here, recursively."""
    found: set[str] = set()
    for line in importlib.metadata.requires(name) or []:
        needed = re.match(r"[A-Za-z0-9_.-]+", line)
        if needed is None or "extra ==" in line:
            continue
        try:
            importlib.metadata.distribution(needed[0])
        except importlib.metadata.PackageNotFoundError:
            continue
        found |= {needed[0], *_requirements(needed[0])}
    # hiredis is an extra of redis, and forq requires it.
    return found | {"hiredis"} if name == "forq" else found


def _copy_distribution(name: str, packages: Path) -> None:
    for file in importlib.metadata.files(name) or []:
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file.locate(), target)


def _cgroup_mount() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _command(pid: str) -> str:
    """The command of a process; '' if it has ended (the setup starts several)."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def booted(config: str) -> Iterator[Machine]:
    machine = Machine(config)
    try:
        yield machine
    finally:
        machine.remove()
