"""`forq pipeline report`: writes the figures of a history as one HTML page.

The page loads nothing from the network, and all user-chosen text is escaped.
"""

import os
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from html import escape
from pathlib import Path

from pyspark.sql import SparkSession

from forq.charts import (
    SCRIPT,
    STYLE,
    Column,
    Series,
    count,
    duration,
    heat_cells,
    legend,
    log_lines,
    range_bars,
    short,
    stacked_areas,
)
from forq.errors import ForqError, UsageError
from forq.pipeline.history import read_history, require_history
from forq.pipeline.report.figures import (
    DAY,
    HOUR,
    MAX_QUEUES_LISTED,
    MINUTE,
    OTHERS,
    SECOND,
    Attempt,
    Figures,
    QueueFigures,
    Times,
    parse_time,
    read_figures,
    to_datetime,
)
from forq.pipeline.session import spark_session
from forq.progress_line import ProgressLine

MISSING = "\u2013"

# Verbs of the journal as shown to operators.
OUTCOMES = {
    "retried": "failed, retried",
    "snoozed": "snoozed",
    "dead": "dead",
    "timed_out": "timed out",
    "stalled": "stalled: process crashed",
    "suspected": "suspect: process crashed with several jobs running",
    "interrupted": "interrupted by a stop",
    "cancelled": "removed while running",
    "deleted": "queue deleted",
    "done": "done",
    "released": "released",
}

# In the journal.
UNKNOWN_CAUSE = "-"

_FOLDER = Path(__file__).parent

_Pick = Callable[[Times], tuple[int | None, int | None, int | None]]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", default="report.html", help="file to write (default: report.html)")
    when = "a date or time (UTC unless it has a zone), or an age: 24h, 7d"
    parser.add_argument("--since", metavar="T", help=f"leave out events before T: {when}")
    parser.add_argument("--until", metavar="T", help="leave out events at or after T")
    parser.add_argument("--title", metavar="TEXT", default="forq report", help="heading of the page")


def run(args: Namespace) -> int:
    now_us = time.time_ns() // 1000
    since_us = None if args.since is None else parse_time(args.since, "--since", now_us)
    until_us = None if args.until is None else parse_time(args.until, "--until", now_us)
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise UsageError(f"--since {args.since} is not before --until {args.until}: give an earlier --since")
    progress = ProgressLine()
    progress.update("starting Spark")
    spark = spark_session("report")
    progress.update(f"reading {args.history}")
    figures = history_figures(spark, args.history, since_us, until_us)
    progress.clear()
    note = f"generated {clock(now_us)} UTC"
    page = empty_page(args.title, note) if figures is None else report_page(args.title, note, figures)
    write_page(Path(args.out), page)
    print(f"{args.out}: {0 if figures is None else figures.events:,} events")
    return 0


def history_figures(spark: SparkSession, history: str, since_us: int | None, until_us: int | None) -> Figures | None:
    require_history(spark, history)
    events = read_history(spark, history, since=_day(since_us), until=_day(until_us))
    return read_figures(spark, events, since_us, until_us)


def _day(at_us: int | None) -> date | None:
    return None if at_us is None else to_datetime(at_us).date()


def write_page(out: Path, page: str) -> None:
    """Writes atomically: the old page stays until the new one is complete."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        fresh.write_text(page, encoding="utf-8", errors="replace")
        fresh.replace(out)
    except OSError as exc:
        raise ForqError(f"cannot write {out}: {exc.strerror or exc}") from exc
    finally:
        fresh.unlink(missing_ok=True)


def report_page(title: str, note: str, figures: Figures) -> str:
    """`note`: end of the line below the title, after the period."""
    parts = (
        _headline(figures),
        _throughput(figures),
        _times(figures),
        _times_by_queue(figures),
        _running(figures),
        _heat(figures),
        _failures(figures),
        _jobs("Slowest jobs", "Attempts with the longest run time.", figures.slowest),
        _jobs("Dead jobs", f"The latest of {count(figures.total('dead'))} dead jobs.", figures.dead),
        _queues(figures),
    )
    span = f"{clock(figures.span.from_us)} to {clock(figures.span.to_us - 1)} UTC"
    length = duration(figures.span.length_us)
    return _page(title, f"{span} · {length} · {count(figures.events)} events · {note}", "".join(parts))


def empty_page(title: str, note: str) -> str:
    return _page(title, note, '<section><p class="empty">No events in this period.</p></section>')


def _page(title: str, subtitle: str, body: str) -> str:
    style, script = (
        "\n".join(file.read_text() for file in (shared, _FOLDER / own))
        for shared, own in ((STYLE, "report.css"), (SCRIPT, "report.js"))
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p>"
        '<button id="theme" type="button">light / dark</button></header>'
        f"{body}</main><script>\n{script}</script></body></html>\n"
    )


def _headline(figures: Figures) -> str:
    done, dead = figures.total("done", "released"), figures.total("dead")
    lost = figures.total("stalled", "timed_out")
    wait, run = figures.times.wait, figures.times.run
    average = sum(queue.busy_us for queue in figures.queues) / figures.span.length_us
    seconds = figures.span.length_us / SECOND
    rate, _, unit = rate_unit(done / seconds)
    cards = (
        (
            "",
            "jobs done or released" if figures.total("released") else "jobs done",
            count(done),
            f"{short(done / seconds * rate)} {unit} on average",
        ),
        (
            "",
            "jobs enqueued",
            count(figures.total("enqueued")),
            f"in {len(figures.queues)} queue{'' if len(figures.queues) == 1 else 's'}",
        ),
        ("good" if not dead else "", "success rate", percent(done, done + dead), "of done and dead jobs"),
        ("bad" if dead else "", "dead jobs", count(dead), "failed for good"),
        ("warn" if lost else "", "timeouts and stalls", count(lost), f"{count(figures.total('retried'))} retries"),
        ("", "median wait", duration_or_dash(wait[0]), f"p99 {duration_or_dash(wait[2])}"),
        ("", "median run time", duration_or_dash(run[0]), f"p99 {duration_or_dash(run[2])}"),
        ("", "peak running jobs", count(figures.peak), f"{short(average)} on average"),
        *((_holds(figures),) if figures.holds.jobs else ()),
    )
    return '<div class="cards">' + "".join(_card(*card) for card in cards) + "</div>"


def _holds(figures: Figures) -> tuple[str, str, str, str]:
    median, _, p99 = figures.holds.times
    note = f"p99 {duration_or_dash(p99)}; {count(figures.holds.at_end)} of {count(figures.holds.jobs)} still held"
    return "", "median time held", duration_or_dash(median), note


def _card(tone: str, name: str, value: str, note: str) -> str:
    return f'<div class="card {tone}"><span>{name}</span><b>{value}</b><small>{escape(note)}</small></div>'


def _throughput(figures: Figures) -> str:
    span = figures.span
    seconds = [span.seconds_in(at) for at in range(span.buckets)]
    totals = [sum(figures.done[name][at] for name in figures.names) / seconds[at] for at in range(span.buckets)]
    scale, sign, unit = rate_unit(max(totals, default=0))

    def rates(counts: Sequence[int]) -> list[float]:
        return [scale * count / second for count, second in zip(counts, seconds, strict=True)]

    areas = [
        Series(name, tone, rates(figures.done[name]), lambda value: f"{short(value)}{sign}")
        for name, tone in _queue_tones(figures)
    ]
    line = Series("enqueued, all queues", "enqueued", rates(figures.enqueued), areas[0].text)
    chart = stacked_areas(_columns(figures), areas, [line], span.ticks(), title=f"Jobs done or released {unit}")
    entries = [(name, tone, count(sum(figures.done[name]))) for name, tone in _queue_tones(figures)]
    entries.append(("enqueued, all queues", "enqueued", count(sum(figures.enqueued))))
    return _section(
        "Throughput",
        f"Jobs done or released {unit}, by queue. Dashed line: jobs enqueued. Where it is above, the backlog grows.",
        chart + legend(entries),
    )


def _wait(times: Times) -> tuple[int | None, int | None, int | None]:
    return times.wait


def _run(times: Times) -> tuple[int | None, int | None, int | None]:
    return times.run


_WAIT_RUN = (
    ("Wait", "From ready (or due) to claimed, per attempt; without the time held.", _wait),
    ("Run", "Run time of the handler, per attempt.", _run),
)


def _times(figures: Figures) -> str:
    charts = []
    for title, explanation, pick in _WAIT_RUN:
        lines = _percentile_lines(figures.times_over_time, pick)
        chart = log_lines(
            _columns(figures), lines, figures.span.ticks(), _bounds(figures.times_over_time, pick), title=title
        )
        charts.append(f"<div><h3>{title}</h3><p>{explanation}</p>{chart}</div>")
    names = legend([(line.name, line.tone, "") for line in _percentile_lines([], _wait)])
    return _section(
        "Wait and run time",
        "All queues together, on a logarithmic scale.",
        f'<div class="pair">{"".join(charts)}</div>{names}',
    )


def _times_by_queue(figures: Figures) -> str:
    by_name = {queue.name: queue.times for queue in figures.queues}
    pairs = []
    for title, _, pick in _WAIT_RUN:
        rows = [(name, tone, pick(by_name[name])) for name, tone in _queue_tones(figures) if name in by_name]
        pairs.append(
            f"<div><h3>{title}: p50 · p90 · p99</h3>{range_bars(rows, duration, title=f'{title} by queue')}</div>"
        )
    columns = _columns(figures)
    ticks = figures.span.ticks()[::3]
    every = [times for series in figures.times_by_queue.values() for times in series]
    cards = []
    for name, _ in _queue_tones(figures):
        series = figures.times_by_queue[name]
        drawn = "".join(
            f"<small>{title.lower()}</small>"
            + log_lines(
                columns,
                _percentile_lines(series, pick),
                ticks if pick is _run else [],
                _bounds(every, pick),
                3,
                title=f"{title} of {name}",
            )
            for title, _, pick in _WAIT_RUN
        )
        cards.append(f"<div><h3>{escape(name)}</h3>{drawn}</div>")
    return _section(
        "Wait and run time per queue",
        "All queues have the same logarithmic scale.",
        f'<div class="pair">{"".join(pairs)}</div><div class="multiples">{"".join(cards)}</div>',
    )


def _percentile_lines(series: Sequence[Times], pick: _Pick) -> list[Series]:
    # Highest first, so that the median is drawn on top.
    return [
        Series(name, f"p{at}", [pick(times)[at] for times in series], duration)
        for at, name in ((2, "p99"), (1, "p90"), (0, "p50"))
    ]


def _bounds(series: Sequence[Times], pick: _Pick) -> tuple[float, float]:
    known = [value for times in series for value in pick(times) if value is not None]
    return min(known, default=1), max(known, default=1)


def _running(figures: Figures) -> str:
    areas = [Series(name, tone, figures.running[name], short) for name, tone in _queue_tones(figures)]
    chart = stacked_areas(_columns(figures), areas, [], figures.span.ticks(), title="Running jobs")
    peaks = {queue.name: queue.peak for queue in figures.queues}
    entries = [(name, tone, f"peak {peaks[name]}" if name in peaks else "") for name, tone in _queue_tones(figures)]
    explanation = f"Average number of jobs running at the same time. Peak of all queues: {count(figures.peak)}."
    return _section("Running jobs", explanation, chart + legend(entries))


def _heat(figures: Figures) -> str:
    heat, span = figures.heat, figures.span
    rows = heat.rows(span)
    place = {row: at for at, (row, _) in enumerate(rows)}
    occurrences = Counter(heat.times(span)) if heat.by_weekday else Counter()
    values = {}
    for (row, cell), (ended, failed) in figures.cells.items():
        often = occurrences.get((row, cell), 1)
        tooltip = f"{short(ended / often)} attempts, {short(failed / often)} failed"
        values[place[row], cell] = (ended / often, f"{tooltip}{' on average' if heat.by_weekday else ''}")
    names = [_cell_name(heat.cell_us, column) for column in range(heat.columns)]
    unit = {SECOND: "second", MINUTE: "minute", 10 * MINUTE: "ten minutes", HOUR: "hour"}[heat.cell_us]
    average = "Average number of attempts" if heat.by_weekday else "Attempts"
    explanation = f"{average} that ended per {unit}{', by weekday' if heat.by_weekday else ''}. Times are UTC."
    cells = heat_cells([name for _, name in rows], names, values, title="Busy times")
    return _section("Busy times", explanation, cells)


def _cell_name(cell_us: int, column: int) -> str:
    if cell_us == HOUR:
        return f"{column:02}:00"
    if cell_us == 10 * MINUTE:
        return f"+{column // 6}:{column % 6}0"
    return f":{column:02}"


def _failures(figures: Figures) -> str:
    if not figures.causes:
        return _section("Failures by cause", "", '<p class="empty">No attempt failed, timed out or stalled.</p>')
    most = max(cause.count for cause in figures.causes)
    rows = [
        [
            ("text", escape(OUTCOMES.get(cause.verb, cause.verb))),
            ("text long", escape(_cause_text(cause.cause))),
            ("text", f'<i class="share" style="width:{90 * cause.count / most:.0f}px"></i>{count(cause.count)}'),
            ("", count(cause.queues)),
            ("text long examples", ", ".join(f"<code>{escape(job)}</code>" for job in cause.examples)),
        ]
        for cause in figures.causes
    ]
    head = (
        ("text", "outcome"),
        ("text", "cause"),
        ("text", "count"),
        ("", "queues"),
        ("text", "example jobs"),
    )
    return _section(
        "Failures by cause",
        "Failed attempts (by exception), timeouts and stalls (by cause), most frequent first.",
        _table(head, rows),
    )


def _jobs(title: str, explanation: str, attempts: Sequence[Attempt]) -> str:
    if not attempts:
        return _section(title, "", '<p class="empty">None.</p>')
    rows = [
        [
            ("text long", f"<code>{escape(one.job)}</code>"),
            ("text name", escape(one.queue)),
            ("", duration_or_dash(one.run_us)),
            ("", duration_or_dash(one.wait_us)),
            ("", MISSING if one.attempt is None else count(one.attempt)),
            ("text", escape(OUTCOMES.get(one.verb, one.verb))),
            ("text long", escape(_cause_text(one.cause))),
            ("", clock(one.ended_us)),
        ]
        for one in attempts
    ]
    head = [("text", "job"), ("text", "queue"), ("", "run time"), ("", "wait"), ("", "attempt"), ("text", "outcome")]
    return _section(title, explanation, _table([*head, ("text", "cause"), ("", "ended (UTC)")], rows))


def _cause_text(cause: str | None) -> str:
    return MISSING if cause in (None, UNKNOWN_CAUSE) else str(cause)


def _queues(figures: Figures) -> str:
    verbs = ("enqueued", "done", "released", "retried", "timed_out", "stalled", "cancelled", "dead")
    head = [("text", "queue"), *(("", verb.replace("_", " ")) for verb in verbs), ("", "success")]
    head += [(kind, p) for _ in ("wait", "run") for kind, p in (("first", "p50"), ("", "p90"), ("", "p99"))]
    head += [("first", "avg"), ("", "peak")]
    above = [(len(verbs) + 2, ""), (3, "wait"), (3, "run"), (2, "running")]
    listed = figures.queues[:MAX_QUEUES_LISTED]
    rows = [_queue_row(queue, verbs, figures.span.length_us) for queue in listed]
    if figures.holds.jobs:
        head += [("first", "jobs"), ("", "at the end"), ("", "p50"), ("", "p99")]
        above.append((4, "held"))
        rows = [[*row, *_hold_cells(queue)] for row, queue in zip(rows, listed, strict=True)]
    more = len(figures.queues) - len(listed)
    explanation = f"Busiest first{f'; {count(more)} more are not listed' if more else ''}."
    return _section("Queues", explanation, _table(head, rows, above))


def _hold_cells(queue: QueueFigures) -> list[tuple[str, str]]:
    held, (median, _, p99) = queue.holds, queue.holds.times
    return [
        (f"first {'' if held.jobs else 'none'}".rstrip(), count(held.jobs)),
        ("" if held.at_end else "none", count(held.at_end)),
        ("", duration_or_dash(median)),
        ("", duration_or_dash(p99)),
    ]


def _queue_row(queue: QueueFigures, verbs: Iterable[str], span_us: int) -> list[tuple[str, str]]:
    done, dead = queue.verbs.get("done", 0) + queue.verbs.get("released", 0), queue.verbs.get("dead", 0)
    row = [("text name", escape(queue.name))]
    row += [("" if queue.verbs.get(verb) else "none", count(queue.verbs.get(verb, 0))) for verb in verbs]
    row.append(("", percent(done, done + dead)))
    for wait_or_run in (queue.times.wait, queue.times.run):
        row += [("first" if at == 0 else "", duration_or_dash(value)) for at, value in enumerate(wait_or_run)]
    return [
        *row,
        ("first", short(queue.busy_us / span_us)),
        ("", MISSING if queue.peak is None else count(queue.peak)),
    ]


def _columns(figures: Figures) -> list[Column]:
    span = figures.span
    columns = []
    for bucket in range(span.buckets):
        begin, end = span.edges(bucket)
        at = to_datetime(span.origin_us + bucket * span.step_us)
        form = "%a %d %b %Y" if span.step_us >= DAY else "%a %d %b %H:%M" if span.step_us >= MINUTE else "%H:%M:%S.%f"
        label = at.strftime(form).removesuffix("00000").removesuffix(".0")
        columns.append(Column((begin - span.from_us) / span.length_us, (end - span.from_us) / span.length_us, label))
    return columns


def _queue_tones(figures: Figures) -> list[tuple[str, str]]:
    return [(name, "others" if name == OTHERS else f"c{at}") for at, name in enumerate(figures.names)]


def _section(title: str, explanation: str, body: str) -> str:
    paragraph = f"<p>{escape(explanation)}</p>" if explanation else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{body}</section>"


def _table(
    head: Iterable[tuple[str, str]], rows: Iterable[list[tuple[str, str]]], above: Iterable[tuple[int, str]] = ()
) -> str:
    """A cell is (CSS class, HTML). `above`: groups of columns above the head, as (number of columns, name)."""
    groups = "".join(
        f'<th class="{"group first" if name else ""}" colspan="{columns}">{name}</th>' for columns, name in above
    )
    top = f"<tr>{groups}</tr>" if groups else ""
    top += "<tr>" + "".join(f'<th class="{kind}">{escape(text)}</th>' for kind, text in head) + "</tr>"
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{kind}{" none" if cell == MISSING else ""}">{cell}</td>' for kind, cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead>{top}</thead><tbody>{body}</tbody></table></div>'


def duration_or_dash(micros: int | None) -> str:
    return MISSING if micros is None else duration(micros)


def percent(part: int, whole: int) -> str:
    if not whole:
        return MISSING
    # Never rounded up to 100%.
    share = 100 * part / whole
    return "100%" if part == whole else f"{min(share, 99.99):.2f}%" if share > 99 else f"{share:.1f}%"


def rate_unit(per_second: float) -> tuple[int, str, str]:
    """Factor, sign and name of the time unit that gives a readable number."""
    if per_second >= 1:
        return 1, "/s", "per second"
    return (60, "/min", "per minute") if per_second * 60 >= 1 else (3600, "/h", "per hour")


def clock(micros: int) -> str:
    return to_datetime(micros).strftime("%Y-%m-%d %H:%M:%S")
