"""The comparison of tasks reports each measure in which a task is slower than allowed."""

from benchmarks.tasks import table, too_slow


def test_a_task_within_its_limits_is_not_reported() -> None:
    found = {
        "forq task": {"enqueue": 8_600.0, "bulk": 60_000.0, "drain": 86_000.0},
        "forq": {"enqueue": 10_000.0, "bulk": 100_000.0, "drain": 100_000.0},
    }
    assert too_slow(found) == []


def test_each_measure_beyond_its_limit_is_reported() -> None:
    found = {
        "forq task": {"enqueue": 8_400.0, "bulk": 24_000.0, "drain": 90_000.0},
        "forq": {"enqueue": 10_000.0, "bulk": 100_000.0, "drain": 100_000.0},
    }
    assert too_slow(found) == [
        "enqueue: a task reaches 84% of a handler's rate, at least 85% is required",
        "bulk: a task reaches 24% of a handler's rate, at least 25% is required",
    ]


def test_a_peer_without_a_bulk_call_has_a_dash_in_the_table() -> None:
    assert table({"celery": {"enqueue": 1_000.0, "drain": 2_000.0}}).splitlines()[-1] == (
        "| celery | 1,000 | \N{EN DASH} | 2,000 |"
    )
