"""The report: its figures match the events, and its page is valid HTML for any events."""

import re
from argparse import ArgumentParser, Namespace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from forq.errors import UsageError
from forq.pipeline.format import EVENTS
from forq.pipeline.history import History
from forq.pipeline.report import page as report
from forq.pipeline.report.figures import (
    DAY,
    HOUR,
    MAX_BUCKETS,
    MAX_NAMED_QUEUES,
    MINUTE,
    OTHERS,
    SECOND,
    Figures,
    Holds,
    Span,
    Times,
    heat_grid_of,
    parse_time,
    read_figures,
)
from forq.pipeline.report.page import MISSING, empty_page, report_page
from tests.pipeline.event_rows import BEGIN, Journal, Traffic, event, simulated
from tests.support.drive.charts import axes_in, labels_shown
from tests.support.drive.supervisor import running
from tests.support.drive.wait import wait_until

BEGIN_US = int(BEGIN.timestamp()) * SECOND
NASTY = """<script>alert("1")</script>&'"""


def frame(spark: SparkSession, *journals: Journal) -> DataFrame:
    return spark.createDataFrame([row for journal in journals for row in journal.rows()], EVENTS)


def figures_of(spark: SparkSession, *journals: Journal) -> Figures:
    figures = read_figures(spark, frame(spark, *journals), None, None)
    assert figures is not None
    return figures


class Outline(HTMLParser):
    """Fails on unbalanced tags; collects the text and the URLs that a browser would load."""

    VOID = ("meta", "br", "path", "rect")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["script"]):
            self.text += data


def two_attempts() -> Journal:
    """One job: ready at 0 s, claimed at 2 s, raises at 3 s, due at 5 s, claimed at 5.5 s, done at 9.5 s."""
    journal = Journal("q")
    journal.note(0, event("enqueued", "a"))
    journal.note(2 * SECOND, event("claimed", "a", fence=1, attempt=1))
    journal.note(3 * SECOND, event("retried", "a", fence=1, micros=SECOND), event("scheduled", "a", due=5 * SECOND))
    journal.note(5 * SECOND, event("promoted", "a"))
    journal.note(5_500_000, event("claimed", "a", fence=2, attempt=2))
    journal.note(9_500_000, event("done", "a", fence=2, micros=4 * SECOND))
    return journal


def test_wait_is_from_ready_or_due_to_claimed_and_run_time_is_as_measured(spark: SparkSession) -> None:
    figures = figures_of(spark, two_attempts())
    assert figures.times == Times((500_000, 2 * SECOND, 2 * SECOND), (SECOND, 4 * SECOND, 4 * SECOND))
    slowest = [(one.attempt, one.verb, one.wait_us, one.run_us) for one in figures.slowest]
    assert slowest == [(2, "done", 500_000, 4 * SECOND), (1, "retried", 2 * SECOND, SECOND)]
    assert [(cause.verb, cause.count, cause.examples) for cause in figures.causes] == [("retried", 1, ["a"])]


def test_the_wait_of_a_job_that_was_run_before_its_time_begins_then(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(0, event("enqueued", "a"), event("scheduled", "a", due=3600 * SECOND))
    journal.note(2 * SECOND, event("promoted", "a"))
    journal.note(5 * SECOND, event("claimed", "a", fence=1, attempt=1))
    journal.note(6 * SECOND, event("done", "a", fence=1, micros=SECOND))
    assert figures_of(spark, journal).times == Times((3 * SECOND,) * 3, (SECOND,) * 3)


def test_the_time_held_is_not_part_of_the_wait(spark: SparkSession) -> None:
    """a is met at 4 s; b at 6 s, and due at 8 s; c is dead because of what it waited for; d stays held."""
    journal, other = Journal("q"), Journal("other")
    other.note(0, event("enqueued", "x"))
    journal.note(
        0, *(event("enqueued", job) for job in "abcd"), *(event("held", job, cause="done x") for job in "abcd")
    )
    journal.note(3 * SECOND, event("updated", "a"), event("held", "a", cause="done x"))
    journal.note(4 * SECOND, event("met", "a"))
    journal.note(5 * SECOND, event("claimed", "a", fence=1, attempt=1))
    journal.note(6 * SECOND, event("met", "b"), event("scheduled", "b", due=8 * SECOND))
    died = event("dead", "c", fence=2, cause="DependencyFailed", fail_job=False)
    journal.note(7 * SECOND, event("unmet", "c", cause="x dead"), event("claimed", "c", fence=2, attempt=1), died)
    journal.note(8 * SECOND, event("promoted", "b"))
    journal.note(11 * SECOND, event("claimed", "b", fence=3, attempt=1))
    figures = figures_of(spark, journal, other)
    assert figures.times.wait == (SECOND, 3 * SECOND, 3 * SECOND)
    assert figures.holds == Holds(4, 1, (6 * SECOND, 7 * SECOND, 7 * SECOND))
    assert {queue.name: queue.holds for queue in figures.queues} == {"q": figures.holds, "other": Holds()}
    assert [(one.verb, one.cause, one.count) for one in figures.causes] == [("dead", "DependencyFailed", 1)]
    text = Outline(report_page("t", "", figures)).text
    assert "median time held6 sp99 7 s; 1 of 4 still held" in text
    assert "heldqueueenqueued" in text


def test_the_page_of_a_history_without_held_jobs_does_not_mention_them(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(0, event("enqueued", "a"), event("held", "a", cause="done x"))
    journal.note(SECOND, event("cancelled", "a"))
    figures = figures_of(spark, journal)
    assert figures.holds == Holds(1, 0, (SECOND,) * 3)
    assert "median time held" not in report_page("t", "", figures_of(spark, two_attempts()))


def test_running_jobs_are_counted_in_the_buckets_in_which_they_run(spark: SparkSession) -> None:
    figures = figures_of(spark, two_attempts())
    span = figures.span
    assert (span.step_us, figures.peak) == (100_000, 1)
    busy = {at for at, share in enumerate(figures.running["q"]) if share == pytest.approx(1)}
    assert busy == {*range(20, 30), *range(55, 95)}
    assert sum(figures.running["q"]) == pytest.approx(50)


def test_jobs_settled_together_count_as_run_one_after_the_other(spark: SparkSession) -> None:
    journal = Journal("q")
    ids = "abcde"
    journal.note(0, *(event("enqueued", job) for job in ids))
    journal.note(SECOND, *(event("claimed", job, fence=1, attempt=1) for job in ids))
    journal.note(2 * SECOND, *(event("done", job, fence=1, micros=200_000) for job in ids))
    figures = figures_of(spark, journal)
    assert figures.peak == 1
    assert figures.running["q"][:20] == [0] * 10 + [1] * 10


def test_an_unfinished_job_runs_to_the_end_and_an_unstarted_returned_one_does_not_run(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(0, event("enqueued", "a"), event("enqueued", "b"))
    journal.note(SECOND, event("claimed", "a", fence=1, attempt=1), event("claimed", "b", fence=1, attempt=1))
    journal.note(2 * SECOND, event("returned", "b"))
    journal.note(3 * SECOND, event("paused"))
    figures = figures_of(spark, journal)
    assert figures.peak == 1
    assert figures.running["q"] == [0] * 10 + [1] * 21
    assert figures.slowest == []


def test_a_stalled_job_without_a_run_time_ran_from_its_claim(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(0, event("enqueued", "a"))
    journal.note(SECOND, event("claimed", "a", fence=1, attempt=1))
    journal.note(4 * SECOND, event("stalled", "a", fence=1, cause="signal-9"), event("returned", "a"))
    figures = figures_of(spark, journal)
    assert [(one.verb, one.cause, one.run_us) for one in figures.slowest] == [("stalled", "signal-9", 3 * SECOND)]
    assert [(cause.verb, cause.cause, cause.count) for cause in figures.causes] == [("stalled", "signal-9", 1)]


def test_a_job_buried_by_a_claim_is_an_example_of_its_cause(spark: SparkSession) -> None:
    """It stalled too often: the claim buries it without an attempt."""
    journal = Journal("q")
    journal.note(0, event("enqueued", "a"))
    died = event("dead", "a", fence=1, cause="StallError", fail_job=False)
    journal.note(SECOND, event("claimed", "a", fence=1, attempt=5), died)
    figures = figures_of(spark, journal)
    assert [(one.verb, one.cause, one.examples) for one in figures.causes] == [("dead", "StallError", ["a"])]


def test_failures_are_grouped_by_exception(spark: SparkSession) -> None:
    """A real run: one queue raises ValueError twice per job, the other an exception of its own."""
    with running() as forq:
        forq.create("bad", "fail", max_retries=1, min_backoff="10ms", max_backoff="10ms")
        forq.create("odd", "raise_strange", max_retries=0)
        for job_id in ("v1", "v2", "v3"):
            forq.client().queue("bad").enqueue(1, id=job_id)
        for job_id in ("s1", "s2"):
            forq.client().queue("odd").enqueue(1, id=job_id)
        wait_until(lambda: forq.queue_status("bad")["dead"] == 3)
        wait_until(lambda: forq.queue_status("odd")["dead"] == 2)
        events = spark.read.format("forq").option("redis", forq.url).load()
        figures = read_figures(spark, events, None, None)
    assert figures is not None
    assert [(cause.verb, cause.cause, cause.count, cause.queues) for cause in figures.causes] == [
        ("dead", "ValueError", 3, 1),
        ("retried", "ValueError", 3, 1),
        ("dead", "Strange", 2, 1),
    ]
    assert [set(cause.examples) <= {"v1", "v2", "v3"} for cause in figures.causes] == [True, True, False]
    assert set(figures.causes[2].examples) == {"s1", "s2"}
    text = Outline(report_page("t", "", figures)).text
    assert re.search(r"failed, retriedValueError31v\d, v\d", text)
    assert re.search(r"deadStrange21s\d, s\d", text)


def test_a_released_job_is_a_success_and_ran_until_it_was_acknowledged(spark: SparkSession) -> None:
    journal = Journal("q")
    journal.note(0, event("enqueued", "a"), event("enqueued", "b"))
    journal.note(SECOND, event("claimed", "a", fence=1, attempt=1))
    journal.note(4 * SECOND, event("released", "a", fence=1, micros=2 * SECOND))
    # Without an awaiter it is claimed and retried in one step.
    journal.note(5 * SECOND, event("claimed", "b", fence=2, attempt=1), event("retried", "b", fence=2, cause="-"))
    figures = figures_of(spark, journal)
    assert (sum(figures.done["q"]), figures.total("released"), figures.peak) == (1, 1, 1)
    assert [(one.verb, one.wait_us, one.run_us) for one in figures.slowest] == [("released", SECOND, 2 * SECOND)]
    assert sum(ended for ended, _ in figures.cells.values()) == 2
    text = Outline(report_page("t", "", figures)).text
    assert "jobs done or released1" in text
    assert "success rate100%" in text
    assert f"failed, retried{MISSING}11b" in text


def test_an_attempt_claimed_before_the_period_is_counted_without_its_wait(spark: SparkSession) -> None:
    events = frame(spark, two_attempts())
    figures = read_figures(spark, events, BEGIN_US + 7 * SECOND, None)
    assert figures is not None
    assert (figures.events, figures.total("done")) == (1, 1)
    assert [(one.wait_us, one.run_us) for one in figures.slowest] == [(None, 4 * SECOND)]
    figures = read_figures(spark, events, None, BEGIN_US + 3 * SECOND)
    assert figures is not None
    assert (figures.total("enqueued"), figures.total("retried")) == (1, 0)


def test_the_figures_of_a_day_match_plain_counts(spark: SparkSession) -> None:
    journals = [
        simulated("emails", Traffic(0.02, 900, 2, failing=0.1), 24 * 3600),
        simulated("thumbs", Traffic(0.01, 9000, 1, failing=0.4, crashing=0.05, hanging=0.02), 24 * 3600),
    ]
    figures = figures_of(spark, *journals)
    rows = [row for journal in journals for row in journal.rows()]
    for verb in ("enqueued", "done", "retried", "stalled", "timed_out", "dead"):
        assert figures.total(verb) == sum(row[5] == verb for row in rows)
    assert sum(map(sum, figures.done.values())) == figures.total("done")
    assert sum(figures.enqueued) == figures.total("enqueued")
    ended = figures.total("done", "retried", "stalled", "timed_out", "dead")
    assert sum(ended for ended, _ in figures.cells.values()) == ended
    assert sum(cause.count for cause in figures.causes) == ended - figures.total("done")
    assert {queue.name: queue.peak for queue in figures.queues} == {"emails": 2, "thumbs": 1}
    seconds = sum(sum(series) for series in figures.running.values()) * figures.span.step_us / SECOND
    assert seconds == pytest.approx(sum(queue.busy_us for queue in figures.queues) / SECOND, rel=0.02)


def test_the_busiest_of_many_queues_are_named_and_all_are_counted(spark: SparkSession) -> None:
    journals = []
    for number in range(40):
        journal = Journal(f"q{number:02}")
        for job in range(number + 1):
            journal.note(job * SECOND, event("enqueued", f"{number}-{job}"))
            journal.note(job * SECOND + 9, event("claimed", f"{number}-{job}", fence=job + 1, attempt=1))
            journal.note(job * SECOND + 99, event("done", f"{number}-{job}", fence=job + 1, micros=90))
        journals.append(journal)
    figures = figures_of(spark, *journals)
    assert figures.names == [*(f"q{number}" for number in range(39, 39 - MAX_NAMED_QUEUES, -1)), OTHERS]
    assert len(figures.queues) == 40
    assert sum(figures.done[OTHERS]) == sum(number + 1 for number in range(40 - MAX_NAMED_QUEUES))
    Outline(report_page("t", "", figures))


@pytest.mark.parametrize("length_us", [SECOND // 2, MINUTE, HOUR, DAY, 40 * DAY])
def test_labels_of_an_axis_do_not_overlap_at_any_width(spark: SparkSession, length_us: int) -> None:
    journal = Journal("q")
    for number in range(11):
        at = number * length_us // 10
        journal.note(at, event("enqueued", f"{number}"), event("claimed", f"{number}", fence=1, attempt=1))
        journal.note(at + 1, event("done", f"{number}", fence=1, micros=10**number // 10))
    page = report_page("t", "", figures_of(spark, journal))
    axes = axes_in(page)
    assert len(axes) > 6
    for axis in axes:
        labels = len(labels_shown(axis, 10**6))
        assert len(labels_shown(axis, 1200)) >= min(3, labels)
        for width_px in range(150, 1250, 10):
            shown = labels_shown(axis, width_px)
            assert all(left[1] < right[0] for left, right in pairwise(shown)), (width_px, shown)


def test_the_chart_of_running_jobs_does_not_claim_to_show_capacity(spark: SparkSession) -> None:
    """A running job holds as many capacity units as the size of its queue, and the journal has no sizes."""
    text = Outline(report_page("t", "", figures_of(spark, two_attempts()))).text
    assert "Running jobsAverage number of jobs running at the same time. Peak of all queues: 1." in text
    assert "Capacity" not in text


def test_user_chosen_text_is_escaped(spark: SparkSession) -> None:
    journal = Journal(NASTY)
    journal.note(0, event("enqueued", NASTY))
    journal.note(SECOND, event("claimed", NASTY, fence=1, attempt=1))
    journal.note(2 * SECOND, event("timed_out", NASTY, fence=1, cause=NASTY), event("returned", NASTY))
    journal.note(3 * SECOND, event("claimed", NASTY, fence=2, attempt=2))
    journal.note(4 * SECOND, event("dead", NASTY, fence=2, micros=SECOND))
    page = report_page(NASTY, NASTY, figures_of(spark, journal))
    assert "<script>alert" not in page
    outline = Outline(page)
    assert outline.text.count(NASTY) >= 8
    assert outline.tags.count("script") == 1


def test_the_page_loads_nothing_from_the_network(spark: SparkSession) -> None:
    page = report_page("t", "", figures_of(spark, two_attempts()))
    assert Outline(page).fetched == []
    assert not re.search(r"https?://|@import|url\(", page)


def test_the_page_of_an_empty_history_says_so(spark: SparkSession) -> None:
    assert read_figures(spark, spark.createDataFrame([], EVENTS), None, None) is None
    assert "No events in this period." in Outline(empty_page("t", "")).text


@pytest.mark.parametrize("length_us", [1, SECOND, MINUTE, HOUR, DAY, 40 * DAY, 366 * DAY, 100 * 366 * DAY])
def test_buckets_and_cells_cover_the_span_within_their_limits(length_us: int) -> None:
    span = Span(BEGIN_US + 12_345_678, BEGIN_US + 12_345_678 + length_us)
    edges = [span.edges(bucket) for bucket in range(span.buckets)]
    assert edges[0][0] == span.from_us
    assert edges[-1][1] == span.to_us
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert len(edges) <= MAX_BUCKETS
    assert len(span.ticks()) <= 10
    heat = heat_grid_of(span)
    assert len(heat.rows(span)) <= 37
    assert heat.columns <= 60


def test_a_time_is_a_date_with_or_without_a_zone_or_an_age() -> None:
    now = BEGIN_US + DAY
    assert parse_time("2026-11-09", "--since", now) == BEGIN_US
    assert parse_time("2026-11-09T01:00+01:00", "--since", now) == BEGIN_US
    assert parse_time("24h", "--since", now) == BEGIN_US
    with pytest.raises(UsageError, match="--since 'yesterday' is not allowed: 2026-11-16, "):
        parse_time("yesterday", "--since", now)


def arguments(history: Path, *given: str) -> Namespace:
    parser = ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args(given, Namespace(history=str(history)))


def test_the_command_writes_the_page_and_replaces_the_old_one(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    History(spark, str(tmp_path / "history")).publish(0, frame(spark, two_attempts()))
    out = tmp_path / "page.html"
    out.write_text("old")
    assert report.run(arguments(tmp_path / "history", "--out", str(out), "--title", "A & B")) == 0
    assert "A & B" in Outline(out.read_text()).text
    assert capsys.readouterr().out == f"{out}: 7 events\n"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]
    assert report.run(arguments(tmp_path / "history", "--out", str(out), "--since", "2027-01-01")) == 0
    assert "No events in this period." in out.read_text()
    with pytest.raises(
        UsageError, match=r"there is no history in .*/none: give --history, or run `forq pipeline ingest`"
    ):
        report.run(arguments(tmp_path / "none", "--out", str(out)))
    with pytest.raises(UsageError, match="is not before --until"):
        report.run(arguments(tmp_path / "history", "--since", "2027-01-01", "--until", "2026-01-01"))
