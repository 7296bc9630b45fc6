"""Shared memory that workers write and other processes read: the scoreboard, and statistics of attempts.

Scoreboard: one slot per worker. A write takes tens of nanoseconds; the supervisor and pulse read without any request,
even while Redis is down. It is mapped before the forks, so children need no descriptor. A slot has 512 bytes: 16 words
of 8 bytes, each written in one aligned store (never torn), four texts with a length byte in front (a reader may see
them half written: they are only displayed), and three more words.

AttemptStats: wait and run times of attempts, for the metrics service. An entry belongs to a queue and has one writer at
a time. It outlives its worker, and the next worker of the queue continues it: counters never decrease while the queue
exists. The supervisor assigns entries; a child finds its own in the table that it inherited. An entry has 1024 bytes:
words of 8 bytes (two sums in µs, failed attempts, time of the last batch, two histograms) and the name of the queue.
Bucket b of a histogram counts times of b significant bits, that is below 2^b µs.
"""

import heapq
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from operator import add, itemgetter
from struct import Struct

from forq.errors import ForqError

HEADER_BYTES = 4096
SLOT_BYTES = 512

POSITION, HELD, DONE, BEAT, STARTED, STATE, PID, EPOCH, ROLE, TIMEOUT, LENIENCE, GUARDED, THREAD = range(13)
PROGRESS, PROGRESS_OF, TURN = 13, 14, 15
PROGRESS_PARTS = 1_000_000

JOB_AT, JOB_MAX = 128, 128
HAS_RESULTS_AT = 257
QUEUE_AT, QUEUE_MAX = 264, 64
WORKER_AT, WORKER_MAX = 330, 48
PROGRESS_AT, PROGRESS_MAX = 384, 103
STEP, TAKEN, MINDER = 61, 62, 63

_WATCHING, _HIGHEST = 0, 1

TICK_BITS, TURN_BITS, INDEX_BITS = 28, 20, 15
TICK_MASK, TURN_MASK, INDEX_MASK = (1 << TICK_BITS) - 1, (1 << TURN_BITS) - 1, (1 << INDEX_BITS) - 1
TICK_SHIFT, TURN_SHIFT, INDEX_SHIFT = 36, 16, 1
TICK_NS_SHIFT = 20
TICK_MS = (1 << TICK_NS_SHIFT) / 1e6
# A reader takes `now` before it reads the slot. A job that starts in between has age 0, not 78 hours.
_TICKS_AHEAD = 1 << 16

LENGTH_BYTE = tuple(bytes([n]) for n in range(JOB_MAX + 1))
# Writes an id with its length byte in front, and zeros behind it; cuts a longer one. One call of C: a worker writes the
# id of every job.
write_job = Struct(f"{JOB_MAX + 1}p").pack_into


class State(IntEnum):
    EMPTY = 0
    STARTING = 1
    IDLE = 2
    BUSY = 3
    PARKED = 4
    STOPPING = 5
    # A job has failed and is about to be settled; its position stays, and no deadline applies.
    SETTLING = 6
    # A job waits that may not start now (rate, max_active).
    LIMITED = 7


class Role(IntEnum):
    MAIN = 0
    RETRY = 1
    # Helpers, which run suspects, or fail jobs while the retry process is busy.
    SUSPECT = 2
    FAIL = 3

    @property
    def runs_fail_jobs(self) -> bool:
        return self in (Role.RETRY, Role.FAIL)


@dataclass(frozen=True, slots=True)
class PositionParts:
    started_tick: int
    turn: int
    index: int
    running: bool


def pack_position(started_ns: int, turn: int, index: int, running: bool) -> int:
    """A worker's position in one word, so that it is read atomically. Turn and index wrap at 20 and 15 bits."""
    return (
        (started_ns >> TICK_NS_SHIFT & TICK_MASK) << TICK_SHIFT
        | (turn & TURN_MASK) << TURN_SHIFT
        | (index & INDEX_MASK) << INDEX_SHIFT
        | running
    )


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """The full number of the last turn, the number of jobs finished since, and whether one is running."""

    turn: int
    index: int
    running: bool


def unpack_position(packed: int) -> PositionParts:
    return PositionParts(
        packed >> TICK_SHIFT & TICK_MASK,
        packed >> TURN_SHIFT & TURN_MASK,
        packed >> INDEX_SHIFT & INDEX_MASK,
        bool(packed & 1),
    )


def age_ms(packed: int, now_ns: int) -> float:
    """Milliseconds since the start in a packed position; correct up to 78 hours (28 bits of 1.05 ms)."""
    ticks = ((now_ns >> TICK_NS_SHIFT) - (packed >> TICK_SHIFT)) & TICK_MASK
    return 0.0 if ticks > TICK_MASK - _TICKS_AHEAD else ticks * TICK_MS


class _Cell:
    """Descriptor: one word of a slot."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, slot: "Slot", owner: type["Slot"]) -> int:
        return slot.words[self._index]

    def __set__(self, slot: "Slot", value: int) -> None:
        slot.words[self._index] = value


class _Text:
    """Descriptor: a short text of a slot, with a length byte in front."""

    def __init__(self, at: int, limit: int) -> None:
        self._at, self._limit = at, limit

    def __get__(self, slot: "Slot", owner: type["Slot"]) -> str:
        length = min(slot.bytes[self._at], self._limit)
        # A text that was cut may end inside a character.
        return str(slot.bytes[self._at + 1 : self._at + 1 + length], "utf-8", "ignore")

    def __set__(self, slot: "Slot", value: str) -> None:
        text = value.encode()[: self._limit]
        slot.bytes[self._at : self._at + 1 + len(text)] = LENGTH_BYTE[len(text)] + text


class Slot:
    """One worker's slot. The worker loop writes `words[...]` directly; everything else uses the attributes."""

    __slots__ = ("bytes", "number", "words")

    held = _Cell(HELD)
    done = _Cell(DONE)
    beat_ns = _Cell(BEAT)
    started_ns = _Cell(STARTED)
    state = _Cell(STATE)
    pid = _Cell(PID)
    epoch = _Cell(EPOCH)
    role = _Cell(ROLE)
    position = _Cell(POSITION)
    # The full number of the last turn whose reply the worker has read. The loop writes it before POSITION.
    turn = _Cell(TURN)
    # Time limit of a job in ms (0: none), and how long after that its worker may end it on its own; not 0 while a
    # coroutine runs.
    timeout_ms = _Cell(TIMEOUT)
    lenience_ms = _Cell(LENIENCE)
    # While code of the job runs on the event loop of its process: since when.
    step_ns = _Cell(STEP)
    # When the supervisor checks the deadline of this worker next, in ns (0: no timer); written by the supervisor.
    guarded = _Cell(GUARDED)
    thread = _Cell(THREAD)
    # The turn whose jobs pulse rescues because the worker does not start them; written by pulse.
    taken = _Cell(TAKEN)
    # Kernel thread id of the minder.
    minder = _Cell(MINDER)
    queue = _Text(QUEUE_AT, QUEUE_MAX)
    worker = _Text(WORKER_AT, WORKER_MAX)
    progress_text = _Text(PROGRESS_AT, PROGRESS_MAX)

    def __init__(self, number: int, view: memoryview) -> None:
        self.number = number
        self.bytes = view
        self.words = view.cast("Q")

    @property
    def job(self) -> bytes:
        length = min(self.bytes[JOB_AT], JOB_MAX)
        return bytes(self.bytes[JOB_AT + 1 : JOB_AT + 1 + length])

    @job.setter
    def job(self, job_id: bytes) -> None:
        write_job(self.bytes, JOB_AT, job_id)

    @property
    def has_results(self) -> bool:
        """Whether the worker has results of jobs in this batch that it has not sent."""
        return self.bytes[HAS_RESULTS_AT] == 1

    @has_results.setter
    def has_results(self, has: bool) -> None:
        self.bytes[HAS_RESULTS_AT] = has

    def show_progress(self, position: int, fraction: float, text: str) -> bool:
        """False if the worker has left this position."""
        words = self.words
        if words[POSITION] != position:
            return False
        words[PROGRESS] = int(fraction * PROGRESS_PARTS + 0.5)
        self.progress_text = text
        words[PROGRESS_OF] = position
        return True

    def progress(self) -> tuple[float, str] | None:
        """Progress of the running job, if it has reported any. A long text is cut."""
        if not self.position & 1 or self.words[PROGRESS_OF] != self.position:
            return None
        return self.words[PROGRESS] / PROGRESS_PARTS, self.progress_text

    def running_since_ns(self) -> tuple[int, int] | None:
        """The packed position of the running job and its start; None if none is running, or one is just starting."""
        packed = self.position
        started = self.started_ns
        if not packed & 1 or started >> TICK_NS_SHIFT & TICK_MASK != packed >> TICK_SHIFT & TICK_MASK:
            return None
        return packed, started

    def read_position(self, packed: int | None = None) -> WorkerPosition:
        """The current position, or the one of `packed`, which was just read.

        POSITION has only the low bits of the turn's number. TURN is written before POSITION
        and read after it, so it belongs to the same turn or to one shortly after, even if the worker died in between.
        """
        at = unpack_position(self.position if packed is None else packed)
        number = self.turn
        return WorkerPosition(number - ((number - at.turn) & TURN_MASK), at.index, at.running)


class Scoreboard:
    """The mapping and, in the supervisor, which slots are taken."""

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
        self.slots = slots
        self._map = mmap.mmap(fd, HEADER_BYTES + slots * SLOT_BYTES)
        self._view = memoryview(self._map)
        self._header = self._view[:HEADER_BYTES].cast("Q")
        self._taken: set[int] = set()
        self._free: list[int] = []
        self._next = 0

    @classmethod
    def create(cls, slots: int = 32768) -> "Scoreboard":
        """Memory is used only for slots that are written."""
        fd = os.memfd_create("forq-scoreboard")
        os.ftruncate(fd, HEADER_BYTES + slots * SLOT_BYTES)
        return cls(fd, slots)

    @property
    def watching(self) -> int:
        """Not zero while pulse polls for batches; otherwise a worker that starts a batch wakes pulse."""
        return self._header[_WATCHING]

    @watching.setter
    def watching(self, value: int) -> None:
        self._header[_WATCHING] = value

    @property
    def highest(self) -> int:
        """One more than the highest slot number ever taken: the range that a reader must scan."""
        return self._header[_HIGHEST]

    def take(self) -> int:
        """The lowest free slot, zeroed. Called by the supervisor only."""
        if self._free:
            number = heapq.heappop(self._free)
        elif self._next < self.slots:
            number = self._next
            self._next += 1
            self._header[_HIGHEST] = self._next
        else:
            raise ForqError(f"all {self.slots} slots of the scoreboard are taken")
        self._clear(number)
        self._taken.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Frees the slot of a worker that is gone. Called by the supervisor only."""
        if number not in self._taken:
            raise ForqError(f"slot {number} of the scoreboard is not taken")
        self._taken.remove(number)
        self._clear(number)
        heapq.heappush(self._free, number)

    def slot(self, number: int) -> Slot:
        if not 0 <= number < self.slots:
            raise ForqError(f"the scoreboard has no slot {number}: it has {self.slots}")
        start = HEADER_BYTES + number * SLOT_BYTES
        return Slot(number, self._view[start : start + SLOT_BYTES])

    def _clear(self, number: int) -> None:
        start = HEADER_BYTES + number * SLOT_BYTES
        self._view[start : start + SLOT_BYTES] = bytes(SLOT_BYTES)


STATS_BYTES = 1024
BUCKETS = 40

RUN_SUM, WAIT_SUM, FAILED, LAST = range(4)
RUN_AT = 8
WAIT_AT = RUN_AT + BUCKETS
_WORDS = WAIT_AT + BUCKETS
_NAME_AT, _NAME_MAX = 896, 64

_HIGHEST_STATS, SNAPSHOTS, REDIS_ERRORS, SUPERVISOR_ERRORS = range(4)

# Bytes of a record up to the millisecond: FLAG PRIORITY ' ' and 13 of the 16 digits of ENQUEUED_US (until 2286).
_HEAD = 16
# In C, since a worker needs them for every job.
_record_of, _head_of = itemgetter(1), itemgetter(slice(_HEAD))
_WORD_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Statistics of one queue. `last_ns`: time of the last batch (0: none)."""

    run: list[int]
    run_micros: int
    wait: list[int]
    wait_micros: int
    failed: int
    last_ns: int

    def __add__(self, other: "QueueStats") -> "QueueStats":
        return QueueStats(
            list(map(add, self.run, other.run)),
            self.run_micros + other.run_micros,
            list(map(add, self.wait, other.wait)),
            self.wait_micros + other.wait_micros,
            self.failed + other.failed,
            max(self.last_ns, other.last_ns),
        )


class WorkerStats:
    """The entry of one worker, its only writer."""

    __slots__ = ("words",)

    def __init__(self, words: "memoryview[int]") -> None:
        self.words = words

    def count(
        self, claimed_us: int, batch: Sequence[tuple[bytes, bytes]], micros: list[int], failed: int, now_ns: int
    ) -> None:
        """Counts finished attempts: the jobs of a batch up to the last that ran, and the run time of each."""
        words = self.words
        times = Counter(map(int.bit_length, micros)) if len(micros) > 1 else {micros[0].bit_length(): 1}
        for bits, number in times.items():
            words[RUN_AT + min(bits, BUCKETS - 1)] += number
        words[RUN_SUM] += sum(micros)
        self._count_waits(claimed_us, map(_head_of, map(_record_of, batch[: len(micros)])))
        # After the run times: readers read failures first, so they never see more failures than attempts.
        words[FAILED] += failed
        words[LAST] = now_ns

    def _count_waits(self, claimed_us: int, heads: Iterable[bytes]) -> None:
        """Groups records by their head up to the millisecond, which neighbors in a batch often share."""
        words = self.words
        for head, alike in groupby(heads):
            if head[:1] != b"p":  # a retried, scheduled or blocked job did not wait the whole time
                continue
            try:
                # Not below 0: the server's clock may have been set back.
                wait = max(0, claimed_us - 1000 * int(head[3:]))
            except ValueError:  # a broken record; its attempt reports it
                continue
            number = len(list(alike))
            words[WAIT_AT + min(wait.bit_length(), BUCKETS - 1)] += number
            # A record dated 1970 must not end the worker: the counter wraps, since an overflow would raise.
            words[WAIT_SUM] = (words[WAIT_SUM] + wait * number) & _WORD_MAX


class AttemptStats:
    """The mapping and, in the supervisor, the owner of each entry. Memory is used only for entries that are written."""

    def __init__(self, number: int = 32768) -> None:
        self._number = number
        self._map = mmap.mmap(-1, HEADER_BYTES + number * STATS_BYTES)
        self._view = memoryview(self._map)
        self.header = self._view[:HEADER_BYTES].cast("Q")
        self._next = 0
        self._free: list[int] = []
        # Slot -> its entry and queue; queue -> entries without a writer.
        self._of_slot: dict[int, tuple[int, str]] = {}
        self._unused: dict[str, list[int]] = {}

    def take(self, slot: int, queue: str) -> None:
        """Assigns an entry of the queue to the worker in this slot. Called by the supervisor only."""
        unused = self._unused.get(queue)
        number = unused.pop() if unused else self._new(queue)
        self._of_slot[slot] = number, queue

    def give_back(self, slot: int) -> None:
        """The worker in this slot is dead; its figures stay. Called by the supervisor only."""
        number, queue = self._of_slot.pop(slot)
        self._unused.setdefault(queue, []).append(number)

    def forget(self, queue: str) -> None:
        """The queue is gone: frees its entries. Called by the supervisor only."""
        for number in self._unused.pop(queue, []):
            start = self._start(number)
            self._view[start + _NAME_AT] = 0
            self._view[start : start + STATS_BYTES] = bytes(STATS_BYTES)
            self._free.append(number)

    def of_slot(self, slot: int) -> WorkerStats:
        number, _ = self._of_slot[slot]
        start = self._start(number)
        return WorkerStats(self._view[start : start + STATS_BYTES].cast("Q"))

    def read(self) -> dict[str, QueueStats]:
        """By queue."""
        found: dict[str, QueueStats] = {}
        for number in range(self.header[_HIGHEST_STATS]):
            name = self._name(number)
            if name:
                stats = self._read_one(number)
                # If the entry was reassigned while it was read, its figures are dropped.
                if self._name(number) == name:
                    queue = name.decode("utf-8", "replace")
                    found[queue] = found[queue] + stats if queue in found else stats
        return found

    def _new(self, queue: str) -> int:
        if self._free:
            number = self._free.pop()
        elif self._next < self._number:
            number = self._next
            self._next += 1
        else:
            raise ForqError(f"all {self._number} entries of the attempt statistics are taken")
        name = queue.encode()[:_NAME_MAX]
        at = self._start(number) + _NAME_AT
        self._view[at + 1 : at + 1 + len(name)] = name
        self._view[at] = len(name)
        self.header[_HIGHEST_STATS] = self._next
        return number

    def _read_one(self, number: int) -> QueueStats:
        start = self._start(number)
        words = self._view[start : start + 8 * _WORDS].cast("Q")
        failed = words[FAILED]
        values = words.tolist()
        return QueueStats(
            run=values[RUN_AT:WAIT_AT],
            run_micros=values[RUN_SUM],
            wait=values[WAIT_AT:_WORDS],
            wait_micros=values[WAIT_SUM],
            failed=failed,
            last_ns=values[LAST],
        )

    def _name(self, number: int) -> bytes:
        at = self._start(number) + _NAME_AT
        length = min(self._view[at], _NAME_MAX)
        return bytes(self._view[at + 1 : at + 1 + length])

    def _start(self, number: int) -> int:
        return HEADER_BYTES + number * STATS_BYTES


def cumulated(buckets: list[int], bounds: Iterable[int]) -> list[int]:
    """The number of times below 2^bound µs for each of the ascending bounds."""
    totals: list[int] = []
    reached = running = 0
    for bound in bounds:
        running += sum(buckets[reached : bound + 1])
        reached = bound + 1
        totals.append(running)
    return totals


def wait_quantile(buckets: Sequence[int], share: float) -> int | None:
    """The time in µs below which this share of the times is, assumed to be spread evenly within its bucket; None if
    there are none. Prometheus computes it in the same way."""
    rank = share * sum(buckets)
    below = 0
    for bits, number in enumerate(buckets):
        if number and below + number >= rank:
            low = 1 << bits >> 1
            # The last bucket has no upper bound.
            return low if bits == BUCKETS - 1 else low + round(low * (rank - below) / number)
        below += number
    return None
