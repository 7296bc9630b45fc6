"""A worker's calls about its queue: join, turn (settle and claim), wait, report progress, leave."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from forq.broker.keys import pending_key, processing_key, queue_base, retry_key, suspects_key, swept_key, wake_key
from forq.broker.link import Link
from forq.broker.scripts import LIMITED, OK, PAUSED, Fate, error_for, read_fates, script
from forq.errors import ForqError
from forq.version import PROTOCOL

# How long a blocking call waits. Over a network, a worker notices by this limit that the server is gone. A Unix socket
# closes with its server, so the limit there only covers unknown failures.
BLOCK_SECONDS = 10
LOCAL_BLOCK_SECONDS = 30
# A reply may be this late before the connection counts as dead: the server checks timeouts every 100 ms.
BLOCK_MARGIN_SECONDS = 5


# The jobs that a turn settles. Flat lists, because they are built once per job.
# Succeeded: (id, fence, micros) per job; id and micros as bytes are sent fastest.
# Failed: (id, fence, micros, error and brief error as JSON, kind, retry at (ms, '+ms' from now, or ''), chance and
# ' ' OPTIONS of its task, if it has some) per job. "permanent" is never retried, "timeout" was ended at its deadline,
# "snooze" is not counted; for any other kind the options decide. "interrupted" and "cancelled" were ended on request:
# the job returns uncounted, or is removed; the stack (JSON) and the cause replace error and brief error.
Settled = list[bytes | str | int]
# What handlers returned, if it is kept: (number of the done job in this turn, from 1, and ' ' KEEP_MS if it is not the
# queue's keep_done; JSON, or '!' and the reason why there is none) per job.
Results = list[bytes | int | str]


@dataclass(frozen=True, slots=True)
class Limits:
    """The queue's options for the claimed jobs.

    timeout_ms: 0 for none. size: capacity units per running job. priority: among queues. max_result_bytes: of a result
    that is kept. keeps_results: also of jobs without a keep_done of their own.
    """

    timeout_ms: int
    size: int
    priority: int
    max_result_bytes: int = 0
    keeps_results: bool = False
    max_retries: int = 0
    retry_lane_retries: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The reply to a turn. A paused or limited worker waits for its wake. `jobs` is id, record, id, record …"""

    paused: bool
    held: bool
    refused: list[bytes]
    fence: str
    limits: Limits
    jobs: list[bytes]
    limited: bool = False
    # What happens next to each failed job that the turn settled, in their order.
    fates: tuple[Fate, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """Whether an item was leased, and the seconds until the next release is possible (0: nothing is waiting)."""

    paused: bool
    leased: bool
    wait_seconds: float


class Consumer:
    """One worker of one queue, with its own connection.

    1. Joins the queue, which registers the worker.
    2. Takes turns: each settles what ran and claims what runs next.
    3. Blocks while there is nothing to claim, or while the queue is paused or limited.
    4. Leaves the queue.
    """

    def __init__(self, url: str, prefix: str, queue: str, processor: str, worker: str, lane: str = "main") -> None:
        self.queue = queue
        self.processor = processor
        self.worker = worker
        self._base = queue_base(prefix, queue)
        self._source = pending_key(self._base) if lane == "main" else f"{self._base}:failed"
        self.lane = lane
        retry = retry_key(self._base)
        self._retry_lane_keys = (retry, swept_key(retry), suspects_key(self._base))
        self._processing = processing_key(self._base, processor, worker)
        self._wake = wake_key(self._base, processor, worker)
        self._epoch = ""
        self._script, self._settle = script("turn"), script("settle")
        self._block_seconds = LOCAL_BLOCK_SECONDS if url.startswith("unix:") else BLOCK_SECONDS
        timeout_seconds = self._block_seconds + BLOCK_MARGIN_SECONDS
        self.link = Link(url, name=f"forq-worker-{worker}", timeout_seconds=timeout_seconds)

    def join(self, expiry_ms: int) -> str:
        """Registers this worker; returns the queue's epoch."""
        reply = self.link.run(script("join"), self._base, PROTOCOL, self.processor, self.worker, expiry_ms)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        self._epoch = reply[1].decode()
        return self._epoch

    def turn(
        self, number: int, done: Settled, failed: Settled, keep: int, want: int, results: Results | None = None
    ) -> Turn:
        """Settles jobs, keeps `keep` unstarted ones, returns the rest of the processing list, claims up to `want`."""
        counts = (len(done) // 3, len(failed) // 8)
        head = self._turn_args(number, keep, want)
        groups = _groups_of(done) if done else ()
        reply = self.link.run(self._script, self._base, *head, *counts, *groups, *failed, *(results or ()))
        # The reply holds fates only if the turn settled failures.
        fates = read_fates(reply.pop(10)) if failed and len(reply) > 10 else ()
        return self._read_turn(reply, fates)

    def _turn_args(self, number: int, keep: int, want: int) -> tuple[str | int, ...]:
        return self._epoch, self.processor, self.worker, number, want, keep, self.lane

    def _read_turn(self, reply: list[Any], fates: tuple[Fate, ...] = ()) -> Turn:
        if reply[0] not in (OK, PAUSED, LIMITED):
            raise error_for(self.queue, reply)
        limits = Limits(reply[4], reply[5], reply[6], abs(reply[7]), reply[7] > 0, reply[8], reply[9])
        paused, limited = reply[0] == PAUSED, reply[0] == LIMITED
        return Turn(paused, reply[1] == 1, reply[2], reply[3].decode(), limits, reply[10:], limited, fates)

    def release(self) -> ReleaseReply:
        """Tries to lease the first item of an auto_release queue to an awaiter."""
        args = (self._epoch, self.processor, self.worker, self.lane)
        reply = self.link.run(script("release"), self._base, *args)
        if reply[0] == PAUSED:
            return ReleaseReply(paused=True, leased=False, wait_seconds=0.0)
        if reply[0] != OK:
            raise error_for(self.queue, reply)
        return ReleaseReply(paused=False, leased=reply[1] == 1, wait_seconds=reply[2] / 1_000_000)

    def fetch_client_id(self) -> None:
        """Call before blocking: others need the id to unblock this connection."""
        self.link.fetch_client_id(at=self._base)

    def read_inputs(self, job_id: str, count: int) -> list[bytes] | None:
        """'HOW RESULT' of each job that this one has waited for, '' for one that has not ended; None if this job has
        ended. No call reads more than READ_BYTES, unless one result is longer."""
        key = f"{self._base}:inputs"
        found = list(self.link.hash_values(key, [f"{job_id} {number}" for number in range(1, count + 1)]))
        # All are deleted in one call when the job ends. So if this one is still there, none was missing.
        if not self.link.call("HEXISTS", key, job_id):
            return None
        return [each or b"" for each in found]

    def lane_has_jobs(self) -> bool:
        """Whether the retry lane or the suspects hold anything (stale hints count)."""
        return bool(self.link.call("EXISTS", *self._retry_lane_keys))

    def queue_has_jobs(self) -> bool:
        """Whether the queue has any job: waiting, scheduled or active."""
        return bool(self.link.call("EXISTS", f"{self._base}:jobs"))

    def wait_for_job(self) -> bool:
        """Blocks until there may be a job (True; in the main lane its id is in the processing list) or time is up."""
        if self.lane == "main":
            moved = self.link.call("BLMOVE", self._source, self._processing, "LEFT", "RIGHT", self._block_seconds)
            return moved is not None
        # This list holds tokens only. In the processing list they would stay until the next turn in this queue, and
        # there is none while the retry process only has work in the fail queue.
        return self.link.call("BLPOP", self._source, self._block_seconds) is not None

    def wait_for_turn(self, number: int, want: int) -> Turn | None:
        """Blocks for a job and takes a turn that claims it, in one round trip; None if the turn failed.

        Both commands are sent at once: the server runs the turn as soon as it has moved the id. It also runs the turn
        if time is up.
        """
        return self._read_waited(*self.link.call_batch(*self._waiting_commands(number, want)))

    def settle_and_wait(
        self, number: int, want: int, done: Settled, settled: Callable[[list[bytes]], None]
    ) -> Turn | None:
        """Settles jobs that succeeded, then does what wait_for_turn does; all is sent at once.

        Calls `settled` with the refused ids as soon as Redis has settled. None if that failed: then nothing is settled,
        but an id may have been moved. The next turn returns it.
        """
        settle = ("FCALL", self._settle.name, 1, self._base, self._epoch, self.processor, self.worker)
        settle += tuple(_groups_of(done))
        replies = self.link.replies(settle, *self._waiting_commands(number, want))
        with closing(replies):
            reply = next(replies)
            if isinstance(reply, Exception):
                return None
            if reply[0] != OK:
                raise error_for(self.queue, reply)
            settled(reply[1])
            return self._read_waited(*self.link.read_answers(list(replies)))

    def _waiting_commands(self, number: int, want: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        wait = ("BLMOVE", self._source, self._processing, "LEFT", "RIGHT", self._block_seconds)
        *head, _ = self._turn_args(number, 0, want)
        return wait, ("FCALL", self._script.name, 1, self._base, *head, "waiting", 0, 0)

    def _read_waited(self, moved: Any, reply: Any) -> Turn | None:
        taken = None if isinstance(reply, ForqError) else self._read_turn(reply)
        if isinstance(moved, ForqError) and not (taken and taken.jobs):
            raise moved
        return taken

    def wait_for_wake(self) -> None:
        """Blocks while this worker may not claim; returns when it may try again.

        Pauses and limits do not apply to fail jobs, so the retry process also waits for the tokens of those.
        """
        tokens = () if self.lane == "main" else (self._source,)
        # A wake can be lost, for example with the server's last second of data: then this bounds the delay.
        self.link.call("BLPOP", self._wake, *tokens, BLOCK_SECONDS)

    def leave(self, number: int) -> None:
        """Unregisters; ids left in the processing list go back uncounted."""
        nothing_runs = (number, 0, 0, "interrupted", "left", "", "")
        self.link.run(script("recover"), self._base, self.processor, self.worker, *nothing_runs)

    def close(self) -> None:
        self.link.close()


def _groups_of(done: Settled) -> list[Any]:
    """The done jobs as a turn sends them: per run of jobs with one fence, the fence, their number, 'ID MICROS ID MICROS
    …' for the journal, and their ids. So the server handles two values per job instead of three."""
    ids, fences = done[::3], done[1::3]
    if fences[0] != fences[-1]:
        at = next(at for at, fence in enumerate(fences) if fence != fences[0])
        return _groups_of(done[: 3 * at]) + _groups_of(done[3 * at :])
    events: list[Any] = done[:]
    del events[1::3]
    try:
        text = b" ".join(events)
    except TypeError:
        text = b" ".join(each if isinstance(each, bytes) else str(each).encode() for each in events)
    return [fences[0], len(ids), text, *ids]


def report_progress(
    link: Link, prefix: str, queue: str, worker: str, job_id: str, fence: int, fraction: float, text: str
) -> bool:
    """Stores the progress of a running job; False if that worker does not run it. Safe to repeat."""
    reply = link.run(script("progress"), queue_base(prefix, queue), worker, job_id, fence, fraction, text)
    if reply[0] != OK:
        raise error_for(queue, reply)
    return bool(reply[1])


def read_progress(packed: bytes | None) -> dict[str, Any] | None:
    """Stored progress as {"fraction", "text", "at"}."""
    if packed is None:
        return None
    fraction, at_ms, text = packed.decode("utf-8", "replace").split(" ", 2)
    return {"fraction": float(fraction), "text": text, "at": int(at_ms) / 1000}
