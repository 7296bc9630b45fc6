"""Killing process trees. Each test process holds the write end of a pipe; end of file proves that all are dead."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from forq.errors import ForqError
from forq.procs import treekill
from forq.procs.orphans import ChildPids, OrphanReport, clean_up
from forq.procs.treekill import (
    become_subreaper,
    children_of,
    descendants_of,
    kill_descendants,
    kill_tree,
    read_stat,
    set_parent_death_signal,
)

LIFETIME_SECONDS = 20


class Pipe:
    """Held open by a tree of processes; reaches end of file when the last one is dead."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()

    def write(self, text: str) -> None:
        os.write(self.write_fd, f"{text}\n".encode())

    def read_words(self, lines: int) -> list[str]:
        received = b""
        while received.count(b"\n") < lines:
            assert self._readable(5.0), f"only received {received!r}"
            part = os.read(self.read_fd, 4096)
            assert part, "the writers are gone"
            received += part
        return received.decode().split()

    def all_dead(self, seconds: float = 1.0) -> bool:
        """Whether every writer is gone. The caller must have closed its own end."""
        deadline = time.monotonic() + seconds
        while self._readable(max(0.0, deadline - time.monotonic())):
            if not os.read(self.read_fd, 65536):
                return True
        return False

    def _readable(self, seconds: float) -> bool:
        return bool(select.select([self.read_fd], [], [], seconds)[0])


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    for fd in (pipe.read_fd, pipe.write_fd):
        with suppress(OSError):
            os.close(fd)


Step = Callable[[], object]


def fork(*steps: Step) -> int:
    """Forks a child that runs these steps and exits."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for step in steps:
            step()
        code = 0
    except AssertionError as exc:
        os.write(2, f"{exc!r}\n".encode())
    finally:
        os._exit(code)


def wait_for_ever() -> None:
    """Exits only after the test must have failed to kill it."""
    signal.alarm(LIFETIME_SECONDS)
    while True:
        signal.pause()


def daemonise(*steps: Step) -> None:
    """Double fork and setsid, like a daemon."""
    os.waitpid(fork(os.setsid, lambda: fork(*steps)), 0)


def run_chain(pipe: Pipe, pause_seconds: float = 0.001, new_session: bool = True) -> None:
    """A chain of short-lived processes: each forks, lets the child go on, and exits."""
    pipe.write("chain")
    deadline = time.monotonic() + LIFETIME_SECONDS
    while time.monotonic() < deadline:
        time.sleep(pause_seconds)
        if os.fork():
            os._exit(0)
        if new_session:
            os.setsid()


def start_worker(*steps: Step) -> int:
    """Starts a session leader and subreaper, like a child of the supervisor."""
    return fork(os.setsid, become_subreaper, *steps, wait_for_ever)


def in_a_subreaper(body: Step) -> None:
    """Runs the test in a child process, apart from pytest's own children."""
    assert reap(fork(os.setsid, become_subreaper, lambda: signal.alarm(LIFETIME_SECONDS), body)) == 0


def reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_kill_tree_ends_a_process_its_children_and_daemons(pipe: Pipe) -> None:
    def work() -> None:
        fork(
            lambda: pipe.write("child"),
            lambda: fork(lambda: pipe.write("grandchild"), wait_for_ever),
            wait_for_ever,
        )
        daemonise(lambda: pipe.write("daemon"), wait_for_ever)

    pid = start_worker(work)
    assert sorted(pipe.read_words(3)) == ["child", "daemon", "grandchild"]
    os.close(pipe.write_fd)
    assert kill_tree(pid)
    assert pipe.all_dead()
    assert reap(pid) == -signal.SIGKILL


@pytest.mark.fault("handler forks without end")
@pytest.mark.parametrize("new_session", [True, False])
def test_kill_tree_ends_fast_forking_chains_20_of_20(new_session: bool) -> None:
    clean = 0
    for _ in range(20):
        pipe = Pipe()
        chain = partial(daemonise, partial(run_chain, pipe, 0.001, new_session))
        pid = start_worker(chain, chain)
        pipe.read_words(2)
        os.close(pipe.write_fd)
        clean += kill_tree(pid) and pipe.all_dead(0.2)
        assert reap(pid) == -signal.SIGKILL
        os.close(pipe.read_fd)
    assert clean == 20


@pytest.mark.fault("handler forks without end")
def test_kill_tree_ends_a_fork_bomb_in_the_workers_own_group(pipe: Pipe) -> None:
    def bomb() -> None:
        pipe.write("bomb")
        while len(os.listdir("/proc")) < 800:
            os.fork()
        wait_for_ever()

    pid = start_worker(lambda: fork(bomb))
    pipe.read_words(1)
    os.close(pipe.write_fd)
    assert kill_tree(pid)
    assert pipe.all_dead()
    assert reap(pid) == -signal.SIGKILL


def test_kill_tree_ends_a_root_that_starts_processes_in_a_loop(pipe: Pipe) -> None:
    def work() -> None:
        pipe.write("started")
        deadline = time.monotonic() + LIFETIME_SECONDS
        while time.monotonic() < deadline:
            fork(os.setsid, wait_for_ever)

    pid = start_worker(work)
    pipe.read_words(1)
    os.close(pipe.write_fd)
    assert kill_tree(pid, deadline_seconds=2.0)
    assert pipe.all_dead()
    assert reap(pid) == -signal.SIGKILL


def test_the_root_is_stopped_while_its_descendants_are_killed(monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    original = treekill.TreeKiller.kill_all
    stopped: list[bool] = []

    def kill_all(killer: treekill.TreeKiller, deadline: float) -> bool:
        result = os.waitid(os.P_PID, killer.root, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        while result is None and time.monotonic() < deadline:
            result = os.waitid(os.P_PID, killer.root, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        stopped.append(result is not None)
        return original(killer, time.monotonic() + 5.0)

    pid = start_worker(lambda: pipe.write("up"))
    pipe.read_words(1)
    os.close(pipe.write_fd)
    monkeypatch.setattr(treekill.TreeKiller, "kill_all", kill_all)
    kill_tree(pid, deadline_seconds=1.0)
    assert stopped == [True]
    assert reap(pid) == -signal.SIGKILL


def test_kill_tree_ends_processes_that_block_every_signal_or_are_stopped(pipe: Pipe) -> None:
    def stubborn() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pipe.write("ready")
        wait_for_ever()

    def stopped() -> None:
        pipe.write("ready")
        os.kill(os.getpid(), signal.SIGSTOP)

    pid = start_worker(lambda: fork(stubborn), lambda: fork(stopped))
    pipe.read_words(2)
    os.close(pipe.write_fd)
    assert kill_tree(pid)
    assert pipe.all_dead()
    assert reap(pid) == -signal.SIGKILL


def test_kill_tree_finds_grandchildren_of_a_root_that_is_not_a_subreaper(pipe: Pipe) -> None:
    def work() -> None:
        fork(os.setsid, lambda: fork(os.setsid, lambda: pipe.write("deep"), wait_for_ever), wait_for_ever)

    pid = fork(work, wait_for_ever)
    pipe.read_words(1)
    os.close(pipe.write_fd)
    assert kill_tree(pid)
    assert pipe.all_dead()
    assert reap(pid) == -signal.SIGKILL


def test_kill_tree_of_a_process_that_has_exited_returns_true() -> None:
    pid = fork(lambda: None)
    reap(pid)
    assert kill_tree(pid)


@pytest.mark.parametrize("pid", [-1, 0, 1])
def test_pids_that_mean_every_process_are_refused(pid: int) -> None:
    with pytest.raises(ForqError):
        kill_tree(pid)
    with pytest.raises(ForqError):
        kill_descendants(pid)


def test_a_process_cannot_kill_its_own_tree() -> None:
    with pytest.raises(ForqError):
        kill_tree(os.getpid())


def test_kill_descendants_leaves_the_root_and_the_spared_subtrees(pipe: Pipe) -> None:
    spared_family = Pipe()

    def work() -> None:
        def spared() -> None:
            fork(lambda: os.close(pipe.write_fd), lambda: spared_family.write("below"), wait_for_ever)
            os.close(pipe.write_fd)
            spared_family.write(f"spared {os.getpid()}")
            wait_for_ever()

        fork(spared)
        fork(lambda: os.close(spared_family.write_fd), lambda: pipe.write("victim"), wait_for_ever)
        daemonise(lambda: os.close(spared_family.write_fd), lambda: pipe.write("daemon"), wait_for_ever)
        os.close(pipe.write_fd)

    root = start_worker(work)
    pipe.read_words(2)
    words = spared_family.read_words(2)
    spared_pid = int(words[words.index("spared") + 1])
    os.close(pipe.write_fd)
    os.close(spared_family.write_fd)
    assert kill_descendants(root, spare=frozenset({spared_pid}))
    assert pipe.all_dead()
    assert not spared_family.all_dead(0.1)
    survivors = {pid for pid in descendants_of(root) if (process := read_stat(pid)) and process.alive}
    assert survivors == {spared_pid, *children_of(spared_pid)}
    assert len(survivors) == 2
    assert kill_tree(root)
    assert spared_family.all_dead()
    reap(root)
    os.close(spared_family.read_fd)


def test_a_worker_can_kill_its_own_descendants_and_survive(pipe: Pipe) -> None:
    def work() -> None:
        become_subreaper()
        fork(lambda: pipe.write("child"), wait_for_ever)
        daemonise(lambda: run_chain(pipe))
        os.close(pipe.write_fd)
        pipe.read_words(2)
        assert kill_descendants(os.getpid())
        assert pipe.all_dead()

    pid = fork(work)
    os.close(pipe.write_fd)
    assert reap(pid) == 0


def kill_orphans(registered: set[int]) -> OrphanReport:
    """Kills and reaps orphans as a supervisor does."""
    own = ChildPids()
    for pid in registered:
        own.add(pid)
    report = clean_up(own, (), (), None)
    for pid in report.zombies:
        assert os.waitpid(pid, os.WNOHANG)[0] == pid
    return report


def test_kill_orphans_kills_and_reaps_only_unregistered_processes() -> None:
    def body() -> None:
        orphans, mine = Pipe(), Pipe()
        registered = fork(
            lambda: os.close(orphans.write_fd), lambda: fork(wait_for_ever), lambda: mine.write("up"), wait_for_ever
        )
        daemonise(lambda: os.close(mine.write_fd), lambda: orphans.write(f"{os.getpid()}"), wait_for_ever)
        daemonise(lambda: os.close(mine.write_fd), lambda: run_chain(orphans))
        mine.read_words(1)
        orphan = next(int(word) for word in orphans.read_words(2) if word != "chain")
        os.close(orphans.write_fd)
        assert orphan in kill_orphans({registered}).killed
        assert orphans.all_dead()
        assert children_of(os.getpid()) == [registered]
        assert len(children_of(registered)) == 1
        assert kill_orphans({registered}) == OrphanReport()
        assert kill_tree(registered)
        assert reap(registered) == -signal.SIGKILL
        kill_orphans(set())
        assert children_of(os.getpid()) == []

    in_a_subreaper(body)


def test_orphans_of_a_killed_worker_are_adopted_and_killed_by_the_supervisor() -> None:
    def body() -> None:
        pipe = Pipe()
        worker = start_worker(lambda: daemonise(lambda: pipe.write("daemon"), wait_for_ever))
        pipe.read_words(1)
        os.close(pipe.write_fd)
        os.kill(worker, signal.SIGKILL)
        assert reap(worker) == -signal.SIGKILL
        assert not pipe.all_dead(0.05)
        assert len(kill_orphans(set()).killed) == 1
        assert pipe.all_dead()

    in_a_subreaper(body)


def test_children_are_found_without_the_children_files(monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    pid = start_worker(lambda: fork(lambda: pipe.write("child"), wait_for_ever))
    pipe.read_words(1)
    with_files = (children_of(pid), descendants_of(pid))
    monkeypatch.setattr(treekill, "_children_files", False)
    assert len(with_files[0]) == 1
    assert (children_of(pid), descendants_of(pid)) == with_files
    os.close(pipe.write_fd)
    assert kill_tree(pid)
    assert pipe.all_dead()
    reap(pid)


def test_a_zombie_exists_but_is_not_alive() -> None:
    pid = fork(lambda: None)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    process = read_stat(pid)
    assert process is not None
    assert not process.alive
    assert reap(pid) == 0
    assert read_stat(pid) is None


def test_the_parent_death_signal_ends_a_child_with_its_parent(pipe: Pipe) -> None:
    def parent() -> None:
        fork(lambda: set_parent_death_signal(signal.SIGKILL), lambda: pipe.write("child"), wait_for_ever)
        wait_for_ever()

    pid = fork(parent)
    pipe.read_words(1)
    os.close(pipe.write_fd)
    os.kill(pid, signal.SIGKILL)
    assert reap(pid) == -signal.SIGKILL
    assert pipe.all_dead()


def test_a_process_that_may_not_be_signalled_is_a_survivor_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body() -> None:
        pipe = Pipe()
        # Two orphans: one can be killed, the other seems to belong to another user.
        for word in ("mine", "foreign"):
            daemonise(lambda word=word: pipe.write(f"{word} {os.getpid()}"), wait_for_ever)  # type: ignore[misc]
        words = pipe.read_words(2)
        mine, foreign = (int(words[words.index(word) + 1]) for word in ("mine", "foreign"))
        send, killpg = signal.pidfd_send_signal, os.killpg

        def refuse(pidfd: int, signum: int) -> None:
            if f"Pid:\t{foreign}\n" in Path(f"/proc/self/fdinfo/{pidfd}").read_text():
                raise PermissionError(1, "Operation not permitted")
            send(pidfd, signum)

        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
        monkeypatch.setattr(
            os, "killpg", lambda pgid, signum: None if pgid == os.getpgid(foreign) else killpg(pgid, signum)
        )
        began = time.monotonic()
        orphans = kill_orphans(set())
        assert time.monotonic() - began < 2.0
        assert (orphans.killed, orphans.survivors) == ([mine], [foreign])
        send(os.pidfd_open(foreign), signal.SIGKILL)

    in_a_subreaper(body)
