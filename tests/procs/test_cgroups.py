"""Control groups on machines with and without writable cgroups."""

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from forq.procs.cgroups import Cgroups


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    groups = Cgroups.find(f"forq-test-{os.getpid()}")
    if groups is None:
        pytest.skip("no writable cgroup2 with cgroup.kill here")
    yield groups
    assert groups.remove(), "processes were left in the group"
    assert not groups.path.exists()


def fork_pausing() -> int:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def test_kill_ends_a_daemonised_grandchild_in_one_write(groups: Cgroups) -> None:
    group = groups.add("q.main")
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        group.join(0)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write_fd, b"x")
                signal.pause()
            os._exit(0)
        signal.pause()
        os._exit(0)
    assert os.read(read_fd, 1) == b"x"
    os.close(write_fd)
    assert group.populated()
    assert group.kill()
    assert not group.populated()
    assert select.select([read_fd], [], [], 1.0)[0]
    assert os.read(read_fd, 1) == b""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    os.close(read_fd)
    assert group.remove()
    assert not group.path.exists()


def test_a_process_can_be_moved_in_and_others_are_left_alone(groups: Cgroups) -> None:
    inside, outside = fork_pausing(), fork_pausing()
    group = groups.add("q.main")
    assert not group.populated()
    group.join(inside)
    assert not group.remove(0.01)
    assert group.kill()
    assert os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]) == -signal.SIGKILL
    assert os.waitpid(outside, os.WNOHANG) == (0, 0)
    os.kill(outside, signal.SIGKILL)
    os.waitpid(outside, 0)


def test_a_removed_group_is_empty_and_killing_it_is_not_an_error(groups: Cgroups) -> None:
    group = groups.add("q.main")
    assert group.remove()
    assert group.kill()
    assert not group.populated()
    assert group.remove()


def test_remove_includes_groups_created_by_a_job(groups: Cgroups) -> None:
    group = groups.add("q.main")
    (group.path / "inner").mkdir()
    assert group.remove()
    assert not group.path.exists()


def mounts_file(tmp_path: Path, mount: Path) -> str:
    file = tmp_path / "mounts"
    file.write_text(f"proc /proc proc rw 0 0\ntmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup2 {mount} cgroup2 rw 0 0\n")
    return str(file)


def test_find_is_none_without_a_cgroup2_mount(tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n")
    assert Cgroups.find("forq", mounts=str(tmp_path / "mounts")) is None


def test_find_is_none_when_proc_files_are_missing(tmp_path: Path) -> None:
    assert Cgroups.find("forq", mounts=str(tmp_path / "nothing")) is None
    assert Cgroups.find("forq", mounts=mounts_file(tmp_path, tmp_path), own=str(tmp_path / "nothing")) is None


def test_find_is_none_and_leaves_nothing_behind_without_cgroup_kill(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    mount.mkdir()
    (mount / "cgroup.procs").touch()
    own = tmp_path / "own"
    own.write_text("1:cpu:/x\n0::/\n")
    assert Cgroups.find("forq", mounts=mounts_file(tmp_path, mount), own=str(own)) is None
    assert not (mount / "forq").exists()


def test_find_is_none_when_the_directory_cannot_be_created(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/no/such/group\n")
    assert Cgroups.find("forq", mounts=mounts_file(tmp_path, tmp_path), own=str(own)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_find_is_none_for_a_user_without_write_permission() -> None:
    pid = os.fork()
    if pid == 0:
        os.setresuid(65534, 65534, 65534)
        os._exit(0 if Cgroups.find(f"forq-nobody-{os.getpid()}") is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
