"""A master that sentinels watch over: found by its name, and found again after a failover."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from forq import Client
from forq.broker.keys import DEFAULT_PREFIX, due_channels
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.errors import RedisUnavailable
from tests.support.drive.redis_cluster import free_ports, run_command
from tests.support.drive.replicas import MASTER, Pair, Sentinels, replicated, watched
from tests.support.drive.supervisor import running
from tests.support.drive.wait import wait_until


@pytest.fixture
def setting() -> Iterator[tuple[Pair, Sentinels]]:
    with watched() as setting:
        yield setting


def persists(call: Callable[[], object]) -> object:
    """What the call returns once Redis is back."""

    def tried() -> list[object]:
        try:
            return [call()]
        except RedisUnavailable:
            return []

    return wait_until(tried, what="Redis is back")[0]


def test_the_master_is_found_also_with_sentinels_that_are_away(setting: tuple[Pair, Sentinels]) -> None:
    pair, sentinels = setting
    assert int(Link(sentinels.url).call("CONFIG", "GET", "port")[1]) == pair.master.port
    nobody, stranger = free_ports(1)[0], pair.replica.port
    url = f"redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{stranger},127.0.0.1:{sentinels.ports[2]}/{MASTER}/2"
    link = Link(url)
    link.call("SET", "x", "1")
    assert Link(f"redis://127.0.0.1:{pair.master.port}/2").call("GET", "x") == b"1"
    with pytest.raises(
        RedisUnavailable, match=r"no sentinel found a working master 'other' \(.*it knows no master with that"
    ):
        Link(f"redis+sentinel://127.0.0.1:{sentinels.ports[0]}/other").call("PING")


def test_after_a_failover_every_connection_leads_to_the_new_master(setting: tuple[Pair, Sentinels]) -> None:
    pair, sentinels = setting
    client = Client(sentinels.url)
    queue = client.create_queue("q")
    safe = queue.enqueue(1, durable="replica")
    subscription = Subscription(sentinels.url, due_channels(DEFAULT_PREFIX, 0), name="test")
    subscription.connect()
    pair.master.kill()
    job_id = persists(lambda: queue.enqueue(2))
    wait_until(lambda: sentinels.master_port() == pair.replica.port, what="all sentinels have heard")
    assert {job["id"] for job in queue.jobs().jobs} == {safe, job_id}
    with pytest.raises(RedisUnavailable):
        subscription.receive()
    subscription.connect()
    queue.enqueue(3, run_in=60)
    wait_until(subscription.receive, what="what the new master publishes is heard")
    subscription.close()


def test_an_old_master_that_is_a_replica_now_is_left(setting: tuple[Pair, Sentinels]) -> None:
    pair, sentinels = setting
    link = Link(sentinels.url)
    link.call("SET", "x", "1")
    # Sentinels end connections when they demote a master: here it is there when that happens.
    run_command(pair.master, "REPLICAOF", "127.0.0.1", pair.replica.port)
    with pytest.raises(RedisUnavailable, match="READONLY"):
        link.call("SET", "x", "2")
    # They name it still; it says itself that it is none.
    with pytest.raises(RedisUnavailable, match=r"it names 127.0.0.1:\d+, which is not a master"):
        link.call("SET", "x", "2")
    run_command(pair.master, "REPLICAOF", "NO", "ONE")
    assert link.call("SET", "x", "3") == b"OK"


def test_who_is_blocked_at_a_master_that_is_demoted_is_told_that_redis_is_away() -> None:
    with replicated() as pair:
        assert "UNBLOCKED" in told_when_demoted(pair)


def told_when_demoted(pair: Pair) -> str:
    link, told = Link(f"redis://127.0.0.1:{pair.master.port}"), []

    def wait() -> None:
        with pytest.raises(RedisUnavailable) as caught:
            link.call("BLPOP", "nothing", 20)
        told.append(str(caught.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: b"blocked_clients:1" in run_command(pair.master, "INFO", "clients"), what="it is blocked")
    run_command(pair.master, "REPLICAOF", "127.0.0.1", pair.replica.port)
    waiting.join(10)
    return told[0]


@pytest.mark.slow
def test_a_supervisor_lives_through_failovers_and_nobody_is_evicted(setting: tuple[Pair, Sentinels]) -> None:
    pair, sentinels = setting
    with running(redis=sentinels.url, settings='heartbeat = "500ms"\nexpiry = "15s"\n') as forq:
        forq.create("q", "record")
        child = forq.wait_for_child("q")
        queue = Client(sentinels.url).queue("q")
        queue.enqueue_many(range(100), durable="replica")
        wait_until(lambda: forq.queue_status("q")["done"] == 100)
        began = time.monotonic()
        sentinels.fail_over()
        wait_until(lambda: sentinels.master_port() == pair.replica.port, what="the replica is the master")
        persists(lambda: queue.enqueue_many(range(100)))
        wait_until(lambda: len({trace.job for trace in forq.traces("end")}) == 200, what="all have run")
        assert time.monotonic() - began < 15  # its expiry
        assert forq.child("q")["pid"] == child["pid"]
        assert "evicted" not in forq.log
