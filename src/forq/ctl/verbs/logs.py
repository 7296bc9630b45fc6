"""logs: what a queue's processes have written, and what they write while one looks."""

from __future__ import annotations

import sys
from collections import deque

from forq.ctl.client import Client, connect
from forq.ctl.tables import coloured, show_json
from forq.errors import UsageError
from forq.log_format import LogFormat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

# How long one question waits for new lines.
QUESTION_SECONDS = 5.0
DEFAULT_LINES = 100


def logs(args: Namespace) -> int:
    lines = DEFAULT_LINES if args.lines is None else args.lines
    if lines < 0:
        raise UsageError(f"--lines {lines} is not allowed: 0 or more")
    client, screen = connect(args), _Screen(args.json)
    params: dict[str, Any] = {"name": args.name, "job": args.job, "lines": lines}
    last: deque[dict[str, Any]] = deque(maxlen=lines)
    cursor = None
    while True:
        answer = client.call("logs", {**params, "cursor": cursor})
        last.extend(answer["records"])
        cursor = answer["cursor"]
        if not answer["more"]:
            break
    screen.show(last)
    while args.follow:
        cursor = _follow(client, {**params, "cursor": cursor}, screen)
    return 0


def _follow(client: Client, params: dict[str, Any], screen: _Screen) -> str:
    answer = client.call("logs", {**params, "wait": QUESTION_SECONDS}, wait_seconds=QUESTION_SECONDS)
    if answer["skipped"]:
        print("forqctl: more was written than could be read: some lines are missing", file=sys.stderr)
    screen.show(answer["records"])
    return str(answer["cursor"])


class _Screen:
    def __init__(self, json: bool) -> None:
        self._json = json
        self._format = LogFormat(json=False, colour=coloured(sys.stdout), date=not sys.stdout.isatty())

    def show(self, records: Any) -> None:
        for record in records:
            if self._json:
                show_json(record)
            else:
                print(self._format.render(record))
        sys.stdout.flush()
