"""The model-based test of the scripts once more, with limits that come, change and go, and tokens that come in."""

import os

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.broker.test_model import WORKERS, QueueMachine, explore
from tests.support.limits_model import BURST, HOUR_US
from tests.support.server import Server

MAX_ACTIVE = st.sampled_from((0, 1, 2, 2, 3))


class LimitedQueueMachine(QueueMachine):
    @initialize(max_active=MAX_ACTIVE, rate=st.booleans())
    def it_is_limited(self, max_active: int, rate: bool) -> None:
        self.checks.limits.listen()
        self._limit(max_active, rate)

    @rule(max_active=MAX_ACTIVE, rate=st.booleans())
    def set_limits(self, max_active: int, rate: bool) -> None:
        self._limit(max_active, rate)

    def _limit(self, max_active: int, rate: bool) -> None:
        limits, before = self.model.limits, bool(self.model.limits)
        options = {"max_active": max_active, "rate_count": int(rate), "rate_ms": HOUR_US // 1000, "burst": BURST}
        self.queue.registry.configure(self.queue.name, options, {})
        limits.max_active, limits.rate = max_active, rate
        limits.promised = before
        if not limits:
            self._promote()

    @rule(hours=st.integers(1, BURST))
    def tokens_come_in(self, hours: int) -> None:
        bucket_us = float(self.queue.redis.hget(self.queue.key("counts"), "bucket_us") or 0)
        if bucket_us:
            self.queue.redis.hset(self.queue.key("counts"), "bucket_us", f"{bucket_us - hours * HOUR_US:.1f}")
        self.model.limits.refill(hours)
        self.model.limits.promised = True

    @rule()
    def promote(self) -> None:
        self._promote()

    def _promote(self) -> None:
        due_ms = self.queue.keeper().promote(self.queue.name)
        self.model.promote()
        self.checks.limits.promoted(due_ms)
        for worker in self.workers:
            if not self.model.limits:
                # It was woken: its next turn comes at once.
                worker.limited = False

    @rule(which=WORKERS, want=st.integers(1, 4))
    def work_on(self, which: int, want: int) -> None:
        """Once more what workers do most: else there are too few that run when limits change."""
        self._take_turn(self._run(which, 9), want=want)

    @invariant()
    def nobody_sleeps_who_may_begin(self) -> None:
        self.checks.limits.check(self.queue.state(), self.workers)


@pytest.mark.timeout(3600 if "FORQ_MODEL_EXAMPLES" in os.environ else 120)
def test_no_interleaving_exceeds_a_limit_or_lets_a_worker_sleep_that_may_begin(server: Server) -> None:
    explore(LimitedQueueMachine, server)
