"""Failovers under load, of a cluster and of a master with sentinels: whatever was reported safe runs."""

import threading
import time
from collections.abc import Callable

import pytest

from forq import Client
from forq.errors import ForqError, OutcomeUnknown, RedisUnavailable
from tests.support.drive.redis_cluster import redis_cluster
from tests.support.drive.replicas import watched
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.slow
SETTINGS = 'heartbeat = "1s"\nexpiry = "10s"\n'


class Producer:
    """Pushes jobs that must outlive the master, and writes down what it was told of each."""

    def __init__(self, url: str, queue: str) -> None:
        self.safe: set[str] = set()
        self.unknown: set[str] = set()
        self.refused = 0
        self._queue = Client(url).queue(queue)
        self._name = queue
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            job_id = f"{self._name}-{number}"
            try:
                self.safe.add(self._queue.enqueue(number, id=job_id, durable="replica"))
            except OutcomeUnknown:
                self.unknown.add(job_id)
            except RedisUnavailable:
                self.refused += 1
                self._ended.wait(0.05)
            self._ended.wait(0.002)


def load_until_failed_over(url: str, forq: Forq, names: list[str], fail: Callable[[], None]) -> list[Producer]:
    producers = [Producer(url, name) for name in names]
    wait_until(lambda: all(len(producer.safe) > 200 for producer in producers), what="jobs are pushed")
    fail()
    safe = [len(producer.safe) for producer in producers]
    wait_until(
        lambda: all(len(producer.safe) > before + 200 for producer, before in zip(producers, safe, strict=True)),
        60,
        what="jobs are pushed again",
    )
    for producer in producers:
        producer.stop()
    wait_until(lambda: all(drained(forq, name) for name in names), 60, what="everything has run")
    return producers


def drained(forq: Forq, name: str) -> bool:
    try:
        found = forq.queue_status(name)
    except (ForqError, AssertionError):
        return False
    return bool(found["waiting"] == found["active"] == found["scheduled"] == 0)


def check(forq: Forq, producers: list[Producer]) -> None:
    ran = {trace.job for trace in forq.traces("end")}
    for producer in producers:
        assert producer.safe - ran == set()
        print(f"safe {len(producer.safe)}, unknown {len(producer.unknown)}, refused {producer.refused}")
    assert ran <= set.union(*(producer.safe | producer.unknown for producer in producers))


def test_a_node_of_a_cluster_dies_and_its_replica_takes_over() -> None:
    with redis_cluster(with_replicas=True) as cluster, running(redis=cluster.url, settings=SETTINGS) as forq:
        names = ["a", "b", "c"]
        for name in names:
            forq.create(name, "record")
            forq.wait_for_child(name)
        lost = cluster.node_of("{a}")
        began = time.monotonic()

        def fail() -> None:
            lost.kill()
            # Its replica is alone: what must be on a replica waits until it has one again.
            wait_until(lambda: cluster.node_of("{a}") is not lost, what="the replica is the master")
            lost.start()

        check(forq, load_until_failed_over(cluster.url, forq, names, fail))
        print(f"took {time.monotonic() - began:.1f} s")
        assert forq.child("a")["restarts"] == 0


def test_the_master_dies_and_the_sentinels_make_its_replica_the_master() -> None:
    with watched() as (pair, sentinels), running(redis=sentinels.url, settings=SETTINGS) as forq:
        forq.create("q", "record")
        forq.wait_for_child("q")

        def fail() -> None:
            pair.master.kill()
            wait_until(lambda: sentinels.master_port() == pair.replica.port, what="the replica is the master")
            pair.master.start()

        check(forq, load_until_failed_over(sentinels.url, forq, ["q"], fail))
        assert forq.child("q")["restarts"] == 0
