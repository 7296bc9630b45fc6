"""A supervisor of an ordinary user, without control groups, whose /proc hides processes (hidepid=2)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.drive.processes import alive, kill_all_at_once
from tests.support.drive.supervisor import BIN, HANDLERS, Forq
from tests.support.drive.wait import wait_until

USER = 65534
HIDDEN = 'mount -t proc -o hidepid=2 forq-test /proc && exec "$@"'
AS_USER = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]


class HiddenForq(Forq):
    """Runs as another user, who sees only the dumpable ones of the own processes."""

    def __init__(self) -> None:
        super().__init__(settings='cgroup = "off"\n')
        for path in (self.directory, self.config):
            os.chown(path, USER, USER)

    def program(self) -> list[str]:
        private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HIDDEN, "sh"]
        return [*private, *AS_USER, *super().program()]

    def programs(self) -> list[int]:
        traces = [trace.event for trace in self.traces() if trace.event.startswith("program=")]
        return [int(event.removeprefix("program=")) for event in traces]


def why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root, to become another user and to mount a /proc"
    tried = ["unshare", "--mount", "--propagation", "private", "sh", "-c", HIDDEN, "sh", *AS_USER]
    if subprocess.run([*tried, "test", "-r", str(HANDLERS)], capture_output=True, check=False).returncode:
        return "another user cannot read this tree, or no /proc with hidepid can be mounted"
    # Where its library is unreadable too, another Python's may be found instead.
    same = "import sys; sys.exit(sys.version != sys.argv[1])"
    if subprocess.run(
        [*tried, str(BIN / "python"), "-c", same, sys.version], capture_output=True, check=False
    ).returncode:
        return "another user cannot run this Python"
    return None


@pytest.fixture
def forq() -> Iterator[HiddenForq]:
    if reason := why_not():
        pytest.skip(reason)
    forq = HiddenForq()
    try:
        forq.start()
        yield forq
    finally:
        # Its directory contains their trace.
        programs = set(forq.programs())
        forq.remove()
        for pid in alive(programs):
            psutil.Process(pid).kill()


def sees(forq: HiddenForq, pid: int) -> bool:
    """Whether the supervisor's /proc shows this process to its user."""
    enter = ["nsenter", "-t", str(forq.pid), "--mount", *AS_USER]
    return subprocess.run([*enter, "test", "-e", f"/proc/{pid}/stat"], check=False).returncode == 0


@pytest.mark.parametrize("end", ["delete", "shutdown", "kill"])
def test_processes_that_proc_hides_are_killed_anyway(forq: HiddenForq, end: str) -> None:
    forq.create("secretive", "leave_hidden")
    forq.ctl("push", "secretive", "1")
    wait_until(lambda: forq.traces("start"), what="the daemon runs")
    programs = set(forq.programs())
    assert len(programs) == 2
    assert not any(sees(forq, pid) for pid in programs)
    if end == "delete":
        assert forq.ctl("delete", "secretive", "--force") == "deleted secretive"
        assert not alive(programs)
    elif end == "shutdown":
        forq.ctl("shutdown", "--now")
        assert forq.process is not None
        assert forq.process.wait(30) == 0
        assert not alive(programs)
    else:
        os.kill(forq.child("secretive")["pid"], 9)
        wait_until(lambda: not alive(programs), 10.0, "leftovers of a dead child are killed")
    assert "cannot kill processes" not in forq.log


def test_unkillable_processes_are_reported_in_the_answer_the_log_and_the_exit_code(forq: HiddenForq) -> None:
    setpriv = shutil.which("setpriv")
    assert setpriv is not None
    become_root = forq.directory / "setpriv"
    shutil.copy(setpriv, become_root)
    become_root.chmod(0o4755)
    forq.create("rising", "leave_program_of_root")
    forq.create("neighbor", "record")
    forq.ctl("push", "rising", f'"{become_root}"')
    (pid,) = wait_until(forq.programs, what="the program runs")
    try:
        wait_until(lambda: alive({pid}) and set(psutil.Process(pid).uids()) == {0}, 5.0, "it is root's")
        wait_until(lambda: psutil.Process(pid).name().startswith("python"), 5.0, "and has all rights")
    except (AssertionError, psutil.NoSuchProcess):
        pytest.skip("no program may become root's here")
    done = forq.run_ctl("delete", "rising", "--force")
    assert (done.returncode, done.stdout) == (3, "deleted rising\n")
    assert done.stderr == (
        f"forqctl: processes started by its handlers cannot be killed: pids {pid}; run as root: kill -9 {pid}\n"
    )
    assert f"cannot kill processes left by a dead child: pids {pid}; as root: kill -9 {pid}" in forq.log
    assert alive({pid}) == {pid}
    # It is known by now, and delays nothing.
    os.kill(forq.child("neighbor")["pid"], 9)
    forq.ctl("push", "neighbor", "1")
    wait_until(lambda: forq.traces("end"), 10.0, "other queues continue")
    assert forq.log.count(f"left by a dead child: pids {pid}") == 1
    psutil.Process(pid).kill()


def test_the_error_for_a_tree_lock_of_an_invisible_process_says_how_to_find_it(forq: HiddenForq) -> None:
    """The daemon holds the lock's descriptor, and its descriptors cannot be read."""
    forq.create("secretive", "leave_hidden")
    forq.ctl("push", "secretive", "1")
    wait_until(lambda: forq.traces("start"), what="the daemon runs")
    programs = set(forq.programs())
    kill_all_at_once([process for process in forq.processes() if process.pid not in programs])
    assert forq.process is not None
    forq.process.wait(30)
    forq.start(ready=False)
    try:
        code = forq.process.wait(60)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it started, daemons={alive(programs)}: {forq.log}") from None
    assert code == 1
    lock = Path(forq.state_dir) / "tree.lock"
    assert f"not visible to this user; as root: fuser -k -9 {lock}" in forq.log
