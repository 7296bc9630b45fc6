"""Servers that are killed, and disks that never got what the server had acknowledged."""

import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import pytest
import redis

from forq.broker.enqueue import Update, new_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.outbox import Outbox
from forq.client import Client
from forq.errors import OutcomeUnknown, RedisUnavailable
from tests.support.drive.one_queue import EXPIRY_MS, OneQueue, one_queue
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.faults.append_only import Snapshot, cut_copy, durable_server, growing_file, snapshot

pytestmark = pytest.mark.timeout(120)

SEED = int(os.environ.get("FORQ_TEST_SEED", "0"))
CUTS_PER_STEP = int(os.environ.get("FORQ_TEST_CUTS", "2"))


class Written(NamedTuple):
    """The state after a step, and how many bytes the server had written by then."""

    step: str
    size: int
    state: Snapshot


def live(queue: OneQueue) -> dict[str, Callable[[], object]]:
    """The steps of a queue's life: each is one call that changes several keys."""
    main = queue.worker("w1", "p1")
    other = queue.worker("w2", "p2")
    outbox = Outbox(queue.link, DEFAULT_PREFIX, "p1", EXPIRY_MS)
    lines: list[bytes] = []
    return {
        "enqueue": lambda: queue.enqueue("a", "b", "c"),
        "enqueue by priority": lambda: queue.enqueue("x", "y", priority=2),
        "enqueue with a token": lambda: queue.enqueue("t", token="once"),
        "enqueue for later": lambda: queue.producer.enqueue([new_job(1, id="l", run_in=600)]),
        "claim": lambda: main.turn(want=3),
        "enqueue behind a running one": lambda: queue.producer.enqueue([new_job(2, id="x")], Update("update")),
        "settle": lambda: main.turn(done="x", keep=2),
        "fail": lambda: main.turn(failed="y", keep=1),
        "fail for good": lambda: main.turn(failed="a", kind="permanent"),
        "collect": lambda: lines.extend(outbox.collect(queue.name)),
        "forget": lambda: outbox.forget(queue.name, lines),
        "claim again": lambda: main.turn(want=2),
        "claim by another": lambda: other.turn(want=1),
        "heartbeat": lambda: queue.recovery("p2").heartbeat(queue.name, EXPIRY_MS, [other.position(0, running=True)]),
        "recover": lambda: queue.recover(main, 0, running=True),
        "cancel": lambda: queue.producer.cancel("l"),
        "pause": lambda: queue.registry.pause(queue.name, paused=True),
        "resume": lambda: queue.registry.pause(queue.name, paused=False),
        "evict": lambda: queue.recovery("p1").evict(queue.name, "p2", "supervisor_lost"),
        "enqueue at the end": lambda: queue.enqueue("z"),
    }


def write_history(server: Server, queue: OneQueue) -> list[Written]:
    file = growing_file(server)
    history = []
    steps: dict[str, Callable[[], object]] = {"begin": lambda: None, **live(queue)}
    for step, take in steps.items():
        take()
        history.append(Written(step, file.stat().st_size, snapshot(queue.redis)))
    return history


@pytest.mark.fault("tail of the append-only file lost")
def test_any_truncation_of_the_append_only_file_leaves_the_queue_between_two_steps() -> None:
    chance = random.Random(SEED)
    with durable_server() as server, one_queue(server.url, max_retries=3) as queue:
        history = write_history(server, queue)
        for before, after in pairwise(history):
            assert after.size > before.size, f"{after.step} wrote nothing"
            assert after.state != before.state, f"{after.step} changed nothing"
            for _ in range(CUTS_PER_STEP):
                size = chance.randrange(before.size + 1, after.size)
                with cut_copy(server, size) as copy, copy.connect() as client:
                    assert snapshot(client) == before.state, f"half of {after.step!r} is there (seed {SEED}, {size})"


@pytest.mark.fault("tail of the append-only file lost")
@pytest.mark.parametrize("step", ["claim", "settle", "fail for good", "claim by another", "evict"])
def test_a_queue_continues_from_a_truncated_append_only_file(step: str) -> None:
    with durable_server() as server, one_queue(server.url, max_retries=3) as queue:
        [cut] = [written.size - 1 for written in write_history(server, queue) if written.step == step]
        with cut_copy(server, cut) as copy:
            left = OneQueue(copy.url, max_retries=3)
            for processor in ("p1", "p2"):
                left.recovery("p3").evict(left.name, processor, "supervisor_lost")
            jobs = left.state().jobs - {job.decode() for job in left.redis.zrange(left.key("scheduled"), 0, -1)}
            worker, held = left.worker("w3", "p3"), left.worker("w4", "p3", "retry")
            done: set[str] = set()
            while claimed := worker.turn(want=9) + held.turn(want=9):
                for who in (worker, held):
                    who.turn(done="".join(job_id for job_id in claimed if job_id in who.held()))
                done |= set(claimed)
            assert done >= jobs
            counts = left.inspector.counts()
            assert (counts.waiting, counts.active) == (0, 0)
            left.close()


class ProducerThread:
    """Enqueues until it is stopped, and records the outcome of each call."""

    def __init__(self, url: str, queue: str) -> None:
        self.acknowledged: list[str] = []
        self.unknown: list[str] = []
        self.refused = 0
        self._queue = Client(url).queue(queue)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def wait_for_more(self, count: int) -> None:
        target = len(self.acknowledged) + count
        wait_until(lambda: len(self.acknowledged) >= target, what=f"{count} more jobs are acknowledged")

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            number += 1
            job_id = f"j{number}"
            try:
                self._queue.enqueue(0, id=job_id)
                self.acknowledged.append(job_id)
            except OutcomeUnknown:
                self.unknown.append(job_id)
            except RedisUnavailable:
                self.refused += 1
                self._stopped.wait(0.02)


def holds_nothing(forq: Forq, queue: str) -> bool:
    status: Mapping[str, object] = forq.client().queue(queue).status()
    states = ("waiting", "scheduled", "blocked", "active", "retry", "dead", "in_flight")
    return not any(status[state] for state in states)


def embedded_pid(forq: Forq) -> int:
    """0 while no server answers."""
    try:
        with redis.Redis.from_url(forq.url) as client:
            return int(client.info("server")["process_id"])
    except redis.ConnectionError:
        return 0


def kill_server(forq: Forq) -> None:
    before = embedded_pid(forq)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: embedded_pid(forq) not in (0, before), what="a new server answers")


@pytest.mark.fault("server killed")
def test_jobs_acknowledged_by_a_killed_server_run_once_and_no_others_run() -> None:
    with running() as forq:
        forq.create("work", "record")
        forq.wait_for_child("work")
        producer = ProducerThread(forq.url, "work")
        try:
            for _ in range(3):
                producer.wait_for_more(100)
                kill_server(forq)
            producer.wait_for_more(100)
        finally:
            producer.stop()
        wait_until(lambda: set(producer.acknowledged) <= {t.job for t in forq.traces("end")}, what="all ran")
        wait_until(lambda: holds_nothing(forq, "work"), what="nothing is left")
        ends = [trace.job for trace in forq.traces("end")]
        assert len(ends) == len(set(ends)), "a job ran twice"
        assert set(ends) <= {*producer.acknowledged, *producer.unknown}
        assert producer.refused + len(producer.unknown) > 0, "the producer met the fault"


@pytest.mark.fault("tail of the append-only file lost")
def test_supervisors_continue_with_the_remaining_data_after_a_power_loss() -> None:
    with durable_server() as server, running(redis=server.url) as forq:
        forq.create("work", "sleep")
        forq.wait_for_child("work")
        queue = forq.client().queue("work")
        ids = queue.enqueue_many([0.01] * 200)
        stored = growing_file(server).stat().st_size
        wait_until(lambda: len(forq.traces("end")) >= 60, what="some are done")
        server.kill()
        size = growing_file(server).stat().st_size
        cut = stored + (size - stored) // 3
        with cut_copy(server, cut) as copy, one_queue(copy.url, "work") as seen:
            left = seen.state().jobs
            expected = seen.inspector.counts().done + len(left)
        assert left, "some settled jobs are unsettled again"
        os.truncate(growing_file(server), cut)
        server.start()
        wait_until(lambda: forq.client().queue("work").status()["done"] == expected, 30.0, "the supervisors continue")
        wait_until(lambda: holds_nothing(forq, "work"), what="nothing is left")
        assert {trace.job for trace in forq.traces("end")} == set(ids)
        assert {trace.stalls for trace in forq.traces()} == {0}, "no worker died of it"


@pytest.mark.fault("server killed")
def test_queues_are_created_again_on_a_server_that_returns_empty(server: Server, redis_url: str) -> None:
    with running(redis=redis_url, settings='heartbeat = "300ms"\nexpiry = "900ms"\n') as forq:
        forq.create("work", "record")
        forq.wait_for_child("work")
        server.kill()
        server.start()
        queue = forq.client().queue("work")

        def stored() -> str | None:
            done = forq.run_ctl("push", "work", "1")
            return done.stdout.strip() if done.returncode == 0 else None

        job_id = wait_until(stored, what="the queue is created again")
        wait_until(lambda: [t for t in forq.traces("end") if t.job == job_id], what="it runs")
        assert queue.status()["waiting"] == 0
