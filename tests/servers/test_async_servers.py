"""AsyncClient with a cluster, with sentinels, and over TLS."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from forq.async_client import AsyncClient
from forq.broker.async_connection import AsyncConnection
from forq.broker.connection import KEEPALIVE
from forq.errors import NoReplica, OutcomeUnknown, RedisUnavailable
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.redis_cluster import RedisCluster, free_ports
from tests.support.drive.replicas import replicated, watched
from tests.support.drive.server import Server
from tests.support.faults.proxy import Proxy
from tests.support.thorough import only_in_test_all

HOUR_MS = 3_600_000


def run(url: str, test: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncClient(url, **options) as client:
            return await test(client)

    return asyncio.run(main())


async def until(condition: Callable[[], Any], what: str) -> Any:
    async with asyncio.timeout(20):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


async def wait_for_done(client: AsyncClient, queue: OneQueue) -> None:
    """A job ends while a coroutine waits for it."""
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    waiting = asyncio.create_task(client.queue(queue.name).wait("a", 20))
    await until(lambda: "a" in queue.hash("waiters"), "it is registered")
    worker.turn(done="a", results={"a": '"result"'})
    assert await waiting == "result"


def test_every_node_of_a_cluster_is_reached(cluster: RedisCluster) -> None:
    cluster.flush()

    async def test(client: AsyncClient) -> None:
        names = [f"q{number}" for number in range(12)]
        queues = await asyncio.gather(*(client.create_queue(name) for name in names))
        await asyncio.gather(*(queue.enqueue(number) for queue in queues for number in range(5)))
        assert set(await client.queues()) == set(names)
        assert [(await queue.status())["waiting"] for queue in queues] == [5] * 12
        assert await queues[0].enqueue_many(range(10))
        with one_queue(cluster.url, "results", keep_done_ms=HOUR_MS) as queue:
            await wait_for_done(client, queue)

    run(cluster.url, test)


def test_a_cluster_without_a_reachable_node_is_unavailable() -> None:
    first, second = free_ports(2)

    async def test(client: AsyncClient) -> None:
        with pytest.raises(RedisUnavailable, match="no node of the cluster sent its slot map"):
            await client.queue("q").enqueue(1)

    run(f"redis+cluster://127.0.0.1:{first},127.0.0.1:{second}", test)


@only_in_test_all
def test_sentinels_lead_to_the_master_also_after_a_failover() -> None:
    with watched() as (pair, sentinels):

        async def port(client: AsyncClient) -> int:
            try:
                return int((await client._run(lambda one: one.link().call("CONFIG", "GET", "port")))[1])
            except RedisUnavailable:
                return 0

        async def test(client: AsyncClient) -> None:
            q = await client.create_queue("q")
            assert await port(client) == pair.master.port
            sentinels.fail_over()
            await until(lambda: sentinels.master_port() == pair.replica.port, "the replica is the master")
            # The sentinels end the connections to the old master when they demote it.
            async with asyncio.timeout(30):
                while await port(client) != pair.replica.port:
                    await asyncio.sleep(0.05)
            await q.enqueue(1)

        run(sentinels.url, test)
        other = f"redis+sentinel://127.0.0.1:{sentinels.ports[0]}/other"

        async def refused(client: AsyncClient) -> None:
            with pytest.raises(RedisUnavailable, match="it knows no master with that name"):
                await client.queues()

        run(other, refused)


def test_a_durable_enqueue_waits_for_the_replica(server: Server) -> None:
    with replicated() as pair:

        async def test(client: AsyncClient) -> None:
            q = await client.create_queue("q")
            await asyncio.gather(*(q.enqueue(number, durable="replica") for number in range(20)))
            pair.replica.kill()
            with pytest.raises((NoReplica, OutcomeUnknown)):
                await q.enqueue(1, durable="replica")

        run(f"redis://127.0.0.1:{pair.master.port}", test)
    server.flush()

    async def alone(client: AsyncClient) -> None:
        q = await client.create_queue("q")
        with pytest.raises(NoReplica):
            await q.enqueue(1, durable="replica")

    run(server.url, alone)


def test_tls_trusts_the_authority_of_the_url_alone(server: Server, tmp_path: Path) -> None:
    server.flush()
    authority, file = trustme.CA(), tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    with (
        Proxy(server.socket, tls=context) as proxy,
        one_queue(server.url),
    ):
        url = f"rediss://localhost:{proxy.port}"

        async def test(client: AsyncClient) -> None:
            q = client.queue("q")
            await asyncio.gather(*(q.enqueue("x" * 100_000, id=f"j{number}") for number in range(10)))
            assert (await q.job("j3"))["data"] == "x" * 100_000
            assert await q.remove("j3")

        async def refused(client: AsyncClient) -> None:
            with pytest.raises(RedisUnavailable, match="certificate verify failed"):
                await client.queues()

        run(f"{url}?ssl_ca_certs={file}", test)
        run(url, refused)


def test_a_connection_over_tcp_notices_that_the_other_machine_is_gone(server: Server) -> None:
    with Proxy(server.socket) as proxy:

        async def test(client: AsyncClient) -> None:
            await client.queues()
            connection = await client._run(lambda one: one.link()._connection)
            assert isinstance(connection, AsyncConnection)
            opened = connection.socket._transport.get_extra_info("socket")
            assert {option: opened.getsockopt(socket.IPPROTO_TCP, option) for option in KEEPALIVE} == KEEPALIVE

        run(proxy.url, test)
