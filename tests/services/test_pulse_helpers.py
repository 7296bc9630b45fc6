"""Pulse without a server: what it logs of rescues, and when it tells the supervisor that jobs need helpers."""

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from forq.broker.recovery import Heartbeat, Position, Recovered
from forq.procs.scoreboard import Role, Scoreboard, State
from forq.services.pulse import Pulse
from tests.support.drive.contexts import context

# What the clock of its timers says.
CLOCK = [1000.0]
NOWHERE = Position("w", 1, 0, True)
RECOVERY: dict[str, Any] = dict.fromkeys(("micros", "stack", "peak_bytes", "output")) | {
    "queue": "q",
    "processor": "p",
    "with_fail_queue": False,
    "worker": "w",
    "turn": 1,
    "index": 0,
    "outcome": "suspect",
    "cause": "signal 9",
}


class Beats:
    """Answers heartbeats; `helpers_wanted`: queue -> for how many jobs."""

    def __init__(self, pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
        self.helpers_wanted: dict[str, int] = {}
        self.sent: list[str] = []
        self.told: list[dict[str, Any]] = []
        pulse._queues = ["q", "q#fail"]
        monkeypatch.setattr(pulse._recovery, "heartbeats", self._beat)
        monkeypatch.setattr(pulse._recovery, "recover", lambda *at, **how: Recovered(0))
        monkeypatch.setattr(pulse._recovery, "promote", lambda queue: None)
        monkeypatch.setattr(pulse._rpc, "notify", lambda event, **fields: self.told.append({"event": event, **fields}))
        pulse._redis_ok = True

    def _beat(self, queues: list[str], expiry_ms: int, positions: object) -> Iterator[tuple[str, Heartbeat]]:
        self.sent += queues
        yield from ((queue, Heartbeat([], None, False, {}, self.helpers_wanted.get(queue, 0))) for queue in queues)


@pytest.fixture
def beats(pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> Beats:
    return Beats(pulse, monkeypatch)


def call_timers(pulse: Pulse, within: float) -> None:
    """Those that are due within so many seconds."""
    CLOCK[0] += within
    pulse._loop.tick(0)


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    ours, theirs = socket.socketpair()
    given = context(
        url="unix:///nowhere",
        prefix="forq:",
        processor="p",
        heartbeat_seconds=10.0,
        expiry_ms=30_000,
        scoreboard=Scoreboard.create(4),
        watch_fd=-1,
    )
    yield Pulse(given, theirs, now=lambda: CLOCK[0])
    ours.close()
    theirs.close()


def test_many_rescues_are_one_line_a_minute_per_queue(
    pulse: Pulse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end_of_the_minute() -> None:
        call_timers(pulse, 60)

    def lines() -> list[str]:
        found = [record.getMessage().partition(" queue=")[2] for record in caplog.records]
        caplog.clear()
        return found

    monkeypatch.setattr(pulse._recovery, "rescue", lambda queue, at: 3)
    caplog.set_level(logging.INFO, "forq")
    for _ in range(100):
        assert pulse._batches.rescue("a", NOWHERE)
    assert pulse._batches.rescue("b", NOWHERE)
    assert lines() == ["a jobs=3", "b jobs=3"]
    end_of_the_minute()
    assert lines() == ["a jobs=297"]
    end_of_the_minute()
    assert lines() == []
    assert pulse._loop._timers == [], "nothing is left that would wake pulse"
    assert pulse._batches.rescue("a", NOWHERE)
    assert lines() == ["a jobs=3"]


def test_after_the_recovery_of_running_jobs_it_tells_once_how_many_suspects_wait(pulse: Pulse, beats: Beats) -> None:
    beats.helpers_wanted = {"q": 3}
    for number in range(3):
        pulse._recover({**RECOVERY, "worker": f"w{number}", "running": True})
    call_timers(pulse, 0.01)
    assert (beats.sent, beats.told) == (["q"], [{"event": "suspects", "queue": "q", "waiting": 3}])
    pulse._recover({**RECOVERY, "running": False})
    call_timers(pulse, 0.01)
    assert beats.sent == ["q"], "nothing was running there"


def test_every_heartbeat_tells_of_suspects_and_of_fail_jobs_that_wait(pulse: Pulse, beats: Beats) -> None:
    beats.helpers_wanted = {"q": 2, "q#fail": 1}
    pulse._send_heartbeats(["q", "q#fail"])
    assert beats.told == [
        {"event": "suspects", "queue": "q", "waiting": 2},
        {"event": "fail_jobs", "queue": "q"},
    ]


@pytest.mark.parametrize("how", ["it hears of it", "it was due"])
@pytest.mark.parametrize("state", [State.BUSY, State.PARKED])
def test_a_fail_job_is_looked_for_only_if_the_retry_process_is_busy(
    pulse: Pulse, beats: Beats, monkeypatch: pytest.MonkeyPatch, state: State, how: str
) -> None:
    slot = pulse._board.slot(pulse._board.take())
    slot.queue, slot.role, slot.state = "q", Role.RETRY, state
    monkeypatch.setattr(pulse._subscription, "receive", lambda: [("forq:queue:{q}@0:due", "fail")] * 5)
    beats.helpers_wanted = {"q#fail": 1}
    if how == "it hears of it":
        pulse._receive()
    else:
        pulse._due["q#fail"] = 1.0
        pulse._promote("q#fail", 1.0)
    assert beats.sent == [], "an idle process would have taken it by then"
    call_timers(pulse, 0.2)
    busy = state == State.BUSY
    assert beats.sent == (["q#fail"] if busy else [])
    assert beats.told == ([{"event": "fail_jobs", "queue": "q"}] if busy else [])
