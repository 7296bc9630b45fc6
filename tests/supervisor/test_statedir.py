"""The state directory: its locks across real processes, and its files across crashes."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forq.errors import ConfigError, ForqError, InvalidName
from forq.procs.treekill import kill_tree, read_stat
from forq.supervisor import statedir
from forq.supervisor.child import ProcessHandle, exec_program, reap, spawn
from forq.supervisor.statedir import PreviousRun, StateDir, holders_of_lock


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    state = StateDir(tmp_path / "state")
    yield state
    state.unlock()


def wait_forever() -> int:
    """Ends only if the test failed to end it."""
    signal.alarm(20)
    while True:
        signal.pause()


class Predecessor:
    """A supervisor with one child that holds the tree lock, in separate processes."""

    def __init__(self, path: Path, start_child: Callable[[StateDir], ProcessHandle]) -> None:
        read_fd, write_fd = os.pipe()

        def supervise() -> int:
            state = StateDir(path)
            state.lock()
            child = start_child(state)
            os.write(write_fd, f"{child.pid}\n".encode())
            os.close(write_fd)
            return wait_forever()

        self.process = spawn(supervise, loop=None, keep_fds=[write_fd], title="forq: test", subreaper=False)
        os.close(write_fd)
        with open(read_fd) as file:
            self.child_pid = int(file.readline())
        self.child_pidfd = os.pidfd_open(self.child_pid)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        os.waitpid(self.process.pid, 0)

    def child_is_alive(self) -> bool:
        try:
            signal.pidfd_send_signal(self.child_pidfd, 0)
        except ProcessLookupError:
            return False
        process = read_stat(self.child_pid)
        return process is not None and process.alive

    def close(self) -> None:
        if self.child_is_alive():
            signal.pidfd_send_signal(self.child_pidfd, signal.SIGKILL)
        if reap(self.process) is None:
            kill_tree(self.process.pid)
            os.waitpid(self.process.pid, 0)
        os.close(self.child_pidfd)
        self.process.close()


def start_worker(state: StateDir) -> ProcessHandle:
    return spawn(wait_forever, loop=None, keep_fds=[state.tree_lock_fd], title="forq: test")


def start_program(state: StateDir) -> ProcessHandle:
    return exec_program(["/bin/sleep", "60"], loop=None, keep_fds=[state.tree_lock_fd], env={})


@pytest.fixture(params=[start_worker, start_program])
def predecessor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Predecessor]:
    predecessor = Predecessor(tmp_path / "state", request.param)
    yield predecessor
    predecessor.close()


def test_the_directory_is_created_for_its_owner_only(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "deep" / "state")
    assert state.path.stat().st_mode & 0o777 == 0o700


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{tmp_path}/file: not a directory"):
        StateDir(tmp_path / "file")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/below: Not a directory"):
        StateDir(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unwritable_directory_is_refused() -> None:
    def check() -> int:
        os.setresuid(65534, 65534, 65534)
        with pytest.raises(ConfigError, match="/etc: not writable for user 65534"):
            StateDir(Path("/etc"))
        return 0

    child = spawn(check, loop=None, keep_fds=(), title="forq: test")
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 0
    child.close()


def test_a_world_writable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o1777)
    with pytest.raises(ConfigError, match=r"/open can be changed by everybody, .*: chmod o-w /.*/open \(or "):
        StateDir(tmp_path / "open")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    with pytest.raises(ConfigError, match=r"/theirs can be changed by user \S+, .*: chown root /.*/theirs \(or "):
        StateDir(tmp_path / "theirs")


def test_all_files_are_below_the_state_directory(state: StateDir) -> None:
    assert state.redis_socket == state.path / "redis.sock"
    assert state.redis_dir == state.path / "redis"
    with pytest.raises(InvalidName):
        state.save_queue("../emails", {})


def test_a_second_supervisor_is_refused_with_the_pid_of_the_first(predecessor: Predecessor, state: StateDir) -> None:
    pid = predecessor.process.pid
    with pytest.raises(ForqError, match=rf"another supervisor \(pid {pid}\) runs on state directory {state.path}"):
        state.lock()
    assert predecessor.child_is_alive()
    assert reap(predecessor.process) is None


@pytest.mark.fault("supervisor killed")
def test_processes_of_a_killed_predecessor_are_killed_before_the_lock_is_taken(
    predecessor: Predecessor, state: StateDir
) -> None:
    predecessor.kill()
    assert predecessor.child_is_alive()
    waits: list[list[int]] = []
    state.lock(on_wait=waits.append)
    assert waits == [[predecessor.child_pid]]
    assert not predecessor.child_is_alive()
    assert (state.path / "supervisor.lock").read_text() == f"{os.getpid()}\n"


def test_lock_gives_up_with_the_pids_of_the_holders_and_releases_its_locks(
    predecessor: Predecessor, state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    predecessor.kill()
    monkeypatch.setattr("forq.supervisor.statedir.kill_tree", lambda *args, **options: False)
    with pytest.raises(ForqError, match=rf"still run: pids \[{predecessor.child_pid}\]"):
        # By then the child has closed its copy of the other lock, even on a busy machine.
        state.lock(wait_seconds=1.0)
    with pytest.raises(ForqError, match="not locked"):
        _ = state.tree_lock_fd
    monkeypatch.undo()
    StateDir(state.path).lock()


def test_a_process_that_only_reads_the_lock_file_is_not_a_holder(predecessor: Predecessor, state: StateDir) -> None:
    reader_fd = os.open(state.path / "tree.lock", os.O_RDONLY)
    reader = spawn(wait_forever, loop=None, keep_fds=[reader_fd], title="forq: test")
    try:
        deadline = time.monotonic() + 5
        while not Path(f"/proc/{reader.pid}/cmdline").read_text().startswith("forq: test"):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert set(holders_of_lock(state.path / "tree.lock")) == {predecessor.process.pid, predecessor.child_pid}
    finally:
        kill_tree(reader.pid)
        os.waitpid(reader.pid, 0)
        reader.close()
        os.close(reader_fd)


def test_locking_an_unused_directory_does_not_wait(state: StateDir) -> None:
    waits: list[list[int]] = []
    state.lock(on_wait=waits.append)
    assert waits == []
    assert os.get_inheritable(state.tree_lock_fd) is False


def test_a_lock_file_that_is_a_symbolic_link_is_refused(state: StateDir, tmp_path: Path) -> None:
    (state.path / "supervisor.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a symbolic link"):
        state.lock()
    assert not (tmp_path / "elsewhere").exists()


def test_each_run_learns_the_name_of_its_predecessor(state: StateDir) -> None:
    state.lock()
    first, before_first = state.take_processor()
    state.unlock()
    state.lock()
    second, before_second = state.take_processor()
    assert before_first is None
    assert before_second == PreviousRun(first, doubt="")
    assert first != second
    assert len(first) == len(second) == 32


def successor_of(state: StateDir) -> PreviousRun:
    """The predecessor that the next supervisor of a directory finds."""
    state.lock()
    try:
        predecessor = state.take_processor()[1]
    finally:
        state.unlock()
    assert predecessor is not None
    return predecessor


def test_a_copied_directory_does_not_prove_that_the_original_run_ended(state: StateDir, tmp_path: Path) -> None:
    state.lock()
    name, _ = state.take_processor()
    shutil.copytree(state.path, tmp_path / "copy")
    copy = StateDir(tmp_path / "copy")
    assert successor_of(copy) == PreviousRun(name, "the directory is a copy, or its file system was mounted again")
    assert successor_of(copy).doubt == "", "from then on it is an independent directory"


def test_another_machine_or_boot_does_not_prove_that_the_previous_run_ended(
    state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, boot = tmp_path / "machine-id", tmp_path / "boot_id"
    monkeypatch.setattr(statedir, "MACHINE_ID", machine)
    monkeypatch.setattr(statedir, "BOOT_ID", boot)
    machine.write_text("0" * 32 + "\n")
    boot.write_text("b1\n")
    state.lock()
    state.take_processor()
    state.unlock()
    assert "0" * 32 not in (state.path / "processor").read_text(), "a machine id is confidential"
    assert successor_of(state).doubt == ""
    boot.write_text("b2\n")
    assert successor_of(state).doubt == "the machine was rebooted since, or is a copy"
    assert successor_of(state).doubt == ""
    machine.write_text("1" * 32 + "\n")
    assert successor_of(state).doubt == "the directory was used on another machine: it was moved or copied"


def test_without_a_machine_id_the_boot_id_and_the_file_are_compared(
    state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("b1\n")
    monkeypatch.setattr(statedir, "MACHINE_ID", tmp_path / "none")
    monkeypatch.setattr(statedir, "BOOT_ID", boot)
    state.lock()
    state.take_processor()
    state.unlock()
    assert successor_of(state).doubt == ""
    boot.write_text("b2\n")
    assert successor_of(state).doubt != ""
    boot.unlink()
    successor_of(state)
    assert successor_of(state).doubt != "", "an unknown id proves nothing"


@pytest.mark.parametrize("content", ["", "old", "old\n", "a b\n"])
def test_an_incomplete_name_file_does_not_prove_that_the_previous_run_ended(state: StateDir, content: str) -> None:
    (state.path / "processor").write_text(content)
    state.lock()
    _, predecessor = state.take_processor()
    assert predecessor == (
        PreviousRun(content.split()[0], "an earlier release did not record where it ran") if content else None
    )


def test_queues_are_saved_replaced_and_dropped(state: StateDir) -> None:
    assert state.load_queues() == {}
    state.save_queue("emails", {"mode": "work", "timeout": 1.5})
    state.save_queue(".hidden.json", {"mode": "external"})
    state.save_queue("emails", {"mode": "work"})
    assert StateDir(state.path).load_queues() == {"emails": {"mode": "work"}, ".hidden.json": {"mode": "external"}}
    state.drop_queue("emails")
    state.drop_queue("emails")
    assert state.load_queues() == {".hidden.json": {"mode": "external"}}
    assert [path.name for path in (state.path / "queues").iterdir()] == [".hidden.json.json"]


def test_a_crash_while_writing_leaves_the_old_definition(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    state.save_queue("emails", {"version": 1})

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        state.save_queue("emails", {"version": 2})
    monkeypatch.undo()
    assert state.load_queues() == {"emails": {"version": 1}}
    state.save_queue("emails", {"version": 3})
    assert state.load_queues() == {"emails": {"version": 3}}


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_a_broken_definition_is_reported_by_name(content: str, state: StateDir) -> None:
    state.save_queue("good", {})
    (state.path / "queues" / "bad.json").write_text(content)
    with pytest.raises(ConfigError, match=f"{state.path}/queues/bad.json"):
        state.load_queues()


def test_a_definition_behind_a_symbolic_link_is_not_read(state: StateDir, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps({"handler": "evil:run"}))
    state.save_queue("good", {})
    (state.path / "queues" / "linked.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="linked"):
        state.load_queues()


@pytest.mark.fault("queue name hostile")
def test_a_hostile_name_never_becomes_a_path(state: StateDir) -> None:
    for name in ("../evil", "a/b", "", "."):
        with pytest.raises(InvalidName):
            state.save_queue(name, {})
    assert not (state.path / "queues").exists()
