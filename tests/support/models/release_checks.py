"""Checks a real queue of the release modes against its model after each step, beyond what holds for all modes."""

from collections import Counter
from dataclasses import dataclass

from tests.support.drive.one_queue import State
from tests.support.drive.release_queue import ReleaseQueue
from tests.support.models.queue_checks import MINUTE_MS, Checks
from tests.support.models.release import LEASE_MS, ReleaseModel


@dataclass(frozen=True)
class Awaiters:
    """All awaiter data in Redis, read in one transaction."""

    entries: dict[str, tuple[int, int, str, str]]  # name -> expires (ms), arrival, via, id
    in_line: list[str]  # ID ARRIVAL AWAITER
    lists: dict[str, str]  # name -> the first line of the content of its list
    ends: dict[str, int]  # key -> ms
    leases: dict[str, float]
    expiries: dict[str, float]
    lane: list[str]

    @property
    def lined_up(self) -> set[str]:
        return {member.rpartition(" ")[2] for member in self.in_line}


class ReleaseChecks(Checks):
    def __init__(self, queue: ReleaseQueue, model: ReleaseModel, names: tuple[str, ...]) -> None:
        super().__init__(queue, model)
        self._gate = queue
        self._release = model
        self._names = names

    def all(self) -> None:
        seen = self._seen = self.awaiters()
        super().all()
        self._check_awaiters(seen)
        self._check_lists(seen)
        self._check_timers(seen)
        if self._release.mode == "on_request" and not self._release.paused:
            self._check_notifications(seen)

    def awaiters(self) -> Awaiters:
        key = self._gate.key
        keys = [key("awaiters"), key("awaiting"), *(key(f"awaiter:{name}") for name in self._names)]
        with self._gate.redis.pipeline(transaction=False) as look:
            look.hgetall(key("awaiters"))
            look.zrange(key("awaiting"), 0, -1)
            look.zrange(key("leases"), 0, -1, withscores=True)
            look.zrange(key("expiries"), 0, -1, withscores=True)
            look.lrange(key("retry:swept"), 0, -1)
            look.lrange(key("retry"), 0, -1)
            for name in self._names:
                look.lrange(key(f"awaiter:{name}"), 0, -1)
            for each in keys:
                look.pttl(each)
            entries, in_line, leases, expiries, swept_lane, lane, *rest = look.execute()
        lists = dict(zip(self._names, rest, strict=False))
        assert all(len(entries) <= 1 for entries in lists.values())
        return Awaiters(
            {name.decode(): _entry(entry.decode()) for name, entry in entries.items()},
            [member.decode() for member in in_line],
            {name: found[0].decode().partition("\n")[0] for name, found in lists.items() if found},
            dict(zip(keys, rest[len(self._names) :], strict=True)),
            {job_id.decode(): at for job_id, at in leases},
            {job_id.decode(): at for job_id, at in expiries},
            [job_id.decode() for job_id in swept_lane + lane],
        )

    def line(self, state: State, lane: str = "main") -> list[str]:
        """The items in line, in the order in which they are tried."""
        return self._line(state, self.awaiters().lane if lane == "retry" else None)

    def _line(self, state: State, in_lane: list[str] | None) -> list[str]:
        """Each id at the position of its first valid hint."""
        items = self._release.items_by_id
        lists = {str(priority): state.waiting.get(priority, []) for priority in range(10)}
        if in_lane is not None:
            lists = {"r": in_lane}
        found = []
        for place, hints in lists.items():
            skipped: Counter[str] = Counter()
            for job_id in hints:
                skipped[job_id] += 1
                counts = skipped[job_id] == state.stale.get(f"{place}:{job_id}", 0) + 1
                if counts and job_id in items and items[job_id].waits and items[job_id].place == place:
                    found.append(job_id)
        return found

    def claimable(self, state: State, lane: str = "main") -> list[str]:
        return self.line(state, lane)

    def _check_jobs(self, state: State) -> None:
        items = self._release.items_by_id
        seen = {}
        for job_id, packed in state.records.items():
            head, _, body = packed.decode().partition("\n")
            numbers = [*(int(part) for part in head[1:].split()), 0, 0, 0, 0]
            seen[job_id] = (body, numbers[0], numbers[2], numbers[5] if len(numbers) > 6 else 0)
        assert {job_id: found[1:] for job_id, found in seen.items()} == {
            job_id: (item.priority, item.retries, item.lane) for job_id, item in items.items()
        }
        assert {job_id: str(item.data) in seen[job_id][0] for job_id, item in items.items()} == dict.fromkeys(
            items, True
        )
        assert state.owners == {
            job_id: item.owner + (":removed" if item.removed else "") for job_id, item in items.items() if item.owner
        }
        assert len(set(state.active.values())) == len(state.active), "an awaiter holds two items"

    def _check_hints(self, state: State) -> None:
        hints = Counter(f"{priority}:{job_id}" for priority, ids in state.waiting.items() for job_id in ids)
        hints += Counter(f"5:{job_id}" for held in state.processing.values() for job_id in held if job_id)
        hints += Counter(f"r:{job_id}" for job_id in self._seen.lane)
        items = self._release.items_by_id
        live = Counter(f"{item.place}:{job_id}" for job_id, item in items.items() if item.waits)
        assert hints == live + Counter(state.stale)
        others = sum(len(ids) for priority, ids in state.waiting.items() if priority != 5) + len(state.swept.get(5, []))
        assert state.summary.other_hints == others
        assert state.summary.lane == sum(item.waits and item.lane > 0 for item in items.values())

    def _check_waking(self, state: State) -> None:
        assert state.tokens <= 1
        if self._release.mode == "on_request":
            assert state.tokens == state.retry_tokens == 0, "no worker blocks on the lists"
            return
        if self._release.paused or any(state.processing.values()):
            return
        if self._line(state, None):
            assert state.tokens or len(state.waiting.get(5, [])) > len(state.swept.get(5, []))
        elif self._line(state, self._seen.lane):
            assert state.retry_tokens

    def _check_counts(self) -> None:
        items = self._release.items_by_id.values()
        counts = self._gate.inspector.counts()
        assert counts.waiting == sum(item.waits and not item.lane for item in items)
        assert counts.retry == sum(item.waits and item.lane > 0 for item in items)
        assert counts.scheduled == sum(item.scheduled for item in items)
        assert counts.blocked == sum(bool(item.blocked) for item in items)
        assert counts.active == sum(item.owner is not None for item in items)
        assert (counts.done, counts.failed, counts.dropped) == (
            self._release.processed,
            self._release.dead,
            0,
        )
        assert counts.dead == len(self._release.archive)
        assert counts.paused == self._release.paused

    def _check_awaiters(self, seen: Awaiters) -> None:
        registered = self._release.registered
        for name in [name for name, known in registered.items() if known.silent and name not in seen.entries]:
            del registered[name]  # at random, or at its turn
        assert {name: entry[1:] for name, entry in seen.entries.items()} == {
            name: (known.arrival, known.via, known.wanted) for name, known in registered.items()
        }
        members = {f"{known.wanted} {known.arrival} {name}" for name, known in registered.items()}
        assert set(seen.in_line) <= members, "a forgotten awaiter is in line"
        if self._release.mode == "auto_release":
            assert set(seen.in_line) == members
        for key, end_ms in seen.ends.items():
            assert end_ms == -2 or 0 <= end_ms <= LEASE_MS, f"{key} has no end"

    def _check_lists(self, seen: Awaiters) -> None:
        for name in self._names:
            found = seen.lists.get(name)
            held = self._release.held_by(name)
            if name in self._release.acked:
                assert found == f"acked {self._release.acked[name]}"
            elif held is not None and found is not None:
                fence = (self._release.items_by_id[held].owner or "").partition(":")[2]
                assert found.startswith(f"{fence} {held} ")
            elif held is not None:
                assert self._release.items_by_id[held].lapses_ms <= self._release.now_ms, f"{name} cannot find its item"
            elif name in self._release.registered and self._release.mode == "on_request":
                known = self._release.registered[name]
                rung = known.via == "-" and name not in seen.lined_up
                # A notification to a silent awaiter ends at once.
                assert (found == "") == rung or known.silent, "a notified awaiter is not in line"

    def _check_timers(self, seen: Awaiters) -> None:
        items = self._release.items_by_id
        assert set(seen.leases) == {job_id for job_id, item in items.items() if item.owner}
        for job_id, at in seen.leases.items():
            assert abs(at - items[job_id].lapses_ms) < MINUTE_MS, f"the lease of {job_id} lapses at another time"
        assert set(seen.expiries) == (set(items) if self._release.timeout_ms else set())
        for job_id, at in seen.expiries.items():
            assert abs(at - items[job_id].expires_ms) < MINUTE_MS, f"{job_id} is too old at another time"

    def _check_notifications(self, seen: Awaiters) -> None:
        """While an item is available, an awaiter that can have it was notified, or there is none."""
        ready = {job_id for job_id, item in self._release.items_by_id.items() if item.waits}
        self._release.unheard &= ready
        rung = {name: known.wanted for name, known in self._release.registered.items() if name not in seen.lined_up}
        for name in seen.lined_up:
            known = self._release.registered[name]
            if known.silent:
                continue
            if known.wanted:
                heard = known.wanted in rung.values() or known.wanted in self._release.unheard
                assert known.wanted not in ready or heard, f"{name} sleeps while {known.wanted} is ready"
            else:
                assert not ready or "" in rung.values() or ready & set(rung.values()), f"{name} sleeps"


def _entry(text: str) -> tuple[int, int, str, str]:
    expires, arrival, via, wanted = text.split(" ", 3)
    return int(expires), int(arrival), via, wanted
