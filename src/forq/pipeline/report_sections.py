"""The sections of a report that are charts: figures in, HTML out."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from html import escape

from forq.pipeline.report_charts import Column, Series, heat_cells, log_lines, range_bars, stacked_areas
from forq.pipeline.report_figures import OTHERS, Figures, Times
from forq.pipeline.report_span import DAY, HOUR, MINUTE, SECOND, moment
from forq.pipeline.report_words import duration, number, rate_unit, short


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
