"""The bare loops take turns with forq, and are apart from the peers in the results."""

from collections.abc import Iterator
from time import monotonic

import pytest

from benchmarks import compare
from benchmarks.compare import Run, bare_loop, limit, results
from benchmarks.measures import QUICK, Effort, Figures
from benchmarks.prototype import BATCHES
from benchmarks.roster import Peer
from benchmarks.servers import BenchServer, RedisServer


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def test_each_round_has_all_bare_loops_and_forq(monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer) -> None:
    def drain(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
        return {"per_second": 80_000.0}, []

    monkeypatch.setattr(compare, "drain", drain)
    monkeypatch.setattr("benchmarks.prototype.measure", lambda server, jobs, batch: {"per_second": 1_000.0 * batch})
    run = Run({"redis": redis_server}, QUICK, rounds=2, repeats=0, deadline=monotonic() + 60)
    forq = Peer("forq", "", "", 1, lambda _: None)
    limit(run, forq)
    assert [trial.peer for trial in run.trials] == [
        *map(bare_loop, BATCHES),
        "forq",
        *map(bare_loop, BATCHES[1:]),
        "forq",
        bare_loop(BATCHES[0]),
    ]
    found = results(run, [forq], {}, load_before=0.0, cap=10.0)
    assert {batch: loop["per_second"] for batch, loop in found["prototype"].items()} == {
        batch: 1_000.0 * batch for batch in BATCHES
    }
    assert found["summaries"] == {"forq": {"limit": found["summaries"]["forq"]["limit"]}}
