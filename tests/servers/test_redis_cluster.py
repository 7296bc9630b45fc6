"""Queues on a Redis Cluster of three masters: where they are, slots that move, nodes that are away."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forq import Client
from forq.broker.chunks import CHUNK_JOBS
from forq.broker.claim import Consumer
from forq.broker.inspect import counts_of
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.broker.link import Link, check_server
from forq.broker.scripts import script
from forq.broker.topology import MAX_REDIRECTS, Cluster, Moved, fetch_slot_map, slot_of
from forq.client import Queue
from forq.errors import ForqError, RedisUnavailable, UnknownQueue
from forq.redis_url import read_address
from tests.support.drive.redis_cluster import RedisCluster, free_ports, node_id, redis_cluster, run_command
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until

NAMES = [f"q{number}" for number in range(12)]


@pytest.fixture
def client(cluster: RedisCluster) -> Iterator[Client]:
    cluster.flush()
    client = Client(cluster.url)
    yield client
    client.close()


def keys_on(node: Server, name: str) -> set[str]:
    return {key.decode() for key in run_command(node, "KEYS", f"*{{{name}}}*")}


@pytest.mark.parametrize(
    ("key", "slot"), [("foo", 12182), ("{user1000}.following", 3443), ("{}x", 10595), ("a{b}{c}", slot_of("b"))]
)
def test_slots_are_those_of_the_specification(cluster: RedisCluster, key: str, slot: int) -> None:
    assert slot_of(key) == slot == run_command(cluster.masters[0], "CLUSTER", "KEYSLOT", key)


@pytest.mark.spec("Q24")
def test_queues_are_spread_over_the_nodes_and_each_is_on_one(cluster: RedisCluster, client: Client) -> None:
    for name in NAMES:
        client.create_queue(name).enqueue_many(range(3))
    found = {name: [node for node in cluster.masters if keys_on(node, name)] for name in NAMES}
    assert all(len(nodes) == 1 for nodes in found.values())
    assert {nodes[0].port for nodes in found.values()} == {node.port for node in cluster.masters}
    assert set(client.queues()) == set(NAMES)


def test_status_tells_of_queues_on_all_nodes_at_once(client: Client) -> None:
    for number, name in enumerate(NAMES):
        client.create_queue(name).enqueue_many(range(number))
    counts = counts_of(client.link(), DEFAULT_PREFIX, [*NAMES, "none"])
    assert [counts[name].waiting for name in NAMES] == list(range(12))  # type: ignore[union-attr]
    assert counts["none"] is None


def test_the_check_looks_at_every_master(cluster: RedisCluster, client: Client) -> None:
    assert "a cluster of 3 masters" in check_server(client.link())
    last = cluster.masters[2]
    run_command(last, "CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ForqError, match=f"the server at redis://127.0.0.1:{last.port} may evict jobs"):
            check_server(client.link())
    finally:
        run_command(last, "CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")


def test_the_recipe_for_users_is_enough_on_every_node(cluster: RedisCluster, client: Client) -> None:
    recipe = Path(__file__).resolve().parents[2] / "etc" / "redis-acl.conf"
    for rules in re.findall(r"^user (forq-.*)$", recipe.read_text(), re.MULTILINE):
        for node in cluster.masters:
            run_command(node, "ACL", "SETUSER", *rules.split())
    worker, producer = (
        Client(cluster.url.replace("//", f"//forq-{user}:CHANGE-ME-{user}@")) for user in ("worker", "producer")
    )
    for name in NAMES:
        worker.create_queue(name).enqueue(1)
        producer.queue(name).enqueue(2)
        assert len(producer.queue(name).jobs().jobs) == 2
    worker.close()
    producer.close()


def test_one_seed_that_is_up_is_enough(cluster: RedisCluster, client: Client) -> None:
    other = Client(f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster.masters[1].port}")
    assert other.create_queue("q0").enqueue(1)
    other.close()


def test_without_any_seed_it_says_what_each_answered() -> None:
    with pytest.raises(RedisUnavailable, match=r"no node of the cluster sent its slot map \(127.0.0.1:1: .*refused"):
        Client("redis+cluster://127.0.0.1:1").queues()


def test_a_server_that_is_no_cluster_is_refused(lone_server: Server) -> None:
    with pytest.raises(RedisUnavailable, match="cluster support disabled"):
        Client(f"redis+cluster://127.0.0.1:{lone_server.port}").queues()


@pytest.fixture
def lone_server() -> Iterator[Server]:
    with Server(port=free_ports(1)[0]) as server:
        yield server


def test_a_slot_that_nobody_serves_is_told() -> None:
    with redis_cluster(1) as one:
        run_command(one.masters[0], "CLUSTER", "DELSLOTSRANGE", 0, 100)
        unserved = next(str(number) for number in range(10**6) if slot_of(str(number)) <= 100)
        with pytest.raises(RedisUnavailable, match=r"no node of the cluster .* serves slot"):
            Link(one.url).call("TIME", at=unserved)


def test_the_url_of_one_node_alone_is_refused_with_the_right_form(cluster: RedisCluster, client: Client) -> None:
    client.create_queue("q0")
    wrong = next(node for node in cluster.masters if node is not cluster.node_of("{q0}"))
    with pytest.raises(ForqError, match=r"is one node of a cluster: give its URL as redis\+cluster://"):
        Client(f"redis://127.0.0.1:{wrong.port}").queue("q0").enqueue(1)


@pytest.fixture
def moving(cluster: RedisCluster, client: Client) -> Iterator[tuple[Queue, Server, Server, int]]:
    """A queue with a job, where it is, where it is to go, and its slot; afterwards it is back."""
    queue = client.create_queue("q0")
    queue.enqueue(1, id="before")
    source = cluster.node_of("{q0}")
    target = next(node for node in cluster.masters if node is not source)
    slot = slot_of("{q0}")
    yield queue, source, target, slot
    cluster.flush()
    begin_move(slot, target, source)
    settle(cluster, slot, source)
    # Until the nodes have talked, one may be told otherwise by another that has not heard of it.
    wait_until(lambda: all(cluster.port_of(slot, node) == source.port for node in cluster.masters), what="all agree")


def move_keys(source: Server, target: Server, slot: int) -> None:
    for key in run_command(source, "CLUSTER", "GETKEYSINSLOT", slot, 1000):
        run_command(source, "MIGRATE", "127.0.0.1", target.port, key, 0, 5000)


def settle(cluster: RedisCluster, slot: int, target: Server) -> None:
    for node in (target, *(node for node in cluster.masters if node is not target)):
        run_command(node, "CLUSTER", "SETSLOT", slot, "NODE", node_id(target))


def begin_move(slot: int, source: Server, target: Server) -> None:
    run_command(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
    run_command(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))


def test_a_queue_that_has_moved_is_followed(
    cluster: RedisCluster, moving: tuple[Queue, Server, Server, int], client: Client
) -> None:
    queue, source, target, slot = moving
    begin_move(slot, source, target)
    move_keys(source, target, slot)
    settle(cluster, slot, target)
    queue.enqueue(2, id="after")
    assert {job["id"] for job in queue.jobs().jobs} == {"before", "after"}
    assert keys_on(source, "q0") == set() != keys_on(target, "q0")
    assert counts_of(client.link(), DEFAULT_PREFIX, ["q0"])["q0"].waiting == 2  # type: ignore[union-attr]


def test_a_worker_that_waits_for_a_job_is_led_to_where_its_queue_has_gone(
    cluster: RedisCluster, moving: tuple[Queue, Server, Server, int]
) -> None:
    queue, source, target, slot = moving
    queue.remove("before")
    worker, taken = Consumer(cluster.url, DEFAULT_PREFIX, "q0", "p", "w"), []
    worker.join(60_000)
    waiting = threading.Thread(target=lambda: taken.append(worker.wait_for_turn(1, 1)))
    # The script is known to the target too, as after any turn that was taken there.
    Link(f"redis://127.0.0.1:{target.port}").load_library(script("turn"))
    waiting.start()
    wait_until(lambda: b"blocked_clients:1" in run_command(source, "INFO", "clients"), what="it waits")
    begin_move(slot, source, target)
    move_keys(source, target, slot)
    settle(cluster, slot, target)
    wait_until(
        lambda: b"blocked_clients:1" in run_command(target, "INFO", "clients"), what="it waits at the other node"
    )
    queue.enqueue(2, id="after")
    waiting.join(20)
    assert taken[0] is not None
    assert taken[0].jobs[0] == b"after"
    worker.close()


@pytest.mark.parametrize("half_way", [False, True])
def test_while_its_keys_are_on_two_nodes_nothing_is_done_to_a_queue(
    cluster: RedisCluster, moving: tuple[Queue, Server, Server, int], half_way: bool
) -> None:
    queue, source, target, slot = moving
    begin_move(slot, source, target)
    if half_way:
        options = f"{queue_base(DEFAULT_PREFIX, 'q0')}:options"
        run_command(source, "MIGRATE", "127.0.0.1", target.port, options, 0, 5000)
    before = keys_on(source, "q0"), keys_on(target, "q0")
    for _ in range(3):
        with pytest.raises(RedisUnavailable, match="the keys of a queue are being moved away"):
            queue.enqueue(2, id="meanwhile")
    assert (keys_on(source, "q0"), keys_on(target, "q0")) == before
    move_keys(source, target, slot)
    settle(cluster, slot, target)
    queue.enqueue(3, id="after")
    assert {job["id"] for job in queue.jobs().jobs} == {"before", "after"}


def test_nodes_that_each_name_another_are_given_up_on(cluster: RedisCluster) -> None:
    calls: list[str] = []

    class Mistaken(Link):
        def call(self, *args: Any, at: str | None = None) -> Any:
            calls.append(self.url)
            raise Moved("elsewhere", slot_of("q"), "127.0.0.1", cluster.masters[len(calls) % 3].port)

    mistaken = Cluster(read_address(cluster.url), "test", Mistaken)
    with pytest.raises(RedisUnavailable, match="too many redirects"):
        mistaken.call(("GET", "q"), None)
    assert len(calls) == MAX_REDIRECTS


def test_a_node_that_lost_its_cluster_is_not_asked_where_to_go(cluster: RedisCluster) -> None:
    with redis_cluster(1) as stray:
        lost = stray.masters[0]
        run_command(lost, "CLUSTER", "FLUSHSLOTS")
        run_command(lost, "CONFIG", "SET", "cluster-require-full-coverage", "yes")
        wait_until(lambda: b"cluster_state:fail" in run_command(lost, "CLUSTER", "INFO"))
        mixed = f"redis+cluster://127.0.0.1:{lost.port},127.0.0.1:{cluster.masters[0].port}"
        for _ in range(8):  # in whatever order they are asked
            assert len(fetch_slot_map(read_address(mixed), (), "test").masters()) == 3


def test_with_one_node_away_the_queues_of_the_others_go_on() -> None:
    with redis_cluster() as cluster:
        client = Client(cluster.url)
        for name in NAMES:
            client.create_queue(name)
        lost = cluster.node_of("{q0}")
        there = [name for name in NAMES if cluster.node_of(f"{{{name}}}") is not lost]
        assert 0 < len(there) < len(NAMES)
        lost.kill()
        for name in there:
            assert client.queue(name).enqueue(1)
        with pytest.raises(RedisUnavailable):
            client.queue("q0").enqueue(1)
        lost.start()
        wait_until(cluster.is_up)
        # It has forgotten everything, as it keeps nothing on disk.
        with pytest.raises(UnknownQueue):
            client.queue("q0").enqueue(1)


def test_every_node_is_offered_the_library(cluster: RedisCluster) -> None:
    for node in cluster.nodes:
        run_command(node, "FUNCTION", "FLUSH")
    link = Link(cluster.url)
    for _ in range(2):
        link.load_library(script("discard"))
    for node in cluster.nodes:
        assert len(run_command(node, "FUNCTION", "LIST")) == 1
    link.close()


def test_a_function_that_some_node_had_lost_is_noticed(cluster: RedisCluster, client: Client) -> None:
    for name in NAMES:
        client.create_queue(name)
    link = Link(cluster.url)
    counts_of(link, DEFAULT_PREFIX, NAMES)
    before = link.library_reloads()
    counts_of(link, DEFAULT_PREFIX, NAMES)
    assert link.library_reloads() == before
    run_command(cluster.node_of(queue_base(DEFAULT_PREFIX, NAMES[0])), "FUNCTION", "FLUSH")
    counts_of(link, DEFAULT_PREFIX, NAMES)
    assert link.library_reloads() > before
    link.close()


def test_a_bulk_enqueue_follows_its_queue_and_keeps_its_order(
    cluster: RedisCluster, moving: tuple[Queue, Server, Server, int]
) -> None:
    """Two chunks are under way when the slot has moved: both are repeated on the other node."""
    queue, source, target, slot = moving
    queue.enqueue_many([1, 2])

    def jobs() -> Iterator[int]:
        for number in range(6 * CHUNK_JOBS):
            if number == 2 * CHUNK_JOBS + 1:
                # Through their own connections: the second chunk has arrived before, as it was sent.
                begin_move(slot, source, target)
                move_keys(source, target, slot)
                settle(cluster, slot, target)
            yield number

    ids = queue.enqueue_many(jobs())
    pending = run_command(target, "LRANGE", f"{queue_base(DEFAULT_PREFIX, 'q0')}:pending", 3, -1)
    assert [job_id.decode() for job_id in pending] == ids
    assert keys_on(source, "q0") == set()
