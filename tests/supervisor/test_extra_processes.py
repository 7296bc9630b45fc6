"""When and how many helpers are started, and what follows their ends. Processes, loop and admission are fakes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from forq.errors import ExitCode, ForqError
from forq.procs.scoreboard import Role
from forq.supervisor.child import Exit
from forq.supervisor.extra_processes import HelperProcesses
from forq.supervisor.process import Member
from forq.supervisor.queue import ServedQueue

FINE = Exit(ExitCode.STOPPED, None)
CRASHED = Exit(1, None)


@dataclass
class FakeProcess:
    role: Role
    pid: int = 7
    now: str = "starting"
    jobs_done: int = 0
    begun: bool = False
    announced: int | None = None
    recovered: bool = False
    retired: bool = False
    child: Any = field(default_factory=lambda: SimpleNamespace(survivors=set()))

    def state(self) -> str:
        return self.now

    def done(self) -> int:
        return self.jobs_done

    def began(self) -> bool:
        return self.begun

    def announced_code(self, how: Exit) -> int | None:
        return self.announced

    def recover(self, how: Exit) -> None:
        self.recovered = True

    def retire(self) -> None:
        self.retired = True


@dataclass
class Rig:
    """`starting`: processes that wait for admission."""

    served: bool = True
    refused: bool = False
    time: float = 100.0
    units: int = 1000
    starting: list[Callable[[], None]] = field(default_factory=list)
    notified: list[str] = field(default_factory=list)
    deps: Any = None

    def __post_init__(self) -> None:
        deps: Any = SimpleNamespace(
            children=SimpleNamespace(loop=SimpleNamespace(now=lambda: self.time)),
            admission=SimpleNamespace(submit=self.starting.append),
            grants=SimpleNamespace(unused_units=lambda: self.units),
            changed=lambda: None,
            queue_gone=lambda name: self.notified.append(f"gone {name}"),
            heartbeat=lambda name: self.notified.append(f"heartbeat {name}"),
        )
        self.deps = deps
        self.helpers = HelperProcesses("q", deps, make=self._make, wanted=lambda: self.served, gone=lambda: None)

    def _make(self, member: Member, owner: Any) -> Any:
        if self.refused:
            raise ForqError("no slot")
        return FakeProcess(member.role)

    def admit(self) -> list[FakeProcess]:
        """Starts all waiting processes; returns all processes."""
        waiting, self.starting[:] = list(self.starting), []
        for start in waiting:
            start()
        return self.helpers.processes  # type: ignore[return-value]

    def want(self, jobs: int, most: int = 4, room: int = 100) -> int:
        """The number of processes after all requested ones have started."""
        self.helpers.want(Role.SUSPECT, jobs, most=most, room=room)
        return len(self.admit())


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize(
    ("jobs", "most", "room", "started"), [(3, 4, 100, 3), (9, 4, 100, 4), (9, 4, 2, 2), (0, 4, 100, 0), (9, 4, -3, 0)]
)
def test_one_helper_is_started_per_waiting_job_within_the_limits(jobs: int, most: int, room: int, started: int) -> None:
    assert Rig().want(jobs, most, room) == started


def test_a_helper_about_to_claim_is_not_started_twice(rig: Rig) -> None:
    for _ in range(5):
        rig.helpers.want(Role.SUSPECT, 2, most=4, room=100)
    assert len(rig.starting) == 2, "requested and not started yet"
    first, second = rig.admit()
    assert rig.want(2) == 2, "starting"
    first.now = "busy"
    second.now = "parked"
    assert rig.want(1) == 2, "one of them waits for capacity"
    assert rig.want(2) == 3
    assert rig.want(9) == 4


def test_helpers_of_one_kind_do_not_count_for_the_other(rig: Rig) -> None:
    assert rig.want(4) == 4
    rig.helpers.want(Role.FAIL, 1, most=1, room=1)
    assert [process.role for process in rig.admit()][-1] == Role.FAIL
    rig.helpers.want(Role.FAIL, 1, most=1, room=1)
    assert len(rig.admit()) == 5


def test_no_helper_is_started_after_its_queue_was_stopped(rig: Rig) -> None:
    rig.helpers.want(Role.SUSPECT, 2, most=4, room=100)
    rig.served = False
    assert rig.admit() == []
    rig.served = True
    assert rig.want(2) == 2, "the earlier request is forgotten"


def test_a_helper_that_found_no_job_ends_without_effect(rig: Rig) -> None:
    rig.want(1)
    (process,) = rig.admit()
    process.announced = ExitCode.STOPPED
    rig.helpers.process_ended(process, FINE)  # type: ignore[arg-type]
    assert (process.recovered, rig.helpers.processes, rig.notified) == (True, [], [])


def test_after_a_helper_that_ran_a_job_the_waiting_jobs_are_checked(rig: Rig) -> None:
    """It may have been recycled, or its queue may have reached a limit temporarily."""
    rig.want(1)
    (process,) = rig.admit()
    rig.helpers.replace_process(process, "max_jobs")  # type: ignore[arg-type]
    assert process.retired
    process.jobs_done = 1
    process.announced = ExitCode.STOPPED
    rig.helpers.process_ended(process, FINE)  # type: ignore[arg-type]
    assert rig.notified == ["heartbeat q"]


def test_a_job_that_kills_its_process_delays_no_other(rig: Rig) -> None:
    for _ in range(20):
        assert rig.want(1) == 1
        (process,) = rig.admit()
        process.begun = True
        rig.helpers.process_ended(process, CRASHED)  # type: ignore[arg-type]


def test_a_helper_that_dies_before_its_first_job_is_restarted_with_growing_delays(rig: Rig) -> None:
    pauses = []
    for _ in range(4):
        assert rig.want(1) == 1
        (process,) = rig.admit()
        rig.helpers.process_ended(process, CRASHED)  # type: ignore[arg-type]
        died = rig.time
        while rig.want(1) == 0:
            rig.time += 0.01
        pauses.append(rig.time - died)
        rig.helpers.processes.clear()
    assert 0.05 < pauses[0] < 0.2 < pauses[2] < pauses[3] < 1.5


@pytest.mark.parametrize("code", [ExitCode.STOPPED, ExitCode.QUEUE_GONE, ExitCode.FENCED])
def test_an_unannounced_exit_code_counts_as_a_crash(rig: Rig, code: int) -> None:
    rig.want(1)
    (process,) = rig.admit()
    rig.helpers.process_ended(process, Exit(code, None))  # type: ignore[arg-type]
    assert rig.notified == []
    assert rig.want(1) == 0, "the next one is delayed"


@pytest.mark.parametrize(("code", "notified"), [(ExitCode.QUEUE_GONE, "gone q"), (ExitCode.FENCED, "heartbeat q")])
def test_an_announced_exit_code_is_passed_on(rig: Rig, code: int, notified: str) -> None:
    rig.want(1)
    (process,) = rig.admit()
    process.announced = code
    rig.helpers.process_ended(process, Exit(code, None))  # type: ignore[arg-type]
    assert rig.notified == [notified]


def test_without_a_free_slot_or_process_the_next_check_tries_again(rig: Rig) -> None:
    rig.refused = True
    assert rig.want(2) == 0
    rig.refused = False
    assert rig.want(2) == 2


@pytest.mark.parametrize(
    ("waiting", "retry", "units", "started"),
    [
        (5, "parked", 1000, 3),
        (3, "parked", 1000, 2),
        (1, "parked", 1000, 0),
        (1, "busy", 1000, 1),
        (2, "starting", 1000, 2),
        (5, "busy", 25, 2),
        (5, "busy", 9, 0),
    ],
)
def test_the_retry_process_runs_one_suspect_and_capacity_limits_the_helpers(
    rig: Rig, waiting: int, retry: str, units: int, started: int
) -> None:
    options = {"concurrency": 3, "size": 10}
    queue = ServedQueue(SimpleNamespace(name="q", mode="work", fail_handler=None), options, rig.deps)  # type: ignore[arg-type]
    queue._wanted = True
    queue._entries[1].process = FakeProcess(Role.RETRY, now=retry)  # type: ignore[assignment]
    rig.units = units
    queue.suspects_wait(waiting)
    assert len(rig.starting) == started
    queue.suspects_wait(waiting)
    assert len(rig.starting) == started, "the second call changes nothing"
