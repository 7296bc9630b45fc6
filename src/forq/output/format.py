"""The FIFO between a queue's processes and the logger: its format, and the parser that turns it into records.

A tagged line is `\x1e`, a JSON array (Line) or object (notice), and a newline, in one write of at most PIPE_BUF bytes.
The kernel keeps such writes whole, so lines of several writers never mix. Everything else in the FIFO is raw output.
"""

import fcntl
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from forq.errors import ForqError
from forq.log_format import iso_time

FIFO_NAME = "output.fifo"
MARK = b"\x1e"
MAX_WRITE = select.PIPE_BUF
MAX_MESSAGE = 8192
MAX_LOGGER = 100
# The id of a fail job: 128 characters, a colon and a fence.
MAX_JOB = 160
# The kernel limits the pipes of an unprivileged user to 64 MiB in total; above that all new pipes are tiny.
PRIVILEGED_BYTES = 1024 * 1024
UNPRIVILEGED_BYTES = 256 * 1024
ELLIPSIS = "…"

RATE = 1024 * 1024
BURST = 8 * 1024 * 1024
URGENT_RATE = 64 * 1024
URGENT_BURST = 256 * 1024
# Added to the size of a line when it is charged to an allowance.
LINE_COST = 100
STREAMS = frozenset({"stdout", "stderr", "log"})
# The end of the year 9999.
MAX_MILLIS = 253_402_300_800_000
_LEVEL = re.compile(r"[A-Za-z0-9_ .-]{1,20}")
URGENT_LEVELS = frozenset({"WARNING", "ERROR", "CRITICAL"})


class Line(NamedTuple):
    """`more`: the line continues in the next one of the same thread. `millis`: epoch ms."""

    stream: str
    level: str
    millis: int
    pid: int
    thread: int
    job: str | None
    logger: str | None
    more: bool
    text: str


class Allowance:
    """Limits a rate and a burst. Several threads use it without a lock: an estimate is enough."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self._burst = burst
        self._left = burst
        self._at = now

    def take(self, cost: float, now: float) -> bool:
        """False if nothing is left. A cost larger than the rest is accepted and paid for later."""
        self._left = min(self._burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left <= 0:
            return False
        self._left -= cost
        return True

    def spend(self, cost: float) -> None:
        """Charges more for something already accepted."""
        self._left -= cost


def open_fifo(directory: Path | str, *, blocking: bool = False) -> int:
    """Opens the FIFO of a queue; creates it if missing. Read-write, so that writes do not fail without a reader."""
    path = f"{directory}/{FIFO_NAME}"
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | (0 if blocking else os.O_NONBLOCK)
    try:
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            _make_fifo(path)
            fd = os.open(path, flags)
    except OSError as exc:
        raise ForqError(f"cannot open {path}: {exc.strerror or exc}") from exc
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise ForqError(f"{path} is not a FIFO")
    _enlarge(fd)
    return fd


def _make_fifo(path: str) -> None:
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        return


def _enlarge(fd: int) -> None:
    wanted = PRIVILEGED_BYTES if os.geteuid() == 0 else UNPRIVILEGED_BYTES
    try:
        if fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) < wanted:
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, wanted)
    except OSError:
        # Not allowed: the default of 64 KiB is used.
        return


def pack_line(line: Line) -> Iterator[bytes]:
    """Splits a line into writes of at most MAX_WRITE bytes."""
    data = MARK + _dumps(line) + b"\n"
    if len(data) <= MAX_WRITE or len(line.text) < 2:
        yield data[:MAX_WRITE]
        return
    middle = len(line.text) // 2
    yield from pack_line(line._replace(text=line.text[:middle], more=True))
    yield from pack_line(line._replace(text=line.text[middle:]))


def pack_notice(notice: dict[str, Any]) -> bytes:
    return MARK + orjson.dumps(notice) + b"\n"


def _dumps(line: Line) -> bytes:
    try:
        return orjson.dumps(tuple(line))
    except TypeError:
        # Lone surrogates, which JSON cannot hold.
        text = line.text.encode(errors="backslashreplace").decode()
        return orjson.dumps(tuple(line._replace(text=text, logger=None)))


def unpack(data: bytes) -> Line | dict[str, Any] | None:
    """Decodes the part between mark and newline; None if forq did not write it."""
    try:
        value = orjson.loads(data)
    except ValueError:
        return None
    if isinstance(value, dict):
        return value if _is_notice(value) else None
    if not isinstance(value, list) or len(value) != len(Line._fields):
        return None
    line = Line(*value)
    return line if _is_line(line) else None


def _is_line(line: Line) -> bool:
    """Handlers can write anything to the FIFO: forged lines must do no harm."""
    texts = [line.stream, line.level, line.text, *(text for text in (line.job, line.logger) if text is not None)]
    numbers = (line.millis, line.pid, line.thread)
    return (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int) for number in numbers)
        and 0 <= line.millis < MAX_MILLIS
        and len(line.job or "") <= MAX_JOB
        and len(line.logger or "") <= MAX_LOGGER
        and line.stream in STREAMS
        and _LEVEL.fullmatch(line.level) is not None
    )


def _is_notice(value: dict[str, Any]) -> bool:
    """{"end": job}, or {"left_out": [lines, bytes]}."""
    if isinstance(end := value.get("end"), str):
        return len(end) <= MAX_JOB
    dropped = value.get("left_out")
    return isinstance(dropped, list) and [isinstance(count, int) and count >= 0 for count in dropped] == [True, True]


# An incomplete line is shown when it has not grown for this long.
IDLE_LINE_SECONDS = 1.0
# At the latest after this time: a progress bar may not end its line for minutes.
MAX_LINE_SECONDS = 5.0
MAX_PARTIAL_LINES = 100
_URGENT = re.compile(rb'\x1e(\["log","(?:WARNING|ERROR|CRITICAL)"[^\n]*)')

Record = dict[str, Any]


class OutputParser:
    """Turns the bytes of one queue's FIFO into records. `now` measures waiting, `clock` dates raw lines."""

    def __init__(
        self, queue: str, *, now: Callable[[], float] = time.monotonic, clock: Callable[[], float] = time.time
    ) -> None:
        self._queue = queue
        self._now = now
        self._clock = clock
        self._rest = b""
        self._rest_at = 0.0
        self._partial: dict[tuple[object, ...], tuple[Line, float, float]] = {}
        # Lines and bytes that the writers reported as dropped.
        self.dropped = [0, 0]

    @property
    def waiting(self) -> bool:
        return bool(self._rest or self._partial)

    def feed(self, chunk: bytes, job: str | None) -> list[Record]:
        """Returns complete records. `job`: the job of raw lines, unless an end notice in the chunk names another."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        raw_from = 0
        records: list[Record] = []
        for line in lines:
            at = line.rfind(MARK)
            message = unpack(line[at + 1 :]) if at >= 0 else None
            if message is None:
                records.append(self._raw(line, job))
                continue
            if at > 0:
                # Raw output without a newline precedes the tagged line.
                records.append(self._raw(line[:at], job))
            if isinstance(message, Line):
                records += self._line(message)
            elif "end" in message:
                _assign_raw_lines(records[raw_from:], message["end"])
                raw_from = len(records)
            else:
                self._count_dropped(message)
        self._keep_rest(rest, job, records)
        return records

    def feed_flood(self, chunk: bytes) -> tuple[int, int, list[Record]]:
        """During a flood: returns the numbers of lines and bytes, and only the urgent records."""
        body, newline, rest = (self._rest + chunk).rpartition(b"\n")
        if not newline:
            self._rest = rest[: MAX_MESSAGE + 1]
            return 0, len(chunk), []
        self._keep_short_rest(rest)
        urgent: list[Record] = []
        # Most floods are raw: searching for one byte is far cheaper.
        for found in _URGENT.finditer(body) if MARK in body else ():
            message = unpack(found[1])
            if isinstance(message, Line):
                urgent += self._line(message)
        return body.count(b"\n") + 1, len(body), urgent

    def overdue(self) -> list[Record]:
        """Incomplete lines that have not grown for a while."""
        now = self._now()
        before, long_before = now - IDLE_LINE_SECONDS, now - MAX_LINE_SECONDS
        records = []
        for key in [key for key, (_, first, last) in self._partial.items() if last <= before or first <= long_before]:
            records += self._records(self._partial.pop(key)[0])
        # The start of a tagged line is kept: its rest arrives with the next read.
        if self._rest and self._rest_at <= before and not self._rest.startswith(MARK):
            records.append(self._raw(self._rest, None))
            self._rest = b""
        return records

    def finish(self) -> list[Record]:
        """Returns incomplete lines; no more input follows."""
        records = [record for line, *_ in self._partial.values() for record in self._records(line)]
        if self._rest:
            records.append(self._raw(self._rest, None))
        self._partial.clear()
        self._rest = b""
        return records

    def _keep_rest(self, rest: bytes, job: str | None, records: list[Record]) -> None:
        # The rest may hold the first part of a tagged line that was read in two.
        at = rest.rfind(MARK, max(0, len(rest) - MAX_WRITE))
        if at > 0:
            records.append(self._raw(rest[:at], job))
            rest = rest[at:]
        self._keep_short_rest(rest)

    def _keep_short_rest(self, rest: bytes) -> None:
        self._rest = rest if rest.startswith(MARK) and len(rest) < MAX_WRITE else rest[: MAX_MESSAGE + 1]
        self._rest_at = self._now()

    def _line(self, line: Line) -> list[Record]:
        key = (line.pid, line.thread, line.stream, line.job)
        now = self._now()
        partial, first, _ = self._partial.pop(key, (None, now, now))
        if partial is not None:
            line = line._replace(text=(partial.text + line.text)[: 2 * MAX_MESSAGE], millis=partial.millis)
        if not line.more:
            return self._records(line)
        records: list[Record] = []
        if len(self._partial) >= MAX_PARTIAL_LINES:
            oldest = next(iter(self._partial))
            records = self._records(self._partial.pop(oldest)[0])
        self._partial[key] = (line._replace(text=_last_redraw(line.text)), first, now)
        return records

    def _records(self, line: Line) -> list[Record]:
        texts = [line.text] if line.stream == "log" else line.text.split("\n")
        about: Record = {"time": iso_time(line.millis / 1000), "level": line.level, "queue": self._queue}
        if line.job is not None:
            about["job"] = line.job
        about |= {"stream": line.stream, "pid": line.pid}
        if line.logger is not None:
            about["logger"] = line.logger
        return [{**about, "message": _shorten(text)} for text in texts]

    def _raw(self, line: bytes, job: str | None) -> Record:
        text = _shorten(line[: MAX_MESSAGE + 1].decode(errors="backslashreplace")).removesuffix("\r")
        about: Record = {"time": iso_time(self._clock()), "level": "INFO", "queue": self._queue}
        if job is not None:
            about["job"] = job
        return {**about, "stream": "raw", "message": text}

    def _count_dropped(self, message: dict[str, Any]) -> None:
        lines, size = message["left_out"]
        self.dropped[0] += lines
        self.dropped[1] += size


def _last_redraw(text: str) -> str:
    """The last state of a progress bar that is redrawn in place."""
    return text[text.rfind("\r", 0, -1) + 1 :]


def _assign_raw_lines(records: list[Record], job: str) -> None:
    """Sets the job of the raw lines."""
    for record in records:
        if record["stream"] == "raw":
            message = record.pop("message")
            del record["stream"]
            record.update(job=job, stream="raw", message=message)


def _shorten(text: str) -> str:
    # The writer has already shortened messages of several lines.
    return text if len(text) <= MAX_MESSAGE or "\n" in text else text[:MAX_MESSAGE] + ELLIPSIS
