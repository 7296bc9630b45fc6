"""The real scripts against a model, in every order Hypothesis can think of.

FORQ_MODEL_EXAMPLES=5000 looks longer, and elsewhere each time.
"""

import os
from collections import Counter
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forq.broker.keeping import Position
from forq.broker.record import unpack
from forq.errors import Exists, Fenced
from tests.support.one_queue import EXPIRY_MS, HandWorker, OneQueue, State
from tests.support.queue_model import ModelJob, ModelQueue, ModelWorker
from tests.support.server import Server

IDS = st.sampled_from("abcdef")
SEVERAL_IDS = st.lists(IDS, min_size=1, max_size=4, unique=True).map("".join)
PRIORITIES = st.sampled_from((5, 5, 5, 0, 7))
SELDOM = st.sampled_from((False, False, False, True))
PROGRESS = st.sampled_from((0, 1, 2, 9, 9))
WANT = st.sampled_from((0, 1, 2, 4))
WORKERS = st.integers(0, 2)
PROCESSORS = ("p1", "p2", "p2")


class QueueMachine(RuleBasedStateMachine):
    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.server.flush()
        self.queue = OneQueue(self.server.url)
        self.model = ModelQueue()
        self.numbers = count(1)
        self.processors = list(PROCESSORS)
        self.real: dict[str, HandWorker] = {}
        self.gone: list[ModelWorker] = []
        self.workers: list[ModelWorker] = []

    @initialize()
    def three_workers_join(self) -> None:
        self.workers = [self._join(processor) for processor in self.processors]

    def _join(self, processor: str) -> ModelWorker:
        name = f"w{next(self.numbers)}"
        self.real[name] = HandWorker(self.queue, name, processor)
        self.real[name].consumer.link = self.queue.link
        self.real[name].consumer.join(EXPIRY_MS)
        return ModelWorker(name, processor)

    @rule(job_id=IDS, priority=PRIORITIES, token=st.sampled_from((None, None, "t1", "t2")), again=st.booleans())
    def enqueue(self, job_id: str, priority: int, token: str | None, again: bool) -> None:
        for _ in range(2 if again and token else 1):
            if token in self.model.tokens:
                assert self.queue.enqueue(job_id, priority=priority, token=token) == [self.model.tokens[token]]
            elif job_id in self.model.jobs:
                with pytest.raises(Exists):
                    self.queue.enqueue(job_id, priority=priority, token=token)
            else:
                assert self.queue.enqueue(job_id, priority=priority, token=token) == [job_id]
                self.model.jobs[job_id] = ModelJob(priority)
                if token:
                    self.model.tokens[token] = job_id

    @rule(which=WORKERS)
    def block(self, which: int) -> None:
        self.real[self.workers[which].name].block()

    @rule(job_ids=SEVERAL_IDS, priority=PRIORITIES)
    def enqueue_what_is_not_there(self, job_ids: str, priority: int) -> None:
        assert self.queue.enqueue(*job_ids, priority=priority, if_exists="skip") == list(job_ids)
        for job_id in job_ids:
            self.model.jobs.setdefault(job_id, ModelJob(priority))

    def _run(self, which: int, progress: int) -> ModelWorker:
        """The worker finishes what it runs and begins the next job of its batch, `progress` times."""
        worker = self.workers[which]
        for _ in range(progress):
            if worker.unsettled or worker.rescued or worker.index >= len(worker.batch):
                break
            worker.index += worker.running
            worker.running = worker.index < len(worker.batch)
        return worker

    @rule(which=WORKERS, progress=PROGRESS, fail=SELDOM, keep=st.booleans(), want=WANT, lose=SELDOM)
    def turn(self, which: int, progress: int, fail: bool, keep: bool, want: int, lose: bool) -> None:
        self._take_turn(self._run(which, progress), fail=fail, keep=keep, want=want, lose=lose)

    def _take_turn(self, worker: ModelWorker, *, fail: bool, keep: bool, want: int, lose: bool) -> None:
        if worker.unsettled:
            done, failed, fence = worker.unsettled
            rest = ""
        else:
            upto = worker.index + worker.running
            failed = worker.batch[worker.index] if worker.running and fail else ""
            done, fence = worker.batch[: upto - len(failed)], worker.fence
            rest = worker.batch[upto:] if keep else ""
        real = self.real[worker.name]
        left = real.held()
        refused = self.model.settle(worker, done, failed, fence)
        for job_id in done + failed:
            if job_id not in refused:
                left.remove(job_id)
        held = left == list(rest) and all(self.model.owns(worker, job_id) for job_id in rest)
        if not held:
            self.model.hand_back(worker, self.model.owned(worker))
        claimable = self._claimable(self.queue.state()) if want and not self.model.paused else 0

        answer = real.whole_turn(want, done, failed, len(rest), fence)

        claimed = [job_id.decode() for job_id in answer.jobs[::2]]
        assert [job_id.decode() for job_id in answer.refused] == refused
        assert answer.held == held
        assert answer.paused == self.model.paused
        assert len(claimed) >= min(want, claimable)
        if claimed:
            self.model.claim(worker, claimed, answer.fence)
        worker.turn, worker.shift = real.number, 0
        if lose:
            worker.unsettled = (done, failed, fence)
            return
        worker.unsettled = None
        worker.rescued = worker.running = False
        worker.seen_turn, worker.index = real.number, 0
        # A worker never keeps and claims in one turn: what it keeps has another fence.
        worker.batch = rest if held and rest and not claimed else "".join(claimed)
        worker.fence = answer.fence or worker.fence
        if held and rest and claimed:
            worker.unsettled = ("", "", worker.fence)

    @rule(which=WORKERS, want=st.integers(1, 4))
    def settle_and_claim(self, which: int, want: int) -> None:
        """What workers do most."""
        self._take_turn(self._run(which, 9), fail=False, keep=False, want=want, lose=False)

    @rule(which=WORKERS, want=st.integers(1, 4))
    def settle_and_claim_unheard(self, which: int, want: int) -> None:
        self._take_turn(self._run(which, 9), fail=False, keep=False, want=want, lose=True)

    def _claimable(self, state: State) -> int:
        """Waiting jobs whose hint cannot be anywhere but in the pending lists (a lower bound)."""
        return sum(
            state.waiting.get(job.priority, []).count(job_id) > state.stale.get(f"{job.priority}:{job_id}", 0)
            for job_id, job in self.model.jobs.items()
            if job.owner is None
        )

    @rule(which=WORKERS, progress=PROGRESS, counted=st.booleans(), again=SELDOM)
    def crash_and_recover(self, which: int, progress: int, counted: bool, again: bool) -> None:
        worker = self._run(which, progress)
        for _ in range(1 + again):
            at = Position(worker.name, worker.seen_turn, worker.index, worker.running)
            self.queue.keeper().recover(self.queue.name, worker.processor, at, count=counted, cause="signal 9")
        self.model.lose_worker(worker, count=counted)
        self.gone.append(worker)
        self.workers[which] = self._join(worker.processor)

    @precondition(lambda self: self.gone)
    @rule(turn=st.booleans(), done=st.sampled_from(("", "a", "bc")))
    def hear_of_the_worker_that_went_last(self, turn: bool, done: str) -> None:
        """A turn that was still on its way, or a BLMOVE that nobody reads any more."""
        worker = self.gone[-1]
        if not turn:
            self.real[worker.name].block()
            return
        with pytest.raises(Fenced):
            self.real[worker.name].whole_turn(3, done, "", 0, worker.fence)

    @rule(which=WORKERS, progress=PROGRESS)
    def rescue(self, which: int, progress: int) -> None:
        worker = self._run(which, progress)
        if not worker.running:
            return
        held = self.real[worker.name].held()
        at = Position(worker.name, worker.seen_turn, worker.index, True)
        moved = self.queue.keeper(worker.processor).rescue(self.queue.name, at)
        place = worker.index - worker.shift
        if worker.seen_turn != worker.turn or len(held) <= place + 1:
            assert moved == 0
            return
        self.model.ran(worker, worker.batch[: worker.index])
        running = worker.batch[worker.index]
        self.model.hand_back(worker, [job_id for job_id in self.model.owned(worker) if job_id != running])
        worker.shift, worker.rescued = worker.index, True

    @rule(job_id=IDS, even_active=st.booleans())
    def take_away(self, job_id: str, even_active: bool) -> None:
        job = self.model.jobs.get(job_id)
        waits = job is not None and job.owner is None
        if even_active:
            assert self.queue.producer.remove(job_id) == (job is not None)
        else:
            assert self.queue.producer.cancel(job_id) == waits
        if waits:
            del self.model.jobs[job_id]
        elif job is not None and even_active:
            job.removed = True

    @rule(paused=SELDOM, which=WORKERS)
    def pause_or_resume_or_beat(self, paused: bool, which: int) -> None:
        if paused != self.model.paused:
            self.queue.registry.pause(self.queue.name, paused=paused)
            self.model.paused = paused
        else:
            self._beat(self.processors[which])

    def _beat(self, processor: str) -> list[str]:
        of = [worker for worker in self.workers if worker.processor == processor]
        positions = [Position(worker.name, worker.seen_turn, worker.index, worker.running) for worker in of]
        return self.queue.keeper(processor).heartbeat(self.queue.name, EXPIRY_MS, positions).evicted

    @rule(by_silence=st.booleans())
    def lose_the_second_host(self, by_silence: bool) -> None:
        lost = self.processors[1]
        self._beat(lost)
        if by_silence:
            self._beat("p1")
            self.queue.redis.zadd(self.queue.key("processors"), {lost: 1})
            self.queue.redis.hset(self.queue.key("counts"), "sweep_after_ms", 0)
            assert self._beat("p1") == [lost]
        else:
            self.queue.keeper().evict(self.queue.name, lost, "supervisor_lost")
        with pytest.raises(Fenced):
            self._beat(lost)
        self.processors = ["p1", *[f"p{next(self.numbers)}"] * 2]
        for which in (1, 2):
            self.model.lose_worker(self.workers[which], count=True)
            self.gone.append(self.workers[which])
            self.workers[which] = self._join(self.processors[which])

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        state = self.queue.state()
        self._check_jobs(state)
        self._check_hints(state)
        self._check_waking(state)
        self._check_counts(state)

    def _check_jobs(self, state: State) -> None:
        """Every job exists, and an active one is in the list of its one owner."""
        assert state.jobs == set(self.model.jobs)
        assert state.owners == {
            job_id: job.owner + (":removed" if job.removed else "")
            for job_id, job in self.model.jobs.items()
            if job.owner
        }
        for job_id, name in state.active.items():
            assert job_id in state.processing.get(name, []), f"{name} owns {job_id} and does not hold it"
        stalls = {job_id: unpack(record).stall_count for job_id, record in state.records.items()}
        assert stalls == {job_id: job.stalls for job_id, job in self.model.jobs.items()}

    def _check_hints(self, state: State) -> None:
        """As many hints as there are stale ones and waiting jobs: fewer would lose a job."""
        hints = Counter(f"{priority}:{job_id}" for priority, ids in state.waiting.items() for job_id in ids)
        moved = [job_id for name in state.processing for job_id in self._not_begun(state, name) if job_id]
        hints += Counter(f"5:{job_id}" for job_id in moved)
        live = Counter(f"{job.priority}:{job_id}" for job_id, job in self.model.jobs.items() if job.owner is None)
        assert hints == live + Counter(state.stale)
        others = sum(len(ids) for priority, ids in state.waiting.items() if priority != 5)
        assert int(state.counts.get("other_hints", 0)) == others

    def _not_begun(self, state: State, name: str) -> list[str]:
        left = list(state.processing[name])
        for job_id, owner in state.active.items():
            if owner == name:
                left.remove(job_id)
        return left

    def _check_waking(self, state: State) -> None:
        """One token at most; and work that can be claimed finds a list in which an idle worker waits not empty."""
        assert state.tokens <= 1
        under_way = any(self._not_begun(state, name) for name in state.processing)
        if self._claimable(state) and not self.model.paused and not under_way:
            assert state.tokens or state.waiting.get(5)

    def _check_counts(self, state: State) -> None:
        counts = self.queue.viewer.counts()
        active = sum(job.owner is not None for job in self.model.jobs.values())
        assert (counts.waiting, counts.active) == (len(self.model.jobs) - active, active)
        assert (counts.processed, counts.dead, counts.dropped) == (self.model.processed, self.model.dead, 0)
        assert counts.failed_total == self.model.dead
        assert counts.paused == self.model.paused

    def teardown(self) -> None:
        self.queue.close()


@pytest.mark.spec("R10", "R11", "R13", "R14", "Q4")
@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 120)
def test_no_interleaving_loses_doubles_or_strands_a_job(server: Server) -> None:
    asked = os.environ.get("FORQ_MODEL_EXAMPLES")
    machine = type("Machine", (QueueMachine,), {"server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(asked or 140),
            stateful_step_count=50,
            derandomize=asked is None,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
