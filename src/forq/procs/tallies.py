"""Tallies: wait and run times, counted by workers in shared memory and read by the metrics process.

A tally belongs to a queue and has one writer at a time. It outlives its worker: the next worker of the queue goes on in
it, so that what is counted never falls while the queue is there. The parent hands tallies out; a child knows its own
from the copy of the parent's table that it was forked with.

A tally is 1024 bytes: words of 8 bytes (two sums in µs, attempts that failed, when the last batch was counted, two
histograms), then the queue's name. Bucket b of a histogram holds times of b significant bits: below 2^b µs.
"""

import mmap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add

from forq.errors import ForqError

HEADER_BYTES = 4096
TALLY_BYTES = 1024
BUCKETS = 40

RUN_SUM, WAIT_SUM, FAILED, LAST = range(4)
RUN_AT = 8
WAIT_AT = RUN_AT + BUCKETS
_WORDS = WAIT_AT + BUCKETS
_NAME_AT, _NAME_MAX = 896, 64

_HIGHEST, LOOKS, REDIS_ERRORS, SUPERVISOR_ERRORS = range(4)

# Of a record: FLAG PRIORITY ' ' ENQUEUED_MS, which has 13 digits until the year 2286.
_HEAD = 16
_WORD_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Tallied:
    """What the workers of one queue have counted. `last_ns`: when the last of them did (0: none has)."""

    run: list[int]
    run_micros: int
    wait: list[int]
    wait_micros: int
    failed: int
    last_ns: int

    def __add__(self, other: "Tallied") -> "Tallied":
        return Tallied(
            list(map(add, self.run, other.run)),
            self.run_micros + other.run_micros,
            list(map(add, self.wait, other.wait)),
            self.wait_micros + other.wait_micros,
            self.failed + other.failed,
            max(self.last_ns, other.last_ns),
        )


class Tally:
    """One worker's. Only that worker writes it."""

    __slots__ = ("words",)

    def __init__(self, words: "memoryview[int]") -> None:
        self.words = words

    def count(
        self, claimed_us: int, batch: Sequence[tuple[bytes, bytes]], micros: list[int], failed: int, now_ns: int
    ) -> None:
        """Attempts that came back: the jobs of a batch up to the last that ran, and what each took."""
        words = self.words
        times = Counter(map(int.bit_length, micros)) if len(micros) > 1 else {micros[0].bit_length(): 1}
        for bits, number in times.items():
            words[RUN_AT + min(bits, BUCKETS - 1)] += number
        words[RUN_SUM] += sum(micros)
        self._count_waits(claimed_us, [record[:_HEAD] for _, record in batch[: len(micros)]])
        # After the run times: a reader that reads this first never sees more failures than attempts.
        words[FAILED] += failed
        words[LAST] = now_ns

    def _count_waits(self, claimed_us: int, heads: list[bytes]) -> None:
        """By the beginnings of the records: neighbours in a batch often share their millisecond."""
        words = self.words
        for head, alike in groupby(heads):
            if head[:1] != b"p":  # it was tried before, or had a time ahead: not all that time it waited
                continue
            try:
                # Not below 0: the server's clock may have been set back.
                wait = max(0, claimed_us - 1000 * int(head[3:]))
            except ValueError:  # a broken record; its attempt has said so
                continue
            number = len(list(alike))
            words[WAIT_AT + min(wait.bit_length(), BUCKETS - 1)] += number
            # Records that claim to be of 1970 must not end the worker: a counter may begin anew, an overflow raises.
            words[WAIT_SUM] = (words[WAIT_SUM] + wait * number) & _WORD_MAX


class Tallies:
    """The mapping and, in the parent, whose its tallies are. Memory is used only for those that are written."""

    def __init__(self, number: int = 32768) -> None:
        self._number = number
        self._map = mmap.mmap(-1, HEADER_BYTES + number * TALLY_BYTES)
        self._view = memoryview(self._map)
        self.header = self._view[:HEADER_BYTES].cast("Q")
        self._next = 0
        self._free: list[int] = []
        # slot -> its tally and queue; queue -> tallies that nobody writes now.
        self._of_slot: dict[int, tuple[int, str]] = {}
        self._resting: dict[str, list[int]] = {}

    def take(self, slot: int, queue: str) -> None:
        """The worker in this slot counts for this queue. Only the parent calls this."""
        resting = self._resting.get(queue)
        number = resting.pop() if resting else self._new(queue)
        self._of_slot[slot] = number, queue

    def give_back(self, slot: int) -> None:
        """The worker in this slot is dead; what it has counted stays. Only the parent calls this."""
        number, queue = self._of_slot.pop(slot)
        self._resting.setdefault(queue, []).append(number)

    def forget(self, queue: str) -> None:
        """The queue is gone: what was counted for it too. Only the parent calls this."""
        for number in self._resting.pop(queue, []):
            start = self._start(number)
            self._view[start + _NAME_AT] = 0
            self._view[start : start + TALLY_BYTES] = bytes(TALLY_BYTES)
            self._free.append(number)

    def of_slot(self, slot: int) -> Tally:
        number, _ = self._of_slot[slot]
        start = self._start(number)
        return Tally(self._view[start : start + TALLY_BYTES].cast("Q"))

    def read(self) -> dict[str, Tallied]:
        """What all workers have counted, by queue."""
        found: dict[str, Tallied] = {}
        for number in range(self.header[_HIGHEST]):
            name = self._name(number)
            if name:
                tallied = self._tallied(number)
                # If it is another's by now, nobody can say whose figures these were.
                if self._name(number) == name:
                    queue = name.decode("utf-8", "replace")
                    found[queue] = found[queue] + tallied if queue in found else tallied
        return found

    def _new(self, queue: str) -> int:
        if self._free:
            number = self._free.pop()
        elif self._next < self._number:
            number = self._next
            self._next += 1
        else:
            raise ForqError(f"all {self._number} tallies are taken")
        name = queue.encode()[:_NAME_MAX]
        at = self._start(number) + _NAME_AT
        self._view[at + 1 : at + 1 + len(name)] = name
        self._view[at] = len(name)
        self.header[_HIGHEST] = self._next
        return number

    def _tallied(self, number: int) -> Tallied:
        start = self._start(number)
        words = self._view[start : start + 8 * _WORDS].cast("Q")
        failed = words[FAILED]
        values = words.tolist()
        return Tallied(
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
        return HEADER_BYTES + number * TALLY_BYTES


def cumulated(buckets: list[int], bounds: Iterable[int]) -> list[int]:
    """How many of the counted times are below 2^bound µs, for each of the bounds, which ascend."""
    totals: list[int] = []
    reached = running = 0
    for bound in bounds:
        running += sum(buckets[reached : bound + 1])
        reached = bound + 1
        totals.append(running)
    return totals
