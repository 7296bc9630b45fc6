"""The minder, step by step: without threads and forks, with a fake clock."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import orjson
import pytest

from forq.errors import RedisUnavailable
from forq.procs.scoreboard import Scoreboard, Slot, State
from forq.workers import minder as module
from forq.workers.grant import Grant
from forq.workers.minder import BEAT_SECONDS, IDLE_BEATS, Minder, ZombieReaper

SECOND_NS = 10**9


class FakeLoop:
    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.stopping = False
        self.blocked: int | None = None
        self.text: str | None = None

    def stop(self) -> None:
        self.stopping = True

    def blocked_client_id(self) -> int | None:
        return self.blocked

    def title_text(self) -> str | None:
        return self.text


class FakeRecycling:
    def __init__(self) -> None:
        self.checks = 0

    def check(self) -> None:
        self.checks += 1


class FakeLink:
    """Replaces the minder's connection to Redis."""

    calls: list[tuple[Any, ...]]
    opened: int
    closed: int
    error: Exception | None

    def __init__(self, url: str, *, name: str, timeout_seconds: float) -> None:
        FakeLink.opened += 1

    def call(self, *words: Any, at: str) -> None:
        if FakeLink.error is not None:
            raise FakeLink.error
        FakeLink.calls.append((*words, at))

    def close(self) -> None:
        FakeLink.closed += 1


class Rig:
    """A minder of two idle workers, the supervisor's end of its leash, and its clock."""

    def __init__(self, titles: str = "full") -> None:
        self.supervisor, self.leash = socket.socketpair()
        self.now_ns = 100 * SECOND_NS
        self.minder = Minder(
            name="q",
            url="unix:///nowhere",
            base="forq:{q}",
            leash=self.leash,
            titles=titles,
            clock_ns=lambda: self.now_ns,
        )
        board = Scoreboard.create(4)
        self.loops = [FakeLoop(board.slot(board.take())) for _ in range(2)]
        for loop in self.loops:
            loop.slot.state = State.IDLE
        self.sent: list[dict[str, object]] = []
        self.grants = {loop.slot.number: Grant(self.sent.append, loop.slot.number) for loop in self.loops}
        self.recycling = FakeRecycling()

    def watch(self, workers: int = 2) -> None:
        self.loops = self.loops[:workers]
        self.minder.watch(self.loops, self.grants, self.recycling)  # type: ignore[arg-type]

    def receive(self, data: bytes) -> None:
        """Sends a message from the supervisor and lets the minder read it."""
        self.supervisor.sendall(data)
        self.minder._read_leash()

    def signal(self, signum: int) -> None:
        os.write(self.minder._signals_write_fd, bytes([signum]))
        self.minder._handle_event(self.minder._signals_fd)

    def close(self) -> None:
        self.supervisor.close()
        self.leash.close()
        for fd in (self.minder._signals_fd, self.minder._signals_write_fd, self.minder._wake_fd):
            os.close(fd)


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shown: list[str] = []
    monkeypatch.setattr(module, "setproctitle", shown.append)
    monkeypatch.setattr(module, "_find_zombies", set)
    return shown


@pytest.fixture
def rig(titles: list[str]) -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> type[FakeLink]:
    FakeLink.calls, FakeLink.opened, FakeLink.closed, FakeLink.error = [], 0, 0, None
    monkeypatch.setattr(module, "Link", FakeLink)
    return FakeLink


class Exited(BaseException):
    """Raised where os._exit would end the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    steps: list[str] = []

    def leave(code: int) -> NoReturn:
        steps.append(f"exit {code}")
        raise Exited

    monkeypatch.setattr(module, "kill_descendants", lambda pid: steps.append(f"kill below {pid}"))
    monkeypatch.setattr(os, "_exit", leave)
    return steps


def test_a_message_reaches_the_grant_of_the_worker_it_names(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forq.workers.grant.ANSWER_SECONDS", 0.0)
    rig.watch()
    first, second = rig.grants.values()
    assert not first.acquire(10, 0)
    assert not second.acquire(10, 0)
    rig.receive(orjson.dumps({"go": rig.loops[1].slot.number}) + b"\n")
    assert not first.acquire(10, 0)
    assert second.acquire(10, 0)


def test_messages_may_be_joined_or_split(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forq.workers.grant.ANSWER_SECONDS", 0.0)
    rig.watch()
    for grant in rig.grants.values():
        assert not grant.acquire(10, 0)
    lines = b"".join(orjson.dumps({"go": number}) + b"\n" for number in rig.grants)
    rig.receive(lines[:12])
    rig.receive(lines[12:])
    assert all(grant.acquire(10, 0) for grant in rig.grants.values())


def test_a_ping_is_answered_with_a_beat_and_reaches_no_grant(rig: Rig) -> None:
    rig.watch()
    rig.receive(b'{"ping":0}\n')
    rig.minder.tick()
    assert [loop.slot.beat_ns for loop in rig.loops] == [rig.now_ns] * 2


def test_a_held_process_starts_after_begin(rig: Rig) -> None:
    rig.receive(b'{"begin":0}\n')
    assert rig.minder.wait_to_begin()
    assert rig.minder._begin_lock.locked(), "it waited for the lock"


def test_a_second_begin_has_no_effect(rig: Rig) -> None:
    rig.receive(b'{"begin":0}\n{"begin":0}\n')
    assert rig.minder.wait_to_begin()


def test_a_held_process_that_is_stopped_does_not_start(rig: Rig) -> None:
    rig.signal(signal.SIGTERM)
    assert not rig.minder.wait_to_begin()


def test_sigterm_stops_every_worker(rig: Rig) -> None:
    rig.watch()
    rig.signal(signal.SIGTERM)
    assert all(loop.stopping for loop in rig.loops)


def test_other_signals_stop_nothing(rig: Rig) -> None:
    rig.watch()
    rig.signal(signal.SIGCHLD)
    assert not any(loop.stopping for loop in rig.loops)


def test_a_sigterm_before_the_workers_exist_stops_them_later(rig: Rig) -> None:
    rig.signal(signal.SIGTERM)
    rig.watch()
    assert all(loop.stopping for loop in rig.loops)


def test_when_the_supervisor_is_gone_the_process_kills_its_tree_and_exits(rig: Rig, exits: list[str]) -> None:
    rig.supervisor.close()
    with pytest.raises(Exited):
        rig.minder._handle_event(rig.leash.fileno())
    assert exits == [f"kill below {os.getpid()}", "exit 1"]


def test_a_broken_leash_means_that_the_supervisor_is_gone(rig: Rig, exits: list[str]) -> None:
    class BrokenSocket:
        def recv(self, size: int) -> bytes:
            raise ConnectionResetError

    rig.minder._leash = BrokenSocket()  # type: ignore[assignment]
    with pytest.raises(Exited):
        rig.minder._read_leash()
    assert len(exits) == 2


def test_slots_contain_the_thread_of_the_minder_before_and_after_a_beat(rig: Rig) -> None:
    rig.minder._thread = 77
    rig.watch()
    assert [loop.slot.minder for loop in rig.loops] == [77, 77]
    rig.loops[0].slot.minder = 0
    rig.minder.tick()
    assert [loop.slot.minder for loop in rig.loops] == [77, 77]


def test_without_workers_a_beat_does_nothing(rig: Rig, titles: list[str]) -> None:
    for _ in range(IDLE_BEATS + 2):
        rig.minder.tick()
    assert titles == []
    assert rig.minder._poll_timeout_ms() == BEAT_SECONDS * 1000


def test_the_minder_sleeps_some_beats_after_the_last_job(rig: Rig) -> None:
    rig.watch()
    rig.loops[1].slot.state = State.BUSY
    for _ in range(5):
        rig.minder.tick()
    assert rig.minder._poll_timeout_ms() == BEAT_SECONDS * 1000, "a job runs"
    rig.loops[1].slot.state = State.IDLE
    for _ in range(IDLE_BEATS):
        rig.minder.tick()
        assert rig.minder._poll_timeout_ms() == BEAT_SECONDS * 1000
    rig.minder.tick()
    assert rig.minder._poll_timeout_ms() is None


def asleep(rig: Rig) -> None:
    for _ in range(IDLE_BEATS + 1):
        rig.minder.tick()
    assert rig.minder._poll_timeout_ms() is None


def test_a_worker_wakes_the_minder_once(rig: Rig) -> None:
    rig.watch()
    rig.minder.wake()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(rig.minder._wake_fd)
    asleep(rig)
    rig.minder.wake()
    rig.minder.wake()
    assert os.eventfd_read(rig.minder._wake_fd) == 1
    assert rig.minder._poll_timeout_ms() == BEAT_SECONDS * 1000


def test_a_woken_minder_stays_awake_for_some_beats(rig: Rig) -> None:
    rig.watch()
    asleep(rig)
    rig.minder.wake()
    rig.minder._handle_event(rig.minder._wake_fd)
    for _ in range(IDLE_BEATS):
        rig.minder.tick()
        assert rig.minder._poll_timeout_ms() == BEAT_SECONDS * 1000
    with pytest.raises(BlockingIOError):
        os.eventfd_read(rig.minder._wake_fd)


def test_a_job_that_starts_while_the_minder_falls_asleep_keeps_it_awake(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.watch()
    for _ in range(IDLE_BEATS):
        rig.minder.tick()

    def begin_a_job(title: str) -> None:
        rig.loops[0].slot.state = State.BUSY
        rig.minder.wake()

    # After the beat has checked for busy workers, before it sets `_asleep`.
    monkeypatch.setattr(module, "setproctitle", begin_a_job)
    rig.minder.tick()
    assert rig.minder._poll_timeout_ms() == BEAT_SECONDS * 1000


def test_each_beat_checks_recycling_while_a_job_runs(rig: Rig) -> None:
    rig.watch()
    rig.minder.tick()
    assert rig.recycling.checks == 0
    rig.loops[0].slot.state = State.BUSY
    rig.minder.tick()
    rig.minder.tick()
    assert rig.recycling.checks == 2


def test_only_blocked_workers_that_must_stop_are_unblocked(rig: Rig, redis: type[FakeLink]) -> None:
    rig.watch()
    rig.loops[1].blocked = 42
    rig.minder.tick()
    assert redis.opened == 0, "it must not stop"
    rig.signal(signal.SIGTERM)
    rig.minder.tick()
    assert redis.calls == [("CLIENT", "UNBLOCK", 42, "forq:{q}")]
    rig.loops[1].blocked = None
    rig.minder.tick()
    assert (redis.opened, redis.closed) == (1, 1)


def test_unblocking_is_retried_at_growing_intervals(
    rig: Rig, redis: type[FakeLink], caplog: pytest.LogCaptureFixture
) -> None:
    rig.watch()
    rig.loops[0].blocked = 42
    rig.signal(signal.SIGTERM)
    redis.error = RedisUnavailable("no server")
    timeouts = [rig.minder._poll_timeout_ms()]
    for _ in range(6):
        rig.minder.tick()
        timeouts.append(rig.minder._poll_timeout_ms())
    assert timeouts == [50, 100, 200, 400, 800, 1000, 1000]
    assert (redis.opened, redis.closed) == (6, 6)
    assert "failed to unblock a worker; retrying name=q error=no server" in caplog.text


def test_a_stopping_process_does_not_sleep(rig: Rig, redis: type[FakeLink]) -> None:
    rig.watch()
    asleep(rig)
    rig.signal(signal.SIGTERM)
    assert rig.minder._poll_timeout_ms() == 50


def test_the_title_of_one_worker_shows_its_state_or_its_job(rig: Rig, titles: list[str]) -> None:
    rig.watch(workers=1)
    slot = rig.loops[0].slot
    slot.done = 1234
    rig.minder.tick()
    slot.state, slot.job, slot.started_ns = State.BUSY, b"mail-7", rig.now_ns
    rig.now_ns += 2_500_000_000
    rig.minder.tick()
    assert titles == ["forq: q idle 1,234 done", "forq: q busy mail-7 2.5s 1,234 done"]


def test_a_title_shows_the_progress_of_the_job(rig: Rig, titles: list[str]) -> None:
    rig.watch(workers=1)
    slot = rig.loops[0].slot
    slot.state, slot.job, slot.started_ns = State.BUSY, b"mail-7", rig.now_ns
    slot.position = 1
    assert slot.show_progress(1, 0.5, "half way")
    rig.minder.update_title()
    assert titles == ["forq: q busy mail-7 0.0s 50% half way, 0 done"]


def test_a_plain_title_names_no_job(titles: list[str]) -> None:
    rig = Rig(titles="plain")
    rig.watch(workers=1)
    slot = rig.loops[0].slot
    slot.state, slot.job, slot.started_ns = State.BUSY, b"secret", rig.now_ns
    rig.minder.tick()
    assert titles == ["forq: q busy 0.0s 0 done"]
    rig.close()


def test_the_title_of_several_workers_counts_the_busy_ones(rig: Rig, titles: list[str]) -> None:
    rig.watch()
    rig.loops[0].slot.state = State.BUSY
    rig.loops[0].slot.done, rig.loops[1].slot.done = 2, 3
    rig.minder.tick()
    assert titles == ["forq: q 1/2 busy 5 done"]


def test_a_loop_may_set_its_own_title(rig: Rig, titles: list[str]) -> None:
    rig.loops[0].text = "on request"
    rig.watch(workers=1)
    rig.minder.update_title()
    assert titles == ["forq: q on request"]


class Ended(BaseException):
    """Ends the minder's thread, which otherwise never ends."""


def test_an_error_in_one_pass_is_logged_and_the_minder_continues(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.watch()
    passes: list[float | None] = []

    class Poll:
        def register(self, fd: int, events: int) -> None:
            pass

        def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
            passes.append(timeout_ms)
            if len(passes) == 2:
                raise Ended
            return [(rig.leash.fileno(), 1)]

    monkeypatch.setattr("forq.workers.minder.select.poll", Poll)
    rig.supervisor.sendall(b"not JSON\n")
    with pytest.raises(Ended):
        rig.minder._run()
    assert passes == [BEAT_SECONDS * 1000] * 2
    assert "minder failed name=q" in caplog.text


def test_a_pass_reads_ready_input_before_its_beat(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.watch()
    registered: list[int] = []

    class Poll:
        def register(self, fd: int, events: int) -> None:
            registered.append(fd)

        def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
            if rig.loops[0].slot.beat_ns:
                raise Ended
            return [(rig.minder._signals_fd, 1)]

    monkeypatch.setattr("forq.workers.minder.select.poll", Poll)
    os.write(rig.minder._signals_write_fd, bytes([signal.SIGTERM]))
    with pytest.raises(Ended):
        rig.minder._run()
    assert rig.loops[0].stopping
    assert rig.loops[0].slot.minder == threading.get_native_id()
    assert set(registered) == {rig.leash.fileno(), rig.minder._signals_fd, rig.minder._wake_fd}


@pytest.fixture
def reaped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    pids: list[int] = []
    monkeypatch.setattr(os, "waitpid", lambda pid, flags: pids.append(pid))
    return pids


def zombies(monkeypatch: pytest.MonkeyPatch, *pids: int) -> None:
    monkeypatch.setattr(module, "_find_zombies", lambda: set(pids))


def test_a_zombie_seen_twice_in_a_row_without_a_job_is_reaped(
    monkeypatch: pytest.MonkeyPatch, reaped: list[int]
) -> None:
    reaper = ZombieReaper()
    zombies(monkeypatch, 10)
    reaper.reap(idle=True)
    assert reaped == []
    zombies(monkeypatch, 10, 11)
    reaper.reap(idle=True)
    assert reaped == [10]


def test_a_zombie_is_not_reaped_if_a_job_ran_in_between(monkeypatch: pytest.MonkeyPatch, reaped: list[int]) -> None:
    reaper = ZombieReaper()
    zombies(monkeypatch, 10)
    reaper.reap(idle=True)
    reaper.reap(idle=False)
    reaper.reap(idle=True)
    assert reaped == []
    reaper.reap(idle=True)
    assert reaped == [10]


def test_programs_of_exec_handlers_are_not_reaped(monkeypatch: pytest.MonkeyPatch, reaped: list[int]) -> None:
    monkeypatch.setattr(module, "running_programs", lambda: frozenset({10}))
    reaper = ZombieReaper()
    zombies(monkeypatch, 10, 11)
    reaper.reap(idle=True)
    reaper.reap(idle=True)
    assert reaped == [11]


def test_a_zombie_already_reaped_by_a_handler_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int, flags: int) -> NoReturn:
        raise ChildProcessError

    monkeypatch.setattr(os, "waitpid", gone)
    reaper = ZombieReaper()
    zombies(monkeypatch, 10)
    reaper.reap(idle=True)
    reaper.reap(idle=True)


def test_beats_reap_zombies_only_while_no_job_runs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, reaped: list[int]
) -> None:
    rig.watch()
    zombies(monkeypatch, 10)
    rig.loops[0].slot.state = State.BUSY
    for _ in range(3):
        rig.minder.tick()
    assert reaped == []
    rig.loops[0].slot.state = State.IDLE
    rig.minder.tick()
    rig.minder.tick()
    assert reaped == [10]
