"""Charts of any data are complete markup that a strict policy allows, with readable labels and a summary."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest

from forq.charts import (
    SCRIPT,
    STYLE,
    Column,
    Series,
    heat_cells,
    legend,
    log_lines,
    minutes_chart,
    range_bars,
    short,
    sparkline,
    stacked_areas,
    waits_chart,
)
from forq.charts.axes import WIDTHS, linear_ticks
from forq.charts.labels import duration
from forq.procs.minutes import MINUTES, Minute
from tests.support.drive.charts import Markup, axes_in, labels_shown

NASTY = """<script>alert("1")</script>&' onload=x"""
# 2025-11-18 14:03 UTC.
NEWEST = 29_391_243
VALUES: dict[str, list[float | None]] = {
    "none": [],
    "all unknown": [None, None, None],
    "zero": [0.0, 0.0, 0.0],
    "one": [5.0],
    "gaps": [None, 1.0, None, 2.0, 3.0, None],
    "huge": [1e300, 1.7e308, 0.0],
    "tiny": [1e-30, 5e-324, 0.0],
    "not finite": [math.inf, math.nan, 1.0],
    "negative": [-1.0, 1.0],
}


def columns(number: int) -> list[Column]:
    return [Column(at / number, (at + 1) / number, f"at {at}") for at in range(number)]


def ticks(number: int, text: str = "{:02}:00") -> list[tuple[float, str]]:
    return [(at / number, text.format(at)) for at in range(number)]


def charts_of(values: Sequence[float | None]) -> list[str]:
    number = len(values)
    series = [Series(NASTY, f"c{at}", values, text) for at, text in enumerate((short, duration))]
    known = [value for value in values if value is not None]
    bounds = min(known, default=1), max(known, default=1)
    rows = [(NASTY, "c0", (*values, None, None, None)[:3])]
    cells = {(0, at): (max(0.0, value), NASTY) for at, value in enumerate(values) if value and value < 1e308}
    return [
        stacked_areas(columns(number), series, series[:1], ticks(number), title=NASTY),
        stacked_areas(columns(number), series, [], [], title=NASTY, whole=True, corner=NASTY),
        log_lines(columns(number), series, ticks(number), bounds, title=NASTY),
        range_bars([row for row in rows if math.isfinite(sum(known))], duration, title=NASTY),
        heat_cells([NASTY], [NASTY] * number, cells, title=NASTY),
        sparkline(values, NASTY, "done"),
        legend([(NASTY, "c0", NASTY)]),
    ]


def check(markup: str) -> Markup:
    """A strict Content-Security-Policy allows it, and every number of its shapes is one."""
    found = Markup(markup)
    for tag, attributes in found.tags:
        assert tag not in ("script", "style", "img")
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        for name in ("d", "x", "y", "cx", "cy", "width", "height"):
            assert not re.search("nan|inf|e[+-]", attributes.get(name, ""))
    for text in found.values("data-tips") + found.values("data-grid"):
        json.loads(text)
    return found


@pytest.mark.parametrize("kind", VALUES)
def test_any_data_and_any_name_give_complete_and_harmless_markup(kind: str) -> None:
    for markup in charts_of(VALUES[kind]):
        check(markup)


@pytest.mark.parametrize("kind", ["none", "all unknown"])
def test_a_chart_without_data_says_so(kind: str) -> None:
    areas, _, lines, _, heat, spark, _ = charts_of(VALUES[kind])
    assert all("no data" in Markup(markup).text for markup in (areas, lines, heat, spark))
    assert check(spark).values("aria-label") == [f"{NASTY}: no data"]


def test_a_chart_has_a_summary() -> None:
    area = Series("done", "done", [10, 340, 120], short)
    other = Series("failed", "failed", [None, 1, None], short)
    title = "done per minute, last hour"
    one = stacked_areas(columns(3), [area], [], ticks(3), title=title, last="now")
    assert check(one).tags[0][1] == {
        "class": "chart",
        "role": "img",
        "aria-label": "done per minute, last hour: now 120, highest 340",
    }
    two = log_lines(columns(3), [area, other], ticks(3), (1, 9), title="t")
    assert check(two).values("aria-label") == ["t: done last 120, highest 340; failed last unknown, highest 1"]
    many = stacked_areas(columns(3), [area] * 5, [], ticks(3), title="t")
    assert check(many).values("aria-label") == ["t: 5 series, last done 120, done 120, done 120"]
    cells = heat_cells(["Mon", "Tue"], ["08:00"], {(0, 0): (1, "1 job"), (1, 0): (2, "2 jobs")}, title="busy")
    assert check(cells).values("aria-label") == ["busy: highest at Tue, 08:00: 2 jobs"]


def test_a_value_between_two_gaps_is_a_dash_as_wide_as_its_column() -> None:
    drawn = log_lines(columns(4), [Series("a", "p0", [1, None, None, 10], short)], [], (1, 10), title="t")
    assert 'd="M0.0 1000.0H250.0M750.0 0.0H1000.0"' in drawn


def test_areas_have_a_gap_where_nothing_is_known() -> None:
    drawn = stacked_areas(columns(3), [Series("a", "c0", [1, None, 1], short)], [], [], title="t")
    assert re.findall(r'class="area tone-c0" d="([^"]*)"', drawn) == [
        "M0.0 0.0L166.7 0.0L333.3 0.0L333.3 1000.0L166.7 1000.0L0.0 1000.0Z"
        "M666.7 0.0L833.3 0.0L1000.0 0.0L1000.0 1000.0L833.3 1000.0L666.7 1000.0Z"
    ]


AXES = {
    "clock": ticks(10),
    "dates": ticks(12, "Mon {:02} Nov 10:00"),
    "many": ticks(144),
    "one": [(0.5, "10 Nov")],
    "one at the end": [(1.0, "Wed 10 Nov 2026")],
    "at the ends": [(0.0, "Mon 09 Nov 2026"), (1.0, "Wed 10 Nov 2026")],
    "same place": [(0.5, "a"), (0.5, "b"), (0.50001, "c")],
    "uneven": [(0.0, "a"), (0.01, "a long label"), (0.9, "b"), (0.97, "another one"), (0.999, "c")],
}


@pytest.mark.parametrize("kind", AXES)
def test_labels_of_an_axis_neither_touch_nor_stick_out_at_any_width(kind: str) -> None:
    given = AXES[kind]
    (axis,) = axes_in(log_lines(columns(3), [Series("a", "c0", [1, 2, 3], short)], given, (1, 9), title="t"))
    for width_px in range(150, 1400, 5):
        shown = labels_shown(axis, width_px)
        assert shown
        assert all(left[1] + 2 < right[0] for left, right in pairwise(shown)), (width_px, shown)
        assert shown[-1][1] <= width_px
        assert shown[0][0] >= -40
    if kind in ("clock", "dates", "at the ends"):
        assert len(labels_shown(axis, 1250)) >= min(6, len(given))


def test_the_column_of_the_y_labels_is_as_wide_as_the_longest() -> None:
    drawn = stacked_areas(columns(2), [Series("a", "c0", [9e8, 1], short)], [], [], title="t")
    assert "1,000,000,000" not in drawn
    width = int(re.findall(r'<svg class="y" width="(\d+)"', drawn)[0])
    longest = max(len(text) for text in re.findall(r"<text [^>]*>([^<]*)<", drawn))
    assert width >= 7 * longest


@pytest.mark.parametrize("highest", [0, 1, 2, 3, 7, 12, 99, 101, 12_345, 10**12])
def test_a_scale_of_counts_has_whole_numbers(highest: int) -> None:
    top, found = linear_ticks(highest, repr, whole=True)
    assert top >= highest
    assert 1 <= len(found) <= 7
    assert all(float(text).is_integer() for _, text in found)


@pytest.mark.parametrize("highest", [5e-324, 1e-308, 1e-9, 0.3, 1, 7, 1e15, 1e302])
def test_a_linear_scale_includes_the_highest_value(highest: float) -> None:
    top, found = linear_ticks(highest, short)
    assert top >= highest
    assert len(found) <= 7


def minute(ended: int, failed: int = 0, p50: int | None = None, p99: int | None = None) -> Minute:
    return Minute(ended, failed, 100 * ended, 0 if p50 is None else ended, p50, p99)


def tips(drawn: str) -> list[list[object]]:
    found: list[list[object]] = json.loads(check(drawn).values("data-tips")[0])
    return found


def test_the_hour_of_a_queue_has_round_ticks_and_tells_gaps_from_idle_minutes() -> None:
    hour = [None] * 57 + [minute(0), minute(10, 2, 1000, 5000), minute(3)]
    drawn = minutes_chart(hour, NEWEST)
    assert len(tips(drawn)) == MINUTES
    assert [tip[1:] for tip in tips(drawn)[56:]] == [
        ["14:00 UTC", [["no data"]]],
        ["14:01 UTC", [["done", "tone-done", "0"], ["failed", "tone-failed", "0"]]],
        ["14:02 UTC", [["done", "tone-done", "8"], ["failed", "tone-failed", "2"]]],
        ["14:03 UTC", [["done", "tone-done", "3"], ["failed", "tone-failed", "0"]]],
    ]
    (axis,) = axes_in(drawn)
    assert re.findall(r">(\d\d:\d\d)<", axis) == ["13:10", "13:20", "13:30", "13:40", "13:50", "14:00"]
    assert re.search(r'class="corner".*>UTC<', drawn)
    assert check(drawn).text.endswith("done 11failed 2")
    waits = waits_chart(hour, NEWEST)
    assert [tip[2] for tip in tips(waits)[56:]] == [
        [["no data"]],
        [["no data"]],
        [["p99", "tone-p2", "5 ms"], ["p50", "tone-p0", "1 ms"]],
        [["no data"]],
    ]
    assert "wait, last hour: p99 now unknown, highest 5 ms; p50 now unknown, highest 1 ms" in waits


def test_an_hour_without_any_minute_is_empty() -> None:
    for drawn in (minutes_chart([None] * 60, 0), waits_chart([None] * 60, 0)):
        assert "no data" in check(drawn).text
        assert not re.search(r">\d\d:\d\d<", drawn)


def test_a_sparkline_ends_with_a_dot_and_has_gaps() -> None:
    drawn = sparkline([0, None, 4, 2], "done per minute", "done")
    assert check(drawn).values("aria-label") == ["done per minute: now 2, highest 4"]
    assert re.findall(r'd="([^"]*)"', drawn) == [
        "M65.7 24L65.7 3.0L97.0 12.0L97.0 24Z",
        "M2.0 21.0h2M65.7 3.0L97.0 12.0",
    ]
    assert re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn) == [("97.0", "12.0")]
    alone = sparkline([3], "x", "done")
    assert re.findall(r'<circle cx="([\d.]+)"', alone) == ["97.0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7.0, "7"),
        (0.123, "0.12"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (999_999_999, "999,999,999"),
        (2e9, "2.00e9"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


# The style and the script.


def colors() -> dict[str, tuple[str, str]]:
    return {
        name: (light, dark)
        for name, light, dark in re.findall(r"--chart-(\w+): light-dark\((#\w+), (#\w+)\)", STYLE.read_text())
    }


def contrast(one: str, other: str) -> float:
    low, high = sorted(luminance(color) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1])
def test_text_and_lines_have_enough_contrast(theme: int) -> None:
    found = {name: both[theme] for name, both in colors().items()}
    page = ("#f6f7f9", "#11141a")[theme]
    decoration = {"card", "rule", "grid", *(f"h{shade}" for shade in range(8))}
    assert len(found) > 25
    for name, color in found.items():
        for below in (found["card"], page):
            if name not in decoration:
                assert contrast(color, below) >= (4.5 if name in ("ink", "soft") else 3), (name, below)


def test_the_style_has_every_tone_and_every_width() -> None:
    style = STYLE.read_text()
    for tone in (*(f"c{at}" for at in range(13)), "others", "p0", "p1", "p2", "done", "failed", "enqueued"):
        assert f".tone-{tone} {{" in style
    assert [int(width) for width in re.findall(r"@container \(width < \d+px\) \{ \.w(\d+) ", style)] == list(WIDTHS)
    assert not re.search(r"https?://|@import|url\(", style)


def test_the_script_inserts_text_only() -> None:
    script = SCRIPT.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function\(|https?://", script)
    assert "textContent" in script


def test_charts_import_the_standard_library_alone() -> None:
    code = "import sys, forq.charts; print(*sorted(name for name in sys.modules if name.startswith('forq.')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in found if not name.startswith("forq.charts")] == ["forq.version"]
