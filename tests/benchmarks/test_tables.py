"""Tables are made from results alone, with a mark where a figure is unreliable."""

import re
from typing import Any

import pytest

from benchmarks.compare import described
from benchmarks.measures import Sample, costs, drain_rate
from benchmarks.roster import roster
from benchmarks.tables import (
    TABLES,
    all_tables,
    cell,
    filled,
    number,
    prototype,
    release,
    settings,
    speed,
    trickle,
    versions,
    waiting,
)
from benchmarks.worker import Failed, Record
from tests.docs.pages import ROOT

# Of the pages' own test.
LONGEST_LINE = 160


@pytest.fixture
def results() -> dict[str, Any]:
    good = {"rounds": 3, "disturbed": False}
    return {
        "taken_at": "2026-01-01T00:00:00+00:00",
        "took_seconds": 60,
        "commit": "abc",
        "machine": {"cpu": "a CPU", "cores": 2, "memory_gb": 8, "kernel": "6.1"},
        "load_average": {"before": 0.1, "after": 1.0},
        "server": "Valkey 9",
        "python": "3.11",
        "rounds": 3,
        "effort": {"backlogs": [10]},
        "crash_cap_seconds": 120.0,
        "disturbed_trials": 0,
        "peers": {
            "forq": {"version": "forq", "note": "this commit", "settings": "fast", "durable_settings": "the same"},
            "huey": {"version": "huey", "released": "2025-12-22", "settings": "fast", "durable_settings": "the same"},
        },
        "left_out": {"sidekiq": "this is no Debian"},
        "prototype": {"64": {"per_second": 100_000.0, "worker_us": 3.0, "redis_us": 4.0}},
        "floors": {"load50": {"p50_ms": 0.0}},
        "trials": [{"peer": "huey", "measure": "idle", "error": "it hung"}],
        "summaries": {
            "forq": {
                "drain": {"per_second": 50_000.0, **good},
                "bulk": {"per_second": 100_000.0, **good},
                "limit": {"per_second": 40_000.0, "worker_us": 8.0, "redis_us": 5.0, **good},
                "trickle": {"redis_us": 400.0, "worker_us": 260.0, "p50_ms": 0.5, "p99_ms": 1.5, **good},
                "crash_process": {"seconds": 0.05, **good},
            },
            "huey": {
                "drain": {"per_second": 2_500.0, "rounds": 1, "disturbed": True},
                "trickle": {"redis_us": 150.0, "p50_ms": 0.5, "p99_ms": 1.5, **good},
                "crash_process": dict(good),
                "idle": {"error": "it hung"},
            },
        },
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0567, "0.06"), (1.234, "1.23"), (56.78, "56.8"), (567.8, "568"), (1_234.5, "1,230"), (1_234_567, "1,230,000")],
)
def test_a_number_shows_three_significant_figures(value: float, text: str) -> None:
    assert number(value) == text


def columns(row: str) -> list[str]:
    return [part.strip() for part in row.split("|")[1:-1]]


def test_the_speed_table_shows_how_many_times_faster_forq_is(results: dict[str, Any]) -> None:
    results["summaries"]["huey"]["bulk"] = {"per_second": 50_000.0, "rounds": 3, "disturbed": False}
    head, _, forq, huey = map(columns, speed(results).splitlines())
    assert head[2:6] == ["bulk /s", "forq is", "drain /s, 1 process", "forq is"]
    assert forq[2:6] == ["100,000", "", "50,000", ""]
    assert huey[2:6] == ["50,000", "2.00\N{MULTIPLICATION SIGN}", "2,500 †", "20.0\N{MULTIPLICATION SIGN}"]


def test_a_peer_without_a_bulk_call_has_no_ratio(results: dict[str, Any]) -> None:
    huey = columns(speed(results).splitlines()[3])
    assert huey[2:4] == ["\N{EN DASH}", ""]


def test_the_trickle_table_adds_up_what_a_job_costs(results: dict[str, Any]) -> None:
    _, _, forq, huey = map(columns, trickle(results).splitlines())
    assert forq == ["forq", "400", "260", "660", "0.50 / 1.50"]
    assert huey == ["huey", "150", "\N{EN DASH}", "\N{EN DASH}", "0.50 / 1.50"]


def test_forq_is_compared_with_the_bare_loop_that_ran_beside_it(results: dict[str, Any]) -> None:
    head, _, bare, forq = map(columns, prototype(results).splitlines())
    assert head[2] == "forq reaches"
    assert bare[:3] == ["bare loop, 64 at a time", "100,000", "40 %"]
    assert forq[:3] == ["forq", "40,000", ""]


def test_a_version_has_its_age_at_the_time_of_the_run(results: dict[str, Any]) -> None:
    huey = results["peers"]["huey"]
    assert release(huey, results["taken_at"]) == "2025-12-22, 10 days before"
    assert release(huey | {"note": "Debian's"}, results["taken_at"]) == "2025-12-22, 10 days before; Debian's"
    assert release(results["peers"]["forq"], results["taken_at"]) == "this commit"
    assert release(huey | {"released": None}, results["taken_at"]) == "unknown"


def test_a_figure_without_a_quiet_round_is_marked(results: dict[str, Any]) -> None:
    assert cell(results, "huey", "drain", "per_second") == "2,500 †"
    assert cell(results, "forq", "drain", "per_second") == "50,000"


def test_a_job_that_never_ran_again_differs_from_one_that_was_not_measured(results: dict[str, Any]) -> None:
    forq, huey = waiting(results).splitlines()[2:]
    assert [part.strip() for part in forq.split("|")][-3:-1] == ["0.05", "\N{EN DASH}"]
    assert [part.strip() for part in huey.split("|")][-3:-1] == ["not within 120", "\N{EN DASH}"]
    assert "failed" in huey


def test_skipped_and_failed_peers_are_listed_with_the_reason(results: dict[str, Any]) -> None:
    text = all_tables(results)
    assert "| sidekiq | left out |  |" in text
    assert "\n\nLeft out: sidekiq: this is no Debian\n" in text
    assert "Failed: huey, idle: it hung" in text


def test_peers_that_failed_alike_share_a_line(results: dict[str, Any]) -> None:
    results["trials"].append({"peer": "forq", "measure": "idle", "error": "it hung"})
    assert "\nFailed: huey, forq, idle: it hung\n" in versions(results) + "\n"


def test_every_table_has_a_place_on_the_page() -> None:
    page = (ROOT / "docs/design/performance.md").read_text()
    assert set(re.findall(r"<!-- table ([a-z]+) -->", page)) == set(TABLES)


def test_no_line_of_the_settings_is_too_wide_for_a_page(results: dict[str, Any]) -> None:
    results["peers"] = {peer.name: described(peer) | {"version": ""} for peer in roster()}
    results["left_out"] = {"sidekiq": "apt-get ended with 100: " + "no such package; " * 12}
    text = settings(results) + versions(results)
    assert [line for line in text.splitlines() if len(line) > LONGEST_LINE] == []


def test_tables_are_inserted_and_replaced(results: dict[str, Any]) -> None:
    document = "Before\n<!-- table speed -->\nold\n<!-- end -->\nAfter\n"
    once = filled(document, results)
    assert once == f"Before\n<!-- table speed -->\n{TABLES['speed'](results)}\n<!-- end -->\nAfter\n"
    assert filled(once, results) == once


def test_a_marker_for_an_unknown_table_is_an_error(results: dict[str, Any]) -> None:
    with pytest.raises(KeyError, match="sped"):
        filled("<!-- table sped -->\n<!-- end -->", results)


def test_a_job_costs_what_was_used_between_two_samples() -> None:
    opened, closed = Sample(100, 1.0, 2.0, 100), Sample(1100, 1.5, 2.1, 1100)
    found = costs(opened, closed, block=10)
    assert found == {"worker_us": pytest.approx(50.0), "redis_us": pytest.approx(10.0)}


def test_a_sample_that_took_too_long_gives_no_cost() -> None:
    opened, closed = Sample(100, 1.0, 2.0, 300), Sample(1100, 1.5, 2.1, 1100)
    assert costs(opened, closed, block=10) == {}


def test_the_rate_of_two_workers_counts_from_when_both_had_begun() -> None:
    second = 1_000_000_000
    alone = [Record(n * second, 0, 1) for n in range(1, 101)]
    both = [Record((100 + n) * second + pid, 0, pid) for n in range(1, 21) for pid in (1, 2)]
    assert drain_rate(alone, block=10, workers=1) == pytest.approx(10.0)
    assert drain_rate([*alone, *both], block=10, workers=2) == pytest.approx(20.0, rel=0.05)
    with pytest.raises(Failed, match="1 of 2"):
        drain_rate(alone, block=10, workers=2)
