"""Starting children: what they inherit, how signals reach them, how they end."""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forq.procs.cgroups import Cgroups
from forq.procs.loop import Loop
from forq.procs.treekill import kill_tree
from forq.supervisor.child import Exit, ProcessHandle, exec_program, reap, signal_child, spawn


@pytest.fixture
def children() -> Iterator[list[ProcessHandle]]:
    """The children of the test; killed and reaped at its end."""
    children: list[ProcessHandle] = []
    yield children
    for child in children:
        kill_tree(child.pid)
        with suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        child.close()


def end_of(child: ProcessHandle, seconds: float = 5.0) -> Exit:
    assert select.select([child.pidfd], [], [], seconds)[0], "the child did not end"
    result = reap(child)
    assert result is not None
    return result


def wait_forever() -> int:
    """Ends only if the test failed to end it."""
    signal.alarm(20)
    while True:
        signal.pause()


def run_and_report(children: list[ProcessHandle], report: Callable[[], Any], **options: Any) -> Any:
    """Returns the result of `report` in a child."""
    read_fd, write_fd = os.pipe()

    def run() -> int:
        os.write(write_fd, json.dumps(report()).encode())
        return 0

    keep_fds = [write_fd, *options.pop("keep_fds", ())]
    child = spawn(run, loop=options.pop("loop", None), keep_fds=keep_fds, title="forq: test", **options)
    children.append(child)
    os.close(write_fd)
    with open(read_fd, "rb") as file:
        content = file.read()
    assert end_of(child) == Exit(0, None)
    return json.loads(content)


def raise_error() -> int:
    raise ValueError("went wrong")


def raise_exit(code: Any) -> int:
    raise SystemExit(code)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda: 0, "exit 0"),
        (lambda: 78, "exit 78"),
        (lambda: 256, "exit 1"),
        (raise_error, "exit 1"),
        (lambda: raise_exit(None), "exit 0"),
        (lambda: raise_exit(3), "exit 3"),
        (lambda: raise_exit("reason"), "exit 1"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9 (SIGKILL)"),
        (lambda: os.abort(), "signal 6 (SIGABRT)"),
    ],
)
def test_the_exit_of_a_child_is_described(run: Callable[[], int], text: str, children: list[ProcessHandle]) -> None:
    child = spawn(run, loop=None, keep_fds=(), title="forq: test")
    children.append(child)
    assert end_of(child).text == text


def test_an_exception_is_shown_on_stderr(children: list[ProcessHandle], capfd: pytest.CaptureFixture[str]) -> None:
    child = spawn(raise_error, loop=None, keep_fds=(), title="forq: test")
    children.append(child)
    end_of(child)
    assert "ValueError: went wrong" in capfd.readouterr().err


def test_buffered_output_is_written_once_and_output_of_the_child_is_not_lost(tmp_path: Path) -> None:
    """Runs in a separate process, because pytest replaces the standard streams."""
    program = """
import sys
from forq.supervisor.child import spawn
import os
print("from the parent")
child = spawn(lambda: print("from the child") or 0, loop=None, keep_fds=(), title="t")
os.waitpid(child.pid, 0)
"""
    output = tmp_path / "output"
    fd = os.open(output, os.O_WRONLY | os.O_CREAT)
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", program],
        {**os.environ, "PYTHONUNBUFFERED": ""},
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, 1)],
    )
    os.close(fd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert output.read_text() == "from the parent\nfrom the child\n"


def test_reap_is_none_while_the_child_runs_and_unknown_when_another_reaped_it(children: list[ProcessHandle]) -> None:
    child = spawn(wait_forever, loop=None, keep_fds=(), title="forq: test")
    children.append(child)
    assert reap(child) is None
    assert signal_child(child, signal.SIGTERM)
    os.waitpid(child.pid, 0)
    assert reap(child) == Exit(None, None)
    assert "unknown" in Exit(None, None).text
    assert not signal_child(child, signal.SIGTERM)


def test_a_child_has_only_the_descriptors_to_keep(children: list[ProcessHandle]) -> None:
    pipes = [os.pipe() for _ in range(10)]
    kept = [pipes[2][0], pipes[7][1]]
    open_fds = run_and_report(children, lambda: [int(fd) for fd in os.listdir("/proc/self/fd")], keep_fds=kept)
    assert {0, 1, 2, *kept} <= set(open_fds)
    # Besides the reporting pipe and the descriptor of the listing.
    assert len(set(open_fds)) == 3 + len(kept) + 2
    for fd in (fd for pair in pipes for fd in pair):
        os.fstat(fd)
        os.close(fd)


def test_a_child_has_its_own_session_and_title(children: list[ProcessHandle]) -> None:
    pid, sid, title = run_and_report(
        children, lambda: [os.getpid(), os.getsid(0), Path("/proc/self/cmdline").read_text()]
    )
    assert pid == sid != os.getsid(0)
    assert title.startswith("forq: test")


@pytest.mark.parametrize("subreaper", [True, False])
def test_a_child_adopts_its_orphans_if_it_is_a_subreaper(subreaper: bool, children: list[ProcessHandle]) -> None:
    def parent_of_orphan() -> list[int]:
        read_fd, write_fd = os.pipe()
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork() == 0:
                while os.getppid() == middle:
                    time.sleep(0.001)
                os.write(write_fd, str(os.getppid()).encode())
            os._exit(0)
        os.close(write_fd)
        os.waitpid(middle, 0)
        return [os.getpid(), int(os.read(read_fd, 20))]

    own, adopter = run_and_report(children, parent_of_orphan, subreaper=subreaper)
    assert (own == adopter) is subreaper


def test_a_child_of_a_loop_has_default_handlers_and_no_blocked_signals(children: list[ProcessHandle]) -> None:
    loop = Loop()
    loop.on_signal(signal.SIGTERM, lambda: None)
    loop.on_signal(signal.SIGHUP, lambda: None)

    def dispositions() -> list[Any]:
        changed = [s for s in signal.valid_signals() if signal.getsignal(s) is not signal.SIG_DFL]
        return [sorted(changed), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))]

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert run_and_report(children, dispositions, loop=loop) == [[signal.SIGPIPE, signal.SIGXFSZ], []]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    loop.close()


def test_the_loop_of_the_parent_continues_after_a_spawn(children: list[ProcessHandle]) -> None:
    loop = Loop()
    read_fd, write_fd = os.pipe()
    received: list[bytes] = []
    loop.add_reader(read_fd, lambda: received.append(os.read(read_fd, 10)))
    child = spawn(lambda: 5, loop=loop, keep_fds=(), title="forq: test")
    children.append(child)
    ends: list[Exit | None] = []
    loop.watch_child(child.pidfd, lambda: ends.append(reap(child)))
    os.write(write_fd, b"x")
    deadline = time.monotonic() + 5
    while not (received and ends) and time.monotonic() < deadline:
        loop.tick(0.05)
    assert received == [b"x"]
    assert ends == [Exit(5, None)]
    loop.close()
    os.close(read_fd)
    os.close(write_fd)


def exit_on_term() -> int:
    """Installs its handler late, like a worker that imports many modules."""
    time.sleep(0.01)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(42))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return wait_forever()


def test_a_term_right_after_the_fork_is_handled_50_of_50_times(children: list[ProcessHandle]) -> None:
    loop = Loop()
    loop.on_signal(signal.SIGTERM, lambda: None)
    for _ in range(50):
        child = spawn(exit_on_term, loop=loop, keep_fds=(), title="forq: test", handled=[signal.SIGTERM])
        assert signal_child(child, signal.SIGTERM)
        children.append(child)
    assert [end_of(child).text for child in children] == ["exit 42"] * 50
    loop.close()


def test_an_unhandled_term_ends_the_child_50_of_50_times(children: list[ProcessHandle]) -> None:
    loop = Loop()
    loop.on_signal(signal.SIGTERM, lambda: None)
    for _ in range(50):
        children.append(spawn(wait_forever, loop=loop, keep_fds=(), title="forq: test"))
        assert signal_child(children[-1], signal.SIGTERM)
    assert {end_of(child).text for child in children} == {"signal 15 (SIGTERM)"}
    loop.close()


def test_a_child_joins_its_cgroup_before_it_runs(children: list[ProcessHandle]) -> None:
    groups = Cgroups.find(f"forq-spawn-{os.getpid()}")
    if groups is None:
        pytest.skip("no writable cgroup2 with cgroup.kill here")
    group = groups.add("q.main")
    own = run_and_report(children, lambda: Path("/proc/self/cgroup").read_text(), cgroup=group)
    assert f"forq-spawn-{os.getpid()}/q.main" in own
    child = spawn(wait_forever, loop=None, keep_fds=(), title="forq: test", cgroup=group)
    children.append(child)
    deadline = time.monotonic() + 5
    while not group.populated() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert group.kill()
    assert end_of(child).text == "signal 9 (SIGKILL)"
    assert groups.remove()


def test_a_program_gets_its_arguments_environment_output_and_kept_descriptors(
    children: list[ProcessHandle], tmp_path: Path
) -> None:
    output = os.open(tmp_path / "output", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    kept_read, kept_write = os.pipe()
    script = f'echo "$GREETING $1"; echo problem >&2; echo kept >/proc/self/fd/{kept_write}; ls /proc/self/fd | wc -l'
    child = exec_program(
        ["/bin/sh", "-c", script, "sh", "world"],
        loop=None,
        keep_fds=[kept_write],
        env={"GREETING": "hello", "PATH": os.environ["PATH"]},
        stdout_fd=output,
        stderr_fd=output,
    )
    children.append(child)
    os.close(kept_write)
    assert end_of(child) == Exit(0, None)
    lines = (tmp_path / "output").read_text().splitlines()
    assert lines[:2] == ["hello world", "problem"]
    # 0, 1, 2, the kept one, and the one with which ls reads the directory.
    assert int(lines[2]) == 5
    assert os.read(kept_read, 10) == b"kept\n"
    os.close(kept_read)
    os.close(output)


def test_a_program_that_cannot_be_run_exits_with_127_and_the_reason(
    children: list[ProcessHandle], capfd: pytest.CaptureFixture[str]
) -> None:
    child = exec_program(["/no/such/program"], loop=None, keep_fds=(), env={})
    children.append(child)
    assert end_of(child).text == "exit 127"
    assert "cannot run /no/such/program: No such file or directory" in capfd.readouterr().err


def test_a_program_starts_with_default_signals(children: list[ProcessHandle], tmp_path: Path) -> None:
    output = os.open(tmp_path / "output", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    child = exec_program(
        ["/bin/grep", "^Sig[BI]", "/proc/self/status"], loop=None, keep_fds=(), env={}, stdout_fd=output
    )
    children.append(child)
    assert end_of(child) == Exit(0, None)
    os.close(output)
    names = (tmp_path / "output").read_text().split()[::2]
    masks = [int(mask, 16) for mask in (tmp_path / "output").read_text().split()[1::2]]
    # Two signals belong to the C library. They cannot be reset, and the tests may have inherited them as ignored.
    ours = sum(1 << (signum - 1) for signum in signal.valid_signals())
    assert (names, [mask & ours for mask in masks]) == (["SigBlk:", "SigIgn:"], [0, 0])


def test_a_program_dies_with_its_parent(children: list[ProcessHandle]) -> None:
    read_fd, write_fd = os.pipe()

    def parent() -> int:
        exec_program(["/bin/sleep", "60"], loop=None, keep_fds=[write_fd], env={}, death_signal=signal.SIGTERM)
        os.close(write_fd)
        return wait_forever()

    child = spawn(parent, loop=None, keep_fds=[write_fd], title="forq: test")
    children.append(child)
    os.close(write_fd)
    deadline = time.monotonic() + 5
    while b"sleep" not in descendants_commands(child.pid) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert b"sleep" in descendants_commands(child.pid)
    signal_child(child, signal.SIGKILL)
    assert select.select([read_fd], [], [], 5.0)[0]
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)


def descendants_commands(pid: int) -> bytes:
    return b" ".join(
        Path(f"/proc/{child}/comm").read_bytes().strip()
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    )
