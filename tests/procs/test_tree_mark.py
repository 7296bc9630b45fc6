"""TreeMark: finds orphans that no parent or cgroup leads to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from forq.errors import ForqError
from forq.procs.orphans import VARIABLE, TreeMark
from forq.procs.treekill import children_of
from forq.supervisor.statedir import StateDir
from tests.support.drive.processes import alive
from tests.support.drive.wait import wait_until

MARK = TreeMark(os.urandom(16), "here")
FOREIGN = TreeMark(os.urandom(16), "here")
LIFETIME_SECONDS = 60
SLEEP = f"import time; time.sleep({LIFETIME_SECONDS})"


class Orphans:
    """Starts processes whose parents exit at once, so that init or another subreaper adopts them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.pids: list[int] = []

    def leave(self, live: Callable[[], object], mark: TreeMark | None = MARK) -> int:
        """Starts an orphan that calls `live` and returns its pid; its parent gets `mark`."""
        file = self._directory / str(len(self.pids))
        parent = os.fork()
        if parent == 0:
            try:
                if mark is not None:
                    mark.apply()
                orphan = os.fork()
                if orphan == 0:
                    os.setsid()
                    live()
                else:
                    # Rename, so that the file is never seen half written.
                    file.with_suffix(".new").write_text(str(orphan))
                    file.with_suffix(".new").rename(file)
            finally:
                os._exit(0)
        os.waitpid(parent, 0)
        pid = int(wait_until(file.exists) and file.read_text())
        self.pids.append(pid)
        return pid

    def end(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[Orphans]:
    orphans = Orphans(tmp_path)
    yield orphans
    orphans.end()


def run_program() -> None:
    os.execv(sys.executable, [sys.executable, "-c", SLEEP])


def wait_for_program(pid: int) -> None:
    """Until exec, the process holds the descriptors of the locks."""
    wait_until(lambda: SLEEP in Path(f"/proc/{pid}/cmdline").read_text(), what="it is a program")


def just_sleep() -> None:
    os.closerange(0, 256)
    time.sleep(LIFETIME_SECONDS)


def run_program_of_a_shell_without_environment() -> None:
    code = f"{sys.executable} -c '{SLEEP}'"
    os.execv("/bin/sh", ["/bin/sh", "-c", f"env -i {code} & wait"])


@pytest.mark.parametrize("live", [run_program, just_sleep, run_program_of_a_shell_without_environment])
def test_only_marked_orphans_are_found_and_killed(orphans: Orphans, live: Callable[[], None]) -> None:
    wanted = orphans.leave(live)
    others = [orphans.leave(live, mark=None), orphans.leave(live, mark=FOREIGN)]
    wait_until(lambda: MARK.find() == [wanted], what="it is found")
    assert wanted in MARK.find_escaped()
    killed, left = MARK.kill(MARK.find, 10.0)
    assert wanted in killed
    assert left == set()
    wait_until(lambda: not alive(killed), what="it is dead")
    assert alive(set(others)) == set(others)
    assert MARK.find() == []
    FOREIGN.kill(FOREIGN.find, 10.0)


def test_a_program_with_an_empty_environment_is_killed_with_its_parent(orphans: Orphans) -> None:
    shell = orphans.leave(run_program_of_a_shell_without_environment)
    wait_until(lambda: MARK.find() == [shell])
    pids = wait_until(lambda: set(children_of(shell)), what="its program runs")
    killed, _ = MARK.kill(MARK.find, 10.0)
    assert killed >= pids
    wait_until(lambda: not alive({shell, *pids}))


def test_the_caller_and_its_ancestors_are_never_found() -> None:
    """A handler may start a supervisor for the same directory."""
    script = (
        "import sys; from forq.procs.orphans import TreeMark; "
        "mark = TreeMark(bytes.fromhex(sys.argv[1]), 'here'); assert mark.marks(__import__('os').getpid()); "
        "print(mark.find())"
    )
    secret = os.urandom(16)
    mark = TreeMark(secret, "here")
    environ = {**os.environ, "FORQ_TREE": mark.value}
    done = subprocess.run(
        [sys.executable, "-c", script, secret.hex()], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_reused_pid_is_not_killed(orphans: Orphans) -> None:
    """The marked process exits between check and kill, and another process gets its pid."""
    innocent = orphans.leave(run_program, mark=None)
    looks = [[innocent], [], []]
    assert MARK.kill(lambda: looks.pop(0) if looks else [], 1.0) == (set(), set())
    assert alive({innocent}) == {innocent}


def test_only_processes_started_since_the_last_check_are_checked(
    orphans: Orphans, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = TreeMark(os.urandom(16), "here")
    looked: list[int] = []
    orphans.leave(run_program, mark=None)
    mark.find_escaped()

    def marks(self: TreeMark, pid: int) -> bool:
        looked.append(pid)
        return False

    monkeypatch.setattr(TreeMark, "marks", marks)
    later = orphans.leave(run_program, mark=None)
    mark.find_escaped()
    assert later in looked
    assert orphans.pids[0] not in looked


def test_each_state_directory_and_each_copy_of_one_has_its_own_mark(tmp_path: Path) -> None:
    first = StateDir(tmp_path / "one")
    first.lock()
    mark = first.tree_mark.value
    first.unlock()
    again = StateDir(tmp_path / "one")
    again.lock()
    assert again.tree_mark.value == mark
    again.unlock()
    subprocess.run(["cp", "-a", str(tmp_path / "one"), str(tmp_path / "two")], check=True)
    copy = StateDir(tmp_path / "two")
    copy.lock()
    assert copy.tree_mark.value != mark
    copy.unlock()
    assert (tmp_path / "one" / "tree.secret").stat().st_mode & 0o777 == 0o600


def test_locking_the_directory_waits_until_marked_orphans_are_dead(orphans: Orphans, tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    state.lock()
    orphan = orphans.leave(run_program, mark=state.tree_mark)
    wait_for_program(orphan)
    state.unlock()
    waited_for: list[list[int]] = []
    successor = StateDir(tmp_path / "state")
    successor.lock(on_wait=waited_for.append)
    assert waited_for == [[orphan]]
    assert not alive({orphan})
    successor.unlock()


def test_a_marked_orphan_that_cannot_be_killed_is_reported(
    orphans: Orphans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(tmp_path / "state")
    state.lock()
    orphan = orphans.leave(run_program, mark=state.tree_mark)
    wait_for_program(orphan)
    state.unlock()

    def refuse(pidfd: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(ForqError, match=rf"of an earlier run on .*: pids {orphan}; as root: kill -9 {orphan}$"):
        StateDir(tmp_path / "state").lock()


def test_programs_are_marked_even_if_the_kernel_refuses_a_named_mapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With SystemCallFilter=~memfd_create, a queue is served, but forked processes without exec are not marked."""

    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(os, "memfd_create", refuse)
    MARK.apply()
    program = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        wait_until(lambda: MARK.marks(program.pid))
    finally:
        program.kill()
        program.wait()
