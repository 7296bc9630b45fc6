"""The model-based test of test_model.py with limits that are set, changed and lifted, and tokens that refill."""

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from forq.broker.recovery import Outcome
from tests.broker.test_model import OUTCOMES, PRIORITIES, RETRY, WORKERS, QueueMachine, explore
from tests.support.drive.limits import pass_hours, stored_limits
from tests.support.drive.server import Server
from tests.support.models.limits import BURST

MAX_ACTIVE = st.sampled_from((1, 2, 2, 3, 0))
MOSTLY = st.sampled_from((True, True, True, False))
MAIN_WORKERS = st.permutations((0, 1, 2))


class LimitedQueueMachine(QueueMachine):
    may_keep = False

    @initialize(max_active=MAX_ACTIVE, rate=st.booleans())
    def it_is_limited(self, max_active: int, rate: bool) -> None:
        self.checks.limits.listen()
        self.keep_done_jobs_or_not(False)
        self._limit(max_active, rate)
        self.much_waits(5)

    @rule(max_active=MAX_ACTIVE, rate=MOSTLY, at_once=MOSTLY)
    def set_limits(self, max_active: int, rate: bool, at_once: bool) -> None:
        self._limit(max_active, rate)
        if at_once:
            self._promote()

    def _limit(self, max_active: int, rate: bool) -> None:
        limits, before = self.model.limits, bool(self.model.limits)
        self.queue.registry.configure(self.queue.name, stored_limits(max_active, rate), {})
        limits.max_active, limits.rate = max_active, rate
        limits.promised = limits.promised or before
        if not limits:
            self._promote()

    @rule(hours=st.integers(1, BURST), at_once=MOSTLY)
    def tokens_come_in(self, hours: int, at_once: bool) -> None:
        pass_hours(self.queue, hours)
        self.model.limits.refill(hours)
        self.model.limits.promised = True
        if at_once:
            self._promote()

    def _promote(self) -> None:
        due_ms = self.queue.recovery().promote(self.queue.name)
        self.model.promote()
        self.checks.limits.promoted(due_ms)
        for worker in self.workers:
            if not self.model.limits:
                # A woken worker takes its next turn at once.
                worker.limited = False

    @rule(priority=PRIORITIES)
    def much_waits(self, priority: int) -> None:
        self._enqueue("abcdef", self._dispatch(priority, "now"), "skip")

    @rule(order=MAIN_WORKERS, want=st.integers(1, 2))
    def all_who_are_awake_work(self, order: list[int], want: int) -> None:
        """Including workers that are woken by it."""
        for which in order:
            worker = self.workers[which]
            if not worker.limited or self.checks.limits.is_woken(worker):
                self._take_turn(self._run(which, 9), want=want)

    @rule(which=WORKERS)
    def end_what_runs(self, which: int) -> None:
        """Claims nothing, so that others can."""
        self._take_turn(self._run(which, 9), want=0)

    @rule(outcome=OUTCOMES)
    def a_process_dies_with_two_jobs(self, outcome: Outcome) -> None:
        for which in (1, 2):
            self._lose(which, self._run(which, 1), outcome)
        self._take_turn(self._run(RETRY, 9), want=1)

    @invariant()
    def no_worker_sleeps_that_may_start(self) -> None:
        self.checks.limits.check(self.queue.state(), self.workers)


@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 400)
def test_no_interleaving_exceeds_a_limit_or_leaves_a_worker_asleep_that_may_start(server: Server) -> None:
    explore(LimitedQueueMachine, server)
