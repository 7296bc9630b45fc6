"""Runs a supervisor whose queues have a past hour: `python -m tests.web.browser.charted_supervisor run …`.

Without it the charts would be empty until the first minute has passed.
"""

import math
import sys
import time

from forq import cli
from forq.procs.minutes import MINUTES, LastHour, Minute, MinuteRings

# Jobs per minute, and every how many of them one fails (0: none).
PACE = {"emails": (60, 0), "payments": (24, 9), "reports": (3, 0), "imports": (8, 4), "webhooks": (40, 31)}


def past_hour(name: str, newest: int) -> LastHour:
    pace, failing = PACE.get(name, (0, 0))
    return LastHour(newest, tuple(_minute(pace, failing, newest - MINUTES + 1 + number) for number in range(MINUTES)))


def _minute(pace: int, failing: int, minute: int) -> Minute:
    ended = round(pace * (1 + 0.5 * math.sin(minute / 7) + 0.3 * math.sin(minute * pace)))
    wait = 800 + 400 * (minute % 9)
    waited = ended > 0
    return Minute(
        ended=ended,
        failed=ended // failing if failing else 0,
        run_micros=ended * 20_000,
        waits=ended,
        wait_p50_us=wait if waited else None,
        wait_p99_us=wait * (12 + minute % 5) if waited else None,
    )


def _newest(rings: MinuteRings) -> int:
    return int(time.time() // 60) - 1


def _read_all(rings: MinuteRings) -> dict[str, LastHour]:
    return {name: past_hour(name, _newest(rings)) for name in PACE}


if __name__ == "__main__":
    MinuteRings.newest = property(_newest)  # type: ignore[method-assign, assignment]
    MinuteRings.read_all = _read_all  # type: ignore[method-assign, assignment]
    sys.argv[0] = "forq"
    sys.exit(cli.main())
