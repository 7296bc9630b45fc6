"""Writes etc/forq.toml and docs/reference/settings.md from the table in src/forq/settings.py (`make settings`).

With --check it writes nothing and exits with 1 if they are out of date.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from forq.settings import (
    APP,
    AUTO_RELEASE,
    BRIDGE,
    DEFINITION,
    METRICS,
    MODES,
    ON_REQUEST,
    OPTIONS,
    PIPELINE,
    SCHEDULE,
    SERVICE,
    TASK,
    WEB,
    WORK,
    Setting,
)
from forq.values import show_duration, show_size

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120

ABOUT_VALUES = (
    'Durations: seconds, or "250ms", "10s", "5m", "2h", "7d". Sizes: bytes, or "64kb", "1mb", "2gb". Rates: "50/1s", '
    '"100/1m", "5/s", or "off". Relative paths are relative to the directory of the config file.'
)
ABOUT_PIPELINE = (
    "Writes the journals of all queues to a history (Parquet) for audits and reports, as a queue of forq itself "
    "(docs/guide/pipeline.md). Needs Spark: pip install 'forq[pipeline]'."
)
ABOUT_METRICS = (
    "Metrics for Prometheus (/metrics) and a health check (/healthz), served by a separate process "
    "(docs/guide/metrics.md). Needs pip install 'forq[metrics]'. Off without this table."
)
ABOUT_WEB = (
    "The dashboard, served by a separate process (docs/guide/dashboard.md). Needs pip install 'forq[web]'. Off without "
    "this table."
)
ABOUT_BRIDGE = (
    "A socket for producers and workers in any language (docs/guide/external-workers.md). The table may be repeated."
)
ABOUT_APP = (
    "An app (docs/guide/apps.md). Its code defines queues and schedules; it is read at each start, and by `forqctl "
    "restart --app NAME`."
)
ABOUT_TASK = "Options of one task, instead of those in its code."
ABOUT_QUEUE = (
    "A queue with its own processes. Its options are read at each start. Without a handler, they are for a queue that "
    "an app defines, and replace those in its code."
)
ABOUT_SCHEDULE = (
    "A periodic job (docs/guide/schedules.md): one job per tick, over all supervisors. Schedules are set at each "
    "start; one that is no longer in this file is removed."
)
ABOUT_GATE = "A queue that releases its items to awaiters (docs/guide/releases.md). It has no handler."
# Names of the kinds in the reference, where they differ.
TYPES = {
    "int": "number",
    "flag": "boolean",
    "processes": "number or text",
    "program": "path or name",
    "redis": "URL",
    "prefix": "text",
    "group": "name of a group",
    "patterns": "list of regular expressions",
    "names": "list of text",
    "header": "text",
    "tracing": "text",
    "history": "path or URL",
    "listen": "address",
}
WITH_RANGE = ("flag", "processes", "rate", "word", "prefix", "tracing", "listen")
MAY_BE_EMPTY = ("path", "program", "redis", "group", "history")


_SHOW: Mapping[str, Callable[[Any], str]] = {"duration": show_duration, "size": show_size, "int": "{:,}".format}


def sample() -> str:
    """etc/forq.toml: every setting, commented out, with its default."""
    variables = ", ".join(row.variable for row in SERVICE.values() if row.variable)
    shared = [name for name, row in OPTIONS.items() if {WORK, AUTO_RELEASE} <= {*row.modes} and name not in _gate()]
    asked = " and ".join(name for name, row in OPTIONS.items() if ON_REQUEST in row.modes and WORK not in row.modes)
    about_gate = (
        f"{ABOUT_GATE} It also has these options from above: {', '.join(shared)}. The options below are fixed while "
        f'the queue exists. Mode "on_request" has only {asked} of them.'
    )
    lines = [
        *_comment("forq.toml: settings of one supervisor. Lines that are commented out show the defaults."),
        "#",
        *_comment("Read from --config FILE, else $FORQ_CONFIG, else /etc/forq/forq.toml, once, at start."),
        *_comment(f"Flags of `forq run` and {variables} take precedence over this file."),
        *_comment(ABOUT_VALUES),
        *_sampled(SERVICE),
        *_header("[pipeline]", ABOUT_PIPELINE),
        *_sampled(PIPELINE),
        *_header("[metrics]", ABOUT_METRICS),
        *_sampled(METRICS),
        *_header("[web]", ABOUT_WEB),
        *_sampled(WEB),
        *_header("[[bridge]]", ABOUT_BRIDGE),
        *_sampled(BRIDGE),
        *_header("[apps.example]", ABOUT_APP),
        *_sampled(APP),
        *_header("[apps.example.tasks.greet]", ABOUT_TASK),
        *_sampled(TASK),
        *_header("[queues.example]", ABOUT_QUEUE),
        *_sampled(DEFINITION),
        *_sampled({name: row for name, row in OPTIONS.items() if WORK in row.modes}),
        *_header("[queues.example.schedules.nightly]", ABOUT_SCHEDULE),
        *_sampled(SCHEDULE),
        *_header("[queues.gate]", about_gate),
        f'#mode = "{AUTO_RELEASE}"',
        *_sampled(_gate(), AUTO_RELEASE),
    ]
    return "\n".join(lines) + "\n"


def _gate() -> dict[str, Setting]:
    """The options of mode auto_release that mode work lacks or that have another default."""
    return {
        name: row
        for name, row in OPTIONS.items()
        if AUTO_RELEASE in row.modes and (WORK not in row.modes or AUTO_RELEASE in row.defaults_in)
    }


def _header(header: str, about: str) -> list[str]:
    return ["", *_comment(about), f"#{header}"]


def _sampled(rows: Mapping[str, Setting], mode: str = WORK) -> list[str]:
    lines = []
    for row in rows.values():
        others = [f"{row.name} = {_toml(row, value)} in mode {m}" for m, value in row.defaults_in.items() if m != mode]
        words = (
            [f"{row.allowed}."] if row.kind == "word" and not all(f'"{word}"' in row.help for word in row.range) else []
        )
        about = " ".join([row.help, *words, *(f"({text})" for text in others)])
        value = row.sample or _toml(row, row.defaults_in.get(mode, row.default))
        # A setting without a value is an alternative to another one and appears only as a comment.
        lines += ["", *_comment(about), f"#{row.name} = {value}"] if value else ["", *_comment(f"{row.name}: {about}")]
    return lines


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


def _toml(row: Setting, value: object) -> str:
    """The value as TOML."""
    if value is None:
        return '""' if row.kind in MAY_BE_EMPTY and not row.sample else ""
    if isinstance(value, bool | str | tuple):
        return json.dumps(value)
    if row.kind in ("int", "processes") or value == 0:
        return f"{value:g}" if value == 0 else str(value)
    return f'"{_SHOW[row.kind](value)}"'


def reference() -> str:
    """docs/reference/settings.md: a table per section."""
    of_releases = {name: row for name, row in OPTIONS.items() if WORK not in row.modes}
    others = {name: row for name, row in OPTIONS.items() if WORK in row.modes}
    lines = [
        "# Settings",
        "",
        "<!-- Written by `make settings` from src/forq/settings.py. -->",
        "",
        *_text(
            "[etc/forq.toml](../../etc/forq.toml) is a config file with every setting and its default. It is read from "
            "`--config`, else `FORQ_CONFIG`, else `/etc/forq/forq.toml`, once, at start. A flag takes precedence over "
            "a variable, a variable over the file."
        ),
        "",
        *_text(ABOUT_VALUES),
        *_table("The supervisor", "At the top of the file.", SERVICE),
        *_table("[pipeline]", ABOUT_PIPELINE, PIPELINE),
        *_table("[metrics]", ABOUT_METRICS, METRICS),
        *_table("[web]", ABOUT_WEB, WEB),
        *_table("[[bridge]]", ABOUT_BRIDGE, BRIDGE),
        *_table("[apps.NAME]", ABOUT_APP, APP),
        *_table("[apps.NAME.tasks.TASK]", ABOUT_TASK, TASK),
        *_table("[queues.NAME]: definition", ABOUT_QUEUE, DEFINITION),
        *_table(
            "[queues.NAME]: options",
            "In the file, or as OPTION=VALUE of `forqctl create`. Live options can be changed with `forqctl set` while "
            "the queue runs. Others need a new process: run `forqctl create` again, or edit the file and restart.",
            others,
        ),
        *_table(
            "[queues.NAME]: options of the other modes",
            "Fixed options keep the values that the queue was created with.",
            of_releases,
        ),
        *_table("[queues.NAME.schedules.KEY]", ABOUT_SCHEDULE, SCHEDULE),
    ]
    return "\n".join(lines) + "\n"


def _text(text: str) -> list[str]:
    return textwrap.wrap(_linked(text), 140, break_long_words=False, break_on_hyphens=False)


def _linked(text: str) -> str:
    return re.sub(r"docs/(\w+)/([\w-]+\.md)", r"[\2](../\1/\2)", text)


def _table(title: str, about: str, rows: Mapping[str, Setting]) -> list[str]:
    with_modes = any(row.modes != MODES for row in rows.values())
    columns = ["name", "type", "range", "default", "live", *(["modes"] if with_modes else []), "meaning"]
    lines = ["", f"## {title}", "", *_text(about), "", _line(columns), _line("---" for _ in columns)]
    for row in rows.values():
        modes = ["all" if row.modes == MODES else ", ".join(row.modes)] if with_modes else []
        kind = TYPES.get(row.kind, row.kind)
        lines.append(_line([f"`{row.name}`", kind, _range(row), _default(row), _live(row), *modes, _meaning(row)]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _range(row: Setting) -> str:
    if row.kind in WITH_RANGE:
        return row.allowed
    if not row.range:
        return ""
    shown = _SHOW[row.kind]
    return f"{shown(row.least or row.lowest)} to {shown(row.highest)}{', or 0' if row.least else ''}"


def _default(row: Setting) -> str:
    own = "" if row.default is None else f"`{_toml(row, row.default)}`"
    return "; ".join([own, *(f"{mode}: `{_toml(row, value)}`" for mode, value in row.defaults_in.items())])


def _live(row: Setting) -> str:
    fixed = ", ".join(row.fixed_in)
    if row.fixed_in and set(row.modes) <= set(row.fixed_in):
        return "fixed"
    return ("yes" if row.live else "no") + (f"; fixed in {fixed}" if fixed else "")


def _meaning(row: Setting) -> str:
    given = [f"`{row.variable}`"] if row.variable else []
    given += [f"`--{row.name.replace('_', '-')}`"] if row.flag is not None else []
    return _linked(row.help) + (f" Also {' and '.join(given)}." if given else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="write_settings.py")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if they are out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project directory to write to")
    arguments = parser.parse_args()
    old = []
    for name, wanted in (("etc/forq.toml", sample()), ("docs/reference/settings.md", reference())):
        path = arguments.root / name
        if not path.exists() or path.read_text() != wanted:
            old.append(name)
            if not arguments.check:
                path.write_text(wanted)
    if arguments.check and old:
        print(f"out of date: {', '.join(old)}; run: make settings", file=sys.stderr)
    return 1 if arguments.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
