"""Formats log lines (JSON or text, journald priority, colour) and redacts what matches the patterns of `log_redact`."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}
_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class LogFormat(NamedTuple):
    """`priority`: lines start with <N>, which journald reads. `date`: text lines start with the date."""

    json: bool
    priority: bool = False
    colour: bool = False
    date: bool = True

    def render(self, record: Mapping[str, Any]) -> str:
        """One record as a line without the newline. As text, a message of several lines stays on several lines."""
        line = as_json(record) if self.json else self._text(record)
        return f"<{_PRIORITIES.get(record['level'], 6)}>{line}" if self.priority else line

    def _text(self, record: Mapping[str, Any]) -> str:
        level = record["level"]
        padded = f"{level:<7}"
        if self.colour and level in _COLOURS:
            padded = f"\x1b[{_COLOURS[level]}m{padded}\x1b[0m"
        about = " ".join(str(record[key]) for key in ("queue", "job") if record.get(key)) if "stream" in record else ""
        name = record.get("logger")
        message = str(record["message"])
        if about:
            message = f"{about}: {name}: {message}" if name and name != "forq" else f"{about}: {message}"
        message = printable(message)
        return f"{_local(record['time'], self.date)} {padded} {message}"


def choose_format(setting: str, fd: int, environ: Mapping[str, str]) -> LogFormat:
    """The format for this descriptor."""
    journal = is_journal(fd, environ)
    terminal = _is_terminal(fd)
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return LogFormat(
        json=setting == "json" or (setting == "auto" and journal),
        priority=journal,
        colour=terminal and not plain,
        date=not terminal,
    )


def is_journal(fd: int, environ: Mapping[str, str]) -> bool:
    """Whether systemd has connected the descriptor to its journal."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def as_json(record: Mapping[str, Any]) -> str:
    import orjson

    try:
        return orjson.dumps(record).decode()
    except TypeError:
        clean = {key: printable(value) if isinstance(value, str) else value for key, value in record.items()}
        return orjson.dumps(clean, default=str).decode()


def iso_time(seconds: float) -> str:
    """UTC, with milliseconds."""
    millis = int(seconds * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(millis // 1000))}.{millis % 1000:03}Z"


def printable(text: str) -> str:
    """Escapes control characters, and indents all lines but the first."""
    if text.isprintable():
        return text
    return without_controls(text).replace("\n", "\n    ")


def without_controls(text: str) -> str:
    """Escapes control characters, also those that change the direction of text, but not the ends of lines."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def _local(iso: str, date: bool) -> str:
    """The same moment in local time."""
    from datetime import datetime

    local = datetime.fromisoformat(iso).astimezone()
    return local.isoformat(" ", "milliseconds")[0 if date else 11 : 23]


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


REDACTED = "[redacted]"


class Redaction:
    """Replaces matches of the patterns in a text; of a pattern with groups, only the groups."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __call__(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(_without_groups if pattern.groups else REDACTED, text)
        return text


def _without_groups(found: re.Match[str]) -> str:
    """The match with its outermost groups replaced."""
    text, end, kept = found[0], 0, ""
    spans = sorted(
        (found.span(number) for number in range(1, found.re.groups + 1)), key=lambda span: (span[0], -span[1])
    )
    for start, stop in spans:
        start, stop = start - found.start(), stop - found.start()
        if start >= end and stop > start:
            kept += text[end:start] + REDACTED
            end = stop
    return kept + text[end:]
