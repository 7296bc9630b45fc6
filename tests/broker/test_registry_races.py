"""Two callers create and delete one queue at the same time: every order of their steps, and a crash after every step
(`make test` tries one order of four).

A step is one call that reads or changes the queue or its registry entry. Calls about the trash and the names of deleted
queues are independent of other callers and are not steps.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest

from forq.broker.keys import DEFAULT_PREFIX, fail_queue, queue_base, registry_key
from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.broker.scripts import NO_QUEUE, OK, script
from forq.errors import BeingDeleted, ForqError, QueueNotEmpty, UnknownQueue
from forq.settings import stored_defaults
from forq.version import PROTOCOL
from tests.support.drive.server import Server
from tests.support.thorough import sample

pytestmark = [pytest.mark.timeout(300), pytest.mark.one_server]

NAME = "q"
BASE = queue_base(DEFAULT_PREFIX, NAME)
FAIL_BASE = queue_base(DEFAULT_PREFIX, fail_queue(NAME))
Caller = Callable[[Registry], object]


class Died(BaseException):
    """Simulates the death of the caller's process."""


class SteppingLink(Link):
    """Each call to the server waits until it is this caller's turn."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.may_go = threading.Semaphore(0)
        self.has_stopped = threading.Semaphore(0)
        self.dies = False

    def call(self, *args: Any, at: str | None = None) -> Any:
        if args[0] in ("HGET", "EXISTS", "GET") or (args[0] == "FCALL" and "remember" not in args[1]):
            self._step()
        return super().call(*args, at=at)

    def _exchange(self, *args: Any) -> Any:
        self._step()
        return super()._exchange(*args)

    def _step(self) -> None:
        self.has_stopped.release()
        self.may_go.acquire()
        if self.dies:
            raise Died


class Stepper:
    """Runs a caller in its own thread, step by step."""

    def __init__(self, url: str, what: Caller) -> None:
        self.link = SteppingLink(url)
        self.over = False
        self._what = what
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.link.has_stopped.acquire()

    def _run(self) -> None:
        try:
            self._what(Registry(self.link, DEFAULT_PREFIX))
        except (ForqError, Died):
            pass
        finally:
            self.over = True
            self.link.has_stopped.release()

    def step(self) -> None:
        if not self.over:
            self.link.may_go.release()
            self.link.has_stopped.acquire()

    def finish(self) -> None:
        while not self.over:
            self.step()
        self._close()

    def die(self) -> None:
        self.link.dies = True
        self.finish()

    def _close(self) -> None:
        self._thread.join()
        self.link.close()


def create(registry: Registry) -> bool:
    return registry.create(NAME, "work", 9, stored_defaults(), {"fail_handler": 1}, fail_options={"max_retries": 1})


def create_like_the_clerk(registry: Registry) -> None:
    try:
        create(registry)
    except BeingDeleted:
        while registry.purge(NAME, lambda lines: None):
            pass
        create(registry)


def delete(registry: Registry) -> None:
    """Deletes the queue without purging it."""
    registry.delete(NAME, force=True)


def end(registry: Registry) -> None:
    delete(registry)
    while registry.purge(NAME, lambda lines: None):
        pass


def repair(registry: Registry) -> None:
    while registry.repair(NAME, lambda lines: None):
        pass


# The initial state, and the two callers.
MEETINGS: list[tuple[str, Caller, Caller]] = [
    ("a queue", create_like_the_clerk, end),
    ("a queue", delete, end),
    ("a queue", delete, repair),
    ("nothing", create_like_the_clerk, create_like_the_clerk),
    ("nothing", create_like_the_clerk, end),
    ("half made", create_like_the_clerk, repair),
    ("half deleted", create_like_the_clerk, repair),
    ("half deleted", delete, repair),
    ("marked", create, repair),
]


@pytest.fixture
def registry(redis_url: str) -> Iterator[Registry]:
    link = Link(redis_url)
    yield Registry(link, DEFAULT_PREFIX)
    link.close()


def steps_of(url: str, prepare: Callable[[], None], what: Caller) -> int:
    """Counts the calls of an undisturbed caller."""
    prepare()
    alone, steps = Stepper(url, what), 0
    while not alone.over:
        alone.step()
        steps += 1
    return steps


def orders(first: int, second: int) -> Iterator[tuple[bool, ...]]:
    """Yields every order of this many steps of each caller; True stands for the first caller."""
    for chosen in combinations(range(first + second), first):
        yield tuple(number in chosen for number in range(first + second))


def check(server: Server, after: str) -> None:
    """Checks what must hold at any time, even after a crash."""
    with server.connect() as redis:
        there, entry = bool(redis.exists(f"{BASE}:options")), redis.hget(registry_key(DEFAULT_PREFIX), NAME)
        assert entry is not None or not there, f"queue without a registry entry: {after}"
        assert bool(redis.exists(f"{FAIL_BASE}:options")) == there, f"incomplete queue: {after}"
        assert redis.scard(f"{FAIL_BASE}:trash") == 0


def check_repaired(server: Server, registry: Registry, after: str) -> None:
    """Checks that the queue is complete or gone, and that it can be created and deleted."""
    repair(registry)
    with server.connect() as redis:
        there, entry = bool(redis.exists(f"{BASE}:options")), redis.hget(registry_key(DEFAULT_PREFIX), NAME)
        assert entry == (b"work" if there else None), f"wrong registry entry: {after}"
    assert create(registry) is not there
    check(server, after)
    end(registry)
    assert registry.names() == {}, after


@pytest.mark.parametrize(("before", "first", "second"), MEETINGS)
def test_no_order_of_steps_and_no_crash_leaves_an_incomplete_queue(
    server: Server, redis_url: str, registry: Registry, before: str, first: Caller, second: Caller
) -> None:
    def prepare() -> None:
        with server.connect() as redis:
            redis.flushdb()
            if before == "half made":
                redis.hset(registry_key(DEFAULT_PREFIX), NAME, "work")
            elif before != "nothing":
                create(registry)
            if before == "marked":
                delete(registry)
            elif before == "half deleted":
                dying = Stepper(redis_url, delete)
                dying.step()
                dying.step()
                dying.die()

    lengths = steps_of(redis_url, prepare, first), steps_of(redis_url, prepare, second)
    # One caller completes; the other crashes after some steps.
    plans = {(lived, lengths[1]) for lived in range(lengths[0] + 1)} | {(lengths[0], n) for n in range(lengths[1] + 1)}
    for plan in sorted(plans):
        for order in sample(list(orders(*plan)), one_in=4):
            after = f"{plan} of {lengths} steps in the order {''.join('12'[not mine] for mine in order)}"
            prepare()
            callers = Stepper(redis_url, first), Stepper(redis_url, second)
            for mine in order:
                callers[not mine].step()
            for caller, lived, all_steps in zip(callers, plan, lengths, strict=True):
                if lived < all_steps:
                    caller.die()
            for caller in callers:
                caller.finish()
            check(server, after)
            check_repaired(server, registry, after)


def test_a_late_delete_spares_the_next_queue_of_that_name(server: Server, redis_url: str, registry: Registry) -> None:
    create(registry)
    late = Stepper(redis_url, delete)
    late.step()
    end(registry)
    create(registry)
    late.finish()
    with server.connect() as redis:
        assert redis.exists(f"{BASE}:options", f"{FAIL_BASE}:options") == 2
    repair(registry)
    assert registry.names() == {NAME: "work"}


def test_a_refused_delete_leaves_the_fail_queue(server: Server, registry: Registry) -> None:
    create(registry)
    with server.connect() as redis:
        redis.hset(f"{BASE}:jobs", "a", "p5 0\n[]")
        with pytest.raises(QueueNotEmpty):
            registry.delete(NAME, force=False)
        assert redis.exists(f"{FAIL_BASE}:options") == 1


def test_a_new_queue_has_no_fail_jobs_of_the_previous_one(server: Server, registry: Registry) -> None:
    create(registry)
    with server.connect() as redis:
        redis.hset(f"{FAIL_BASE}:jobs", "a:1", "p5 0\n[]")
        end(registry)
        create(registry)
        assert redis.exists(f"{FAIL_BASE}:jobs", f"{FAIL_BASE}:trash") == 0


def test_no_fail_queue_is_created_without_its_queue(server: Server, redis_url: str) -> None:
    link = Link(redis_url)
    assert link.run(script("create"), FAIL_BASE, PROTOCOL, "fail", 0, 0, "") == [NO_QUEUE]
    link.close()
    with server.connect() as redis:
        assert redis.exists(f"{FAIL_BASE}:options") == 0


def test_a_caller_that_read_another_entry_leaves_the_entry_alone(redis_url: str, registry: Registry) -> None:
    create(registry)
    link = Link(redis_url)
    for entry in ("", "on_request"):
        assert link.run(script("retire"), registry_key(DEFAULT_PREFIX), NAME, "deleting 1", entry) == [OK, 0]
    link.close()
    assert registry.names() == {NAME: "work"}


def test_an_entry_without_a_queue_is_reported_and_repaired(server: Server, registry: Registry) -> None:
    create(registry)
    with server.connect() as redis:
        redis.hset(registry_key(DEFAULT_PREFIX), "half", "work")
    assert registry.incomplete(registry.names()) == {"half": "work"}
    while registry.repair("half", lambda lines: None):
        pass
    assert registry.names() == {NAME: "work"}
    with pytest.raises(UnknownQueue):
        registry.delete("half", force=True)


def test_an_unfinished_deletion_is_reported_and_finished(server: Server, registry: Registry) -> None:
    create(registry)
    registry.delete(NAME, force=True)
    assert registry.incomplete(registry.names()) == {NAME: "deleting"}
    repair(registry)
    assert registry.names() == registry.incomplete(registry.names()) == {}
