"""Units of capacity: who gets them, who must yield them, and that no waiter starves."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from forq.supervisor.capacity import (
    PATIENCE_SECONDS,
    SHORTEST_TICK_SECONDS,
    SLICE_SECONDS,
    Capacity,
    Holder,
    Instruction,
)
from tests.supervisor.capacity_model import AGING_SECONDS, CapacityModel, Kind, Simulation

# A power of two, like AGING_SECONDS, so that sums of them are exact; above SHORTEST_TICK_SECONDS.
TICK_SECONDS = 1 / 64


def go(holder: Holder) -> Instruction:
    return Instruction(holder, "go")


def wait(holder: Holder) -> Instruction:
    return Instruction(holder, "wait")


def ask(holder: Holder) -> Instruction:
    return Instruction(holder, "yield")


def capacity_of(units: int = 100, idle: Callable[[Holder], bool] = lambda holder: False) -> Capacity:
    return Capacity(units, aging_seconds=AGING_SECONDS, idle=idle)


def full(*holders: tuple[int, int], idle: tuple[Holder, ...] = ()) -> Capacity:
    """100 units; holders 0, 1, ... have held (units, priority) since -10."""
    capacity = capacity_of(idle=idle.__contains__)
    for holder, (units, priority) in enumerate(holders):
        assert capacity.want(holder, units, priority, -10.0) == [go(holder)]
    return capacity


def test_a_request_that_fits_is_granted_at_once_and_kept() -> None:
    capacity = capacity_of()
    assert [capacity.want(holder, 50, 0, 0.0) for holder in (1, 2)] == [[go(1)], [go(2)]]
    assert capacity.tick(1000.0) == []
    assert (capacity.granted, capacity.free) == (100, 0)
    assert capacity.next_tick_seconds(1000.0) is None


def test_a_request_that_fits_checks_no_other_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at(*args: object) -> bool:
        raise AssertionError(args)

    capacity = capacity_of(units=10_000, idle=look_at)
    monkeypatch.setattr(capacity, "_waiting_line", look_at)
    for holder in range(1000):
        assert capacity.want(holder, 10, 0, 0.0) == [go(holder)]
    for holder in range(1000):
        assert capacity.done(holder, 1.0) == []
    assert capacity.granted == 0


def test_a_request_above_the_capacity_gets_all_units() -> None:
    capacity = capacity_of()
    assert capacity.want(1, 10**6, 0, 0.0) == [go(1)]
    assert capacity.granted == 100


def test_waiters_are_ordered_by_priority_then_units_then_waiting_time() -> None:
    capacity = full((100, 9))
    for holder, units, priority in ((1, 40, 0), (2, 30, 0), (3, 30, 0), (4, 50, 1)):
        assert capacity.want(holder, units, priority, 0.0) == [wait(holder)]
    assert capacity.done(0, 0.1)[:2] == [go(4), go(2)]


def test_waiting_raises_the_priority_level() -> None:
    capacity = full((100, 9))
    capacity.want(1, 100, 0, 0.0)
    capacity.want(2, 100, 2, 3 * AGING_SECONDS)
    assert [waiter["level"] for waiter in capacity.describe(3 * AGING_SECONDS)["waiting"]] == [3, 2]
    assert capacity.done(0, 3 * AGING_SECONDS) == [go(1), ask(1)]


@pytest.mark.parametrize(("priority", "asked"), [(1, [ask(0)]), (0, []), (-1, [])])
def test_only_holders_of_lower_priority_must_yield_at_once(priority: int, asked: list[Instruction]) -> None:
    capacity = capacity_of()
    capacity.want(0, 100, 0, 0.0)
    assert capacity.want(1, 10, priority, SLICE_SECONDS / 2) == [wait(1), *asked]


def test_a_holder_of_the_same_priority_yields_after_its_slice() -> None:
    capacity = capacity_of()
    capacity.want(0, 100, 0, 0.0)
    assert capacity.want(1, 10, 0, 0.02) == [wait(1)]
    assert capacity.next_tick_seconds(0.02) == pytest.approx(SLICE_SECONDS - 0.02)
    assert capacity.tick(SLICE_SECONDS) == [ask(0)]


def test_a_holder_of_higher_priority_yields_once_the_head_has_risen_to_it() -> None:
    capacity = full((100, 1))
    assert capacity.want(1, 10, 0, 0.0) == [wait(1)]
    assert capacity.tick(AGING_SECONDS - TICK_SECONDS) == []
    assert capacity.tick(AGING_SECONDS) == [ask(0)]


def test_idle_holders_must_yield_first_whatever_their_priority() -> None:
    capacity = full((50, 0), (50, 9), idle=(1,))
    assert capacity.want(2, 10, 5, 0.0) == [wait(2), ask(1)]


def test_no_more_holders_than_needed_must_yield_and_each_only_once() -> None:
    capacity = full((40, 0), (30, -1), (30, -1))
    assert capacity.want(3, 50, 5, 0.0) == [wait(3), ask(1), ask(2)]
    assert capacity.want(3, 50, 5, 0.0) == [wait(3)]
    assert capacity.done(1, 0.1) == []
    assert capacity.done(2, 0.1) == [go(3)]


def test_among_equal_priorities_the_oldest_holder_must_yield() -> None:
    capacity = capacity_of()
    for holder, since in ((0, 2.0), (1, 1.0), (2, 3.0)):
        capacity.want(holder, 30, 0, since)
    assert capacity.want(3, 20, 5, 10.0) == [wait(3), ask(1)]


def test_a_tick_is_due_when_another_waiter_becomes_first() -> None:
    capacity = full((60, -1), (40, -1))
    assert capacity.want(2, 100, 0, 0.0) == [wait(2), ask(0), ask(1)]
    assert capacity.want(3, 30, 1, 1.5 * AGING_SECONDS) == [wait(3)]
    assert capacity.done(1, 2 * AGING_SECONDS) == []
    assert capacity.next_tick_seconds(2 * AGING_SECONDS) == 0.5 * AGING_SECONDS
    assert capacity.tick(2.5 * AGING_SECONDS) == [go(3), ask(3)]


def test_a_holder_that_becomes_idle_must_yield_even_if_a_busy_one_was_requested_to() -> None:
    idle: set[Holder] = set()
    capacity = capacity_of(idle=idle.__contains__)
    capacity.want(0, 50, 0, 0.0)
    capacity.want(1, 50, 9, 0.0)
    assert capacity.want(2, 50, 5, 1.0) == [wait(2), ask(0)]
    idle.add(1)
    assert capacity.next_tick_seconds(1.0) == pytest.approx(SLICE_SECONDS)
    assert capacity.tick(1.0 + SLICE_SECONDS) == [ask(1)]


def test_ticks_have_a_minimum_interval() -> None:
    capacity = capacity_of()
    capacity.want(0, 100, 0, 0.0)
    now = SLICE_SECONDS - SHORTEST_TICK_SECONDS / 10
    capacity.want(1, 10, 0, now)
    assert capacity.next_tick_seconds(now) == pytest.approx(SHORTEST_TICK_SECONDS)


def test_querying_the_next_tick_does_not_postpone_it() -> None:
    capacity = full((100, 1))
    capacity.want(1, 10, 0, 0.0)
    assert capacity.next_tick_seconds(0.04) == pytest.approx(SLICE_SECONDS - 0.04)
    assert capacity.next_tick_seconds(0.3) == 0.0


def test_a_new_grant_does_not_count_as_idle_at_first() -> None:
    capacity = capacity_of(idle=lambda holder: True)
    capacity.want(0, 100, 9, 0.0)
    assert capacity.want(1, 100, 0, 0.01) == [wait(1)]
    assert capacity.tick(SLICE_SECONDS) == [ask(0)]


def test_smaller_requests_overtake_a_large_one_until_it_has_waited_long_enough() -> None:
    capacity = full((60, 9))
    assert capacity.want(1, 100, 5, 0.0) == [wait(1)]
    assert capacity.want(2, 20, 0, AGING_SECONDS - TICK_SECONDS) == [go(2), ask(2)]
    assert capacity.want(3, 20, 0, AGING_SECONDS) == [wait(3)]
    assert capacity.done(2, AGING_SECONDS) == []
    assert capacity.done(0, AGING_SECONDS) == [go(1)]


def test_units_of_a_dead_holder_are_granted_in_the_same_call() -> None:
    capacity = full((100, 0))
    capacity.want(1, 100, 0, 0.0)
    capacity.want(2, 100, 0, 0.0)
    assert capacity.done(1, 0.01) == []
    assert capacity.done(0, 0.01) == [go(2)]


def test_a_repeated_request_keeps_its_place_and_a_changed_one_loses_it() -> None:
    capacity = full((100, 9))
    capacity.want(1, 50, 0, 0.0)
    capacity.want(1, 50, 0, AGING_SECONDS)
    assert capacity.describe(AGING_SECONDS)["waiting"][0]["waited_seconds"] == AGING_SECONDS
    capacity.want(1, 60, 0, AGING_SECONDS)
    assert capacity.describe(AGING_SECONDS)["waiting"][0]["waited_seconds"] == 0


def test_describe_lists_holders_and_waiters() -> None:
    capacity = full((100, 0))
    capacity.want(1, 30, 2, 0.0)
    holders = [{"holder": 0, "units": 100, "priority": 0, "held_seconds": 10.5, "yield_sent": True}]
    waiting = [{"holder": 1, "units": 30, "priority": 2, "level": 4, "waited_seconds": 0.5}]
    assert capacity.describe(0.5) == {"units": 100, "granted": 100, "free": 0, "holders": holders, "waiting": waiting}


HOLDERS = st.integers(0, 7)
SIZES = st.sampled_from((1, 10, 10, 30, 50, 70, 100, 500))
PRIORITIES = st.integers(-2, 2)


class CapacityMachine(RuleBasedStateMachine):
    """Any calls in any order, sensible or not."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CapacityModel()
        self.idleness_changed = False

    @rule(holder=HOLDERS, units=SIZES, priority=PRIORITIES)
    def want(self, holder: Holder, units: int, priority: int) -> None:
        self.model.want(holder, units, priority)

    @rule(holder=HOLDERS)
    def done(self, holder: Holder) -> None:
        self.model.done(holder)

    @rule(holder=HOLDERS)
    def gone(self, holder: Holder) -> None:
        self.model.gone(holder)

    @rule(holder=HOLDERS)
    def turn_idle_or_busy(self, holder: Holder) -> None:
        self.model.idle ^= {holder}
        self.idleness_changed = True

    @rule(ticks=st.integers(1, 40))
    def time_passes(self, ticks: int) -> None:
        patience = self.model.capacity.next_tick_seconds(self.model.now)
        self.model.now += ticks * TICK_SECONDS
        instructions = self.model.tick()
        if not self.idleness_changed and (patience is None or ticks * TICK_SECONDS < patience):
            assert instructions == [], "a tick was due earlier than announced"
        self.idleness_changed = False

    @rule()
    def tick_when_due(self) -> None:
        patience = self.model.capacity.next_tick_seconds(self.model.now)
        if patience is not None:
            # Rounded up to whole ticks, so that sums stay exact.
            self.model.now += -(-patience // TICK_SECONDS) * TICK_SECONDS
            self.model.tick()


def test_the_capacity_rules_hold_for_any_order_of_calls() -> None:
    run_state_machine_as_test(
        CapacityMachine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None)
    )


def test_units_of_a_new_grant_do_not_spare_an_idle_holder() -> None:
    """Its holder is idle, but may not have received the grant yet."""
    model = CapacityModel()
    model.idle |= {1, 2}
    model.want(2, 1, 1)
    model.now += TICK_SECONDS
    model.want(1, 70, 0)
    assert model.want(0, 30, 1) == [wait(0), ask(1)]
    model.now += 3 * TICK_SECONDS
    assert model.tick() == [ask(2)]


KINDS = st.builds(
    Kind,
    st.sampled_from((10, 30, 50, 60, 100)),
    st.integers(-2, 2),
    st.sampled_from((0.002, 0.02, 0.3)),
    st.sampled_from((0.0, 0.0, 0.3)),
    st.sampled_from((0.0, 0.0, 0.02)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(KINDS, min_size=2, max_size=7), st.integers(0, 10**6))
def test_every_waiter_is_served_in_bounded_time(kinds: list[Kind], seed: int) -> None:
    simulation = Simulation(kinds, seed)
    simulation.run(6.0)
    assert min(simulation.served) > 0


def test_the_higher_priority_gets_most_units_and_the_lower_one_does_not_starve() -> None:
    simulation = Simulation([Kind(100, 4, 0.004), Kind(100, 0, 0.004)], seed=1)
    simulation.run(20.0)
    high, low = simulation.served
    assert low >= 20.0 / (6 * AGING_SECONDS)
    assert high > 20 * low


def test_equal_priorities_get_equal_shares() -> None:
    simulation = Simulation([Kind(60, 0, 0.004), Kind(60, 0, 0.004), Kind(60, 0, 0.004)], seed=1)
    simulation.run(20.0)
    assert min(simulation.served) > 0.8 * max(simulation.served)


def test_a_holder_that_never_yields_does_not_block_units_of_idle_holders() -> None:
    """A holder whose process is stopped cannot yield."""
    capacity = Capacity(100, aging_seconds=100.0, idle=lambda holder: True)
    for holder in (1, 2):
        capacity.want(holder, 50, 0, now=0.0)
    assert capacity.want(3, 50, 0, now=1.0) == [Instruction(3, "wait"), Instruction(1, "yield")]
    due = capacity.next_tick_seconds(1.0)
    assert due is not None
    assert due <= PATIENCE_SECONDS
    assert capacity.tick(1.0 + PATIENCE_SECONDS) == [Instruction(2, "yield")]
    assert capacity.done(2, 2.1) == [Instruction(3, "go")]
