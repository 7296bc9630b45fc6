"""Connections to the server that break, fall silent, lose replies or are slow."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from forq.broker import claim
from forq.broker.claim import Consumer
from forq.broker.enqueue import Producer, Update, new_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.errors import OutcomeUnknown, RedisUnavailable
from tests.support.drive.one_queue import EXPIRY_MS, State, one_queue
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until
from tests.support.faults.proxy import Proxy

pytestmark = pytest.mark.timeout(120)

WORKER = b"forq-worker"


@pytest.fixture
def proxy(server: Server, redis_url: str, tmp_path: Path) -> Iterator[Proxy]:
    with Proxy(server.socket, listen=tmp_path / "proxy.sock") as proxy:
        yield proxy


@pytest.fixture
def forq(proxy: Proxy) -> Iterator[Forq]:
    with running(redis=proxy.url) as forq:
        forq.create("work", "sleep")
        forq.wait_for_child("work")
        yield forq


def wait_until_done(forq: Forq, count: int) -> None:
    """Waits until `count` jobs are settled and nothing is left; each ran once and no process was lost."""

    seen = forq.client().queue("work")

    def done() -> bool:
        status = seen.status()
        return status["done"] == count and not status["waiting"] + status["active"] + status["in_flight"]

    wait_until(done, 30.0, f"{count} jobs are done")
    starts = Counter(trace.job for trace in forq.traces("start"))
    assert sorted(starts.values()) == [1] * count, starts
    assert {trace.stalls for trace in forq.traces()} == {0}
    assert forq.child("work")["restarts"] == 0


@pytest.mark.fault("connection dropped")
def test_repeatedly_cut_connections_lose_no_job_and_no_process(forq: Forq, proxy: Proxy) -> None:
    forq.client().queue("work").enqueue_many([0.02] * 60)
    for done in (5, 15, 25):
        wait_until(lambda done=done: len(forq.traces("end")) >= done, what="some are done")  # type: ignore[misc]
        assert proxy.cut() > 0
    wait_until_done(forq, 60)


@pytest.mark.fault("connection dropped")
def test_connections_that_the_server_closes_are_reopened(server: Server, redis_url: str) -> None:
    with running(redis=redis_url) as forq, server.connect() as redis:
        forq.create("work", "sleep")
        forq.wait_for_child("work")
        forq.client().queue("work").enqueue_many([0.02] * 40)
        for done in (5, 15):
            wait_until(lambda done=done: len(forq.traces("end")) >= done, what="some are done")  # type: ignore[misc]
            assert redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes") > 0
        wait_until_done(forq, 40)


@pytest.mark.fault("reply lost")
def test_an_idle_worker_that_lost_the_reply_with_its_job_runs_it_once(forq: Forq, proxy: Proxy) -> None:
    wait_until(lambda: forq.child("work")["state"] == "idle", what="it waits for a job")
    proxy.drop_reply(client=WORKER)
    # Both children wait; only the main one gets something to reply to.
    forq.client().queue("work").enqueue(0)
    wait_until_done(forq, 1)
    assert proxy.dropped == 1


@pytest.mark.fault("reply lost")
def test_a_worker_that_lost_the_reply_to_its_settle_settles_once(forq: Forq, proxy: Proxy) -> None:
    queue = forq.client().queue("work")
    queue.enqueue(0.3)
    wait_until(lambda: forq.traces("start"), what="it runs")
    proxy.drop_reply(client=WORKER)
    proxy.drop_reply(client=WORKER)
    queue.enqueue_many([0] * 10)
    wait_until_done(forq, 11)
    assert proxy.dropped == 2


@pytest.mark.fault("reply lost")
def test_a_producer_with_a_lost_reply_gets_an_error_and_its_token_makes_a_second_call_safe(
    proxy: Proxy, redis_url: str
) -> None:
    with one_queue(redis_url) as queue:
        link = Link(proxy.url, name="forq-producer")
        producer = Producer(link, DEFAULT_PREFIX, "q")
        assert link.call("PING")
        producer.enqueue([new_job(1, id="first")])
        proxy.drop_reply(client=b"forq-producer")
        with pytest.raises(OutcomeUnknown):
            producer.enqueue([new_job(2, token="order-7")])
        assert queue.inspector.counts().waiting == 2, "it was carried out"
        producer.enqueue([new_job(2, token="order-7")], Update("refuse"))
        assert queue.inspector.counts().waiting == 2
        link.close()


@pytest.mark.fault("connection half-open")
def test_a_half_open_connection_is_replaced_in_bounded_time(
    server: Server, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP: a worker waits longer at a unix socket, which cannot be half-open."""
    monkeypatch.setattr(claim, "BLOCK_SECONDS", 1)
    monkeypatch.setattr(claim, "BLOCK_MARGIN_SECONDS", 1)
    with one_queue(redis_url) as queue, Proxy(server.socket) as proxy:
        consumer = Consumer(proxy.url, DEFAULT_PREFIX, "q", "p1", "w1")
        consumer.join(EXPIRY_MS)
        assert consumer.turn(1, [], [], 0, 1).jobs == []
        assert proxy.half_open(WORKER) == 1
        began = time.monotonic()
        with pytest.raises(RedisUnavailable):
            consumer.wait_for_job()
        assert time.monotonic() - began < 10
        queue.enqueue("a")
        assert consumer.wait_for_job(), "on a new connection"
        assert consumer.turn(2, [], [], 0, 1).jobs[0] == b"a"
        assert queue.state().active == {"a": "w1"}
        consumer.close()


@pytest.mark.fault("connection half-open")
def test_a_producer_on_a_half_open_connection_gets_an_error_in_bounded_time(proxy: Proxy, redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        link = Link(proxy.url, name="forq-producer", timeout_seconds=0.5)
        producer = Producer(link, DEFAULT_PREFIX, "q")
        producer.enqueue([new_job(1, id="a")])
        assert proxy.half_open(b"forq-producer") == 1
        with pytest.raises(OutcomeUnknown):
            producer.enqueue([new_job(1, id="b")])
        producer.enqueue([new_job(1, id="b")])
        assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
        link.close()


@pytest.mark.fault("network slow")
def test_a_slow_network_only_delays_jobs(forq: Forq, proxy: Proxy) -> None:
    proxy.delay(0.03)
    queue = forq.client().queue("work")
    queue.enqueue_many([0] * 30)
    queue.enqueue(0, run_in=0.3)
    wait_until_done(forq, 31)
    proxy.delay(0.0)
    assert "evicted processors" not in forq.log


@pytest.mark.fault("network slow")
def test_a_silent_network_delays_jobs_and_loses_none(forq: Forq, proxy: Proxy) -> None:
    forq.client().queue("work").enqueue_many([0.05] * 20)
    wait_until(lambda: len(forq.traces("end")) >= 3, what="some are done")
    proxy.freeze()
    held = len(forq.traces("start"))
    status = forq.run_ctl("status", "--json")
    assert status.returncode == 0, "the supervisor answers meanwhile"
    # Time for the other 17 jobs, if they could be claimed. No event marks that nothing was claimed.
    time.sleep(1.0)
    assert len(forq.traces("start")) <= held + 1, "only claimed jobs run"
    proxy.thaw()
    wait_until_done(forq, 20)
