"""Trials disturbed by other processes are detected; the benchmark's own processes do not count."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import processes
from benchmarks.compare import Run
from benchmarks.measures import QUICK, Effort, Figures
from benchmarks.processes import busy_seconds, cpu_seconds, foreign_share
from benchmarks.roster import Peer
from benchmarks.servers import BenchServer
from benchmarks.worker import Failed
from tests.benchmarks.no_server import NoServer

SPIN = [sys.executable, "-c", "while True: pass"]


@contextmanager
def spinning() -> Iterator[int]:
    process = subprocess.Popen(SPIN)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_idle_and_waiting_for_disks_is_not_busy_and_stolen_time_is() -> None:
    hz = os.sysconf("SC_CLK_TCK")
    line = f"cpu {1 * hz} {2 * hz} {3 * hz} {1000 * hz} {500 * hz} {4 * hz} {5 * hz} {6 * hz} {70 * hz} 0"
    assert busy_seconds(line) == 1 + 2 + 3 + 4 + 5 + 6


def test_time_that_is_not_our_own_is_foreign_and_never_negative() -> None:
    assert foreign_share(busy_seconds=3.0, own_seconds=2.0, seconds=4.0) == 0.25
    assert foreign_share(busy_seconds=1.9, own_seconds=2.0, seconds=4.0) == 0.0


def test_the_time_of_a_child_counts_as_our_own_while_it_runs_and_after_its_end() -> None:
    before = processes.tree_cpu_seconds(os.getpid())
    with spinning() as pid:
        while cpu_seconds(pid) < 0.3:
            time.sleep(0.01)
        assert processes.tree_cpu_seconds(os.getpid()) - before >= 0.3
    assert processes.tree_cpu_seconds(os.getpid()) - before >= 0.25


class Shares:
    """Replaces Quiet: returns one share per trial, in this order."""

    def __init__(self, *shares: float) -> None:
        self._shares = iter(shares)

    def __call__(self) -> "Shares":
        return self

    def foreign_share(self) -> float:
        return next(self._shares)


def run_of(monkeypatch: pytest.MonkeyPatch, shares: Shares, minutes: float = 10) -> Run:
    monkeypatch.setattr("benchmarks.compare.Quiet", shares)
    return Run({"redis": NoServer()}, QUICK, rounds=1, repeats=2, deadline=time.monotonic() + 60 * minutes)


def peer() -> Peer:
    return Peer("huey", "", "", 1, lambda _: None)


def measure(_peer: Peer, _server: BenchServer, _effort: Effort, _number: int) -> tuple[Figures, list[float]]:
    return {"per_second": 1.0}, []


def test_a_disturbed_trial_is_repeated_until_one_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, Shares(0.5, 0.1, 0.0))
    run.series({"drain": measure}, [peer()])
    assert [(trial.foreign_share, trial.disturbed) for trial in run.trials] == [(0.5, True), (0.1, False)]


def test_repetition_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, Shares(0.5, 0.6, 0.7, 0.8))
    run.series({"drain": measure}, [peer()])
    assert [trial.disturbed for trial in run.trials] == [True] * 3


def test_repeats_of_all_trials_share_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, Shares(*[0.5] * 4))
    run.spare_seconds = 1e-9
    run.series({"drain": measure, "idle": measure}, [peer()])
    assert [(trial.measure, trial.disturbed) for trial in run.trials] == [("drain", True)] * 2 + [("idle", True)]


def test_an_error_that_nobody_expected_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
        raise IndexError("no records")

    run = run_of(monkeypatch, Shares(0.0, 0.0))
    run.series({"drain": odd, "idle": measure}, [peer()])
    assert [(trial.measure, trial.error) for trial in run.trials] == [
        ("drain", "IndexError: no records"),
        ("idle", None),
    ]


def test_a_failing_peer_is_reported_and_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(peer: Peer, server: BenchServer, effort: Effort, number: int) -> tuple[Figures, list[float]]:
        if peer.name == "rq":
            raise Failed("it hung")
        return measure(peer, server, effort, number)

    run = run_of(monkeypatch, Shares(0.0, 0.0))
    run.series({"drain": hangs}, [Peer("rq", "", "", 1, lambda _: None), peer()])
    assert [(trial.peer, trial.error) for trial in run.trials] == [("rq", "it hung"), ("huey", None)]


def test_no_trial_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(monkeypatch, Shares(), minutes=-1)
    run.series({"drain": measure}, [peer()])
    assert [trial.error for trial in run.trials] == ["no time was left"]


def test_all_compared_peers_are_measured_in_every_round_in_turn(
    monkeypatch: pytest.MonkeyPatch, server: BenchServer
) -> None:
    run = run_of(monkeypatch, Shares(*[0.0] * 7))
    run.rounds = 2
    no_bulk = Peer("rq", "", "", 1, lambda _: None, bulk=False)
    run.series({"drain": measure, "bulk": measure}, [peer(), no_bulk])
    assert [(trial.round, trial.measure, trial.peer) for trial in run.trials] == [
        (0, "drain", "huey"),
        (0, "drain", "rq"),
        (0, "bulk", "huey"),
        (1, "drain", "rq"),
        (1, "drain", "huey"),
        (1, "bulk", "huey"),
    ]
