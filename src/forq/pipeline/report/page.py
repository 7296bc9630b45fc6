"""Numbers, times and verbs in the words of a report.

The sections of a report that are charts: figures in, HTML out.

The report as one page: figures in, HTML out. It needs no network; everything that users chose is escaped.

forq pipeline report: what a history tells an operator, as one page of HTML.

report_figures.py reads the numbers, report_page.py writes the page; between them nothing but dataclasses.
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

from forq.errors import ForqError, UsageError
from forq.pipeline.history import read_history, require_history
from forq.pipeline.report.charts import Column, Series, heat_cells, log_lines, range_bars, stacked_areas
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
    moment,
    parse_moment,
    read_figures,
)
from forq.pipeline.session import spark_session
from forq.progress_line import ProgressLine

MISSING = "\u2013"

# What the verbs of the journal mean to an operator.
VERB_WORDS = {
    "retried": "failed, tried again",
    "dead": "failed for good",
    "timed_out": "ran past its deadline",
    "stalled": "its process died",
    "suspected": "its process died, several ran",
    "interrupted": "stopped while it ran",
    "cancelled": "removed while it ran",
    "deleted": "its queue was deleted",
    "done": "done",
    "released": "released",
}
# What the journal says of a cause that nobody knows.
UNKNOWN_CAUSE = "-"


def number(value: int) -> str:
    return f"{value:,}"


def duration(micros: float) -> str:
    for size, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min"), (SECOND, "s"), (1000, "ms")):
        if micros >= size:
            return f"{short(micros / size)} {unit}"
    return f"{short(micros)} µs"


def shown_time(micros: int | None) -> str:
    return MISSING if micros is None else duration(micros)


def short(value: float) -> str:
    """Three digits: nobody reads more."""
    if value >= 100 or value == int(value):
        return f"{round(value):,}"
    if value < 1:
        return f"{value:.2g}"
    return f"{value:.{1 if value >= 10 else 2}f}".rstrip("0").rstrip(".")


def percent(part: int, whole: int) -> str:
    if not whole:
        return MISSING
    # Never 100 % while something is missing.
    share = 100 * part / whole
    return "100 %" if part == whole else f"{min(share, 99.99):.2f} %" if share > 99 else f"{share:.1f} %"


def rate_unit(per_second: float) -> tuple[int, str, str]:
    """By what to multiply a rate so that it is a number people can read, the unit's sign and its name."""
    if per_second >= 1:
        return 1, "/s", "per second"
    return (60, "/min", "per minute") if per_second * 60 >= 1 else (3600, "/h", "per hour")


def clock(micros: int) -> str:
    return moment(micros).strftime("%Y-%m-%d %H:%M:%S")


def _wait(times: Times) -> tuple[int | None, int | None, int | None]:
    return times.wait


def _run(times: Times) -> tuple[int | None, int | None, int | None]:
    return times.run


_WAIT_AND_RUN = (
    ("Wait", "From ready (or due) to claimed by a worker.", _wait),
    ("Run", "What the handler took, per attempt.", _run),
)
_Pick = Callable[[Times], tuple[int | None, int | None, int | None]]


def throughput(figures: Figures) -> str:
    span = figures.span
    seconds = [span.seconds_in(at) for at in range(span.buckets)]
    totals = [sum(figures.done[name][at] for name in figures.names) / seconds[at] for at in range(span.buckets)]
    scale, sign, unit = rate_unit(max(totals, default=0))

    def rates(counts: Sequence[int]) -> list[float]:
        return [scale * count / second for count, second in zip(counts, seconds, strict=True)]

    areas = [
        Series(name, tone, rates(figures.done[name]), lambda value: f"{short(value)}{sign}")
        for name, tone in _tones(figures)
    ]
    line = Series("enqueued, all", "enqueued", rates(figures.enqueued), areas[0].text)
    chart = stacked_areas(_columns(figures), areas, [line], span.ticks())
    legend = [(name, tone, number(sum(figures.done[name]))) for name, tone in _tones(figures)]
    legend.append(("enqueued, all", "enqueued", number(sum(figures.enqueued))))
    return section(
        "Throughput",
        f"Jobs done or released {unit}, by queue, and how many came in. Where that, dashed, is above, a backlog grows.",
        chart + _legend(legend),
    )


def times(figures: Figures) -> str:
    charts = []
    for title, said, pick in _WAIT_AND_RUN:
        lines = _percentile_lines(figures.times_over_time, pick)
        chart = log_lines(_columns(figures), lines, figures.span.ticks(), _bounds(figures.times_over_time, pick))
        charts.append(f"<div><h3>{title}</h3><p>{said}</p>{chart}</div>")
    legend = _legend([(line.name, line.tone, "") for line in _percentile_lines([], _wait)])
    return section("Wait and run time", "All queues.", f'<div class="pair">{"".join(charts)}</div>{legend}')


def times_by_queue(figures: Figures) -> str:
    by_name = {queue.name: queue.times for queue in figures.queues}
    pairs = []
    for title, _, pick in _WAIT_AND_RUN:
        rows = [(name, tone, pick(by_name[name])) for name, tone in _tones(figures) if name in by_name]
        pairs.append(f"<div><h3>{title}: p50 · p90 · p99</h3>{range_bars(rows, duration)}</div>")
    columns = _columns(figures)
    ticks = figures.span.ticks()[::3]
    every = [times for series in figures.times_by_queue.values() for times in series]
    cards = []
    for name, _ in _tones(figures):
        series = figures.times_by_queue[name]
        drawn = "".join(
            f"<small>{title.lower()}</small>"
            + log_lines(
                columns, _percentile_lines(series, pick), ticks if pick is _run else [], _bounds(every, pick), 3
            )
            for title, _, pick in _WAIT_AND_RUN
        )
        cards.append(f"<div><h3>{escape(name)}</h3>{drawn}</div>")
    return section(
        "Wait and run time per queue",
        "On one logarithmic scale each, so that queues can be compared.",
        f'<div class="pair">{"".join(pairs)}</div><div class="multiples">{"".join(cards)}</div>',
    )


def running(figures: Figures) -> str:
    areas = [Series(name, tone, figures.running[name], short) for name, tone in _tones(figures)]
    chart = stacked_areas(_columns(figures), areas, [], figures.span.ticks())
    peaks = {queue.name: queue.peak for queue in figures.queues}
    legend = [(name, tone, f"at most {peaks[name]}" if name in peaks else "") for name, tone in _tones(figures)]
    said = f"Jobs that ran at the same time, on average; at most {number(figures.peak)} at once."
    return section("Running jobs", said, chart + _legend(legend))


def heat(figures: Figures) -> str:
    heat, span = figures.heat, figures.span
    rows = heat.rows(span)
    place = {row: at for at, (row, _) in enumerate(rows)}
    occurrences = Counter(heat.times(span)) if heat.by_weekday else Counter()
    values = {}
    for (row, cell), (ended, failed) in figures.cells.items():
        often = occurrences.get((row, cell), 1)
        said = f"{short(ended / often)} attempts, {short(failed / often)} failed"
        values[place[row], cell] = (ended / often, f"{said}{' on average' if heat.by_weekday else ''}")
    names = [_cell_name(heat.cell_us, column) for column in range(heat.columns)]
    unit = {SECOND: "second", MINUTE: "minute", 10 * MINUTE: "ten minutes", HOUR: "hour"}[heat.cell_us]
    said = f"Attempts that ended, per {unit}{', on average per weekday' if heat.by_weekday else ''}. UTC."
    return section("When it is busy", said, heat_cells([name for _, name in rows], names, values))


def _cell_name(cell_us: int, column: int) -> str:
    if cell_us == HOUR:
        return f"{column:02}:00"
    if cell_us == 10 * MINUTE:
        return f"+{column // 6}:{column % 6}0"
    return f":{column:02}"


def _percentile_lines(series: Sequence[Times], pick: _Pick) -> list[Series]:
    # The highest first, so that the median is drawn over the others.
    return [
        Series(name, f"p{at}", [pick(times)[at] for times in series], duration)
        for at, name in ((2, "p99"), (1, "p90"), (0, "p50"))
    ]


def _bounds(series: Sequence[Times], pick: _Pick) -> tuple[float, float]:
    known = [value for times in series for value in pick(times) if value is not None]
    return min(known, default=1), max(known, default=1)


def _columns(figures: Figures) -> list[Column]:
    span = figures.span
    columns = []
    for bucket in range(span.buckets):
        begin, end = span.edges(bucket)
        at = moment(span.origin_us + bucket * span.step_us)
        form = "%a %d %b %Y" if span.step_us >= DAY else "%a %d %b %H:%M" if span.step_us >= MINUTE else "%H:%M:%S.%f"
        label = at.strftime(form).removesuffix("00000").removesuffix(".0")
        columns.append(Column((begin - span.from_us) / span.length_us, (end - span.from_us) / span.length_us, label))
    return columns


def _tones(figures: Figures) -> list[tuple[str, str]]:
    return [(name, "others" if name == OTHERS else f"c{at}") for at, name in enumerate(figures.names)]


def section(title: str, said: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{f'<p>{escape(said)}</p>' if said else ''}{body}</section>"


def _legend(entries: Iterable[tuple[str, str, str]]) -> str:
    items = "".join(
        f'<li><i class="chip {tone}"></i>{escape(name)} <em>{escape(note)}</em></li>' for name, tone, note in entries
    )
    return f'<ul class="legend">{items}</ul>'


_FOLDER = Path(__file__).parent


def empty_page(title: str, said: str) -> str:
    return _page(title, said, '<section><p class="empty">No events: nothing happened in this shown_time.</p></section>')


def report_page(title: str, said: str, figures: Figures) -> str:
    """`said`: what the line below the title says besides the shown_time."""
    parts = (
        _headline(figures),
        throughput(figures),
        times(figures),
        times_by_queue(figures),
        running(figures),
        heat(figures),
        _causes(figures),
        _jobs("Slowest jobs", "The attempts that ran longest.", figures.slowest),
        _jobs("Dead jobs", f"{number(figures.total('dead'))} failed for good; the latest:", figures.dead),
        _queues(figures),
    )
    span = f"{clock(figures.span.from_us)} to {clock(figures.span.to_us - 1)} UTC"
    length = duration(figures.span.length_us)
    return _page(title, f"{span} · {length} · {number(figures.events)} events · {said}", "".join(parts))


def _page(title: str, said: str, body: str) -> str:
    style, script = ((_FOLDER / name).read_text() for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(said)}</p>"
        '<button id="scheme" type="button">light / dark</button></header>'
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
            number(done),
            f"{short(done / seconds * rate)} {unit} on average",
        ),
        ("", "jobs enqueued", number(figures.total("enqueued")), f"in {len(figures.queues)} queues"),
        ("good" if not dead else "", "ended well", percent(done, done + dead), "of done and dead"),
        ("bad" if dead else "", "dead", number(dead), "failed for good"),
        ("warn" if lost else "", "timeouts and stalls", number(lost), f"{number(figures.total('retried'))} retries"),
        ("", "wait, median", shown_time(wait[0]), f"p99 {shown_time(wait[2])}"),
        ("", "run, median", shown_time(run[0]), f"p99 {shown_time(run[2])}"),
        ("", "running at once", number(figures.peak), f"at most; {short(average)} on average"),
    )
    return '<div class="cards">' + "".join(_card(*card) for card in cards) + "</div>"


def _card(tone: str, name: str, value: str, note: str) -> str:
    return f'<div class="card {tone}"><span>{name}</span><b>{value}</b><small>{escape(note)}</small></div>'


def _causes(figures: Figures) -> str:
    if not figures.causes:
        return section("Failures by cause", "", '<p class="empty">None: no attempt failed, timed out or stalled.</p>')
    most = max(cause.count for cause in figures.causes)
    rows = [
        [
            ("text", escape(VERB_WORDS.get(cause.verb, cause.verb))),
            ("text long", escape(_cause(cause.cause))),
            ("text", f'<i class="share" style="width:{90 * cause.count / most:.0f}px"></i>{number(cause.count)}'),
            ("", number(cause.queues)),
            ("text long examples", ", ".join(f"<code>{escape(job)}</code>" for job in cause.examples)),
        ]
        for cause in figures.causes
    ]
    head = (
        ("text", "what happened"),
        ("text", "cause"),
        ("text", "how often"),
        ("", "queues"),
        ("text", "for example"),
    )
    return section(
        "Failures by cause",
        "Exceptions by name, timeouts, stalls and deaths: what attempts ended with, the most frequent first.",
        _table(head, rows),
    )


def _jobs(title: str, said: str, attempts: Sequence[Attempt]) -> str:
    if not attempts:
        return section(title, "", '<p class="empty">None.</p>')
    rows = [
        [
            ("text long", f"<code>{escape(one.job)}</code>"),
            ("text name", escape(one.queue)),
            ("", shown_time(one.run_us)),
            ("", shown_time(one.wait_us)),
            ("", MISSING if one.attempt is None else number(one.attempt)),
            ("text", escape(VERB_WORDS.get(one.verb, one.verb))),
            ("text long", escape(_cause(one.cause))),
            ("", clock(one.ended_us)),
        ]
        for one in attempts
    ]
    head = [("text", "job"), ("text", "queue"), ("", "ran"), ("", "waited"), ("", "attempt"), ("text", "ended")]
    return section(title, said, _table([*head, ("text", "cause"), ("", "at (UTC)")], rows))


def _cause(cause: str | None) -> str:
    return MISSING if cause in (None, UNKNOWN_CAUSE) else str(cause)


def _queues(figures: Figures) -> str:
    verbs = ("enqueued", "done", "released", "retried", "timed_out", "stalled", "cancelled", "dead")
    head = [("text", "queue"), *(("", verb.replace("_", " ")) for verb in verbs), ("", "ended well")]
    head += [(kind, p) for _ in ("wait", "run") for kind, p in (("first", "p50"), ("", "p90"), ("", "p99"))]
    head += [("first", "avg"), ("", "max")]
    above = [(len(verbs) + 2, ""), (3, "wait"), (3, "run"), (2, "running")]
    listed = figures.queues[:MAX_QUEUES_LISTED]
    rows = [_queue_row(queue, verbs, figures.span.length_us) for queue in listed]
    more = len(figures.queues) - len(listed)
    said = f"The busiest first{f'; {number(more)} more are not listed' if more else ''}."
    return section("Queues", said, _table(head, rows, above))


def _queue_row(queue: QueueFigures, verbs: Iterable[str], span_us: int) -> list[tuple[str, str]]:
    done, dead = queue.verbs.get("done", 0) + queue.verbs.get("released", 0), queue.verbs.get("dead", 0)
    row = [("text name", escape(queue.name))]
    row += [("" if queue.verbs.get(verb) else "none", number(queue.verbs.get(verb, 0))) for verb in verbs]
    row.append(("", percent(done, done + dead)))
    for wait_or_run in (queue.times.wait, queue.times.run):
        row += [("first" if at == 0 else "", shown_time(value)) for at, value in enumerate(wait_or_run)]
    return [
        *row,
        ("first", short(queue.busy_us / span_us)),
        ("", MISSING if queue.peak is None else number(queue.peak)),
    ]


def _table(
    head: Iterable[tuple[str, str]], rows: Iterable[list[tuple[str, str]]], above: Iterable[tuple[int, str]] = ()
) -> str:
    """Cells are HTML already; their first part is the class. `above` the head: how many columns go together as what."""
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


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (default: report.html)")
    when = "a date or time (UTC unless it has a zone), or how long ago: 24h, 7d"
    parser.add_argument("--since", metavar="T", help=f"leave out what was before: {when}")
    parser.add_argument("--until", metavar="T", help="leave out what was then or after")
    parser.add_argument("--title", metavar="TEXT", default="forq report", help="the heading of the page")


def run(args: Namespace) -> int:
    now_us = time.time_ns() // 1000
    since_us = None if args.since is None else parse_moment(args.since, "--since", now_us)
    until_us = None if args.until is None else parse_moment(args.until, "--until", now_us)
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise UsageError(f"--since {args.since} is not before --until {args.until}")
    progress = ProgressLine()
    progress.update("starting Spark")
    spark = spark_session("report")
    progress.update(f"reading {args.history}")
    figures = history_figures(spark, args.history, since_us, until_us)
    progress.clear()
    said = f"made {clock(now_us)} UTC"
    page = empty_page(args.title, said) if figures is None else report_page(args.title, said, figures)
    write_page(Path(args.out), page)
    print(f"{args.out}: {0 if figures is None else figures.events:,} events")
    return 0


def history_figures(spark: SparkSession, history: str, since_us: int | None, until_us: int | None) -> Figures | None:
    require_history(spark, history)
    events = read_history(spark, history, since=_day(since_us), until=_day(until_us))
    return read_figures(spark, events, since_us, until_us)


def _day(at_us: int | None) -> date | None:
    return None if at_us is None else moment(at_us).date()


def write_page(out: Path, page: str) -> None:
    """Whole or not at all: the old page stays until the new one is complete."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        fresh.write_text(page, encoding="utf-8", errors="replace")
        fresh.replace(out)
    except OSError as exc:
        raise ForqError(f"cannot write {out}: {exc.strerror or exc}") from exc
    finally:
        fresh.unlink(missing_ok=True)
