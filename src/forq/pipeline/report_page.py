"""The report as one page: figures in, HTML out. It needs no network; everything that users chose is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from forq.pipeline.report_figures import MAX_QUEUES_LISTED, Attempt, Figures, QueueFigures
from forq.pipeline.report_sections import heat, running, section, throughput, times, times_by_queue
from forq.pipeline.report_span import SECOND
from forq.pipeline.report_words import (
    MISSING,
    UNKNOWN_CAUSE,
    VERB_WORDS,
    clock,
    duration,
    number,
    percent,
    rate_unit,
    short,
    time,
)

_FOLDER = Path(__file__).parent


def empty_page(title: str, said: str) -> str:
    return _page(title, said, '<section><p class="empty">No events: nothing happened in this time.</p></section>')


def report_page(title: str, said: str, figures: Figures) -> str:
    """`said`: what the line below the title says besides the time."""
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
        ("", "wait, median", time(wait[0]), f"p99 {time(wait[2])}"),
        ("", "run, median", time(run[0]), f"p99 {time(run[2])}"),
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
            ("", time(one.run_us)),
            ("", time(one.wait_us)),
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
        row += [("first" if at == 0 else "", time(value)) for at, value in enumerate(wait_or_run)]
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
