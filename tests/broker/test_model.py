"""The real scripts against a model, in every order Hypothesis can think of.

FORQ_MODEL_EXAMPLES=5000 looks longer, and elsewhere each time.
"""

import os
from itertools import count

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

from forq.broker.claim import Results, Settled, Turn, report_progress
from forq.broker.enqueue import Restored, Update, new_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.recovery import Outcome, Position
from forq.errors import Exists, Fenced, QueueFull
from tests.broker.sweeping import sweeping_at_once
from tests.support.drive.one_queue import EXPIRY_MS, HandWorker, OneQueue
from tests.support.drive.server import Server
from tests.support.models.mutants import MUTANT
from tests.support.models.queue import (
    DONE_MAX,
    KEEP_DONE_MS,
    MAX_ITEMS,
    MAX_RETRIES,
    MAX_STALLS,
    MAX_TIMEOUTS,
    Dispatch,
    Failure,
    Full,
    LateTurn,
    ModelQueue,
    ModelWorker,
    Taken,
    result_of,
)
from tests.support.models.queue_checks import MINUTE_MS, Checks, pass_time
from tests.support.thorough import examples

# Every time in a run is ahead by one of these, or has come: far enough apart that the seconds of a run do not matter.
AHEAD_MS = {"now": None, "soon": 30 * MINUTE_MS, "later": 50 * MINUTE_MS, "far": 600 * MINUTE_MS}
BACKOFF_MS = (20 * MINUTE_MS, 40 * MINUTE_MS, 40 * MINUTE_MS)
STEP_MS = 35 * MINUTE_MS

IDS = st.sampled_from("abcdef")
SEVERAL_IDS = st.lists(IDS, min_size=1, max_size=4).map("".join)
PRIORITIES = st.sampled_from((5, 5, 5, 0, 7))
RUN_AT = st.sampled_from(("now", "now", "soon", "later", "far"))
HOW_RUN_AT = st.sampled_from((True, False, "if_later", "if_earlier"))
IF_EXISTS = st.sampled_from(("update", "update", "update", "skip", "refuse"))
SELDOM = st.sampled_from((False, False, False, True))
PROGRESS = st.sampled_from((0, 1, 2, 9, 9))
FAILURES = st.sampled_from((None, None, None, "backoff", "backoff", "now", "soon", "permanent", "timeout"))
OUTCOMES: st.SearchStrategy[Outcome] = st.sampled_from(("stalled", "timed_out", "interrupted", "suspect", "suspect"))
WANT = st.sampled_from((0, 1, 2, 4))
# The last two: the retry child's, and that of a process that runs suspects only.
WORKERS = st.integers(0, 4)
RETRY = 3
LANES = ("main", "main", "main", "retry", "suspects")
PROCESSORS = ("p1", "p2", "p2", "p1", "p1")


class QueueMachine(RuleBasedStateMachine):
    server: Server
    # What is kept of done jobs goes by the millisecond: for rules of one script only.
    may_keep = True

    def __init__(self) -> None:
        super().__init__()
        self.server.flush()
        self.queue = OneQueue(
            self.server.url,
            max_retries=MAX_RETRIES,
            max_items=MAX_ITEMS,
            max_stalls=MAX_STALLS,
            max_timeouts=MAX_TIMEOUTS,
            min_backoff_ms=BACKOFF_MS[0],
            max_backoff_ms=BACKOFF_MS[-1],
            jitter=0,
            keep_done_ms=KEEP_DONE_MS,
            done_max=DONE_MAX,
        )
        seconds, _ = self.queue.redis.time()
        self.model = ModelQueue(seconds * 1000, BACKOFF_MS)
        self.checks = Checks(self.queue, self.model)
        self.numbers = count(1)
        self.processors = list(PROCESSORS)
        self.real: dict[str, HandWorker] = {}
        self.gone: list[ModelWorker] = []
        self.workers: list[ModelWorker] = []

    @initialize()
    def all_workers_join(self) -> None:
        self.workers = [self._join(which) for which in range(len(PROCESSORS))]

    def _join(self, which: int) -> ModelWorker:
        name, processor = f"w{next(self.numbers)}", self.processors[which]
        lane = LANES[which]
        self.real[name] = HandWorker(self.queue, name, processor, lane)
        self.real[name].consumer.link = self.queue.link
        self.real[name].consumer.join(EXPIRY_MS)
        return ModelWorker(name, processor, lane)

    @rule(job_id=IDS, priority=PRIORITIES, run_at=RUN_AT, if_exists=IF_EXISTS)
    def enqueue(self, job_id: str, priority: int, run_at: str, if_exists: str) -> None:
        self._enqueue(job_id, self._dispatch(priority, run_at), if_exists)

    @rule(
        job_ids=SEVERAL_IDS,
        priority=PRIORITIES,
        run_at=RUN_AT,
        update_data=st.booleans(),
        how=HOW_RUN_AT,
        reset=st.sampled_from((None, True, False)),
    )
    def update(
        self, job_ids: str, priority: int, run_at: str, update_data: bool, how: bool | str, reset: bool | None
    ) -> None:
        self._enqueue(job_ids, self._dispatch(priority, run_at, update_data, how, reset), "update")

    @rule(job_id=IDS, priority=PRIORITIES, run_at=RUN_AT, if_exists=IF_EXISTS, token=st.sampled_from(("t1", "t2")))
    def enqueue_and_repeat_since_the_reply_was_lost(
        self, job_id: str, priority: int, run_at: str, if_exists: str, token: str
    ) -> None:
        dispatch = self._dispatch(priority, run_at)
        for _ in range(2):
            self._enqueue(job_id, dispatch, if_exists, token)

    @rule(job_ids=SEVERAL_IDS, priority=PRIORITIES)
    def enqueue_what_is_not_there(self, job_ids: str, priority: int) -> None:
        self._enqueue(job_ids, self._dispatch(priority, "now"), "skip")

    @rule(job_ids=SEVERAL_IDS, priority=PRIORITIES, deaths=st.lists(st.integers(1, 3), min_size=4, max_size=4))
    def restore(self, job_ids: str, priority: int, deaths: list[int]) -> None:
        """Of lines of a failed log: several may be of one id, and the same line may be there twice."""
        dispatch = self._dispatch(priority, "now")
        lines = [(job_id, f"{job_id}@{death}") for job_id, death in zip(job_ids, deaths, strict=False)]
        jobs = [new_job(dispatch.data, id=job_id, priority=priority, token=token) for job_id, token in lines]
        try:
            outcomes = self.model.restore(lines, dispatch)
        except Full:
            with pytest.raises(QueueFull):
                self.queue.producer.restore(jobs)
        else:
            left = [at for at, outcome in enumerate(outcomes) if outcome == "left"]
            expected = Restored(outcomes.count("stored"), outcomes.count("known"), left)
            assert self.queue.producer.restore(jobs) == expected

    def _dispatch(
        self,
        priority: int,
        run_at: str,
        update_data: bool = True,
        how: bool | str = True,
        reset: bool | None = None,
    ) -> Dispatch:
        return Dispatch(next(self.numbers), priority, self._at(run_at) or 0, update_data, how, reset)

    def _at(self, when: str) -> int | None:
        ahead = AHEAD_MS[when]
        return None if ahead is None else self.model.now_ms + ahead

    def _enqueue(self, job_ids: str, dispatch: Dispatch, if_exists: str, token: str | None = None) -> None:
        run_at = dispatch.run_at / 1000 or None
        jobs = [
            new_job(dispatch.data, id=job_id, priority=dispatch.priority, token=token, run_at=run_at)
            for job_id in job_ids
        ]
        update = Update(if_exists, dispatch.update_data, dispatch.update_run_at, dispatch.reset)
        try:
            expected = self.model.enqueue(list(job_ids), dispatch, if_exists, token)
        except (Taken, Full) as refusal:
            with pytest.raises(Exists if isinstance(refusal, Taken) else QueueFull):
                self.queue.producer.enqueue(jobs, update)
        else:
            assert self.queue.producer.enqueue(jobs, update) == expected

    @rule(which=WORKERS)
    def block(self, which: int) -> None:
        if not self.workers[which].limited:
            self.real[self.workers[which].name].block()

    def _run(self, which: int, progress: int) -> ModelWorker:
        """The worker finishes what it runs and begins the next job of its batch, `progress` times."""
        worker = self.workers[which]
        for _ in range(progress):
            if worker.unsettled or worker.rescued or worker.index >= len(worker.batch):
                break
            worker.index += worker.running
            worker.running = worker.index < len(worker.batch)
        return worker

    @rule(which=WORKERS, progress=PROGRESS, fail=FAILURES, keep=st.booleans(), want=WANT, lose=SELDOM)
    def turn(self, which: int, progress: int, fail: str | None, keep: bool, want: int, lose: bool) -> None:
        self._take_turn(self._run(which, progress), fail=fail, keep=keep, want=want, lose=lose)

    @rule(which=WORKERS, want=st.integers(1, 4))
    def settle_and_claim(self, which: int, want: int) -> None:
        """What workers do most."""
        self._take_turn(self._run(which, 9), want=want)

    @rule(which=WORKERS, want=st.integers(1, 4))
    def settle_and_claim_unheard(self, which: int, want: int) -> None:
        self._take_turn(self._run(which, 9), want=want, lose=True)

    @rule(which=st.sampled_from((RETRY, RETRY + 1)), want=st.integers(1, 4))
    def run_a_suspect(self, which: int, want: int) -> None:
        self._take_turn(self._run(which, 9), want=want)

    @rule(which=WORKERS, fail=FAILURES)
    def fail_what_runs(self, which: int, fail: str | None) -> None:
        self._take_turn(self._run(which, 1), fail=fail or "backoff", want=0)

    def _take_turn(
        self, worker: ModelWorker, *, want: int, fail: str | None = None, keep: bool = False, lose: bool = False
    ) -> None:
        done, failed, how, fence, rest = self._to_settle(worker, fail, keep)
        real = self.real[worker.name]
        left = real.held()
        refused = self.model.settle(worker, done, failed, how, fence)
        for job_id in done + failed:
            if job_id not in refused:
                left.remove(job_id)
        held = left == list(rest) and all(self.model.owns(worker, job_id) for job_id in rest)
        if not held:
            self.model.hand_back(self.model.owned(worker))
        if worker.lane != "main":
            want = min(want, 1)
        state = self.queue.state()
        self.model.promote()
        wanted, want = want, self.checks.limits.within(state, worker, want)
        may_claim = want > 0 and not self.model.paused
        claimable = self.checks.claimable(state, worker.lane) if may_claim else []
        spent = {job_id for job_id, job in self.model.jobs.items() if job.waits and job.spent} if may_claim else set()

        self.checks.limits.turns(worker)
        answer = self._send_turn(real, wanted, (done, failed, how, fence), len(rest))

        claimed = [job_id.decode() for job_id in answer.jobs[::2]]
        buried = spent - set(self.queue.state().jobs)
        assert len(claimed) == want or not spent & set(claimable) - buried
        self.model.bury_spent(buried, worker.lane)
        assert [job_id.decode() for job_id in answer.refused] == refused
        assert [(fate.kind, fate.attempt, fate.max_attempts) for fate in answer.fates] == self.model.fates
        assert answer.held == held
        assert answer.paused == self.model.paused
        assert len(claimed) <= want
        self.checks.limits.check_answer(worker, answer, limited=0 < wanted > want == 0)
        assert len(claimed) >= min(want, len(set(claimable) - spent))
        if claimed and worker.lane != "main":
            in_line = [job_id for job_id in state.suspects if job_id in claimable and job_id not in spent]
            assert claimed[0] not in in_line[1:], "another suspect is older"
        if claimed:
            self.model.claim(worker, claimed, answer.fence)
        worker.turn, worker.shift = real.number, 0
        self.checks.limits.sleeps(worker, answer, heard=not lose)
        if lose:
            worker.unsettled = (done, failed, how, fence)
            return
        worker.unsettled = None
        worker.rescued = worker.running = False
        worker.seen_turn, worker.index = real.number, 0
        # A worker never keeps and claims in one turn: what it keeps has another fence.
        worker.batch = rest if held and rest and not claimed else "".join(claimed)
        worker.fence = answer.fence or worker.fence
        if held and rest and claimed:
            worker.unsettled = ("", "", Failure(), worker.fence)

    def _to_settle(self, worker: ModelWorker, fail: str | None, keep: bool) -> tuple[str, str, Failure, str, str]:
        """(done, failed, how, fence, what it keeps)."""
        if worker.unsettled:
            return *worker.unsettled, ""
        upto = worker.index + worker.running
        failed = worker.batch[worker.index] if worker.running and fail else ""
        how = Failure()
        if fail in ("permanent", "timeout"):
            how = Failure(fail)
        elif fail in ("now", "soon"):
            how = Failure(retry_at=self._at(fail) or 1)
        return worker.batch[: upto - len(failed)], failed, how, worker.fence, worker.batch[upto:] if keep else ""

    def _send_turn(self, real: HandWorker, want: int, settled: tuple[str, str, Failure, str], keep: int) -> Turn:
        real.number += 1
        return self._send(real, real.number, want, settled, keep)

    def _send(
        self, real: HandWorker, number: int, want: int, settled: tuple[str, str, Failure, str], keep: int = 0
    ) -> Turn:
        done, failed, how, fence = settled
        retry_at = "" if how.retry_at is None else how.retry_at
        succeeded: Settled = [part for job_id in done for part in (job_id, fence, 7)]
        gave_up: Settled = [
            part for job_id in failed for part in (job_id, fence, 7, "{}", "{}", how.kind, retry_at, "0.5")
        ]
        results: Results = [part for n, job_id in enumerate(done, 1) for part in (n, result_of(job_id).encode())]
        answer = real.consumer.turn(number, succeeded, gave_up, keep, want, results)
        real.fence = answer.fence or real.fence
        return answer

    @rule(which=WORKERS, progress=PROGRESS, fail=FAILURES, want=WANT)
    def give_up_a_connection(self, which: int, progress: int, fail: str | None, want: int) -> None:
        """The turn that was sent over it has not reached the server; the worker will repeat it under another number."""
        worker = self._run(which, progress)
        settled = self._to_settle(worker, fail, keep=False)[:4]
        real = self.real[worker.name]
        real.number += 1
        worker.unsettled = settled
        worker.late.append(LateTurn(real.number, want, settled))

    @rule(which=WORKERS, moved=st.booleans())
    def deliver_what_is_late(self, which: int, moved: bool) -> None:
        """`moved`: a BLMOVE was sent along."""
        worker = self.workers[which]
        if worker.late and not worker.limited:
            self._deliver(worker, worker.late.pop(0), moved)

    @rule(which=WORKERS, progress=PROGRESS, want=st.integers(1, 4), moved=st.booleans())
    def deliver_a_turn_after_the_next_one(self, which: int, progress: int, want: int, moved: bool) -> None:
        """In one step, since the worker has to run something by then."""
        self.give_up_a_connection(which, progress, None, want)
        worker = self.workers[which]
        self._take_turn(worker, want=want)
        self._run(which, 1)
        self._deliver(worker, worker.late.pop(), moved)

    def _deliver(self, worker: ModelWorker, late: LateTurn, moved: bool) -> None:
        real = self.real[worker.name]
        if moved:
            real.block()
        if late.number > worker.turn:
            # Nothing has come since: it is taken, and nobody hears the answer.
            last, real.number = real.number, late.number - 1
            self._take_turn(worker, want=late.want, lose=True)
            real.number = last
            return
        with pytest.raises(Fenced):
            self._send(real, late.number, late.want, late.settled)
        assert all(self.model.owns(worker, job_id) for job_id in real.held()), "what is not its own went back"

    @rule(which=WORKERS, progress=PROGRESS, outcome=OUTCOMES, again=SELDOM)
    def crash_and_recover(self, which: int, progress: int, outcome: Outcome, again: bool) -> None:
        self._lose(which, self._run(which, progress), outcome, again=again)

    @rule(which=WORKERS, want=st.integers(1, 3), outcome=OUTCOMES)
    def claim_begin_and_crash(self, which: int, want: int, outcome: Outcome) -> None:
        """In one step, since jobs that were lost several times are seldom met otherwise."""
        self._take_turn(self._run(which, 9), want=want)
        self._lose(which, self._run(which, 1), outcome)

    @rule(which=WORKERS, want=st.integers(1, 3))
    def claim_begin_and_time_out(self, which: int, want: int) -> None:
        self._take_turn(self._run(which, 9), want=want)
        self._take_turn(self._run(which, 1), fail="timeout", want=0)

    def _lose(self, which: int, worker: ModelWorker, outcome: Outcome, *, again: bool = False) -> None:
        for _ in range(1 + again):
            at = Position(worker.name, worker.seen_turn, worker.index, worker.running)
            self.queue.recovery().recover(self.queue.name, worker.processor, at, outcome=outcome, cause="signal 9")
        self.model.lose_worker(worker, outcome)
        self.gone.append(worker)
        self.workers[which] = self._join(which)

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
        self._rescue(self._run(which, progress))

    @rule(which=WORKERS, progress=st.integers(1, 3))
    def claim_and_be_held_up(self, which: int, progress: int) -> None:
        """In one step, since batches that are long enough are seldom met otherwise."""
        self._take_turn(self._run(which, 9), want=4)
        self._rescue(self._run(which, progress))

    @rule(which=WORKERS, claims=st.booleans(), lose=st.booleans())
    def freeze_before_it_begins(self, which: int, claims: bool, lose: bool) -> None:
        """Its process does not answer, and it has begun nothing of what its last turn gave it, read or not."""
        worker = self._run(which, 9)
        if claims:
            self._take_turn(worker, want=4, lose=lose)
        if worker.seen_turn == worker.turn and (worker.running or worker.index):
            return
        held = self.real[worker.name].held()
        at = Position(worker.name, worker.turn, 0, False)
        assert self.queue.recovery(worker.processor).rescue(self.queue.name, at) == len(held)
        self.model.hand_back(self.model.owned(worker))
        worker.rescued = True

    def _rescue(self, worker: ModelWorker) -> None:
        if not worker.running:
            return
        held = self.real[worker.name].held()
        at = Position(worker.name, worker.seen_turn, worker.index, True)
        moved = self.queue.recovery(worker.processor).rescue(self.queue.name, at)
        place = worker.index - worker.shift
        if worker.seen_turn != worker.turn or len(held) <= place + 1:
            assert moved == 0
            return
        stays = worker.batch[: worker.index + 1] if self.model.keeps else worker.batch[worker.index]
        if not self.model.keeps:
            self.model.ran(worker, worker.batch[: worker.index])
            worker.shift = worker.index
        self.model.hand_back(job_id for job_id in self.model.owned(worker) if job_id not in stays)
        worker.rescued = True

    @rule(which=WORKERS, job_id=IDS, again=st.booleans())
    def report_progress(self, which: int, job_id: str, again: bool) -> None:
        """Of any job, also one that it does not run (any more); the call may arrive twice."""
        worker, text = self.workers[which], f"step {next(self.numbers)}"
        job = self.model.jobs.get(job_id)
        owns = job is not None and bool(worker.fence) and job.owner == f"{worker.name}:{worker.fence}"
        told = (
            self.queue.link,
            DEFAULT_PREFIX,
            self.queue.name,
            worker.name,
            job_id,
            int(worker.fence or 0),
            0.5,
            text,
        )
        for _ in range(1 + again):
            assert report_progress(*told) == owns
        if job is not None and owns:
            job.progress = text

    @rule(job_id=IDS, even_active=st.booleans())
    def take_away(self, job_id: str, even_active: bool) -> None:
        call = self.queue.producer.remove if even_active else self.queue.producer.cancel
        assert call(job_id) == self.model.cancel(job_id, even_active=even_active)

    @rule(promote=st.booleans())
    def let_time_pass(self, promote: bool) -> None:
        pass_time(self.queue, STEP_MS)
        self.model.pass_time(STEP_MS)
        self.checks.pass_time(STEP_MS)
        if promote:
            due_ms = self.queue.recovery().promote(self.queue.name)
            self.model.promote()
            self.model.forget_in_time()
            self.checks.limits.promoted(due_ms)
            ahead = [job.run_at - self.model.now_ms for job in self.model.jobs.values() if job.scheduled]
            if not self.checks.limits.may_be_due(self.queue.state()):
                assert (due_ms is None) == (not ahead)
                assert due_ms is None or abs(due_ms - min(ahead)) < MINUTE_MS

    @rule(paused=SELDOM, which=WORKERS)
    def pause_or_resume_or_beat(self, paused: bool, which: int) -> None:
        if paused != self.model.paused:
            self.queue.registry.pause(self.queue.name, paused=paused)
            self.model.paused = paused
        else:
            self._beat(self.processors[which])

    @rule(keeps=st.booleans())
    def keep_done_jobs_or_not(self, keeps: bool) -> None:
        keeps = keeps and self.may_keep
        self.queue.registry.configure(self.queue.name, {"keep_done_ms": KEEP_DONE_MS if keeps else 0}, {})
        self.model.keeps = keeps

    def _beat(self, processor: str) -> list[str]:
        of = [worker for worker in self.workers if worker.processor == processor]
        positions = [Position(worker.name, worker.seen_turn, worker.index, worker.running) for worker in of]
        beat = self.queue.recovery(processor).heartbeat(self.queue.name, EXPIRY_MS, positions)
        self.model.promote()
        self.model.forget_in_time()
        self.checks.limits.promoted(beat.due_ms)
        return beat.evicted

    @rule(by_silence=st.booleans())
    def lose_the_second_host(self, by_silence: bool) -> None:
        lost = self.processors[1]
        self._beat(lost)
        held = self.queue.state().processing
        if by_silence:
            self._beat("p1")
            self.queue.redis.zadd(self.queue.key("processors"), {lost: 1})
            self.queue.redis.hset(self.queue.key("counts"), "sweep_after_ms", 0)
            assert self._beat("p1") == [lost]
        else:
            self.queue.recovery().evict(self.queue.name, lost, "supervisor_lost")
        with pytest.raises(Fenced):
            self._beat(lost)
        self.processors[1:RETRY] = [f"p{next(self.numbers)}"] * 2
        for which in (1, 2):
            only = held.get(self.workers[which].name, [])
            self.model.lose_worker(self.workers[which], "stalled", only[0] if len(only) == 1 else None)
            self.gone.append(self.workers[which])
            self.workers[which] = self._join(which)

    @invariant()
    def no_registered_number_has_fallen(self) -> None:
        for worker in self.workers:
            found = self.queue.redis.hget(self.queue.key(f"processor:{worker.processor}:workers"), worker.name)
            assert int(found.partition(b":")[0]) == worker.turn >= worker.registered
            worker.registered = worker.turn

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        self.checks.all()

    def teardown(self) -> None:
        self.checks.limits.close()
        self.queue.close()


@pytest.mark.spec("R10", "R11", "R13", "R14", "Q4")
@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 400)
def test_no_interleaving_loses_doubles_or_strands_a_job(server: Server) -> None:
    explore(QueueMachine, server)


@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 400)
def test_no_interleaving_does_so_while_stale_hints_are_taken_out(server: Server) -> None:
    with sweeping_at_once():
        explore(QueueMachine, server)


def explore(machine_type: type[QueueMachine], server: Server) -> None:
    asked = os.environ.get("FORQ_MODEL_EXAMPLES")
    machine = type("Machine", (machine_type,), {"server": server})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(asked or examples(30, 120)),
            stateful_step_count=50,
            derandomize=asked is None,
            deadline=None,
            database=None,
            # Of a mutant only whether it is found counts.
            phases=[Phase.generate] if MUTANT in os.environ else list(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
