"""The grant of a worker: the messages it sends, and its state when messages cross."""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from forq.supervisor.capacity import Capacity, Instruction
from forq.workers.grant import Grant
from tests.support.drive.wait import wait_until

DONE: dict[str, object] = {"done": 7}
PATIENCE_SECONDS = 10.0


def want(units: int = 10, priority: int = 0) -> dict[str, object]:
    return {"want": 7, "units": units, "priority": priority}


class Parent:
    """Records the messages it receives, and answers each request at once with the given messages."""

    def __init__(self) -> None:
        self.received: list[dict[str, object]] = []
        self.answers: list[tuple[str, ...]] = []
        self.broken = False
        self.grant = Grant(self._receive, 7)

    def _receive(self, message: dict[str, object]) -> None:
        if self.broken:
            raise BrokenPipeError
        self.received.append(message)
        if "want" in message and self.answers:
            threading.Thread(target=self._send, args=(self.answers.pop(0),)).start()

    def _send(self, messages: tuple[str, ...]) -> None:
        for message in messages:
            self.grant.receive(message)

    def take_messages(self) -> list[dict[str, object]]:
        received, self.received = self.received, []
        return received


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Parent:
    # Answers come from another thread, which may take longer than the real 50 ms on a busy machine.
    monkeypatch.setattr("forq.workers.grant.ANSWER_SECONDS", 1.0)
    return Parent()


@contextmanager
def in_thread(call: Callable[[], bool]) -> Iterator[list[bool]]:
    """Runs `call` concurrently with the block; its result is in the list afterwards."""
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    yield results
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def holding(parent: Parent) -> Grant:
    """A grant in use."""
    parent.answers = [("go",)]
    assert parent.grant.acquire(10, 0)
    assert parent.take_messages() == [want()]
    return parent.grant


def waiting_grant(parent: Parent) -> Grant:
    """A grant whose worker was answered "wait" and does not wait yet."""
    parent.answers = [("wait",)]
    assert not parent.grant.acquire(10, 0)
    assert parent.take_messages() == [want()]
    return parent.grant


def test_without_a_shortage_a_grant_is_requested_only_once(parent: Parent) -> None:
    grant = holding(parent)
    for _ in range(100):
        grant.stop_using()
        assert grant.acquire(10, 0)
        assert grant.acquire(10, 0)
    assert parent.take_messages() == []


def test_an_idle_grant_that_must_yield_is_returned_at_once(parent: Parent) -> None:
    grant = holding(parent)
    grant.stop_using()
    grant.receive("yield")
    assert parent.take_messages() == [DONE]
    assert not grant.yield_requested


def test_a_grant_in_use_that_must_yield_is_returned_when_the_worker_is_idle(parent: Parent) -> None:
    grant = holding(parent)
    grant.receive("yield")
    assert grant.yield_requested
    assert parent.take_messages() == []
    grant.stop_using()
    assert parent.take_messages() == [DONE]
    assert not grant.yield_requested


def test_a_worker_that_must_yield_requests_a_new_grant_before_its_next_batch(parent: Parent) -> None:
    grant = holding(parent)
    grant.receive("yield")
    parent.answers = [("wait",)]
    assert not grant.acquire(10, 0)
    assert parent.take_messages() == [DONE, want()]


def test_a_yield_received_with_the_grant_still_allows_one_batch(parent: Parent) -> None:
    grant = waiting_grant(parent)
    with in_thread(grant.wait) as result:
        wait_until(lambda: grant._worker_waiting)
        grant.receive("go")
        grant.receive("yield")
    assert result == [True]
    assert grant.yield_requested
    assert parent.take_messages() == []


def test_a_missing_answer_does_not_block_the_worker(parent: Parent) -> None:
    assert not parent.grant.acquire(10, 0)
    assert not parent.grant.acquire(10, 0)
    assert parent.take_messages() == [want()]


def test_a_worker_that_must_wait_returns_its_jobs_without_a_timeout(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forq.workers.grant.ANSWER_SECONDS", 6 * PATIENCE_SECONDS)
    with in_thread(lambda: parent.grant.acquire(10, 0)) as result:
        wait_until(lambda: parent.grant._worker_waiting)
        parent.grant.receive("wait")
    assert result == [False]


def test_a_grant_between_begin_and_wait_is_not_lost(parent: Parent) -> None:
    grant = waiting_grant(parent)
    grant.receive("go")
    assert grant.wait()
    assert parent.take_messages() == []


def test_a_grant_and_a_yield_between_begin_and_wait_cause_a_new_request(parent: Parent) -> None:
    grant = waiting_grant(parent)
    grant.receive("go")
    grant.receive("yield")
    assert parent.take_messages() == [DONE]
    parent.answers = [("wait", "go")]
    assert grant.wait()
    assert parent.take_messages() == [want()]


def test_a_grant_that_is_no_longer_requested_is_returned(parent: Parent) -> None:
    grant = waiting_grant(parent)
    grant.give_back()
    assert parent.take_messages() == []
    grant.receive("go")
    assert parent.take_messages() == [DONE]


def test_a_duplicate_grant_changes_nothing(parent: Parent) -> None:
    grant = holding(parent)
    grant.receive("go")
    assert parent.take_messages() == []
    grant.receive("yield")
    assert grant.yield_requested, "it is still in use"
    parent.answers = [("go",)]
    assert grant.acquire(10, 0)
    grant.stop_using()
    parent.take_messages()
    grant.receive("go")
    assert parent.take_messages() == []


def test_a_worker_that_waits_for_jobs_needs_a_new_grant(parent: Parent) -> None:
    grant = waiting_grant(parent)
    grant.give_back()
    with in_thread(grant.wait) as result:
        wait_until(lambda: grant._worker_waiting)
        grant.receive("go")
    assert result == [True]
    assert parent.take_messages() == []


def test_only_acquire_waits_for_an_answer_with_a_timeout(parent: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    grant = parent.grant
    timeouts: list[float | None] = []

    def wait_for(condition: Callable[[], bool], seconds: float | None) -> None:
        assert not condition()
        timeouts.append(seconds)
        if seconds is None:
            grant._receive_go()
            assert condition()

    monkeypatch.setattr(grant._changed, "wait_for", wait_for)
    assert not grant.acquire(10, 0)
    assert grant.wait()
    assert timeouts == [1.0, None]


def test_a_late_yield_does_not_cancel_the_next_request(parent: Parent) -> None:
    grant = holding(parent)
    grant.give_back()
    parent.answers = [("yield", "go")]
    assert grant.acquire(10, 0)
    assert parent.take_messages() == [DONE, want()]
    assert not grant.yield_requested


@pytest.mark.parametrize(("units", "priority"), [(20, 0), (10, 5)])
def test_changed_terms_return_the_grant_and_request_a_new_one(parent: Parent, units: int, priority: int) -> None:
    grant = holding(parent)
    grant.stop_using()
    parent.answers = [("go",)]
    assert grant.acquire(units, priority)
    assert parent.take_messages() == [DONE, want(units, priority)]


def test_changed_terms_are_requested_only_after_the_earlier_answer(parent: Parent) -> None:
    grant = waiting_grant(parent)
    assert not grant.acquire(50, 0)
    assert parent.take_messages() == []
    parent.answers = [("go",)]
    with in_thread(grant.wait) as result:
        wait_until(lambda: grant._worker_waiting)
        grant.receive("go")
    assert result == [True]
    assert parent.take_messages() == [DONE, want(50)]


def test_stop_wakes_a_waiting_worker_and_withdraws_its_request(parent: Parent) -> None:
    grant = waiting_grant(parent)
    with in_thread(grant.wait) as result:
        wait_until(lambda: grant._worker_waiting)
        grant.stop()
    assert result == [False]
    assert parent.take_messages() == [DONE]


def test_a_grant_received_after_the_stop_is_returned(parent: Parent) -> None:
    grant = waiting_grant(parent)
    grant.stop()
    parent.take_messages()
    grant.receive("go")
    assert parent.take_messages() == [DONE]
    assert not grant.wait()
    assert not grant.acquire(10, 0)
    assert parent.take_messages() == []


def test_stop_returns_an_unused_grant_and_leaves_one_in_use_to_the_worker(parent: Parent) -> None:
    grant = holding(parent)
    grant.stop()
    assert parent.take_messages() == []
    grant.stop_using()
    assert parent.take_messages() == [DONE]
    other = Parent()
    kept = holding(other)
    kept.stop_using()
    kept.stop()
    assert other.take_messages() == [DONE]


def test_a_grant_followed_by_a_stop_before_the_worker_wakes_is_returned(parent: Parent) -> None:
    grant = waiting_grant(parent)
    with in_thread(grant.wait) as result:
        wait_until(lambda: grant._worker_waiting)
        with grant._changed:
            grant._receive_go()
            grant._stopped = True
            grant._changed.notify_all()
    assert result == [False]
    assert parent.take_messages() == [DONE]


def test_a_message_that_cannot_be_sent_does_not_change_the_state(parent: Parent) -> None:
    grant = holding(parent)
    grant.receive("yield")
    parent.broken = True
    with pytest.raises(BrokenPipeError):
        grant.stop_using()
    assert grant.yield_requested
    parent.broken = False
    grant.stop_using()
    parent.broken = True
    with pytest.raises(BrokenPipeError):
        grant.acquire(10, 0)
    parent.broken = False
    parent.answers = [("go",)]
    assert grant.acquire(10, 0)
    assert parent.take_messages() == [DONE, want()]


def test_stop_wakes_the_worker_even_if_the_leash_is_broken(parent: Parent) -> None:
    grant = waiting_grant(parent)
    parent.broken = True
    with in_thread(grant.wait) as result:
        wait_until(lambda: grant._worker_waiting)
        with pytest.raises(BrokenPipeError):
            grant.stop()
    assert result == [False]


CAPACITY = 100
ENOUGH_BATCHES = 1500


class Rig:
    """A real Capacity and real Grants, each in its own thread, and messages that take a moment."""

    def __init__(self, terms: list[tuple[int, int]], seed: int) -> None:
        self.up: queue.Queue[dict[str, object] | None] = queue.Queue()
        self.down: list[queue.Queue[str | None]] = [queue.Queue() for _ in terms]
        self.grants = [Grant(self.up.put, number) for number in range(len(terms))]
        self.capacity = Capacity(CAPACITY, aging_seconds=0.02, idle=lambda number: not self.busy[number])
        self.terms = terms
        self.busy = [False] * len(terms)
        self.batches = [0] * len(terms)
        self.in_use = 0
        self.most_in_use = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.random = random.Random(seed)

    def parent(self) -> None:
        while True:
            patience = self.capacity.next_tick_seconds(time.monotonic())
            try:
                message = self.up.get(timeout=patience)
            except queue.Empty:
                self._send(self.capacity.tick(time.monotonic()))
                continue
            if message is None:
                return
            self._send(self._answer({key: int(str(value)) for key, value in message.items()}))

    def _answer(self, message: dict[str, int]) -> list[Instruction]:
        now = time.monotonic()
        if "want" in message:
            return self.capacity.want(message["want"], message["units"], message["priority"], now)
        return self.capacity.done(message["done"], now)

    def _send(self, orders: list[Instruction]) -> None:
        for order in orders:
            self.down[order.holder].put(order.action)

    def minder(self, number: int) -> None:
        while (message := self.down[number].get()) is not None:
            time.sleep(self.random.random() * 0.001)
            self.grants[number].receive(message)

    def worker(self, number: int) -> None:
        grant, chance = self.grants[number], random.Random(number)
        while not self.stopping.is_set():
            units, priority = self.terms[number]
            if chance.random() < 0.1:
                units = max(1, units // 2)
            if not grant.acquire(units, priority) and (chance.random() < 0.2 or not grant.wait()):
                grant.give_back()
                continue
            while self._run_batch(number, units, chance) and not grant.yield_requested and chance.random() < 0.9:
                pass
            grant.stop_using() if chance.random() < 0.8 else grant.give_back()
            time.sleep(chance.random() * 0.002)
        grant.give_back()

    def _run_batch(self, number: int, units: int, chance: random.Random) -> bool:
        with self.lock:
            self.in_use += units
            self.most_in_use = max(self.most_in_use, self.in_use)
        self.busy[number] = True
        time.sleep(chance.random() * 0.003)
        self.busy[number] = False
        with self.lock:
            self.in_use -= units
        self.batches[number] += 1
        return not self.stopping.is_set()


def test_concurrent_grants_never_exceed_the_capacity_and_all_workers_progress() -> None:
    terms = [(10, 0), (10, 0), (30, 1), (30, 5), (60, 0), (60, 2), (100, 0), (100, 5), (45, -3), (5, 3)]
    rig = Rig(terms, seed=1)
    ends = [threading.Thread(target=rig.parent)]
    ends += [threading.Thread(target=rig.minder, args=(number,)) for number in range(len(terms))]
    workers = [threading.Thread(target=rig.worker, args=(number,)) for number in range(len(terms))]
    for thread in ends + workers:
        thread.start()
    wait_until(lambda: min(rig.batches) >= 5 and sum(rig.batches) >= ENOUGH_BATCHES)
    rig.stopping.set()
    for grant in rig.grants:
        grant.stop()
    for thread in workers:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    wait_until(lambda: rig.capacity.granted == 0 and not rig.capacity.describe(0)["waiting"])
    rig.up.put(None)
    for line in rig.down:
        line.put(None)
    for thread in ends:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert CAPACITY / 2 < rig.most_in_use <= CAPACITY
