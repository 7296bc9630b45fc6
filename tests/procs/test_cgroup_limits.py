"""Limits enforced by the kernel. A plain folder replaces the group if this machine lacks the controller."""

import os
from pathlib import Path

import pytest

from forq.procs.cgroups import Cgroup, Cgroups, Delegation, Exceeded, Resources, exceeded, limit


def make_group(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in {"procs": "", "subtree_control": "", "controllers": "memory pids cpu", **files}.items():
        (path / f"cgroup.{name}").write_text(text)
    return path


@pytest.fixture
def groups(tmp_path: Path) -> Cgroups:
    """Our group with the groups of the children and of the supervisor in it, as the kernel creates them."""
    own = make_group(tmp_path / "forq.service")
    make_group(own / "forq-x-supervisor")
    return Cgroups(make_group(own / "forq-x"))


def control(path: Path) -> str:
    return (path / "cgroup.subtree_control").read_text()


def test_the_supervisor_moves_to_its_own_group_and_controllers_are_enabled_for_the_children(groups: Cgroups) -> None:
    own = groups.path.parent
    delegation = Delegation(groups, ("memory",))
    assert delegation.begin()
    assert (own / "forq-x-supervisor" / "cgroup.procs").read_text() == str(os.getpid())
    assert (control(own), control(groups.path)) == ("+memory", "+memory")
    delegation.end()
    assert (own / "cgroup.procs").read_text() == str(os.getpid())
    assert control(own).startswith("-memory")
    assert control(groups.path).startswith("-memory")


def test_controllers_enabled_by_others_stay_enabled(groups: Cgroups) -> None:
    own = groups.path.parent
    (own / "cgroup.subtree_control").write_text("memory")
    delegation = Delegation(groups, ("memory",))
    assert delegation.begin()
    delegation.end()
    assert control(own) == "memory"


def test_without_the_controllers_nothing_is_changed(groups: Cgroups) -> None:
    (groups.path.parent / "cgroup.controllers").write_text("cpu pids")
    assert not Delegation(groups).begin()
    assert (groups.path.parent / "cgroup.procs").read_text() == ""
    assert control(groups.path.parent) == ""


def test_a_refused_step_is_rolled_back(groups: Cgroups) -> None:
    (groups.path / "cgroup.subtree_control").unlink()
    assert not Delegation(groups, ("memory",)).begin()
    assert (groups.path.parent / "cgroup.procs").read_text() == str(os.getpid())
    assert control(groups.path.parent).startswith("-memory")


def test_limits_are_written_to_the_files_of_the_kernel(tmp_path: Path) -> None:
    files = ("memory.max", "memory.oom.group", "memory.swap.max", "pids.max")
    for name in files:
        (tmp_path / name).touch()
    assert limit(Cgroup(tmp_path), Resources(memory_bytes=1000, tasks=20))
    assert [(tmp_path / name).read_text() for name in files] == ["1000", "1", "0", "20"]


@pytest.mark.parametrize("there", [("memory.max",), ("pids.max",), ()])
def test_if_the_kernel_cannot_enforce_one_limit_all_are_left_to_the_warden(
    tmp_path: Path, there: tuple[str, ...]
) -> None:
    for name in there:
        (tmp_path / name).touch()
    assert not limit(Cgroup(tmp_path), Resources(memory_bytes=1000, tasks=20))


def test_a_limit_that_is_not_set_needs_no_controller(tmp_path: Path) -> None:
    (tmp_path / "pids.max").touch()
    assert limit(Cgroup(tmp_path), Resources(tasks=20))


def test_a_kill_by_the_kernel_is_reported_with_the_peak(tmp_path: Path) -> None:
    group = Cgroup(tmp_path)
    assert exceeded(group) is None, "no memory controller"
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 0\noom_group_kill 0\n")
    assert exceeded(group) is None
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 3\noom_group_kill 1\n")
    assert exceeded(group) == Exceeded("oom", None), "older kernels do not record the peak"
    (tmp_path / "memory.peak").write_text("104857600\n")
    assert exceeded(group) == Exceeded("oom", 104857600)


def test_a_real_group_enables_a_controller_for_its_children() -> None:
    """With any controller that is already enabled for our own group."""
    groups = Cgroups.find(f"forq-delegation-{os.getpid()}")
    if groups is None:
        pytest.skip("no writable cgroup2 with cgroup.kill here")
    own = groups.path.parent
    available = (own / "cgroup.controllers").read_text().split()
    if not available or (own / "cgroup.type").exists():
        groups.remove()
        pytest.skip("no controller to hand down, or not from a group that may hold processes too")
    controller = available[-1]
    before = control(own)
    delegation = Delegation(groups, (controller,))
    try:
        assert delegation.begin()
        assert controller in (groups.add("child").path / "cgroup.controllers").read_text().split()
        assert os.fsdecode(f"{groups.path.name}-supervisor") in Path("/proc/self/cgroup").read_text()
    finally:
        groups.remove()
        delegation.end()
    assert control(own) == before
    assert not groups.path.with_name(f"{groups.path.name}-supervisor").exists()
