"""Which children belong to the supervisor: a child forked during a check is never treated as an orphan."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial

from forq.procs import orphans
from forq.procs.orphans import ChildPids
from forq.procs.treekill import children_of
from tests.support.drive.processes import in_a_process_of_its_own


def fork(run: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    return pid


def ended(pid: int, seconds: float = 20.0) -> int | None:
    """Returns its exit code, or None if it is still running."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def test_the_shared_memory_always_matches_the_set_of_children() -> None:
    own, chance, wanted = ChildPids(), random.Random(7), set[int]()
    for _ in range(2000):
        pid = chance.randrange(1, 60)
        if chance.random() < 0.5:
            own.add(pid)
            wanted.add(pid)
        else:
            own.discard(pid)
            wanted.discard(pid)
        assert all((pid in own) == (pid in wanted) for pid in range(60))
        own.owner = os.getppid()
        assert own.read_with(lambda: [1], time.monotonic() + 5) == ([1], frozenset(wanted))


def test_a_list_of_children_read_during_a_fork_is_discarded() -> None:
    own, looks = ChildPids(), 0
    own.owner = os.getppid()

    def children() -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 1:
            with own.forking():
                own.add(7)
        return [7]

    assert own.read_with(children, time.monotonic() + 5) == ([7], frozenset({7}))
    assert looks == 2


def test_no_orphans_are_found_during_a_fork_or_without_the_supervisor() -> None:
    own = ChildPids()
    own.owner = os.getppid()
    with own.forking():
        assert own.read_with(lambda: [7], time.monotonic() + 0.05) == ([], frozenset())
    own.owner = 1 if os.getppid() != 1 else 2
    assert own.read_with(lambda: [7], time.monotonic() + 5) == ([], frozenset())


def test_another_process_kills_orphans_and_spares_the_supervisors_children() -> None:
    def check() -> None:
        own = ChildPids()
        reading, writing = os.pipe()

        def clean_up() -> None:
            report = orphans.clean_up(own, [], [], None)
            os.write(writing, f"{report.killed} {report.zombies}".encode())

        with own.forking():
            mine = fork(signal.pause)
            own.add(mine)
        orphan = fork(signal.pause)
        with own.forking():
            warden = fork(clean_up)
            own.add(warden)
        assert os.read(reading, 100).decode() == f"[{orphan}] [{orphan}]"
        assert ended(warden) == 0
        assert ended(orphan) == -signal.SIGKILL, "the supervisor reaps it"
        assert ended(mine, 0.05) is None
        os.kill(mine, signal.SIGKILL)

    in_a_process_of_its_own(check)


def test_children_forked_while_another_process_kills_orphans_survive() -> None:
    def check() -> None:
        own = ChildPids()

        def kill() -> None:
            for _ in range(300):
                orphans.clean_up(own, [], [], None)

        with own.forking():
            warden = fork(kill)
            own.add(warden)
        mine: list[int] = []
        while os.waitpid(warden, os.WNOHANG)[0] == 0:
            with own.forking():
                mine.append(fork(signal.pause))
                own.add(mine[-1])
            if len(mine) > 20:
                pid = mine.pop(0)
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it was killed"
                os.kill(pid, signal.SIGKILL)
                assert ended(pid) == -signal.SIGKILL
                own.discard(pid)
        assert len(mine) > 5
        assert sorted(children_of(os.getpid())) == sorted(mine)
        for pid in mine:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it was killed"
            os.kill(pid, signal.SIGKILL)

    in_a_process_of_its_own(check)


def test_an_orphan_that_could_not_be_killed_is_not_waited_for_again() -> None:
    def check() -> None:
        own = ChildPids()
        survivor = fork(signal.pause)
        with own.forking():
            warden = fork(partial(orphans.clean_up, own, [survivor], [], None))
            own.add(warden)
        assert ended(warden) == 0
        assert ended(survivor, 0.05) is None
        os.kill(survivor, signal.SIGKILL)

    in_a_process_of_its_own(check)
