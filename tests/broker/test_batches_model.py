"""Batches against a small model: random histories over two queues, the batches' home and another one.

FORQ_MODEL_EXAMPLES=1000 runs more examples, different ones each time.
"""

import os
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forq.batch import MOST_OF_CHILD_ID, Batch, Children
from forq.broker.claim import Settled
from forq.broker.reports import Reports
from forq.broker.scripts import OK, script
from forq.client import Client, new_job
from forq.errors import BatchEnded
from tests.broker.test_batches import deliver, pass_hours
from tests.support.drive.one_queue import EXPIRY_MS, NO, HandWorker, OneQueue
from tests.support.drive.server import Server
from tests.support.models.mutants import MUTANT
from tests.support.thorough import examples

HOME, OTHER = "q", "other"
QUEUES = st.sampled_from((HOME, OTHER))
PICK = st.integers(0, 5)
# A batch that is not sealed is abandoned after an hour, and one that has ended is forgotten after a day.
SHORT_MINUTES, LONG_MINUTES, DAY_MINUTES, HOUR_MINUTES = 18, 1800, 1440, 60
MOST_BATCHES, MOST_RUNNING = 2, 3
ENDED = ("done", "failed", "abandoned")


@dataclass
class Member:
    """A member, or its place. `state`: reserved, waiting, running or ended. `counted`: how its home has counted it."""

    number: int
    queue: str
    id: str
    state: str = "reserved"
    counted: str = ""
    children: list["Member"] = field(default_factory=list)


@dataclass
class ModelBatch:
    """`callbacks`: held, ready, running or over. `minutes`: since its last member was added, or since its end."""

    id: str
    use: bool
    state: str = "open"
    members: list[Member] = field(default_factory=list)
    callbacks: dict[str, str] = field(default_factory=lambda: dict.fromkeys(("on_done", "on_end", "on_dead"), "held"))
    minutes: int = 0
    is_forgotten: bool = False

    def has_jobs(self) -> bool:
        return any(member.state in ("waiting", "running") for member in self.members)

    def open_members(self) -> list[Member]:
        return [member for member in self.members if not member.counted]

    def counted(self, *hows: str) -> int:
        return sum(member.counted in hows for member in self.members)

    def seal(self, cancel: bool) -> None:
        if self.state == "open" or (cancel and self.state not in ENDED):
            self.state = "cancelled" if cancel else "sealed"
            self._finish_if_over()

    def count(self, member: Member, how: str) -> None:
        if self.is_forgotten or member.counted:
            return
        member.counted = how
        if how == "dead" and self.callbacks["on_dead"] == "held":
            self.callbacks["on_dead"] = "ready"
        self._finish_if_over()

    def finish(self, how: str) -> None:
        self.state, self.minutes = how, 0
        for name, state in self.callbacks.items():
            if state == "held":
                runs = (name == "on_end" and how != "abandoned") or (name == "on_done" and how == "done")
                self.callbacks[name] = "ready" if runs else "over"

    def _finish_if_over(self) -> None:
        if self.state in ("sealed", "cancelled") and not self.open_members():
            all_done = self.state == "sealed" and self.counted("done") == len(self.members)
            self.finish("done" if all_done else "failed")

    def entry(self) -> str:
        counts = (self.counted("done"), self.counted("dead"), self.counted("cancelled", "lost"))
        return " ".join(map(str, (self.state, int(self.use), len(self.members), len(self.open_members()), *counts)))


@dataclass
class Running:
    """A worker and the job that it runs: a member, or the callback with this name."""

    worker: HandWorker
    fence: str
    queue: str
    batch: ModelBatch
    member: Member | None
    callback: str
    children: int = 0

    @property
    def id(self) -> str:
        return self.member.id if self.member else f"{self.batch.id}:{self.callback}"


class BatchMachine(RuleBasedStateMachine):
    server: ClassVar[Server]

    def __init__(self) -> None:
        super().__init__()
        self.server.flush()
        self.queues = {name: OneQueue(self.server.url, name, max_stalls=1000, flows=2) for name in (HOME, OTHER)}
        self.home, self.other = self.queues[HOME], self.queues[OTHER]
        self.client = Client(self.server.url)
        self.numbers = count(1)
        # All of them, the forgotten ones included: their members may still run.
        self.batches: list[ModelBatch] = []
        # Those that the other queue has not forgotten.
        self.reports: list[tuple[ModelBatch, Member, str]] = []
        self.running: list[Running] = []
        self.ended_callbacks: set[str] = set()

    @initialize(
        use=st.booleans(), queues=st.lists(QUEUES, min_size=1, max_size=3), seals=st.booleans(), claims=st.booleans()
    )
    def begin_with_a_batch(self, use: bool, queues: list[str], seals: bool, claims: bool) -> None:
        self.open(use, False)
        for queue in queues:
            self.add(0, queue, False)
        if seals:
            self.seal(0)
        if claims:
            self._claim(queues[0])

    def known(self) -> list[ModelBatch]:
        return [batch for batch in self.batches if not batch.is_forgotten]

    def pick(self, pick: int) -> ModelBatch | None:
        known = self.known()
        return known[pick % len(known)] if known else None

    def real(self, batch: ModelBatch) -> Batch:
        return self.client.find_batch(HOME, batch.id)

    @precondition(lambda self: sum(batch.state not in ENDED for batch in self.batches) < MOST_BATCHES)
    @rule(use=st.booleans(), reuse=st.booleans())
    def open(self, use: bool, reuse: bool) -> None:
        """`reuse`: with the id of a batch that is forgotten, if no member of it is left."""
        names = [f"B{next(self.numbers)}"]
        if reuse:
            left = {batch.id for batch in self.batches if not batch.is_forgotten or batch.has_jobs()}
            names = [batch.id for batch in self.batches if batch.id not in left] or names
        batch = ModelBatch(names[-1], use)
        self.ended_callbacks -= {f"{batch.id}:{name}" for name in batch.callbacks}
        self.batches.append(batch)
        self._open(batch)

    @precondition(lambda self: self.known())
    @rule(pick=PICK)
    def open_again(self, pick: int) -> None:
        if batch := self.pick(pick):
            if batch.state == "open":
                self._open(batch)
            else:
                with pytest.raises(BatchEnded):
                    self._open(batch)

    def _open(self, batch: ModelBatch) -> None:
        callbacks = {name: new_job(name) for name in batch.callbacks}
        self.client.batch(HOME, id=batch.id, results=batch.use, **callbacks)

    @precondition(lambda self: self.known())
    @rule(pick=PICK, queue=QUEUES, dies=st.sampled_from((False, False, False, True)))
    def add(self, pick: int, queue: str, dies: bool) -> None:
        """`dies`: the producer dies after it has reserved the place of the member."""
        batch = self.pick(pick)
        if batch is None:
            return
        real, job_id = self.real(batch), f"m{next(self.numbers)}"
        real._keeps_results = batch.use
        if batch.state != "open":
            real.enqueue(queue, 1, id=job_id)
            with pytest.raises(BatchEnded):
                real.flush()
            return
        member = Member(len(batch.members) + 1, queue, job_id)
        batch.members.append(member)
        batch.minutes = 0
        if dies:
            assert real._stored().reserve([(queue, job_id)]) == [member.number]
        else:
            real.enqueue(queue, 1, id=job_id)
            real.flush()
            member.state = "waiting"

    @precondition(lambda self: any(running.member for running in self.running))
    @rule(pick=PICK, queue=QUEUES, dies=st.booleans())
    def add_child(self, pick: int, queue: str, dies: bool) -> None:
        """A running member adds the next member of its attempt, perhaps one that an earlier attempt has added."""
        adding = [running for running in self.running if running.member]
        if not adding:
            return
        running = adding[pick % len(adding)]
        batch, parent = running.batch, running.member
        assert parent is not None
        if batch.is_forgotten:
            return
        at = running.children
        known = parent.children[at] if at < len(parent.children) else None
        queue = known.queue if known else queue
        real = Batch(
            self.client.link,
            self.client.prefix,
            HOME,
            batch.id,
            keeps_results=batch.use,
            parent=parent.number,
            parent_id=parent.id,
        )
        real._children = Children(at)
        if batch.state == "cancelled" or batch.state in ENDED:
            real.enqueue(queue, 1)
            with pytest.raises(BatchEnded):
                real.flush()
            return
        running.children += 1
        child_id = f"{parent.id[: MOST_OF_CHILD_ID - len(batch.id)]}.{batch.id}.{parent.number}.{at + 1}"
        if known is None:
            known = Member(len(batch.members) + 1, queue, child_id)
            batch.members.append(known)
            parent.children.append(known)
            batch.minutes = 0 if batch.state == "open" else batch.minutes
        elif batch.state == "open":
            batch.minutes = 0
        if dies:
            reserved = real._stored().reserve([(queue, child_id)], parent.number, at)
            assert reserved == [0 if known.counted else known.number]
        else:
            assert real.enqueue(queue, 1) == child_id
            real.flush()
            if known.state == "reserved" and not known.counted:
                known.state = "waiting"

    @rule(queue=QUEUES)
    def claim(self, queue: str) -> None:
        self._claim(queue)

    @rule(queue=QUEUES, fails=st.booleans(), delivers=st.booleans())
    def run_one(self, queue: str, fails: bool, delivers: bool) -> None:
        """In one step, since histories need it most."""
        if self._claim(queue):
            self.settle(len(self.running) - 1, fails)
            if delivers:
                self.deliver()

    def _claim(self, queue: str) -> bool:
        if sum(running.queue == queue for running in self.running) == MOST_RUNNING:
            return False
        real = self.queues[queue]
        worker = HandWorker(real, f"w{next(self.numbers)}", "p1")
        worker.consumer.link = real.link
        worker.consumer.join(EXPIRY_MS)
        claimed = worker.turn(1)
        for job_id in claimed:
            running = self._find(worker, queue, job_id)
            self.running.append(running)
            if running.member:
                assert running.member.state == "waiting"
                running.member.state = "running"
            else:
                assert running.batch.callbacks[running.callback] == "ready"
                assert job_id not in self.ended_callbacks
                running.batch.callbacks[running.callback] = "running"
        return bool(claimed)

    def _find(self, worker: HandWorker, queue: str, job_id: str) -> Running:
        # An earlier batch may have had the id.
        for batch in reversed(self.batches):
            for name in batch.callbacks:
                if job_id == f"{batch.id}:{name}":
                    return Running(worker, worker.fence, queue, batch, None, name)
            for member in batch.members:
                if job_id == member.id:
                    return Running(worker, worker.fence, queue, batch, member, "")
        raise AssertionError(f"{job_id} is a job of no batch")

    @precondition(lambda self: self.running)
    @rule(pick=PICK, fails=st.sampled_from((False, False, True)))
    def settle(self, pick: int, fails: bool) -> None:
        if not self.running:
            return
        running = self.running.pop(pick % len(self.running))
        ended, worker = running.id.encode(), running.worker
        worker.number += 1
        if fails:
            failed: Settled = [ended, running.fence, 7, NO, NO, "retriable", "", "0.5"]
            worker.consumer.turn(worker.number, [], failed, 0, 0)
        else:
            worker.consumer.turn(worker.number, [ended, running.fence, 7], [], 0, 0, [1, b"1"])
        if running.member:
            self._end(running.batch, running.member, "dead" if fails else "done")
        else:
            running.batch.callbacks[running.callback] = "over"
            self.ended_callbacks.add(running.id)

    def _end(self, batch: ModelBatch, member: Member, how: str) -> None:
        member.state = "ended"
        if member.queue == HOME:
            batch.count(member, how)
        else:
            self.reports.append((batch, member, how))

    @precondition(lambda self: self.running)
    @rule(pick=PICK)
    def lose_a_worker(self, pick: int) -> None:
        if not self.running:
            return
        running = self.running.pop(pick % len(self.running))
        self.queues[running.queue].recover(running.worker, 0, running=True)
        if running.member:
            running.member.state = "waiting"
        else:
            running.batch.callbacks[running.callback] = "ready"

    @rule(pick=PICK)
    def cancel_a_member(self, pick: int) -> None:
        waiting = [
            (batch, member) for batch in self.batches for member in batch.members if member.state == "waiting"
        ]  # fmt: skip
        if waiting:
            batch, member = waiting[pick % len(waiting)]
            assert self.queues[member.queue].producer.cancel(member.id)
            self._end(batch, member, "cancelled")

    @precondition(lambda self: self.known())
    @rule(pick=PICK)
    def seal(self, pick: int) -> None:
        if batch := self.pick(pick):
            batch.seal(cancel=False)
            assert self.real(batch)._stored().seal() == len(batch.open_members())

    @precondition(lambda self: self.known())
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        if batch := self.pick(pick):
            batch.seal(cancel=True)
            waiting = [member for member in batch.open_members() if member.state == "waiting"]
            for member in waiting:
                self._end(batch, member, "cancelled")
            assert self.real(batch).cancel() == len(waiting)

    @precondition(lambda self: self.reports)
    @rule()
    def deliver(self) -> None:
        deliver(self.other)
        for report in self.reports:
            self._count(*report)
        self.reports = []

    @precondition(lambda self: self.reports)
    @rule(most=st.integers(1, 3), times=st.integers(1, 2))
    def deliver_and_die(self, most: int, times: int) -> None:
        """Pulse delivers some reports and dies before it forgets them."""
        lines = self.other.redis.lrange(self.other.key("reports:q"), 0, most - 1)
        for _ in range(times if lines else 0):
            assert self.home.link.run(script("report"), self.home.base, *lines) == [OK, len(lines)]
        for report in self.reports[:most]:
            self._count(*report)

    @rule()
    def forget_no_report_that_was_not_delivered(self) -> None:
        """A late call of pulse to forget what it had delivered, when other reports are there."""
        Reports(self.other.link, "forq:")._forget(self.other.base, "reports:q", [b"done 1 batch B0 1 0\n"])

    def _count(self, batch: ModelBatch, member: Member, how: str) -> None:
        batch.count(member, how)

    @rule(minutes=st.sampled_from((SHORT_MINUTES, SHORT_MINUTES, SHORT_MINUTES, LONG_MINUTES)))
    def pass_time(self, minutes: int) -> None:
        pass_hours(self.home, minutes / 60)
        for _ in range(2):
            self.home.recovery().promote(HOME)
        for batch in self.known():
            batch.minutes += minutes
            if batch.state == "open" and batch.minutes >= HOUR_MINUTES:
                batch.finish("abandoned")
            elif batch.state in ENDED and batch.minutes >= DAY_MINUTES:
                # A callback may read the results.
                batch.is_forgotten = set(batch.callbacks.values()) == {"over"}
            elif batch.state in ("sealed", "cancelled"):
                # The next attempt of a parent stores its child.
                kept = [child for parent in batch.open_members() for child in parent.children]
                for member in batch.open_members():
                    on_its_way = member.queue == OTHER and self.reports
                    if member.state == "reserved" and not on_its_way and member not in kept:
                        batch.count(member, "lost")

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        found = {batch_id: entry.rsplit(" ", 2)[0] for batch_id, entry in self.home.hash("batches").items()}
        assert found == {batch.id: batch.entry() for batch in self.known()}

    @invariant()
    def each_open_place_is_that_of_a_member(self) -> None:
        places = self.home.hash("batch:members").items()
        # Without when it was reserved, and by whom.
        assert {number: place.rsplit(" ", 2)[0] for number, place in places} == {
            f"{batch.id} {member.number}": f"{member.queue} {member.id}"
            for batch in self.known()
            for member in batch.open_members()
        }
        assert set(self.home.hash("batch:results")) == {
            f"{batch.id} {member.number}"
            for batch in self.known()
            for member in batch.members
            if batch.use and member.counted
        }

    @invariant()
    def callbacks_are_held_until_it_is_their_time(self) -> None:
        assert set(self.home.hash("held")) == {
            f"{batch.id}:{name}" for batch in self.batches for name, state in batch.callbacks.items() if state == "held"
        }

    @invariant()
    def all_other_jobs_are_where_they_belong(self) -> None:
        expected: dict[str, set[str]] = {HOME: set(), OTHER: set()}
        for batch in self.batches:
            for name, state in batch.callbacks.items():
                if state in ("ready", "running"):
                    expected[HOME].add(f"{batch.id}:{name}")
            for member in batch.members:
                if member.state in ("waiting", "running"):
                    expected[member.queue].add(member.id)
        for name, queue in self.queues.items():
            assert {job_id.decode() for job_id in queue.redis.hkeys(queue.key("jobs"))} == expected[name]
        assert self.other.redis.llen(self.other.key("reports:q")) == len(self.reports)

    def teardown(self) -> None:
        try:
            self._let_all_end()
        finally:
            self.client.close()
            for queue in self.queues.values():
                queue.close()

    def _let_all_end(self) -> None:
        for batch in self.known():
            batch.seal(cancel=False)
            self.real(batch).seal()
        self.deliver()
        # Children that nobody has stored are lost once their parents have ended.
        for _ in range(2):
            self.pass_time(SHORT_MINUTES)
            while self.running or self._claim(HOME) or self._claim(OTHER):
                self.settle(0, False)
                self.deliver()
        self.counts_are_those_of_the_model()
        assert all(batch.state in ENDED for batch in self.batches)
        self.pass_time(LONG_MINUTES)
        names = ("held", "held:jobs", "held:open", "sources", "edges", "resolving", "jobs", "checks", "batches")
        more = ("batch:members", "batch:results", "batch:children", "reports", "reports:q")
        for queue in self.queues.values():
            assert [name for name in (*names, *more) if queue.redis.exists(queue.key(name))] == []


@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 400)
def test_each_member_counts_once_and_each_callback_runs_once(server: Server) -> None:
    requested = os.environ.get("FORQ_MODEL_EXAMPLES")
    run_state_machine_as_test(
        type("Machine", (BatchMachine,), {"server": server}),
        settings=settings(
            max_examples=int(requested or examples(30, 120)),
            stateful_step_count=40,
            derandomize=requested is None,
            deadline=None,
            database=None,
            # For a mutant it only matters whether it is detected.
            phases=[Phase.generate] if MUTANT in os.environ else list(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
