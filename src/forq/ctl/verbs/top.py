"""top: the queues as they are now, again and again."""

from __future__ import annotations

import os
import sys

from forq.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace

SHORTEST_INTERVAL_SECONDS = 0.1


def top(args: Namespace) -> int:
    from forq.values import parse_duration

    interval_seconds = parse_duration(args.interval)
    if interval_seconds < SHORTEST_INTERVAL_SECONDS:
        raise UsageError(f"--interval is at least {SHORTEST_INTERVAL_SECONDS:g} s")
    if args.count is not None and args.count < 1:
        raise UsageError("--count is at least 1")
    if args.json or args.plain or args.count is not None or not _has_screen():
        from forq.ctl.top.blocks import run

        return run(args, interval_seconds)
    try:
        from forq.ctl.top.screen import show
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "rich":
            raise
        raise UsageError("the screen of top needs rich: pip install 'forq[top]', or use --plain") from exc
    return show(args, interval_seconds)


def _has_screen() -> bool:
    return os.environ.get("TERM", "dumb") != "dumb" and sys.stdin.isatty() and sys.stdout.isatty()
