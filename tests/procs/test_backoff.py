"""Backoff: pauses grow up to a limit, have jitter, and reset after a success."""

import random

import pytest

from forq.procs.backoff import Backoff


def test_each_pause_is_longer_up_to_the_limit() -> None:
    backoff = Backoff(0.1, 1.0)
    assert [backoff.fail() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert backoff.failures == 6


def test_a_success_resets_the_pause() -> None:
    backoff = Backoff(0.02, 1.0, factor=3.0)
    assert [backoff.fail() for _ in range(3)] == pytest.approx([0.02, 0.06, 0.18])
    backoff.reset()
    assert (backoff.fail(), backoff.failures) == (0.02, 1)


def test_without_a_failure_there_is_no_pause() -> None:
    backoff = Backoff(0.1, 1.0)
    assert (backoff.pause_after(0), backoff.pause_after(-3)) == (0.0, 0.0)


def test_any_number_of_failures_stays_within_the_limit() -> None:
    assert Backoff(0.1, 30.0, factor=10.0).pause_after(10**9) == 30.0


def test_pauses_vary_randomly_within_the_spread() -> None:
    pauses = {Backoff(1.0, 9.0, spread=0.2, rng=random.Random(seed)).fail() for seed in range(200)}
    assert len(pauses) > 100
    assert 0.8 <= min(pauses) < 0.85
    assert 1.15 < max(pauses) <= 1.2
