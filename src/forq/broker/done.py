"""Done jobs that a queue keeps, with what their handlers returned.

`done` holds ids by the time they ended, `done:jobs` under the same id ENDED_MS ' ' FENCE ' ' MICROS '\\n' RESULT '\\n'
RECORD '\\n' ATTEMPTS. RESULT is JSON; '' if it was lost with its worker; or '!' and why there is none.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from forq.broker.link import Link
from forq.broker.record import read_error, show_record
from forq.settings import EXTERNAL, OPTIONS, WORK
from forq.values import show_duration, show_time

LOST = "its result was lost: its worker died before it could tell it"


@dataclass(frozen=True, slots=True)
class DoneJob:
    """`result_error`: why there is no result (None: there is one, which may be None). `record`: packed."""

    ended_ms: int
    fence: int
    micros: int | None
    result: Any
    result_error: str | None
    record: bytes
    attempts: list[Any]

    def show(self, job_id: str) -> dict[str, Any]:
        """Everything known about it."""
        shown = {"id": job_id, "state": "done", "fence": self.fence, **show_record(self.record, job_id)}
        run_seconds = None if self.micros is None else self.micros / 1e6
        shown |= {"ended_at": self.ended_ms / 1000, "run_seconds": run_seconds, "attempts": self.attempts}
        known = {"result": self.result} if self.result_error is None else {"result_error": self.result_error}
        return shown | known


def read_done(packed: bytes) -> DoneJob:
    """What is kept of a done job; of what is broken, what can be shown."""
    head, _, rest = packed.partition(b"\n")
    packed_result, _, rest = rest.partition(b"\n")
    record, _, packed_attempts = rest.rpartition(b"\n")
    ended_ms, fence, micros = (int(part) if part.isdigit() else None for part in (*head.split(b" "), b"", b"", b"")[:3])
    result, result_error = _read_result(packed_result)
    attempts = read_error(packed_attempts)
    tried = attempts if isinstance(attempts, list) else [attempts]
    return DoneJob(ended_ms or 0, fence or 0, micros, result, result_error, record, tried)


def why_not_kept(link: Link, base: str, queue: str) -> str:
    """Why nothing is kept of a job that has ended, and the command that keeps more from now on."""
    (mode, keep_ms, done_max), count, oldest = link.pipeline(
        [
            ("HMGET", f"{base}:options", "mode", "keep_done_ms", "done_max"),
            ("ZCARD", f"{base}:done"),
            ("ZRANGE", f"{base}:done", 0, 0, "WITHSCORES"),
        ]
    )
    if mode is not None and mode.decode() not in (WORK, EXTERNAL):
        return f"a queue of mode {mode.decode()} keeps none"
    # A queue made by an earlier release lacks some of them.
    seconds, most = int(keep_ms or 0) / 1000, int(OPTIONS["done_max"].default if done_max is None else done_max)
    if not seconds:
        return (
            f"its queue keeps no results; `forqctl set {queue} keep_done=1h` keeps those of jobs that end from then on"
        )
    if count >= most:
        since = f", now those since {show_time(float(oldest[1]) / 1000)}" if oldest else ""
        more = min(int(OPTIONS["done_max"].highest), max(10 * most, 10_000))
        return (
            f"its queue keeps the results of the last done_max = {most} jobs{since}; "
            f"`forqctl set {queue} done_max={more}` keeps more"
        )
    return (
        f"its queue keeps results for keep_done = {show_duration(seconds)} (done_max = {most}, {count} are kept); "
        f"`forqctl set {queue} keep_done={show_duration(2 * seconds)}` keeps them for longer"
    )


def _read_result(packed: bytes) -> tuple[Any, str | None]:
    if not packed:
        return None, LOST
    if packed.startswith(b"!"):
        return None, packed[1:].decode(errors="replace")
    try:
        return orjson.loads(packed), None
    except ValueError as exc:
        return None, f"what is kept of it is not JSON: {exc}"
