"""Results: the done jobs that a queue keeps, and waiting for the end of a job.

`done` holds ids by their end time; `done:own` holds those of jobs with a keep_done of their own, by the time until
which they are kept. `done:jobs` holds under each id

    ENDED_MS ' ' FENCE ' ' MICROS '\n' RESULT '\n' RECORD '\n' ATTEMPTS

RESULT is JSON; '' if it was lost with its worker; or '!' and the reason why there is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import orjson

from forq.broker.dead import DeadJobs
from forq.broker.enqueue import JobIdentity
from forq.broker.keys import ended_channel, queue_base
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.broker.record import read_error, show_record
from forq.broker.scripts import NO_QUEUE, OK, error_for, script
from forq.errors import ForqError, UnknownJob
from forq.redis_url import database_of
from forq.settings import EXTERNAL, OPTIONS, WORK
from forq.values import check_job_id, check_queue_name, show_duration, show_time

LOST = "its result was lost: its worker died before it could send it"


@dataclass(frozen=True, slots=True)
class DoneJob:
    """A done job that is kept. `result_error`: why there is no result; None if there is one. `record` is packed."""

    ended_ms: int
    fence: int
    micros: int | None
    result: Any
    result_error: str | None
    record: bytes
    attempts: list[Any]

    def show(self, job_id: str) -> dict[str, Any]:
        """All its fields for output."""
        shown = {"id": job_id, "state": "done", "fence": self.fence, **show_record(self.record, job_id)}
        run_seconds = None if self.micros is None else self.micros / 1e6
        shown |= {"ended_at": self.ended_ms / 1000, "run_seconds": run_seconds, "attempts": self.attempts}
        known = {"result": self.result} if self.result_error is None else {"result_error": self.result_error}
        return shown | known


def read_done(packed: bytes) -> DoneJob:
    """Reads a packed done job; broken parts do not raise."""
    head, _, rest = packed.partition(b"\n")
    packed_result, _, rest = rest.partition(b"\n")
    record, _, packed_attempts = rest.rpartition(b"\n")
    ended_ms, fence, micros = (int(part) if part.isdigit() else None for part in (*head.split(b" "), b"", b"", b"")[:3])
    result, result_error = _read_result(packed_result)
    attempts = read_error(packed_attempts)
    tried = attempts if isinstance(attempts, list) else [attempts]
    return DoneJob(ended_ms or 0, fence or 0, micros, result, result_error, record, tried)


def why_not_kept(link: Link, base: str, queue: str) -> str:
    """Why an ended job is not kept, and the command that keeps more jobs from now on."""
    (mode, keep_ms, done_max), count, oldest = link.pipeline(
        [
            ("HMGET", f"{base}:options", "mode", "keep_done_ms", "done_max"),
            ("ZCARD", f"{base}:done"),
            ("ZRANGE", f"{base}:done", 0, 0, "WITHSCORES"),
        ]
    )
    if mode is not None and mode.decode() not in (WORK, EXTERNAL):
        return f"a queue of mode {mode.decode()} keeps no results"
    # A queue of an earlier release may lack some of these options.
    seconds, most = int(keep_ms or 0) / 1000, int(OPTIONS["done_max"].default if done_max is None else done_max)
    if not seconds:
        kept = "no results" if not count else "only results of tasks and jobs with their own keep_done"
        return f"its queue keeps {kept}; `forqctl set {queue} keep_done=1h` keeps those of jobs that end after it"
    if count >= most:
        since = f", currently those since {show_time(float(oldest[1]) / 1000)}" if oldest else ""
        more = min(int(OPTIONS["done_max"].highest), max(10 * most, 10_000))
        return (
            f"its queue keeps the results of the last done_max = {most} jobs{since}; "
            f"`forqctl set {queue} done_max={more}` keeps more"
        )
    return (
        f"its queue keeps results for keep_done = {show_duration(seconds)} (done_max = {most}, {count} are kept); "
        f"`forqctl set {queue} keep_done={show_duration(2 * seconds)}` keeps them longer"
    )


def _read_result(packed: bytes) -> tuple[Any, str | None]:
    if not packed:
        return None, LOST
    if packed.startswith(b"!"):
        return None, packed[1:].decode(errors="replace")
    try:
        return orjson.loads(packed), None
    except ValueError as exc:
        return None, f"the stored result is not JSON: {exc}"


WaitState = Literal["live", "done", "dead", "cancelled", "gone"]


@dataclass(frozen=True, slots=True)
class WaitTarget:
    """The job that is waited for: its queue's epoch and its mark ('': the one of this id that ended last)."""

    epoch: str
    mark: str

    @property
    def enqueued_us(self) -> int | None:
        enqueued = self.mark.partition("-")[2]
        return int(enqueued) if enqueued.isdigit() else None


@dataclass(frozen=True, slots=True)
class WaitStatus:
    """The job's state. `fence`: of the last attempt of a done or dead job. `done`: None if the job is not kept.

    "gone": how the job ended is no longer known, or it has been dead for long.
    """

    target: WaitTarget
    state: WaitState
    fence: int = 0
    done: DoneJob | None = None


class AwaitedJob(NamedTuple):
    """One of many jobs. `identity`, `keeps`: as for ResultWaiter. `target`: None before the first check."""

    id: str
    target: WaitTarget | None = None
    identity: JobIdentity | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class WaitCheck:
    """The state of one of many jobs. `ended_ms`: of a done job that is kept; None: unknown."""

    state: WaitState
    target: WaitTarget | None
    ended_ms: int | None = None


def check_jobs(link: Link, base: str, queue: str, jobs: Sequence[AwaitedJob], valid_ms: int) -> list[WaitCheck]:
    """`ResultWaiter.check` for several jobs of a queue, in one round trip.

    The jobs of a queue that no longer exists are "gone". A live job without a target must be checked again.
    """
    calls = [(base, job.id, *_wait_arguments(job.target, job.identity, job.keeps, valid_ms)) for job in jobs]
    checks: list[WaitCheck] = []
    for reply, job in zip(link.run_batch(script("wait"), calls), jobs, strict=True):
        if isinstance(reply, ForqError):
            raise reply
        if reply[0] == NO_QUEUE:
            checks.append(WaitCheck("gone", job.target))
            continue
        if reply[0] != OK:
            raise error_for(queue, reply)
        state, epoch, mark = (part.decode() for part in reply[1:4])
        # Results may be long, and only the end time is of interest.
        ended_ms = reply[5][: reply[5].find(b" ")] if len(reply) > 5 else b""
        if mark and state != "live" and is_ahead(job.identity, int(reply[4]) if len(reply) > 4 else 0):
            # The job that this one was blocked behind. The caller checks again.
            checks.append(WaitCheck("live", None))
        else:
            checks.append(WaitCheck(state, WaitTarget(epoch, mark), int(ended_ms) if ended_ms.isdigit() else None))
    return checks


class ResultWaiter:
    """Waits for the end of one job: subscribe first, then check; check again after each message."""

    def __init__(
        self,
        link: Link,
        prefix: str,
        queue: str,
        job_id: str,
        identity: JobIdentity | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """`identity`: of the job that is meant, if another one may have its id. `keeps`: its task keeps its result."""
        self.identity = identity
        self._keeps = keeps
        self.queue = check_queue_name(queue)
        self.job_id = check_job_id(job_id)
        self._link = link
        self._base = queue_base(prefix, queue)
        self._dead = DeadJobs(link, prefix, queue)

    def subscription(self) -> Subscription:
        channel = ended_channel(self._base, database_of(self._link.url), self.job_id)
        return Subscription(self._link.url, channel, name="forq-waiter", exact=True)

    def check(self, target: WaitTarget | None, valid_ms: int) -> WaitStatus:
        """The job's state. If it is live, its end will be published within valid_ms. Safe to repeat.

        `target`: None the first time. UsageError if the queue keeps no results; UnknownQueue if the queue is gone, even
        if it was created again.
        """
        arguments = _wait_arguments(target, self.identity, self._keeps, valid_ms)
        reply = self._link.run(script("wait"), self._base, self.job_id, *arguments)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        state, epoch, mark = (part.decode() for part in reply[1:4])
        fence = int(reply[4]) if len(reply) > 4 else 0
        return WaitStatus(WaitTarget(epoch, mark), state, fence, read_done(reply[5]) if len(reply) > 5 else None)

    def is_other_job(self, status: WaitStatus) -> bool:
        """Whether the job that ended is one that the wanted job was blocked behind: then check again from the start.
        That may be unknown (gone). The check from the start finds the wanted job, or has no mark."""
        return bool(status.target.mark) and status.state != "live" and is_ahead(self.identity, status.fence)

    def why_not_kept(self) -> str:
        return why_not_kept(self._link, self._base, self.queue)

    def error_of_dead(self, fence: int) -> Any:
        """The error of the job that died in this attempt; None if it is not kept."""
        shown = self._show_dead(f"{self.job_id}@{fence}")
        return None if shown is None else shown["error"]

    def error_of_last_dead(self, target: WaitTarget, after: int = 0) -> Any:
        """The error of the last dead job with this id, if it is the target and died in an attempt after `after`."""
        shown = self._show_dead(self.job_id)
        if shown is None or shown["fence"] <= after:
            return None
        other = target.enqueued_us is not None and round(shown["enqueued_at"] * 1e6) != target.enqueued_us
        if other or (self.identity is not None and self.identity.is_other(shown)):
            return None
        return shown["error"]

    def _show_dead(self, reference: str) -> dict[str, Any] | None:
        try:
            return self._dead.show(reference)
        except UnknownJob:
            return None


def is_ahead(identity: JobIdentity | None, fence: int) -> bool:
    """Whether the job that ended in this attempt is one that the wanted job was blocked behind."""
    return identity is not None and identity.is_behind(fence)


def _wait_arguments(
    target: WaitTarget | None, identity: JobIdentity | None, keeps: bool, valid_ms: int
) -> tuple[str | int, ...]:
    since = (identity.epoch if identity else "", "") if target is None else (target.epoch, target.mark)
    return *since, valid_ms, int(keeps), "" if identity is None else identity.pack()
