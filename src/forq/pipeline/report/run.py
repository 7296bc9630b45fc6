"""`forq pipeline report`: writes one HTML page about a history. figures.py reads the numbers, page.py formats them."""

import os
import time
from argparse import ArgumentParser, Namespace
from datetime import date
from pathlib import Path

from pyspark.sql import SparkSession

from forq.errors import ForqError, UsageError
from forq.pipeline.history import read_history, require_history
from forq.pipeline.report.figures import Figures, parse_time, read_figures, to_datetime
from forq.pipeline.report.page import clock, empty_page, report_page
from forq.pipeline.session import spark_session
from forq.progress_line import ProgressLine


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
