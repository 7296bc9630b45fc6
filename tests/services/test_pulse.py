"""Pulse without a server: what it logs, and what it tells the supervisor."""

import logging
import socket
from collections.abc import Iterator

import pytest

from forq.broker.keeping import Position
from forq.scoreboard import Scoreboard
from forq.services.pulse import Pulse, PulseSettings

NOWHERE = Position("w", 1, 0, True)


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    ours, theirs = socket.socketpair()
    settings = PulseSettings(
        url="unix:///nowhere",
        prefix="forq:",
        processor="p",
        heartbeat_seconds=10.0,
        expiry_ms=30_000,
        scoreboard=Scoreboard.create(4),
        leash=theirs,
        watch_fd=-1,
        cgroups=None,
    )
    yield Pulse(settings)
    ours.close()
    theirs.close()


def test_many_rescues_are_one_line_a_minute_per_queue(
    pulse: Pulse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end_of_the_minute() -> None:
        timers, pulse._timers = pulse._timers, []
        for _, _, call in timers:
            call()

    def lines() -> list[str]:
        found = [record.getMessage().partition(" queue=")[2] for record in caplog.records]
        caplog.clear()
        return found

    monkeypatch.setattr(pulse._keeper, "rescue", lambda queue, at: 3)
    caplog.set_level(logging.INFO, "forq")
    for _ in range(100):
        assert pulse._rescue("a", NOWHERE)
    assert pulse._rescue("b", NOWHERE)
    assert lines() == ["a jobs=3", "b jobs=3"]
    end_of_the_minute()
    assert lines() == ["a jobs=297"]
    end_of_the_minute()
    assert lines() == []
    assert pulse._timers == [], "nothing is left that would wake pulse"
    assert pulse._rescue("a", NOWHERE)
    assert lines() == ["a jobs=3"]
