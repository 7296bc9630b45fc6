"""Shared memory with figures of the last 60 minutes of each queue, for the charts of the dashboard.

The supervisor maps it before the forks. The web process is the only writer: at each minute boundary it takes the
difference between the tallies (AttemptStats) and their totals at the last boundary. The memory outlives that process,
and the next one continues.

An entry belongs to a queue. It has its name, the totals at the last boundary with their time, and a ring: minute m of
the epoch is in place m % 60. A writer may die between any two writes, therefore
- a minute is valid only while the first word of its place is its number; that word is cleared before the others change,
- totals are valid only while their time is not 0, and they change after the minute that was computed from them,
- a name is readable only while its length is not 0; the rest of a new entry is cleared before.
So a reader sees a minute as a whole or not at all, and the next writer skips what it cannot compute.
"""

import mmap
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import gt, sub
from typing import Literal

from forq.procs.scoreboard import BUCKETS, QueueStats, wait_quantile

MINUTES = 60
MINUTE_SECONDS = 60.0
# Boundaries further than this from 60 s apart leave a gap: the difference does not belong to one minute.
TOLERANCE_SECONDS = 10.0
# A queue without tallies is forgotten after this time: none of its minutes would be shown.
FORGET_SECONDS = 3600.0

# The header has the last minute that was written, the time of that write by both clocks, and the number of entries.
_HEADER_BYTES = 4096
_NEWEST, _WALL, _STEADY, _ENTRIES = range(4)

# Words of an entry: the length of the name and the name, when the queue was last seen (steady clock), the time of the
# totals (wall clock), the totals, and the ring.
_LENGTH, _NAME, _NAME_WORDS = 0, 1, 8
_NAME_BYTES = 8 * _NAME_WORDS
_SEEN = _NAME + _NAME_WORDS
_TOTALS_AT = _SEEN + 1
_TOTALS = _TOTALS_AT + 1
_RUN_MICROS, _FAILED = 2 * BUCKETS, 2 * BUCKETS + 1
_TOTALS_WORDS = 2 * BUCKETS + 2
_RING = _TOTALS + _TOTALS_WORDS
# The minute, then ended, failed, run_micros, waits, p50 and p99.
_MINUTE_WORDS = 7
_ENTRY_WORDS = _RING + MINUTES * _MINUTE_WORDS
ENTRY_BYTES = 8 * _ENTRY_WORDS

_NO_TOTALS = [0] * _TOTALS_WORDS

# Time since the last boundary: none (the same boundary again), a minute, or anything else.
Elapsed = Literal["repeat", "minute", "gap"]


@dataclass(frozen=True, slots=True)
class Minute:
    """Attempts of a queue that ended in one minute. `waits`: claimed jobs with a known wait; its quantiles are None
    without any."""

    ended: int
    failed: int
    run_micros: int
    waits: int
    wait_p50_us: int | None
    wait_p99_us: int | None

    @property
    def done(self) -> int:
        return self.ended - self.failed


@dataclass(frozen=True, slots=True)
class LastHour:
    """60 minutes, the oldest first. None: nothing is known. `newest`: the last one, in minutes since the epoch."""

    newest: int
    minutes: tuple[Minute | None, ...]


def seconds_to_boundary(now_seconds: float) -> float:
    """When to write next."""
    return MINUTE_SECONDS - now_seconds % MINUTE_SECONDS


class MinuteRings:
    """The mapping. Memory is used only for entries that are written.

    1. `write` adds the minute that just ended, for each queue that has tallies.
    2. `read` and `read_all` return the last 60 minutes, up to the last one that was written.

    `steady` does not jump and is the same in all processes. A minute counts only if 60 s have passed by both clocks: a
    clock that was set, a suspended machine or a late writer leave a gap.
    """

    def __init__(self, number: int = 1000, steady: Callable[[], float] = time.monotonic) -> None:
        self._number = number
        self._steady = steady
        self._map = mmap.mmap(-1, _HEADER_BYTES + number * ENTRY_BYTES)
        self._words = memoryview(self._map).cast("Q")
        # The writer's: entries by name, and unused ones (None: this process has not written yet).
        self._places: dict[bytes, int] = {}
        self._free: list[int] | None = None
        # The readers': where the entry of a name was last. Apart, since readers may be other threads of the writer.
        self._seen_at: dict[bytes, int] = {}

    @property
    def newest(self) -> int:
        """The last minute that was written, since the epoch; 0: none."""
        return self._words[_NEWEST]

    def write(self, stats: Mapping[str, QueueStats], now_seconds: float) -> None:
        """Called at each minute boundary, by the web process only. A second call at the same boundary does nothing."""
        words = self._words
        # A timer may end shortly before the boundary.
        minute = max(0, int((now_seconds + TOLERANCE_SECONDS) // MINUTE_SECONDS) - 1)
        now = _Now(minute, _millis(now_seconds), _millis(self._steady()))
        if self._free is None:
            self._find_entries()
        if minute < words[_NEWEST]:
            self._clear_after(minute)
        new_since = now.elapsed(words[_WALL], words[_STEADY])
        names = {_key(queue): one for queue, one in stats.items()}
        self._forget_gone(names.keys(), now)
        for name, one in names.items():
            place = self._places.get(name)
            if place is not None:
                self._continue(place, one, now)
            elif (place := self._take(name, names.keys())) is not None:
                # A queue that was created after the last boundary began at zero.
                self._store(place, one, _NO_TOTALS if new_since == "minute" else None, now)
        if new_since != "repeat":
            words[_WALL] = 0
            words[_STEADY] = now.steady_ms
            words[_WALL] = now.wall_ms
            words[_NEWEST] = minute

    def read(self, name: str) -> LastHour:
        key = _key(name)
        place = self._seen_at.get(key)
        if place is None or self._name(place) != key:
            place = next((at for at in range(self._words[_ENTRIES]) if self._name(at) == key), None)
        newest = self.newest
        if place is None:
            return LastHour(newest, (None,) * MINUTES)
        self._seen_at[key] = place
        hour = self._read_entry(place, newest)
        # If the entry was reused while it was read, its minutes are dropped.
        return hour if self._name(place) == key else LastHour(newest, (None,) * MINUTES)

    def read_all(self) -> dict[str, LastHour]:
        """By queue."""
        newest = self.newest
        found = {}
        for place in range(self._words[_ENTRIES]):
            name = self._name(place)
            if name:
                hour = self._read_entry(place, newest)
                # If the entry was reused while it was read, its minutes are dropped.
                if self._name(place) == name:
                    found[name.decode("utf-8", "replace")] = hour
        return found

    def _continue(self, place: int, one: QueueStats, now: "_Now") -> None:
        """Writes the minute of a queue that has an entry."""
        words, at = self._words, self._start(place)
        elapsed = now.elapsed(words[at + _TOTALS_AT], words[at + _SEEN])
        if elapsed == "repeat":
            return
        self._store(place, one, words[at + _TOTALS : at + _RING].tolist() if elapsed == "minute" else None, now)

    def _store(self, place: int, one: QueueStats, before: list[int] | None, now: "_Now") -> None:
        """Writes the difference to the totals `before` (None: not known), then the new totals."""
        words, at = self._words, self._start(place)
        totals = [*one.run, *one.wait, one.run_micros, one.failed]
        if before is not None:
            if any(map(gt, before, totals)):
                # The queue was dropped and created again.
                before = _NO_TOTALS
            ended = sum(one.run) - sum(before[:BUCKETS])
            # A worker counts its failures last. One that was read in between belongs to the next minute.
            failed = min(one.failed - before[_FAILED], ended)
            totals[_FAILED] = before[_FAILED] + failed
            self._put_minute(
                at + _RING + now.minute % MINUTES * _MINUTE_WORDS,
                now.minute,
                (ended, failed, one.run_micros - before[_RUN_MICROS]),
                list(map(sub, one.wait, before[BUCKETS:_RUN_MICROS])),
            )
        words[at + _TOTALS_AT] = 0
        words[at + _TOTALS : at + _RING] = array("Q", totals)
        words[at + _SEEN] = now.steady_ms
        words[at + _TOTALS_AT] = now.wall_ms

    def _put_minute(self, at: int, minute: int, counts: tuple[int, int, int], waits: list[int]) -> None:
        words = self._words
        p50, p99 = (wait_quantile(waits, share) or 0 for share in (0.5, 0.99))
        words[at] = 0
        words[at + 1 : at + _MINUTE_WORDS] = array("Q", (*counts, sum(waits), p50, p99))
        words[at] = minute

    def _read_entry(self, place: int, newest: int) -> LastHour:
        at = self._start(place) + _RING
        ring = self._words[at : at + MINUTES * _MINUTE_WORDS].tolist()
        # Read again after the figures: a minute that was being replaced is dropped.
        stamps = self._words[at : at + MINUTES * _MINUTE_WORDS : _MINUTE_WORDS].tolist()
        minutes: list[Minute | None] = []
        for minute in range(newest - MINUTES + 1, newest + 1):
            number = minute % MINUTES
            stamp, *figures = ring[number * _MINUTE_WORDS : (number + 1) * _MINUTE_WORDS]
            minutes.append(_minute(figures) if 0 < minute == stamp == stamps[number] else None)
        return LastHour(newest, tuple(minutes))

    def _find_entries(self) -> None:
        """The first write of this process: finds the entries of the writer before it."""
        self._places, self._free = {}, []
        for place in range(self._words[_ENTRIES]):
            name = self._name(place)
            if name and name not in self._places:
                self._places[name] = place
            else:
                self._words[self._start(place) + _LENGTH] = 0
                self._free.append(place)

    def _take(self, name: bytes, present: Iterable[bytes]) -> int | None:
        """A cleared entry for a new queue; None if all are taken by other queues."""
        assert self._free is not None
        words = self._words
        if not self._free and words[_ENTRIES] == self._number:
            self._forget_longest_gone(set(present))
        if self._free:
            place = self._free.pop()
        elif words[_ENTRIES] < self._number:
            place = words[_ENTRIES]
        else:
            return None
        at = self._start(place)
        words[at + _LENGTH] = 0
        words[at : at + _ENTRY_WORDS] = array("Q", bytes(ENTRY_BYTES))
        words[at + _NAME : at + _SEEN] = array("Q", name.ljust(_NAME_BYTES, b"\0"))
        words[at + _SEEN] = _millis(self._steady())
        words[at + _LENGTH] = len(name)
        words[_ENTRIES] = max(words[_ENTRIES], place + 1)
        self._places[name] = place
        return place

    def _forget_gone(self, present: Iterable[bytes], now: "_Now") -> None:
        for name in self._places.keys() - present:
            seen_ms = self._words[self._start(self._places[name]) + _SEEN]
            if now.steady_ms - seen_ms >= 1000 * FORGET_SECONDS:
                self._forget(name)

    def _forget_longest_gone(self, present: set[bytes]) -> None:
        gone = self._places.keys() - present
        if gone:
            self._forget(min(gone, key=lambda name: self._words[self._start(self._places[name]) + _SEEN]))

    def _forget(self, name: bytes) -> None:
        assert self._free is not None
        place = self._places.pop(name)
        self._words[self._start(place) + _LENGTH] = 0
        self._free.append(place)

    def _clear_after(self, minute: int) -> None:
        """The clock was set back: minutes that are now in the future would be shown again when their time comes."""
        words = self._words
        for place in range(words[_ENTRIES]):
            first = self._start(place) + _RING
            for at in range(first, first + MINUTES * _MINUTE_WORDS, _MINUTE_WORDS):
                if words[at] > minute:
                    words[at] = 0

    def _name(self, place: int) -> bytes:
        at = self._start(place)
        length = min(self._words[at + _LENGTH], _NAME_BYTES)
        return self._words[at + _NAME : at + _SEEN].tobytes()[:length]

    def _start(self, place: int) -> int:
        return _HEADER_BYTES // 8 + place * _ENTRY_WORDS


@dataclass(frozen=True, slots=True)
class _Now:
    """The minute that ended, and the time by both clocks."""

    minute: int
    wall_ms: int
    steady_ms: int

    def elapsed(self, wall_ms: int, steady_ms: int) -> Elapsed:
        """Since a time by both clocks (wall_ms 0: not known)."""
        if not wall_ms:
            return "gap"
        passed = ((self.wall_ms - wall_ms) / 1000, (self.steady_ms - steady_ms) / 1000)
        if all(0 <= seconds < TOLERANCE_SECONDS for seconds in passed):
            return "repeat"
        fits = all(abs(seconds - MINUTE_SECONDS) <= TOLERANCE_SECONDS for seconds in passed)
        return "minute" if fits else "gap"


def _key(name: str) -> bytes:
    return name.encode()[:_NAME_BYTES]


def _minute(figures: list[int]) -> Minute:
    ended, failed, run_micros, waits, p50, p99 = figures
    return Minute(ended, failed, run_micros, waits, p50 if waits else None, p99 if waits else None)


def _millis(seconds: float) -> int:
    return max(0, round(seconds * 1000))
