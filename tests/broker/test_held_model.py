"""Held jobs against the model: the steps of test_model.py, and jobs that wait for others.

FORQ_MODEL_EXAMPLES=5000 runs more examples, different ones each time.
"""

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from forq.broker import dependencies
from forq.broker.enqueue import Update, new_job
from forq.errors import Exists, ForqError, QueueFull, UnknownDependency, UsageError
from tests.broker.slow_flows import MAX_ENDS, following_one_edge_per_call
from tests.broker.test_model import (
    EXPIRES_IN_MS,
    IDS,
    IF_EXISTS,
    OPTIONS,
    PRIORITIES,
    RUN_AT,
    SELDOM,
    WORKERS,
    QueueMachine,
    explore,
)
from tests.support.drive.server import Server
from tests.support.models.held import After
from tests.support.models.held_checks import Flows
from tests.support.models.queue import Dispatch, Full, NotKept, Taken, Unknown

# No job has the last id.
NAMES = st.lists(st.sampled_from("abcdefabcdefz"), min_size=1, max_size=3, unique=True).map("".join)
WHEN = st.sampled_from(("done", "done", "ended", "dead"))
USE = st.sampled_from((dependencies.NOT_USED, dependencies.NOT_USED, dependencies.READ, dependencies.AS_LIST))
# A job, and what it waits for.
LINES = st.lists(st.tuples(IDS, st.one_of(st.just(""), NAMES)), min_size=2, max_size=4)
REFUSALS: dict[type[Exception], type[ForqError]] = {
    Taken: Exists,
    Full: QueueFull,
    Unknown: UnknownDependency,
    NotKept: UsageError,
}


class HeldMachine(QueueMachine):
    @rule(
        job_id=IDS,
        names=NAMES,
        when=WHEN,
        results=USE,
        priority=PRIORITIES,
        run_at=RUN_AT,
        if_exists=IF_EXISTS,
        options=OPTIONS,
    )
    def enqueue_after(
        self,
        job_id: str,
        names: str,
        when: str,
        results: int,
        priority: int,
        run_at: str,
        if_exists: str,
        options: str,
    ) -> None:
        dispatch = self._dispatch(priority, run_at, options=options)
        self._store([(self._unused(job_id), dispatch, After(tuple(names), when, results))], if_exists)

    @rule(job_id=IDS, names=NAMES, if_exists=IF_EXISTS)
    def enqueue_any_id_after(self, job_id: str, names: str, if_exists: str) -> None:
        self._store([(job_id, self._dispatch(5, "now"), After(tuple(names)))], if_exists)

    @rule(job_id=IDS, when=WHEN, results=USE)
    def enqueue_after_what_is_there(self, job_id: str, when: str, results: int) -> None:
        names = [name for name in "fedcba" if self.model.lives(name)]
        if names:
            after = After(tuple(names[:3]), when, results)
            self._store([(self._unused(job_id), self._dispatch(5, "now"), after)], "update")

    @rule(lines=LINES, when=WHEN, results=USE, if_exists=IF_EXISTS)
    def enqueue_several(self, lines: list[tuple[str, str]], when: str, results: int, if_exists: str) -> None:
        """In one call: chains, repeated ids, and ids that are stored later in it."""
        self._store(
            [
                (job_id, self._dispatch(5, "now"), After(tuple(names), when, results) if names else None)
                for job_id, names in lines
            ],
            if_exists,
        )

    @rule(which=WORKERS, results=USE, lose=SELDOM)
    def wait_for_the_enqueue_behind_an_active_job(self, which: int, results: int, lose: bool) -> None:
        """In one step, because it is rare otherwise."""
        self._take_turn(self._run(which, 9), want=2)
        worker = self.workers[which]
        for job_id in self.model.owned(worker)[:1]:
            if self.model.items() < 6:
                self._store([(job_id, self._dispatch(5, "now"), None)], "update")
                waiting = self._unused(job_id)
                self._store([(waiting, self._dispatch(5, "now"), After((job_id,), "ended", results))], "update")
        if lose:
            self._lose(which, self._run(which, 1), "stalled")

    def _unused(self, job_id: str) -> str:
        """This id or the next one that no job has; this one if all are in use."""
        at = "abcdef".index(job_id)
        return next((other for other in ("abcdef" * 2)[at : at + 6] if not self.model.lives(other)), job_id)

    def _store(self, lines: list[tuple[str, Dispatch, After | None]], if_exists: str) -> None:
        jobs = []
        for job_id, dispatch, after in lines:
            run_at = dispatch.run_at / 1000 or None
            options = f"x={EXPIRES_IN_MS}" if dispatch.expires else dispatch.options
            job = new_job(dispatch.data, id=job_id, priority=dispatch.priority, run_at=run_at, options=options)
            if after is not None:
                words = tuple(f"j{name}" for name in after.names)
                job = job._replace(after=dependencies.After(words, after.when, after.use).pack())
            jobs.append(job)
        try:
            self.model.store(lines, if_exists)
        except tuple(REFUSALS) as refusal:
            with pytest.raises(REFUSALS[type(refusal)]):
                self.queue.producer.enqueue(jobs, Update(if_exists))
        else:
            stored = self.queue.producer.enqueue_identified(jobs, Update(if_exists))
            assert [job_id for job_id, _ in stored] == [job_id for job_id, _, _ in lines]


class SlowHeldMachine(HeldMachine):
    """Each call follows one edge only, and few ends are remembered: pulse does most of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.checks.forget_ends(MAX_ENDS)

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        flows = Flows(self.queue)
        flows.check()
        while flows.resolving:
            before, due_ms = flows.resolving, self.queue.recovery().promote(self.queue.name)
            flows = Flows(self.queue)
            flows.check()
            assert flows.resolving != before
            assert due_ms == 0 or not flows.resolving, "pulse would not come back at once"
            self.model.promote()
            self.model.forget_in_time()
        super().all_is_as_it_should_be()


@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 400)
def test_no_interleaving_lets_a_job_run_too_soon_or_wait_for_ever(server: Server) -> None:
    explore(HeldMachine, server, 40, 200)


@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 400)
def test_no_interleaving_does_so_while_pulse_follows_the_edges(server: Server) -> None:
    with following_one_edge_per_call():
        explore(SlowHeldMachine, server, 20, 120)
