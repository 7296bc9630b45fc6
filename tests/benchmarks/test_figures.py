"""Figures computed from trials: percentiles, medians over rounds, minimum waits."""

import pytest

from benchmarks.figures import Trial, least_waits_ms, percentile, percentiles, poisson_ns, summary


def trial(value: float, *, disturbed: bool = False, error: str | None = None) -> Trial:
    return Trial("huey", "drain", 0, {"per_second": value}, [value], disturbed=disturbed, error=error)


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 50), (99, 99), (99.9, 100), (100, 100)])
def test_a_percentile_is_the_nearest_rank(percent: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), percent) == expected


@pytest.mark.parametrize("count", [1_000, 10_000, 123_000])
def test_a_percentile_is_not_off_by_one_where_percent_has_no_exact_double(count: int) -> None:
    assert percentile(range(1, count + 1), 99.9) == count * 999 // 1000


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)


def test_a_percentile_needs_a_sample_beyond_it() -> None:
    assert set(percentiles([1.0] * 99)) == {"samples", "p50_ms"}
    assert set(percentiles([1.0] * 100)) == {"samples", "p50_ms", "p99_ms"}
    assert set(percentiles([1.0] * 1000)) == {"samples", "p50_ms", "p99_ms", "p999_ms"}


def test_disturbed_rounds_are_not_averaged_in() -> None:
    found = summary([trial(100), trial(5, disturbed=True), trial(110), trial(120)])
    assert (found["per_second"], found["rounds"], found["disturbed"]) == (110, 3, False)
    assert found["samples"] == 3


def test_disturbed_rounds_are_used_and_marked_when_there_are_no_others() -> None:
    found = summary([trial(100, disturbed=True), trial(50, disturbed=True), trial(80, disturbed=True)])
    assert (found["per_second"], found["disturbed"]) == (80, True)


def test_a_failed_round_counts_only_as_the_reason_when_there_is_no_other() -> None:
    assert summary([trial(0, error="it hung"), trial(100)])["per_second"] == 100
    assert summary([trial(0, error="it hung")]) == {"error": "it hung"}


def test_arrivals_come_at_the_rate_and_are_the_same_for_everyone() -> None:
    times = poisson_ns(200.0, 20_000, seed=1)
    assert times == poisson_ns(200.0, 20_000, seed=1) != poisson_ns(200.0, 20_000, seed=2)
    assert times == sorted(times)
    assert 20_000 / (times[-1] / 1e9) == pytest.approx(200.0, rel=0.05)


def test_a_job_waits_only_for_the_jobs_before_it() -> None:
    ms = 1_000_000
    assert least_waits_ms([0, 1 * ms, 2 * ms, 100 * ms], service_ms=5.0) == [0.0, 4.0, 8.0, 0.0]
