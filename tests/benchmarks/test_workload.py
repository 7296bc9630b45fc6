"""The simulation that the workload is compared with, checked against results computed by hand."""

import pytest

from benchmarks.workload_model import WORKERS, Arrival, draw, outcome, simulate


def jobs(*services: float) -> list[Arrival]:
    """All arrive at 0, in this order."""
    return [Arrival(0.0, number, service) for number, service in enumerate(services)]


def test_jobs_are_served_in_order_by_the_workers() -> None:
    assert simulate(jobs(3, 1, 1, 1), [], 2, beside=True) == {0: 3, 1: 1, 2: 2, 3: 3}


def test_a_free_worker_waits_for_the_next_arrival() -> None:
    assert simulate([Arrival(0, 0, 1), Arrival(5, 1, 1)], [], 1, beside=True) == {0: 1, 1: 6}


def test_a_job_killed_alone_runs_again_before_all_others() -> None:
    for beside in (True, False):
        assert simulate(jobs(2, 2), [1.0], 1, beside=beside) == {0: 3, 1: 5}


def test_jobs_killed_together_run_again_beside_the_workers_or_on_them() -> None:
    assert simulate(jobs(2, 3, 1, 1), [1.0], 2, beside=True) == {0: 3, 1: 4, 2: 2, 3: 2}
    assert simulate(jobs(2, 3, 1, 1), [1.0], 2, beside=False) == {0: 3, 1: 4, 2: 4, 3: 5}


def test_a_job_that_ends_at_the_moment_of_a_kill_has_ended() -> None:
    assert simulate(jobs(1, 2), [1.0], 2, beside=True) == {0: 1, 1: 3}


def test_no_more_suspects_run_at_once_than_workers_and_the_retry_process() -> None:
    """Two kills leave four suspects; three run at once."""
    assert simulate(jobs(10, 10, 10, 10), [1.0, 2.0], 2, beside=True) == {0: 11, 1: 11, 2: 12, 3: 21}


def test_the_outcome_is_the_mean_wait_and_the_last_end() -> None:
    first, second = tuple(jobs(1, 2)), tuple(jobs(4))
    found = outcome([first, second], [{0: 1.0, 1: 5.0}, {0: 4.5}])
    assert found.mean_wait == pytest.approx((0 + 3 + 0.5) / 3)
    assert found.makespan == 5.0


def test_a_seed_repeats_the_workload() -> None:
    drawn = draw(5, 10.0, 20)
    assert drawn == draw(5, 10.0, 20) != draw(6, 10.0, 20)
    assert (sum(WORKERS), len(drawn.arrivals), len(drawn.kills)) == (150, 11, 20)
    for arrivals, workers in zip(drawn.arrivals, WORKERS, strict=True):
        assert sum(job.service for job in arrivals) >= workers * 10.0
        assert all(0.001 <= job.service <= 20.0 for job in arrivals)
        assert list(arrivals) == sorted(arrivals)
