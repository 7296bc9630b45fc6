"""The FIFO that a queue's processes write to, and the form of what is written there.

What knows its job is `\\x1e`, a JSON array or object, and a newline, in one write of at most PIPE_BUF bytes: the kernel
keeps such writes whole, so that lines of several writers never mix. Everything else in the FIFO is raw.
"""

import fcntl
import os
import re
import select
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from forq.errors import ForqError

NAME = "output.fifo"
MARK = b"\x1e"
MAX_WRITE = select.PIPE_BUF
MAX_MESSAGE = 8192
MAX_LOGGER = 100
# A fail job's: an id of 128 characters, a colon and a fence.
MAX_JOB = 160
# Kernels count the pipes of a user without privileges, and give him tiny ones above 64 MiB, for whatever purpose.
PRIVILEGED_BYTES = 1024 * 1024
UNPRIVILEGED_BYTES = 256 * 1024
CUT = "…"

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


def open_pipe(directory: Path | str, *, blocking: bool = False) -> int:
    """The FIFO of a queue, for reading and writing: a write then never fails for lack of a reader. Made if missing."""
    path = f"{directory}/{NAME}"
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | (0 if blocking else os.O_NONBLOCK)
    try:
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            _make(path)
            fd = os.open(path, flags)
    except OSError as exc:
        raise ForqError(f"cannot open {path}: {exc.strerror or exc}") from exc
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise ForqError(f"{path} is not a FIFO")
    _enlarge(fd)
    return fd


def _make(path: str) -> None:
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


def pack_note(note: dict[str, Any]) -> bytes:
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
    left_out = value.get("left_out")
    return isinstance(left_out, list) and [isinstance(count, int) and count >= 0 for count in left_out] == [True, True]
