"""A worker's calls: join the queue, take turns, wait.

How far a running job is: its worker's call that says so, and what is stored.

The call by which a worker of an auto_release queue tries to release the item at the head of the line.
"""

from dataclasses import dataclass
from typing import Any

from forq.broker.keys import pending_key, processing_key, queue_base, retry_key, suspects_key, swept_key, wake_key
from forq.broker.link import Link
from forq.broker.replies import LIMITED, OK, PAUSED, Fate, error_for, read_fates
from forq.broker.scripts import Script, script
from forq.errors import ForqError
from forq.version import PROTOCOL

# How long a worker waits before it asks again. Across a network that shows it that the server has gone without a word;
# a Unix socket ends together with its server, so there it only bounds what nobody has thought of.
BLOCK_SECONDS = 10
LOCAL_BLOCK_SECONDS = 30
# A reply may be this late before the connection counts as dead: the server looks at timeouts every 100 ms.
BLOCK_MARGIN_SECONDS = 5


# What a worker settles, flat, since it is built once per job: (id, fence, micros) per job that succeeded,
# (id, fence, micros, error and brief error as JSON, kind, retry at (ms or ''), chance) per job that failed. Kinds:
# "permanent"; "timeout", of a handler that was ended at its deadline; any other is tried again by the queue's options.
Settled = list[bytes | str | int]
# What handlers returned, of a queue that keeps that: (number of the done job in this turn, from 1; JSON, or '!' and why
# there is none) per job.
Results = list[bytes | int]


@dataclass(frozen=True, slots=True)
class Limits:
    """The queue's options for jobs that begin now: timeout (0: none), units of capacity, priority among queues, and how
    long what their handlers return may be (0: it is not kept)."""

    timeout_ms: int
    size: int
    priority: int
    max_result_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer to a turn. Paused or limited, the worker waits for its wake. `jobs` is id, record, id, record …"""

    paused: bool
    held: bool
    refused: list[bytes]
    fence: str
    limits: Limits
    jobs: list[bytes]
    limited: bool = False
    # Of the failed jobs that it settled, in their order.
    fates: tuple[Fate, ...] = ()


class Consumer:
    """One worker of one queue, with a connection of its own."""

    def __init__(self, url: str, prefix: str, queue: str, processor: str, worker: str, lane: str = "main") -> None:
        self.queue = queue
        self.processor = processor
        self.worker = worker
        self._base = queue_base(prefix, queue)
        self._source = pending_key(self._base) if lane == "main" else f"{self._base}:failed"
        self.lane = lane
        retry = retry_key(self._base)
        self._of_retry_child = (retry, swept_key(retry), suspects_key(self._base))
        self._processing = processing_key(self._base, processor, worker)
        self._wake = wake_key(self._base, processor, worker)
        self._epoch = ""
        self._script = script("turn")
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
        """Settles, keeps `keep` unstarted jobs, hands back whatever else is in the list, claims up to `want`."""
        counts = (len(done) // 3, len(failed) // 8)
        about = self._about(number, keep, want)
        reply = self.link.run(self._script, self._base, *about, *counts, *done, *failed, *(results or ()))
        # Only a turn that settles failures is answered with what follows them.
        fates = read_fates(reply.pop(8)) if failed and len(reply) > 8 else ()
        return self._read(reply, fates)

    def _about(self, number: int, keep: int, want: int) -> tuple[str | int, ...]:
        return self._epoch, self.processor, self.worker, number, want, keep, self.lane

    def _read(self, reply: list[Any], fates: tuple[Fate, ...] = ()) -> Turn:
        if reply[0] not in (OK, PAUSED, LIMITED):
            raise error_for(self.queue, reply)
        limits = Limits(reply[4], reply[5], reply[6], reply[7])
        paused, limited = reply[0] == PAUSED, reply[0] == LIMITED
        return Turn(paused, reply[1] == 1, reply[2], reply[3].decode(), limits, reply[8:], limited, fates)

    def run(self, its: Script, *args: object) -> list[Any]:
        """Another script of this worker's, which takes the queue's epoch first."""
        return self.link.run(its, self._base, self._epoch, *args)

    def fetch_client_id(self) -> None:
        """Before it blocks: so that it can be told by which number others may unblock it."""
        self.link.fetch_client_id(at=self._base)

    def lane_has_jobs(self) -> bool:
        """Whether the retry lane or the suspects have any (or hints of some that are gone)."""
        return bool(self.link.call("EXISTS", *self._of_retry_child))

    def wait_for_job(self) -> bool:
        """Blocks until there may be a job (True; one of the main lane is in the processing list then) or time is up."""
        if self.lane == "main":
            moved = self.link.call("BLMOVE", self._source, self._processing, "LEFT", "RIGHT", self._block_seconds)
            return moved is not None
        # Tokens only. In the processing list they would stay until the next turn in this queue, and there is none while
        # the retry child has work in the fail queue alone.
        return self.link.call("BLPOP", self._source, self._block_seconds) is not None

    def wait_for_turn(self, number: int, want: int) -> Turn | None:
        """Blocks in the same way, and then takes a turn that claims; None if that could not be taken.

        Both are sent together: the server takes the turn as soon as it has moved the id, and a job is there one round
        trip earlier. If time is up, the turn was taken all the same.
        """
        wait = ("BLMOVE", self._source, self._processing, "LEFT", "RIGHT", self._block_seconds)
        *about, _ = self._about(number, 0, want)
        turn = ("FCALL", self._script.name, 1, self._base, *about, "waiting", 0, 0)
        moved, reply = self.link.call_batch(wait, turn)
        taken = None if isinstance(reply, ForqError) else self._read(reply)
        if isinstance(moved, ForqError) and not (taken and taken.jobs):
            raise moved
        return taken

    def wait_for_wake(self) -> None:
        """Blocks while this worker may not claim; returns when it may ask again. Fail jobs are not held up: the retry
        child hears of those too (in its list there are tokens only)."""
        others = () if self.lane == "main" else (self._source,)
        # A kick can be lost (with the server's last second, say): then this is how long a resumed queue stands still.
        self.link.call("BLPOP", self._wake, *others, BLOCK_SECONDS)

    def leave(self, number: int) -> None:
        """Unregisters; what is still in the list goes back uncounted."""
        nothing_runs = (number, 0, 0, "interrupted", "left", "", "")
        self.link.run(script("recover"), self._base, self.processor, self.worker, *nothing_runs)

    def close(self) -> None:
        self.link.close()


def report_progress(
    link: Link, prefix: str, queue: str, worker: str, job_id: str, fence: int, fraction: float, text: str
) -> bool:
    """False if that worker does not run that job (any more). Safe to repeat."""
    reply = link.run(script("progress"), queue_base(prefix, queue), worker, job_id, fence, fraction, text)
    if reply[0] != OK:
        raise error_for(queue, reply)
    return bool(reply[1])


def read_progress(packed: bytes | None) -> dict[str, Any] | None:
    """What is stored of a job, as it is shown: {"fraction", "text", "at"}."""
    if packed is None:
        return None
    fraction, at_ms, text = packed.decode("utf-8", "replace").split(" ", 2)
    return {"fraction": float(fraction), "text": text, "at": int(at_ms) / 1000}


@dataclass(frozen=True, slots=True)
class ReleaseReply:
    """What came of it, and in how many seconds the next one can be made (0: nothing is in line)."""

    paused: bool
    handed_over: bool
    wait_seconds: float


class Releaser:
    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._script = script("release")

    def release(self) -> ReleaseReply:
        reply = self._consumer.run(self._script, self._consumer.processor, self._consumer.worker, self._consumer.lane)
        if reply[0] == PAUSED:
            return ReleaseReply(paused=True, handed_over=False, wait_seconds=0.0)
        if reply[0] != OK:
            raise error_for(self._consumer.queue, reply)
        return ReleaseReply(paused=False, handed_over=reply[1] == 1, wait_seconds=reply[2] / 1_000_000)
