"""Starts a real Redis Cluster: masters, and replicas of them, on ports of 127.0.0.1."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from forq.broker.topology import fetch_slot_map, slot_of
from forq.redis_url import CLUSTER, read_address
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until

_NODE_TIMEOUT_MS = 1000


class RedisCluster:
    """Node n serves the n-th part of the slots; replica n, if any, follows node n."""

    def __init__(self, masters: int = 3, *, with_replicas: bool = False, announced: Sequence[int] = ()) -> None:
        """`announced`: ports that the masters announce to clients instead of their own."""
        ports = free_ports(4 * masters)
        self.masters = [_node(ports.pop(), ports.pop()) for _ in range(masters)]
        for node, port in zip(self.masters, announced, strict=False):
            node.settings["cluster-announce-port"] = str(port)
        self.replicas = [_node(ports.pop(), ports.pop()) for _ in range(masters)] if with_replicas else []

    @property
    def nodes(self) -> list[Server]:
        return [*self.masters, *self.replicas]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        part = REDIS_CLUSTER_HASH_SLOTS // len(self.masters) + 1
        for number, node in enumerate(self.masters):
            run_command(
                node, "CLUSTER", "ADDSLOTSRANGE", number * part, min(REDIS_CLUSTER_HASH_SLOTS, (number + 1) * part) - 1
            )
        first = self.masters[0]
        for node in self.nodes[1:]:
            bus = node.settings["cluster-port"]
            run_command(first, "CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        wait_until(lambda: all(self._knows_all(node) for node in self.nodes), what="the nodes know each other")
        for master, replica in zip(self.masters, self.replicas, strict=False):
            _follow(replica, node_id(master))
        wait_until(
            lambda: all(is_in_sync(replica) for replica in self.replicas), what="the replicas follow their masters"
        )
        wait_until(self.is_up, what="the cluster is up")

    def is_up(self) -> bool:
        """According to all running nodes."""
        return all(b"cluster_state:ok" in run_command(node, "CLUSTER", "INFO") for node in self.nodes if node.running)

    def node_of(self, key: str) -> Server:
        """The master that serves this key, according to the first running node."""
        asked = next(node for node in self.nodes if node.running)
        port = self.port_of(slot_of(key), asked)
        return next(node for node in self.nodes if node.port == port)

    def port_of(self, slot: int, asked: Server) -> int:
        """The port of the master of this slot, according to this node; 0 if no node serves it."""
        ranges = run_command(asked, "CLUSTER", "SLOTS")
        return next((int(master[1]) for start, end, master, *_ in ranges if start <= slot <= end), 0)

    def flush(self) -> None:
        for node in self.masters:
            node.flush()

    def remove(self) -> None:
        for node in self.nodes:
            node.remove()

    def _knows_all(self, node: Server) -> bool:
        lines = run_command(node, "CLUSTER", "NODES").splitlines()
        return len(lines) == len(self.nodes) and not any(b"handshake" in line for line in lines)


@contextmanager
def redis_cluster(
    masters: int = 3, *, with_replicas: bool = False, announced: Sequence[int] = ()
) -> Iterator[RedisCluster]:
    cluster = RedisCluster(masters, with_replicas=with_replicas, announced=announced)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


def connect(url: str, key: str) -> redis.Redis:
    """A redis-py client for checks by tests; of a cluster, connected to the node that serves this key."""
    address = read_address(url)
    if address.kind == CLUSTER:
        url = fetch_slot_map(address, (), "test").url_of(slot_of(key)) or url
    return redis.Redis.from_url(url)


def run_command(server: Server, *command: object) -> Any:
    """Runs one command and returns the raw reply."""
    with server.connect() as client:
        client.response_callbacks.clear()
        return client.execute_command(*command)


def node_id(node: Server) -> str:
    return str(run_command(node, "CLUSTER", "MYID").decode())


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _node(port: int, bus: int) -> Server:
    settings = {
        "cluster-enabled": "yes",
        "cluster-port": str(bus),
        "cluster-node-timeout": str(_NODE_TIMEOUT_MS),
        # While one is down, the others keep serving their slots.
        "cluster-require-full-coverage": "no",
        "repl-diskless-sync-delay": "0",
    }
    return Server(port=port, settings=settings)


def is_in_sync(replica: Server) -> bool:
    return b"master_link_status:up" in run_command(replica, "INFO", "replication")


def _follow(replica: Server, master_id: str) -> None:
    def followed() -> bool:
        try:
            run_command(replica, "CLUSTER", "REPLICATE", master_id)
        except redis.ResponseError as exc:
            if "Unknown node" not in str(exc):  # it does not know that node yet
                raise
            return False
        return True

    wait_until(followed, what="a replica knows its master")
