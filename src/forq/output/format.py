"""The FIFO that a queue's processes write to, and the form of what is written there.

What knows its job is `\x1e`, a JSON array or object, and a newline, in one write of at most PIPE_BUF bytes: the kernel
keeps such writes whole, so that lines of several writers never mix. Everything else in the FIFO is raw.

What was read from one queue's FIFO, turned into records: lines with their time, level, job and stream.
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
# A fail job's: an id of 128 characters, a colon and a fence.
MAX_JOB = 160
# Kernels count the pipes of a user without privileges, and give him tiny ones above 64 MiB, for whatever purpose.
PRIVILEGED_BYTES = 1024 * 1024
UNPRIVILEGED_BYTES = 256 * 1024
ELLIPSIS = "…"

RATE = 1024 * 1024
BURST = 8 * 1024 * 1024
URGENT_RATE = 64 * 1024
URGENT_BURST = 256 * 1024
# What a line costs beside its bytes.
LINE_COST = 100
STREAMS = frozenset({"stdout", "stderr", "log"})
# The end of the year 9999.
MAX_MILLIS = 253_402_300_800_000
_LEVEL = re.compile(r"[A-Za-z0-9_ .-]{1,20}")
URGENT_LEVELS = frozenset({"WARNING", "ERROR", "CRITICAL"})


class Line(NamedTuple):
    """`more`: the line goes on in what the same thread writes next. `millis`: when it was written, since the epoch."""

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
    """So much per second, and so much at once. Counted by several threads without a lock: an estimate will do."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self._burst = burst
        self._left = burst
        self._at = now

    def take(self, cost: float, now: float) -> bool:
        """False if there is none left. One that is larger than what is left is let through, and paid for later."""
        self._left = min(self._burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left <= 0:
            return False
        self._left -= cost
        return True

    def spend(self, cost: float) -> None:
        """What was let through turned out to cost more."""
        self._left -= cost


def open_fifo(directory: Path | str, *, blocking: bool = False) -> int:
    """The FIFO of a queue, for reading and writing: a write then never fails for lack of a reader. Made if missing."""
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
        # Not allowed here: the usual 64 KiB have to do.
        return


def pack_line(line: Line) -> Iterator[bytes]:
    """The writes that a line takes."""
    data = MARK + _dumps(line) + b"\n"
    if len(data) <= MAX_WRITE or len(line.text) < 2:
        yield data[:MAX_WRITE]
        return
    middle = len(line.text) // 2
    yield from pack_line(line._replace(text=line.text[:middle], more=True))
    yield from pack_line(line._replace(text=line.text[middle:]))


def pack_notice(note: dict[str, Any]) -> bytes:
    return MARK + orjson.dumps(note) + b"\n"


def _dumps(line: Line) -> bytes:
    try:
        return orjson.dumps(tuple(line))
    except TypeError:
        # Lone surrogates, which JSON cannot hold.
        text = line.text.encode(errors="backslashreplace").decode()
        return orjson.dumps(tuple(line._replace(text=text, logger=None)))


def unpack(data: bytes) -> Line | dict[str, Any] | None:
    """What follows the mark, without the newline; None if nobody of us has written that."""
    try:
        value = orjson.loads(data)
    except ValueError:
        return None
    if isinstance(value, dict):
        return value if _is_note(value) else None
    if not isinstance(value, list) or len(value) != len(Line._fields):
        return None
    line = Line(*value)
    return line if _is_line(line) else None


def _is_line(line: Line) -> bool:
    """Anybody can write to the FIFO: what is not of our making must do no harm."""
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


def _is_note(value: dict[str, Any]) -> bool:
    """{"end": job}, or {"left_out": [lines, bytes]}."""
    if isinstance(end := value.get("end"), str):
        return len(end) <= MAX_JOB
    dropped = value.get("left_out")
    return isinstance(dropped, list) and [isinstance(count, int) and count >= 0 for count in dropped] == [True, True]


# A line without an end is shown when nothing was added to it for so long.
IDLE_LINE_SECONDS = 1.0
# And at the latest after so long: a bar that moves has no end for a long time.
MAX_LINE_SECONDS = 5.0
MAX_PARTIAL_LINES = 100
_URGENT = re.compile(rb'\x1e(\["log","(?:WARNING|ERROR|CRITICAL)"[^\n]*)')

Record = dict[str, Any]


class OutputParser:
    """`now` is for patience, `clock` for the times of raw lines."""

    def __init__(
        self, queue: str, *, now: Callable[[], float] = time.monotonic, clock: Callable[[], float] = time.time
    ) -> None:
        self._queue = queue
        self._now = now
        self._clock = clock
        self._rest = b""
        self._rest_at = 0.0
        self._partial: dict[tuple[object, ...], tuple[Line, float, float]] = {}
        # What the writers say that they have left out: lines, bytes.
        self.dropped = [0, 0]

    @property
    def waiting(self) -> bool:
        return bool(self._rest or self._partial)

    def feed(self, chunk: bytes, job: str | None) -> list[Record]:
        """The records that are complete. `job`: whose raw lines these are, unless a mark in the chunk says better."""
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
                # Somebody has written half a line without a tag in front of it.
                records.append(self._raw(line[:at], job))
            if isinstance(message, Line):
                records += self._line(message)
            elif "end" in message:
                _assign_raw_lines(records[raw_from:], message["end"])
                raw_from = len(records)
            else:
                self._note(message)
        self._keep_rest(rest, job, records)
        return records

    def feed_flood(self, chunk: bytes) -> tuple[int, int, list[Record]]:
        """Of a flood only what is urgent: the lines and bytes that were left out, and the urgent ones."""
        body, newline, rest = (self._rest + chunk).rpartition(b"\n")
        if not newline:
            self._rest = rest[: MAX_MESSAGE + 1]
            return 0, len(chunk), []
        self._keep_short_rest(rest)
        urgent: list[Record] = []
        # Most floods are raw: to look for one byte is far cheaper.
        for found in _URGENT.finditer(body) if MARK in body else ():
            message = unpack(found[1])
            if isinstance(message, Line):
                urgent += self._line(message)
        return body.count(b"\n") + 1, len(body), urgent

    def overdue(self) -> list[Record]:
        """Lines without an end that nothing was added to for a while."""
        now = self._now()
        before, long_before = now - IDLE_LINE_SECONDS, now - MAX_LINE_SECONDS
        records = []
        for key in [key for key, (_, first, last) in self._partial.items() if last <= before or first <= long_before]:
            records += self._records(self._partial.pop(key)[0])
        # Half a tagged line is being written just now.
        if self._rest and self._rest_at <= before and not self._rest.startswith(MARK):
            records.append(self._raw(self._rest, None))
            self._rest = b""
        return records

    def finish(self) -> list[Record]:
        """No more will come."""
        records = [record for line, *_ in self._partial.values() for record in self._records(line)]
        if self._rest:
            records.append(self._raw(self._rest, None))
        self._partial.clear()
        self._rest = b""
        return records

    def _keep_rest(self, rest: bytes, job: str | None, records: list[Record]) -> None:
        # What begins with a mark may be the first part of a line that is written whole and was read in two.
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

    def _note(self, message: dict[str, Any]) -> None:
        lines, size = message["left_out"]
        self.dropped[0] += lines
        self.dropped[1] += size


def _last_redraw(text: str) -> str:
    """Of a bar that is drawn again and again in its place, the last one."""
    return text[text.rfind("\r", 0, -1) + 1 :]


def _assign_raw_lines(records: list[Record], job: str) -> None:
    """The raw lines among them are this job's."""
    for record in records:
        if record["stream"] == "raw":
            message = record.pop("message")
            del record["stream"]
            record.update(job=job, stream="raw", message=message)


def _shorten(text: str) -> str:
    # Messages of several lines were shortened where they were written, in their middle.
    return text if len(text) <= MAX_MESSAGE or "\n" in text else text[:MAX_MESSAGE] + ELLIPSIS
