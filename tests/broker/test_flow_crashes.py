"""Flows and batches whose producer dies at any of its calls, or loses the reply to one."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import pytest

from forq.broker.flows import FlowJob, store_flow
from forq.broker.link import Link
from forq.broker.scripts import Script
from forq.client import Client, new_job
from forq.errors import OutcomeUnknown
from tests.broker.test_batches import callbacks, deliver, pass_hours
from tests.support.drive.one_queue import OneQueue, one_queue

# The producer catches the error and goes on; or it is gone.
HOWS = ("not sent", "reply lost", "killed before", "killed after")
KEYS = ("held", "held:jobs", "held:open", "inputs", "sources", "edges", "resolving", "reports", "batch:members", "jobs")
PREFIX = "forq:"
_numbers = count()


class Killed(BaseException):
    pass


class Breaker:
    """Breaks call number `at` of a link, counted from 1. A killed producer makes no further call. `meanwhile`: what
    others do before the producer notices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: str, at: int, meanwhile: Callable[[], None]) -> None:
        self.calls, self.at, self.how, self.run, self.meanwhile = 0, at, how, Link.run, meanwhile
        self.is_broken = False
        monkeypatch.setattr(Link, "run", lambda link, script, base, *args: self(link, script, base, *args))

    def __call__(self, link: Link, script: Script, base: str, *args: Any) -> list[Any]:
        if self.is_broken:
            return self.run(link, script, base, *args)
        self.calls += 1
        error = Killed if self.how.startswith("killed") else OutcomeUnknown
        if self.calls > self.at and error is Killed:
            raise Killed
        if self.calls != self.at:
            return self.run(link, script, base, *args)
        if self.how in ("reply lost", "killed after"):
            self.run(link, script, base, *args)
            self.is_broken = True
            self.meanwhile()
            self.is_broken = False
        raise error("the connection broke")


@pytest.fixture
def queues(queue: OneQueue, redis_url: str) -> Iterator[list[OneQueue]]:
    with one_queue(redis_url, "other") as other:
        yield [queue, other]


def run_ready(queues: list[OneQueue], run: list[str]) -> None:
    for queue in queues:
        worker = queue.worker(f"w{next(_numbers)}")
        while claimed := worker.turn(1):
            run += claimed
            worker.number += 1
            worker.consumer.turn(worker.number, [claimed[0].encode(), worker.fence, 7], [], 0, 0, [1, b"1"])
    deliver(*queues)


def run_all(queues: list[OneQueue], run: list[str]) -> None:
    """Runs everything that can run, while two hours pass, and then a day."""
    for hours in (*[0.35] * 6, 25, 0):
        run_ready(queues, run)
        for queue in queues:
            pass_hours(queue, hours)
            queue.recovery().promote(queue.name)
        deliver(*queues)


def is_clean(queues: list[OneQueue]) -> bool:
    return [queue.key(name) for queue in queues for name in KEYS if queue.redis.exists(queue.key(name))] == []


@pytest.mark.fault("reply lost")
@pytest.mark.parametrize("how", HOWS)
def test_a_flow_runs_completely_or_not_at_all(queues: list[OneQueue], how: str) -> None:
    for at in count(1):
        jobs = [
            FlowJob(name, new_job(1, id=f"{at}{letter}"), needs)
            for name, letter, needs in (
                ("q", "a", ()), ("other", "b", ()), ("other", "c", (0, 1)), ("q", "d", (0,)), ("q", "e", (2, 3)),
            )
        ]  # fmt: skip
        run: list[str] = []
        with pytest.MonkeyPatch.context() as patched:
            breaker = Breaker(patched, how, at, partial(run_ready, queues, run))
            with suppress(OutcomeUnknown, Killed):
                store_flow(queues[0].link, PREFIX, f"f{at}", jobs)
            assert breaker.calls
        run_all(queues, run)
        assert run == [] or sorted(run) == [f"{at}{letter}" for letter in "abcde"]
        assert is_clean(queues)
        if breaker.calls < at:
            assert run
            return


@pytest.mark.parametrize("how", HOWS)
def test_each_callback_ends_once_whenever_the_producer_dies(queues: list[OneQueue], redis_url: str, how: str) -> None:
    for at in count(1):
        client, run = Client(redis_url), list[str]()
        with pytest.MonkeyPatch.context() as patched:
            breaker = Breaker(patched, how, at, partial(run_ready, queues, run))
            with (
                suppress(OutcomeUnknown, Killed),
                client.batch("q", id=f"B{at}", **callbacks("on_done", "on_end")) as batch,
            ):
                batch.enqueue("q", 1, id=f"{at}a")
                batch.enqueue("other", 1, id=f"{at}b")
                batch.flush()
                batch.enqueue("other", 1, id=f"{at}c")
        run_all(queues, run)
        assert len(set(run)) == len(run)
        assert is_clean(queues)
        is_done = f"B{at}:on_done" in run
        # An abandoned batch has no callback that runs.
        assert (f"B{at}:on_end" in run) >= is_done
        if is_done:
            assert {f"{at}a", f"{at}b", f"{at}c"} < set(run)
        client.close()
        if breaker.calls < at:
            assert is_done
            return
