"""A model of a queue of the release modes: its items, their awaiters, and the items handed over.

It has no hints, and so no order within a priority: release_checks.py checks that against the lists.
"""

from dataclasses import dataclass, field

from tests.support.models.queue import Dispatch, ModelJob, ModelQueue

MINUTE_MS = 60_000
RELEASE_RETRIES = 1
RETRY_LANE_RETRIES = 1
RETRY_INTERVAL_MS = 20 * MINUTE_MS
LEASE_MS = 30 * MINUTE_MS
ITEM_TIMEOUT_MS = 90 * MINUTE_MS


@dataclass
class Item(ModelJob):
    lane: int = 0
    lapses_ms: int = 0  # while it is handed over
    expires_ms: int = 0
    too_old: bool = False  # while handed over

    @property
    def place(self) -> str:
        return "r" if self.lane else str(self.priority)

    @property
    def awaiter(self) -> str:
        return (self.owner or "").partition(":")[0]


@dataclass
class Registered:
    """An awaiter of an item ('': of any)."""

    wanted: str
    via: str
    arrival: int
    silent: bool = False


@dataclass(frozen=True)
class Handed:
    """An item that was handed to an awaiter, who may have lost it since."""

    awaiter: str
    job_id: str
    fence: int


@dataclass
class ReleaseModel(ModelQueue):
    mode: str = "auto_release"
    timeout_ms: int = 0
    items_by_id: dict[str, Item] = field(default_factory=dict)
    registered: dict[str, Registered] = field(default_factory=dict)
    acked: dict[str, int] = field(default_factory=dict)  # awaiter -> fence, for a minute
    handed: list[Handed] = field(default_factory=list)
    archive: list[tuple[str, int, int, int]] = field(default_factory=list)  # id, fence, data, priority
    # Ids whose notified awaiter did not ask again.
    unheard: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # The same dict under two names; here its values are Items.
        self.jobs = self.items_by_id  # type: ignore[assignment]

    def forget_all(self) -> None:
        """The queue was deleted and created again."""
        self.items_by_id.clear()
        for forgotten in (self.registered, self.tokens, self.unheard, self.archive):
            forgotten.clear()
        self.processed = self.dead = 0
        self.paused = False

    def _dispatch(self, job_id: str, dispatch: Dispatch, if_exists: str) -> None:
        item = self.items_by_id.get(job_id)
        if item is None:
            self._add(job_id, Item(dispatch.data, dispatch.priority, dispatch.run_at))
        elif if_exists == "update" and item.owner:
            item.blocked.append(dispatch)
        elif if_exists == "update":
            before = item.run_at
            self._apply(dispatch, item)
            if item.run_at > self.now_ms and item.run_at != before:
                item.expires_ms = self._expiry(item.run_at)
            elif item.run_at != before:
                item.expires_ms = min(item.expires_ms, self._expiry(0))
            self._ready(item)

    def _apply(self, dispatch: Dispatch, item: Item) -> None:
        dispatch.on(item)
        if dispatch.update_data if dispatch.reset is None else dispatch.reset:
            item.lane = 0

    def _expiry(self, from_ms: int) -> int:
        return max(self.now_ms, from_ms) + self.timeout_ms

    def _add(self, job_id: str, item: Item) -> None:
        item.expires_ms = self._expiry(item.run_at)
        self._ready(item)
        self.items_by_id[job_id] = item

    def _end(self, job_id: str, how: str, result: str | None = None) -> None:
        ended = self.items_by_id.pop(job_id)
        first, *others = ended.blocked or (None,)
        if first is None:
            return
        item = Item(first.data, first.priority, first.run_at, enqueued_us=ended.blocked_us)
        for dispatch in others:
            if dispatch:
                self._apply(dispatch, item)
        self._add(job_id, item)

    def _come_back(self, job_id: str, run_at: int) -> None:
        job = self.items_by_id[job_id]
        job.owner, job.run_at, job.lapses_ms = None, run_at, 0
        for dispatch in job.blocked:
            self._apply(dispatch, job)
        job.blocked, job.blocked_us = [], 0
        if job.run_at > self.now_ms:
            job.expires_ms, job.too_old = self._expiry(job.run_at), False
        self._ready(job)

    def pass_time(self, ms: int) -> None:
        super().pass_time(ms)
        for item in self.items_by_id.values():
            item.expires_ms -= ms
            if item.owner:
                item.lapses_ms -= ms
        self.acked.clear()

    def look_at_times(self, fence_of: dict[str, int]) -> None:
        """Applies lapsed leases, expired items and due items. `fence_of`: of items that died."""
        for job_id in [job_id for job_id, item in self.items_by_id.items() if item.owner]:
            if self.items_by_id[job_id].lapses_ms <= self.now_ms:
                self.hand_back([job_id])
        for job_id, item in list(self.items_by_id.items()):
            if not self.timeout_ms or item.expires_ms > self.now_ms:
                continue
            if item.owner:
                item.too_old, item.expires_ms = True, item.lapses_ms
            else:
                self.bury(job_id, fence_of[job_id])
        self.promote()

    def bury(self, job_id: str, fence: int) -> None:
        item = self.items_by_id.pop(job_id)
        self.dead += 1
        self.archive.append((job_id, fence, item.data, item.priority))

    def put_off(self, job_id: str, fence: int) -> None:
        """Reschedules an item that had no awaiter."""
        item = self.items_by_id[job_id]
        if item.lane == 0 and item.retries < RELEASE_RETRIES:
            item.retries += 1
            item.run_at = self.now_ms + RETRY_INTERVAL_MS
            self._ready(item)
        elif item.lane < RETRY_LANE_RETRIES:
            item.retries += 1
            item.lane += 1
        else:
            self.bury(job_id, fence)

    def hand_over(self, job_id: str, awaiter: str, fence: int, lease_ms: int = LEASE_MS) -> None:
        assert fence > self.last_fence, "fences grow"
        self.last_fence = fence
        item = self.items_by_id[job_id]
        assert item.waits, f"{job_id} is handed over twice, or before its time"
        assert self.held_by(awaiter) is None, f"{awaiter} holds two items"
        item.owner, item.lapses_ms = f"{awaiter}:{fence}", self.now_ms + lease_ms
        self.registered.pop(awaiter, None)
        self.handed.append(Handed(awaiter, job_id, fence))

    def held_by(self, awaiter: str) -> str | None:
        held = [job_id for job_id, item in self.items_by_id.items() if item.awaiter == awaiter]
        assert len(held) < 2, f"{awaiter} holds {held}"
        return held[0] if held else None

    def first_awaiter(self, job_id: str) -> str | None:
        """The awaiter of this item, else of any item, first come first served; silent awaiters do not count."""
        for wanted in (job_id, ""):
            living = {n: r.arrival for n, r in self.registered.items() if r.wanted == wanted and not r.silent}
            if living:
                return min(living, key=lambda name: living[name])
        return None

    def ack(self, hand: Handed) -> bool:
        """Whether the ack is accepted."""
        if self.acked.get(hand.awaiter) == hand.fence:
            return True
        item = self.items_by_id.get(hand.job_id)
        if item is None or item.owner != f"{hand.awaiter}:{hand.fence}":
            return False
        self.processed += 1
        self._end(hand.job_id, "released")
        self.acked[hand.awaiter] = hand.fence
        return True

    def leave(self, awaiter: str) -> bool:
        """Whether it held an item."""
        self.registered.pop(awaiter, None)
        held = self.held_by(awaiter)
        if held is None:
            return False
        item = self.items_by_id[held]
        self.hand_back([held])
        if item.too_old:
            item.expires_ms = self.now_ms
        return True

    def revive(self, job_id: str) -> None:
        newest = max((dead for dead in self.archive if dead[0] == job_id), key=lambda dead: dead[1])
        self.archive.remove(newest)
        self._add(job_id, Item(newest[2], newest[3]))
