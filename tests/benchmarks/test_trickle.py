"""Jobs that come one by one: what each costs, without those of the warm-up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import pytest

from benchmarks.measures import QUICK, TRICKLE_PER_SECOND, trickle
from benchmarks.roster import Peer
from benchmarks.worker import Bench, Failed, Record
from tests.benchmarks.no_server import NoServer

SERVER_US, WARM_UP_US, WAIT_MS = 400, 9_000, 2.0


class FakeBench:
    """Its jobs start 2 ms after they were sent. They cost the server 400 µs each, those of the warm-up far more."""

    def __init__(self, _peer: Peer, server: NoServer) -> None:
        self.server = server
        self._sent: list[int] = []
        self._shown = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def work(self) -> None: ...

    def warm(self, _timeout_seconds: float) -> None:
        self._sent, self._shown = [0], 1

    @contextmanager
    def arriving(self, times_ns: list[int]) -> Iterator[None]:
        self._sent += times_ns
        yield

    def records(self) -> list[Record]:
        return [Record(sent + int(WAIT_MS * 1e6), sent, 1) for sent in self._sent[: self._shown]]

    def wait_for_records(self, count: int, _timeout_seconds: float, look_seconds: float = 0.0) -> list[Record]:
        each_us = WARM_UP_US if count <= 201 else SERVER_US
        self.server.used_seconds += (count - self._shown) * each_us / 1e6
        self._shown = count
        return self.records()

    def pids(self) -> list[int]:
        return []


def peer(*command: str) -> Peer:
    return Peer("huey", "", "", 1, lambda _: None, command=list(command))


def test_a_trickle_counts_the_jobs_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measures.Bench", FakeBench)
    figures, waits = trickle(peer(), NoServer(), QUICK, 0)
    assert figures == {"redis_us": pytest.approx(SERVER_US), "worker_us": 0.0}
    assert waits == [pytest.approx(WAIT_MS)] * round(TRICKLE_PER_SECOND * QUICK.trickle_seconds)


def test_a_producer_that_fails_meanwhile_is_noticed() -> None:
    bench = Bench(peer("sh", "-c", "echo no such socket >&2; exit 3"), NoServer())
    with bench, pytest.raises(Failed, match="arrivals ended with 3: no such socket"), bench.arriving([0]):
        pass
