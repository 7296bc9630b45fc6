"""The scoreboard: one shared memory mapping in which every worker has a slot that it writes.

Children store what they are doing in tens of nanoseconds; the parent and pulse read it without asking anyone, also
while Redis is down. It is mapped before the forks: children inherit the mapping and do not need its descriptor.

A slot is 512 bytes: 16 words of 8 bytes, each written in one aligned store (never torn), then four texts with a length
byte in front (which a reader may see half written: they are for people), then two words more.
"""

import heapq
import mmap
import os
from dataclasses import dataclass
from enum import IntEnum

from forq.errors import ForqError

HEADER_BYTES = 4096
SLOT_BYTES = 512

WORD, HELD, DONE, BEAT, STARTED, STATE, PID, EPOCH, ROLE, TIMEOUT, LENIENCE, GUARDED, THREAD = range(13)
PROGRESS, PROGRESS_OF, NUMBER = 13, 14, 15
PROGRESS_PARTS = 1_000_000

JOB_AT, JOB_MAX = 128, 128
QUEUE_AT, QUEUE_MAX = 264, 64
WORKER_AT, WORKER_MAX = 330, 48
PROGRESS_AT, PROGRESS_MAX = 384, 111
TAKEN, MINDER = 62, 63

_WATCHING, _HIGHEST = 0, 1

TICK_BITS, TURN_BITS, INDEX_BITS = 28, 20, 15
TICK_MASK, TURN_MASK, INDEX_MASK = (1 << TICK_BITS) - 1, (1 << TURN_BITS) - 1, (1 << INDEX_BITS) - 1
TICK_SHIFT, TURN_SHIFT, INDEX_SHIFT = 36, 16, 1
TICK_NS_SHIFT = 20
TICK_MS = (1 << TICK_NS_SHIFT) / 1e6
# A reader takes its `now` before it looks, so a job that starts in between is younger than now: age 0, not 78 hours.
_TICKS_AHEAD = 1 << 16

LENGTH_BYTE = tuple(bytes([n]) for n in range(JOB_MAX + 1))


class State(IntEnum):
    EMPTY = 0
    STARTING = 1
    IDLE = 2
    BUSY = 3
    PARKED = 4
    STOPPING = 5
    # A job has failed and is about to be settled; its position stays, and its deadline is over.
    SETTLING = 6
    # Something waits, and may not begin now (rate, max_active).
    LIMITED = 7


class Role(IntEnum):
    MAIN = 0
    RETRY = 1
    # For a while only: runs suspects, or fail jobs that the retry process is too busy for.
    SUSPECT = 2
    FAIL = 3

    @property
    def runs_fail_jobs(self) -> bool:
        return self in (Role.RETRY, Role.FAIL)


@dataclass(frozen=True, slots=True)
class Word:
    started_tick: int
    turn: int
    index: int
    running: bool


def pack_word(started_ns: int, turn: int, index: int, running: bool) -> int:
    """What a worker runs, in the one word that pulse may act on; turn and index wrap at 20 and 15 bits."""
    return (
        (started_ns >> TICK_NS_SHIFT & TICK_MASK) << TICK_SHIFT
        | (turn & TURN_MASK) << TURN_SHIFT
        | (index & INDEX_MASK) << INDEX_SHIFT
        | running
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker is: the whole number of its last turn, how many jobs it has finished since, whether one runs."""

    turn: int
    index: int
    running: bool


def unpack_word(word: int) -> Word:
    return Word(
        word >> TICK_SHIFT & TICK_MASK,
        word >> TURN_SHIFT & TURN_MASK,
        word >> INDEX_SHIFT & INDEX_MASK,
        bool(word & 1),
    )


def age_ms(word: int, now_ns: int) -> float:
    """Milliseconds since the start packed in `word`; right for ages up to 78 hours (28 bits of 1.05 ms)."""
    ticks = ((now_ns >> TICK_NS_SHIFT) - (word >> TICK_SHIFT)) & TICK_MASK
    return 0.0 if ticks > TICK_MASK - _TICKS_AHEAD else ticks * TICK_MS


@dataclass(frozen=True)
class SlotView:
    """What one slot said at one moment."""

    number: int
    state: State
    role: Role
    pid: int
    epoch: int
    queue: str
    worker: str
    job: str
    held: int
    done: int
    beat_ns: int
    started_ns: int
    word: Word


class _Cell:
    """An attribute of a slot that is one word of it."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, slot: "Slot", owner: type["Slot"]) -> int:
        return slot.words[self._index]

    def __set__(self, slot: "Slot", value: int) -> None:
        slot.words[self._index] = value


class _Text:
    """An attribute of a slot that is a short text with a length byte in front."""

    def __init__(self, at: int, limit: int) -> None:
        self._at, self._limit = at, limit

    def __get__(self, slot: "Slot", owner: type["Slot"]) -> str:
        length = min(slot.bytes[self._at], self._limit)
        # One that was cut may end in the middle of a character.
        return str(slot.bytes[self._at + 1 : self._at + 1 + length], "utf-8", "ignore")

    def __set__(self, slot: "Slot", value: str) -> None:
        text = value.encode()[: self._limit]
        slot.bytes[self._at : self._at + 1 + len(text)] = LENGTH_BYTE[len(text)] + text


class Slot:
    """One worker's slot. Its loop writes `words[WORD]`, `words[HELD]` and so on directly; others use the attributes."""

    __slots__ = ("bytes", "number", "words")

    held = _Cell(HELD)
    done = _Cell(DONE)
    beat_ns = _Cell(BEAT)
    started_ns = _Cell(STARTED)
    state = _Cell(STATE)
    pid = _Cell(PID)
    epoch = _Cell(EPOCH)
    role = _Cell(ROLE)
    word = _Cell(WORD)
    # The whole number of the last turn whose answer the worker has read. The loop writes it before WORD.
    turn = _Cell(NUMBER)
    # What one job may take (ms; 0: as long as it likes), and for how long after that its worker deals with it itself.
    timeout_ms = _Cell(TIMEOUT)
    lenience_ms = _Cell(LENIENCE)
    # Not zero while the parent has a timer for this worker; written by the parent.
    guarded = _Cell(GUARDED)
    thread = _Cell(THREAD)
    # The number of a turn whose jobs pulse is giving back, since the worker does not begin them; written by pulse.
    taken = _Cell(TAKEN)
    # The thread of the minder, as the kernel calls it.
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
        job_id = job_id[:JOB_MAX]
        length = len(job_id)
        self.bytes[JOB_AT : JOB_AT + 1 + length] = LENGTH_BYTE[length] + job_id

    def show_progress(self, position: int, fraction: float, text: str) -> bool:
        """What the job at this position says; False if the worker is somewhere else by now."""
        words = self.words
        if words[WORD] != position:
            return False
        words[PROGRESS] = int(fraction * PROGRESS_PARTS + 0.5)
        self.progress_text = text
        words[PROGRESS_OF] = position
        return True

    def progress(self) -> tuple[float, str] | None:
        """How far the running job is, if it has said so; of a long text only the beginning."""
        if not self.word & 1 or self.words[PROGRESS_OF] != self.word:
            return None
        return self.words[PROGRESS] / PROGRESS_PARTS, self.progress_text

    def running_since_ns(self) -> tuple[int, int] | None:
        """The position word of the job that is running and when it began; None if none is, or one is just beginning."""
        word = self.word
        started = self.started_ns
        if not word & 1 or started >> TICK_NS_SHIFT & TICK_MASK != word >> TICK_SHIFT & TICK_MASK:
            return None
        return word, started

    def place(self, word: int | None = None) -> Place:
        """Where the worker is, or was when `word` was read.

        WORD has only the low bits of the turn's number. NUMBER is written before it, so read after it NUMBER is that
        of the same turn or of one shortly after: also if the worker died between the two.
        """
        at = unpack_word(self.word if word is None else word)
        number = self.turn
        return Place(number - ((number - at.turn) & TURN_MASK), at.index, at.running)

    def describe(self) -> SlotView:
        return SlotView(
            number=self.number,
            state=State(self.state),
            role=Role(self.role),
            pid=self.pid,
            epoch=self.epoch,
            queue=self.queue,
            worker=self.worker,
            job=self.job.decode("utf-8", "replace"),
            held=self.held,
            done=self.done,
            beat_ns=self.beat_ns,
            started_ns=self.started_ns,
            word=unpack_word(self.word),
        )


class Scoreboard:
    """The mapping and, in the parent, which of its slots are taken."""

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
        """A new, empty scoreboard; memory is used only for slots that are written."""
        fd = os.memfd_create("forq-scoreboard")
        os.ftruncate(fd, HEADER_BYTES + slots * SLOT_BYTES)
        return cls(fd, slots)

    @property
    def watching(self) -> int:
        """Not zero while pulse looks at the batches: a worker that begins one rings it only if not."""
        return self._header[_WATCHING]

    @watching.setter
    def watching(self, value: int) -> None:
        self._header[_WATCHING] = value

    @property
    def highest(self) -> int:
        """One more than the highest slot number ever taken: how far a reader must scan."""
        return self._header[_HIGHEST]

    def take(self) -> int:
        """The lowest free slot, zeroed. Only the parent calls this."""
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
        """Free a slot whose worker is gone; it reads as EMPTY from now on. Only the parent calls this."""
        if number not in self._taken:
            raise ForqError(f"slot {number} of the scoreboard is not taken")
        self._taken.remove(number)
        self._clear(number)
        heapq.heappush(self._free, number)

    def in_use(self) -> list[int]:
        return sorted(self._taken)

    def slot(self, number: int) -> Slot:
        if not 0 <= number < self.slots:
            raise ForqError(f"the scoreboard has no slot {number}: it has {self.slots}")
        start = HEADER_BYTES + number * SLOT_BYTES
        return Slot(number, self._view[start : start + SLOT_BYTES])

    def _clear(self, number: int) -> None:
        start = HEADER_BYTES + number * SLOT_BYTES
        self._view[start : start + SLOT_BYTES] = bytes(SLOT_BYTES)
