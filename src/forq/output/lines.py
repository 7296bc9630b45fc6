"""What was read from one queue's FIFO, turned into records: lines with their time, level, job and stream."""

import re
import time
from collections.abc import Callable
from typing import Any

from forq.log_format import iso_time
from forq.output.pipe import CUT, MARK, MAX_MESSAGE, MAX_WRITE, Line, unpack

# A line without an end is shown when nothing was added to it for so long.
PATIENCE_SECONDS = 1.0
# And at the latest after so long: a bar that moves has no end for a long time.
LONGEST_SECONDS = 5.0
MAX_BEGUN = 100
_URGENT = re.compile(rb'\x1e(\["log","(?:WARNING|ERROR|CRITICAL)"[^\n]*)')

Record = dict[str, Any]


class OutputLines:
    """`now` is for patience, `clock` for the times of raw lines."""

    def __init__(
        self, queue: str, *, now: Callable[[], float] = time.monotonic, clock: Callable[[], float] = time.time
    ) -> None:
        self._queue = queue
        self._now = now
        self._clock = clock
        self._rest = b""
        self._rest_at = 0.0
        self._begun: dict[tuple[object, ...], tuple[Line, float, float]] = {}
        # What the writers say that they have left out: lines, bytes.
        self.left_out = [0, 0]

    @property
    def waiting(self) -> bool:
        return bool(self._rest or self._begun)

    def take(self, chunk: bytes, job: str | None) -> list[Record]:
        """The records that are complete. `job`: whose raw lines these are, unless a mark in the chunk says better."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        raw_from = 0
        records: list[Record] = []
        for line in lines:
            at = line.rfind(MARK)
            told = unpack(line[at + 1 :]) if at >= 0 else None
            if told is None:
                records.append(self._raw(line, job))
                continue
            if at > 0:
                # Somebody has written half a line without a tag in front of it.
                records.append(self._raw(line[:at], job))
            if isinstance(told, Line):
                records += self._line(told)
            elif "end" in told:
                _claim(records[raw_from:], told["end"])
                raw_from = len(records)
            else:
                self._note(told)
        self._keep(rest, job, records)
        return records

    def skip(self, chunk: bytes) -> tuple[int, int, list[Record]]:
        """Of a flood only what is urgent: the lines and bytes that were left out, and the urgent ones."""
        body, newline, rest = (self._rest + chunk).rpartition(b"\n")
        if not newline:
            self._rest = rest[: MAX_MESSAGE + 1]
            return 0, len(chunk), []
        self._keep_short(rest)
        urgent: list[Record] = []
        # Most floods are raw: to look for one byte is far cheaper.
        for found in _URGENT.finditer(body) if MARK in body else ():
            told = unpack(found[1])
            if isinstance(told, Line):
                urgent += self._line(told)
        return body.count(b"\n") + 1, len(body), urgent

    def late(self) -> list[Record]:
        """Lines without an end that nothing was added to for a while."""
        now = self._now()
        before, long_before = now - PATIENCE_SECONDS, now - LONGEST_SECONDS
        records = []
        for key in [key for key, (_, first, last) in self._begun.items() if last <= before or first <= long_before]:
            records += self._records(self._begun.pop(key)[0])
        # Half a tagged line is being written just now.
        if self._rest and self._rest_at <= before and not self._rest.startswith(MARK):
            records.append(self._raw(self._rest, None))
            self._rest = b""
        return records

    def end(self) -> list[Record]:
        """No more will come."""
        records = [record for line, *_ in self._begun.values() for record in self._records(line)]
        if self._rest:
            records.append(self._raw(self._rest, None))
        self._begun.clear()
        self._rest = b""
        return records

    def _keep(self, rest: bytes, job: str | None, records: list[Record]) -> None:
        # What begins with a mark may be the first part of a line that is written whole and was read in two.
        at = rest.rfind(MARK, max(0, len(rest) - MAX_WRITE))
        if at > 0:
            records.append(self._raw(rest[:at], job))
            rest = rest[at:]
        self._keep_short(rest)

    def _keep_short(self, rest: bytes) -> None:
        self._rest = rest if rest.startswith(MARK) and len(rest) < MAX_WRITE else rest[: MAX_MESSAGE + 1]
        self._rest_at = self._now()

    def _line(self, line: Line) -> list[Record]:
        key = (line.pid, line.thread, line.stream, line.job)
        now = self._now()
        begun, first, _ = self._begun.pop(key, (None, now, now))
        if begun is not None:
            line = line._replace(text=(begun.text + line.text)[: 2 * MAX_MESSAGE], millis=begun.millis)
        if not line.more:
            return self._records(line)
        records = [] if len(self._begun) < MAX_BEGUN else self._records(self._begun.pop(next(iter(self._begun)))[0])
        self._begun[key] = (line._replace(text=_redrawn(line.text)), first, now)
        return records

    def _records(self, line: Line) -> list[Record]:
        texts = [line.text] if line.stream == "log" else line.text.split("\n")
        about: Record = {"time": iso_time(line.millis / 1000), "level": line.level, "queue": self._queue}
        if line.job is not None:
            about["job"] = line.job
        about |= {"stream": line.stream, "pid": line.pid}
        if line.logger is not None:
            about["logger"] = line.logger
        return [{**about, "message": _short(text)} for text in texts]

    def _raw(self, line: bytes, job: str | None) -> Record:
        text = _short(line[: MAX_MESSAGE + 1].decode(errors="backslashreplace")).removesuffix("\r")
        about: Record = {"time": iso_time(self._clock()), "level": "INFO", "queue": self._queue}
        if job is not None:
            about["job"] = job
        return {**about, "stream": "raw", "message": text}

    def _note(self, told: dict[str, Any]) -> None:
        lines, size = told["left_out"]
        self.left_out[0] += lines
        self.left_out[1] += size


def _redrawn(text: str) -> str:
    """Of a bar that is drawn again and again in its place, the last one."""
    return text[text.rfind("\r", 0, -1) + 1 :]


def _claim(records: list[Record], job: str) -> None:
    """The raw lines among them are this job's."""
    for record in records:
        if record["stream"] == "raw":
            message = record.pop("message")
            del record["stream"]
            record.update(job=job, stream="raw", message=message)


def _short(text: str) -> str:
    # Messages of several lines were shortened where they were written, in their middle.
    return text if len(text) <= MAX_MESSAGE or "\n" in text else text[:MAX_MESSAGE] + CUT
