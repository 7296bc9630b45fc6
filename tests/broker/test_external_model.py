"""Mode external against a small model, with random sequences of calls; after each call the journal must replay."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from forq.errors import LeaseLapsed
from tests.support.drive.external_queue import ExternalQueue
from tests.support.drive.limits import pass_hours, stored_limits
from tests.support.models.journal_replay import Replay
from tests.support.models.limits import BURST, ModelLimits

# Small, so that a few steps exceed them.
MAX_STALLS, MAX_RETRIES, LANE_RETRIES = 1, 1, 1
IDS, WORKERS, BRIDGES = "abcd", ("w1", "w2", "w3"), ("b1", "b2")
SEEDS, STEPS = 8, 500


@dataclass
class Known:
    """A job in the model. `place`: its priority, or 10 in the retry lane."""

    priority: int
    retries: int = 0
    stalls: int = 0
    lane: int = 0
    owner: str | None = None
    accepted: bool = False

    @property
    def place(self) -> int:
        return 10 if self.lane else self.priority


@dataclass
class Model:
    jobs: dict[str, Known] = field(default_factory=dict)
    line: list[str] = field(default_factory=list)  # waiting ids, in order within each place
    dead: int = 0
    done: int = 0
    bridges: dict[str, str] = field(default_factory=dict)  # worker -> bridge, for idle and assigned workers
    ended: dict[str, tuple[str, str]] = field(default_factory=dict)  # worker -> outcome, id
    limits: ModelLimits = field(default_factory=ModelLimits)

    def held_by(self, worker: str) -> str | None:
        return next((job_id for job_id, job in self.jobs.items() if job.owner == worker), None)

    def next(self) -> str | None:
        """The first id of the lowest place; the retry lane comes last."""
        return min(self.line, key=lambda job_id: (self.jobs[job_id].place, self.line.index(job_id)), default=None)

    def bring_back(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if job.accepted:
            job.stalls += 1
        job.owner, job.accepted = None, False
        self.line.insert(0, job_id)

    def active(self) -> int:
        return sum(job.owner is not None for job in self.jobs.values())

    def assign(self, worker: str) -> str | None:
        if self.limits and self.limits.room(self.active()) < 1:
            return None
        while (job_id := self.next()) is not None:
            self.line.remove(job_id)
            if self.jobs[job_id].stalls <= MAX_STALLS:
                self.jobs[job_id].owner = worker
                self.limits.begin(1, self.active())
                self.ended.pop(worker, None)
                return job_id
            del self.jobs[job_id]
            self.dead += 1
        return None


class ExternalMachine:
    """Applies each step to the queue and to the model."""

    def __init__(self, url: str, seed: int) -> None:
        self._chance = random.Random(seed)
        limits: dict[str, Any] = {
            "max_stalls": MAX_STALLS,
            "max_retries": MAX_RETRIES,
            "retry_lane_retries": LANE_RETRIES,
        }
        self.queue = ExternalQueue(url, min_backoff_ms=0, max_backoff_ms=0, **limits)
        self.queue.redis.flushall()
        self.queue.create(min_backoff_ms=0, max_backoff_ms=0, lease_ms=600_000, **limits)
        self.model = Model()
        self.taken: list[str] = []

    def run(self) -> list[str]:
        """Returns the steps taken."""
        chance = self._chance
        for _ in range(STEPS):
            worker, job_id, bridge = chance.choice(WORKERS), chance.choice(IDS), chance.choice(BRIDGES)
            pair = self._pair(worker, job_id)
            steps: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = [
                (4, self.add, (job_id, chance.choice((0, 5, 9)))),
                (4, self.idle, (worker, bridge)),
                (2, self.fetch_assigned, (worker,)),
                (5, self.accept, (*pair, chance.random() < 0.5)),
                (2, self.finish, pair),
                (3, self.fail, (*pair, chance.random() < 0.2)),
                (2, self.fall_silent, ()),
                (1, self.leave, (worker, bridge)),
                (1, self.cancel, (job_id,)),
                (1, self.tick, ()),
                (1, self.limit, (chance.choice((0, 0, 1, 2)), chance.random() < 0.5)),
                (2, self.tokens_come_in, (chance.randint(1, BURST),)),
            ]
            weights = [weight for weight, _, _ in steps]
            _, step, arguments = chance.choices(steps, weights)[0]
            self.taken.append(f"{step.__name__}{arguments}")
            step(*arguments)
            self.check_queue()
            self.check_journal()
        return self.taken

    def _pair(self, worker: str, job_id: str) -> tuple[str, str]:
        """Returns mostly a worker and the job it holds, otherwise any pair."""
        held = self.model.held_by(worker)
        return worker, held if held is not None and self._chance.random() < 0.8 else job_id

    def add(self, job_id: str, priority: int) -> None:
        if job_id not in self.model.jobs:
            self.queue.enqueue(job_id, priority=priority)
            self.model.jobs[job_id] = Known(priority)
            self.model.line.append(job_id)

    def idle(self, worker: str, bridge: str) -> None:
        held = self.model.held_by(worker)
        if held is not None and self.model.jobs[held].accepted:
            self.model.bring_back(held)
            held = None
        expected = held or self.model.assign(worker)
        self.model.bridges[worker] = bridge
        assert self.queue.idle(worker, bridge) == expected

    def fetch_assigned(self, worker: str) -> None:
        held = self.model.held_by(worker)
        if held is not None:
            expected = None if self.model.jobs[held].accepted else held
        else:
            expected = self.model.assign(worker) if worker in self.model.bridges else None
        bridge = self.model.bridges.get(worker, "b1")
        assert self.queue.fetch_assigned(worker, bridge) == expected

    def accept(self, worker: str, job_id: str, far: bool) -> None:
        holds = self.model.held_by(worker) == job_id

        def call() -> None:
            if far:
                self.queue.external.progress(worker, job_id, 0.5, "half")
            else:
                self.queue.external.accept(worker, job_id)

        if holds:
            call()
            self.model.jobs[job_id].accepted = True
            self.model.bridges.pop(worker, None)
        else:
            with pytest.raises(LeaseLapsed):
                call()

    def finish(self, worker: str, job_id: str) -> None:
        if self._ends(worker, job_id, "done", lambda: self.queue.external.finish(worker, job_id)):
            del self.model.jobs[job_id]
            self.model.done += 1

    def fail(self, worker: str, job_id: str, permanent: bool) -> None:
        kind = "permanent" if permanent else "retriable"
        if not self._ends(worker, job_id, "failed", lambda: self.queue.fail(job_id, worker, kind)):
            return
        job = self.model.jobs[job_id]
        if permanent or (job.retries >= MAX_RETRIES and job.lane >= LANE_RETRIES):
            del self.model.jobs[job_id]
            self.model.dead += 1
            return
        if job.lane or job.retries >= MAX_RETRIES:
            job.lane += 1
        job.retries += 1
        job.owner, job.accepted = None, False
        self.model.line.append(job_id)

    def _ends(self, worker: str, job_id: str, outcome: str, call: Callable[[], None]) -> bool:
        if self.model.held_by(worker) == job_id:
            call()
            self.model.bridges.pop(worker, None)
            self.model.ended[worker] = (outcome, job_id)
            return True
        if self.model.ended.get(worker) == (outcome, job_id):
            call()
        else:
            with pytest.raises(LeaseLapsed):
                call()
        return False

    def fall_silent(self) -> None:
        held = sorted(job_id for job_id, job in self.model.jobs.items() if job.owner)
        if not held:
            return
        job_id = self._chance.choice(held)
        owner = self.model.jobs[job_id].owner
        assert owner is not None
        self.queue.end_leases(job_id)
        self.model.bridges.pop(owner, None)
        self.model.bring_back(job_id)

    def leave(self, worker: str, bridge: str) -> None:
        mine = self.model.bridges.get(worker) == bridge
        held = self.model.held_by(worker)
        assert self.queue.external.leave(worker, bridge) == (mine and held is not None)
        if mine:
            del self.model.bridges[worker]
            self.model.ended.pop(worker, None)
            if held is not None:
                self.model.bring_back(held)

    def cancel(self, job_id: str) -> None:
        waits = job_id in self.model.line
        assert self.queue.producer.cancel(job_id) == waits
        if waits:
            self.model.line.remove(job_id)
            del self.model.jobs[job_id]

    def tick(self) -> None:
        self.queue.promote()

    def limit(self, max_active: int, rate: bool) -> None:
        self.queue.registry.configure(self.queue.name, stored_limits(max_active, rate), {})
        self.model.limits.max_active, self.model.limits.rate = max_active, rate

    def tokens_come_in(self, hours: int) -> None:
        pass_hours(self.queue, hours)
        self.model.limits.refill(hours)

    def check_queue(self) -> None:
        model, state = self.model, self.queue.state()
        assert state.jobs == set(model.jobs)
        assert state.active == {job_id: job.owner for job_id, job in model.jobs.items() if job.owner}
        accepted = {job_id for job_id, job in model.jobs.items() if job.accepted}
        assert {member.decode() for member in self.queue.redis.zrange(self.queue.key("accepted"), 0, -1)} == accepted
        assert {member.decode() for member in self.queue.redis.zrange(self.queue.key("leases"), 0, -1)} == set(
            state.active
        )
        counts = self.queue.inspector.counts()
        assert (counts.done, counts.failed) == (model.done, model.dead)
        assert counts.waiting + counts.retry == len(model.line)
        if model.limits:
            assert counts.limits is not None
            assert counts.limits["may_begin"] == model.limits.room(model.active())
        for job_id, job in model.jobs.items():
            shown = self.queue.inspector.job(job_id)
            assert (shown["retry_count"], shown["stall_count"]) == (job.retries, job.stalls)

    def check_journal(self) -> None:
        replay = Replay().read_all(self.queue.entries())
        assert set(replay.ready) == set(self.model.line)
        assert set(replay.active) == {job_id for job_id, job in self.model.jobs.items() if job.owner}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_sequence_of_calls_matches_the_model(redis_url: str, seed: int) -> None:
    machine = ExternalMachine(redis_url, seed)
    try:
        machine.run()
    except BaseException:
        print(f"seed {seed}:", *machine.taken, sep="\n  ")
        raise
    verbs = {event.verb for event in machine.queue.events()}
    machine.queue.close()
    assert {"claimed", "done", "retried", "stalled", "returned", "dead", "cancelled"} <= verbs, (
        "every kind of event occurred"
    )
