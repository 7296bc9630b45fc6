"""How values are shown."""

import time

import pytest

from forq.procs.minutes import Minute
from forq.web.display import duration, iso, lines, moment, number, prose, rate, size, so_far, state, text, throughput

DASH = "\N{EN DASH}"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, DASH),
        (0.0000004, "0 µs"),
        (0.0025, "2 ms"),
        (0.5, "500 ms"),
        (1.0, "1.0 s"),
        (9.96, "10.0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (3725, "1 h 2 min"),
        (86400 * 3 + 3600, "3 d 1 h"),
        (86400 * 4000, "4,000 d"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("per_second", "shown"),
    [(None, DASH), (0, "0/s"), (0.05, "3.0/min"), (3.21, "3.2/s"), (99.96, "100.0/s"), (84_123.4, "84,123/s")],
)
def test_a_rate_has_its_unit(per_second: float | None, shown: str) -> None:
    assert rate(per_second) == shown


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(None, DASH), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (10_900_000, "10.4 MB"), (5 << 30, "5.0 GB")],
)
def test_a_size_has_its_unit(size_bytes: int | None, shown: str) -> None:
    assert size(size_bytes) == shown


def test_numbers_have_separators() -> None:
    assert (number(1234567), number(None)) == ("1,234,567", DASH)


def test_a_time_is_relative_with_the_iso_time_on_hover() -> None:
    assert moment(1_000_000_000.5).startswith(
        '<time datetime="2001-09-09T01:46:40.500Z" title="2001-09-09T01:46:40.500Z">'
    )
    assert moment(1_000_000_000.5).endswith(" ago</time>")
    assert moment(None) == DASH


def test_a_time_that_no_calendar_has_is_a_number() -> None:
    assert iso(1e20) == "1e+20"


def test_text_of_others_is_escaped_and_has_no_control_characters() -> None:
    assert state('<b onclick="x">') == '<span class="state plain">&lt;b onclick=&#34;x&#34;&gt;</span>'
    assert text("a\x1b[31m\u202eb\x00") == "a\\x1b[31m\\u202eb\\x00"
    assert text(None) == ""


def test_minutes_become_a_sparkline() -> None:
    minute = Minute(ended=5, failed=1, run_micros=10, waits=0, wait_p50_us=None, wait_p99_us=None)
    assert "now 5, highest 5" in throughput([None] * 59 + [minute])
    assert "no data" in throughput([None] * 60)


def test_code_in_messages_is_marked_and_all_else_is_escaped() -> None:
    assert prose("`forqctl why` says <b>") == "<code>forqctl why</code> says &lt;b&gt;"
    assert prose("`<i>`") == "<code>&lt;i&gt;</code>"
    assert prose("it`s") == "it`s"


def test_several_lines_keep_their_indentation() -> None:
    assert lines("a\n  b\u202e") == "a\n  b\\u202e"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "now"),
        (4.9, "now"),
        (7, "5 s ago"),
        (59, "55 s ago"),
        (119, "1 min ago"),
        (3725, "1 h 2 min ago"),
        (-3700, "in 1 h 1 min"),
    ],
)
def test_a_relative_time_is_coarse(seconds: float, shown: str) -> None:
    assert f">{shown}<" in moment(time.time() - seconds)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "less than 5 s"), (7, "5 s"), (119, "1 min"), (3725, "1 h 2 min"), (None, DASH)],
)
def test_the_time_that_something_runs_is_coarse(seconds: float | None, shown: str) -> None:
    assert so_far(seconds) == shown
