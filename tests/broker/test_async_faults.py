"""AsyncClient when calls are cancelled, the server stops or restarts, processes fork, and event loops end."""

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forq.async_client import AsyncClient
from forq.errors import BackPressure, ForqError, OutcomeUnknown, RedisUnavailable, UnknownJob, WaitTimeout
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.release_queue import gate
from tests.support.drive.server import Server
from tests.support.faults.proxy import Proxy

HOUR_MS = 3_600_000


@pytest.fixture
def own_server() -> Iterator[Server]:
    server = Server(appendonly=True)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def queue(own_server: Server) -> Iterator[OneQueue]:
    with one_queue(own_server.url, keep_done_ms=HOUR_MS) as queue:
        yield queue


def run(url: str, test: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        async with AsyncClient(url, **options) as client:
            return await test(client)

    return asyncio.run(main())


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Polls without blocking the event loop."""
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)
    return value


def names(server: Server) -> list[str]:
    """The names of all connections but this one."""
    with server.connect() as client:
        return sorted(one["name"] for one in client.client_list() if one["name"])


def subscriptions(server: Server) -> int:
    with server.connect() as client:
        return sum(int(one["sub"]) for one in client.client_list())


def test_cancelled_enqueues_are_stored_or_not_and_leave_nothing_behind(own_server: Server, queue: OneQueue) -> None:
    chance = random.Random(os.environ["FORQ_TEST_SEED"])
    told: dict[str, str] = {}

    async def enqueue(client: AsyncClient, job_id: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await client.queue("q").enqueue(1, id=job_id)
            told[job_id] = "done"
        except TimeoutError:
            told[job_id] = "cancelled"
        except OutcomeUnknown:
            told[job_id] = "unknown"

    async def test(client: AsyncClient) -> None:
        for start in range(0, 500, 10):
            calls = (enqueue(client, f"j{start + n}", chance.uniform(0, 0.004)) for n in range(10))
            await asyncio.gather(*calls)
        for number in range(20):
            await enqueue(client, f"last{number}", 20)
        assert names(own_server).count("forq-client") <= 4

    run(own_server.url, test, max_connections=4)
    stored = queue.state().jobs
    done = {job_id for job_id, outcome in told.items() if outcome == "done"}
    assert len(told) == 520
    assert done <= stored <= set(told)
    assert 0 < len(done) < 520, "the delays should end some calls and not others"
    queue.link.close()
    deadline = time.monotonic() + 10
    while names(own_server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert names(own_server) == []


def test_cancelled_waits_leave_no_subscription(own_server: Server, queue: OneQueue) -> None:
    chance = random.Random(os.environ["FORQ_TEST_SEED"])
    queue.enqueue("a", "b")

    async def wait(client: AsyncClient, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await client.queue("q").wait(chance.choice("ab"))

    async def test(client: AsyncClient) -> None:
        for _ in range(25):
            await asyncio.gather(*(wait(client, chance.uniform(0, 0.02)) for _ in range(20)))
        await until(lambda: subscriptions(own_server) == 0, "no channel is left")
        assert names(own_server).count("forq-waiter") <= 1
        # And the subscription still works.
        worker = queue.worker()
        worker.turn(want=1)
        waiting = asyncio.create_task(client.queue("q").wait("a", 20))
        await until(lambda: subscriptions(own_server) == 1, "it is subscribed")
        worker.turn(done="a", results={"a": "1"})
        assert await waiting == 1

    run(own_server.url, test)
    assert "forq-waiter" not in names(own_server)


def test_cancelled_dequeues_lose_no_item(own_server: Server) -> None:
    chance = random.Random(os.environ["FORQ_TEST_SEED"])
    with gate(own_server.url, "on_request") as queue:
        got: list[Any] = []
        acked: list[Any] = []

        async def dequeue(client: AsyncClient, seconds: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    release = await client.queue("q").dequeue(wait=5, lease=600)
                    if release is not None:
                        got.append(release.data)
                        await asyncio.shield(release.ack())
                        acked.append(release.data)

        async def test(client: AsyncClient) -> None:
            q = client.queue("q")
            for number in range(60):
                calls = [dequeue(client, chance.uniform(0, 0.03)) for _ in range(4)]
                await asyncio.gather(q.enqueue(number), *calls)
            while (rest := await q.dequeue(wait=0.5)) is not None:
                got.append(rest.data)
            await until(lambda: not queue.hash("awaiters"), "no awaiter is left")

        run(own_server.url, test)
        assert set(got) == set(range(60)), "each item reached a caller, or went back and was taken later"
        assert queue.state().jobs == set()


def test_a_stopped_server_blocks_no_other_coroutine(own_server: Server, queue: OneQueue) -> None:
    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        await q.enqueue(1)
        gaps: list[float] = []
        stop = asyncio.Event()

        async def tick() -> None:
            last = time.monotonic()
            while not stop.is_set():
                await asyncio.sleep(0.01)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()

        ticking = asyncio.create_task(tick())
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            calls = [q.enqueue(2), q.status(), client.queues(), q.wait("a", 1), q.enqueue_many(range(600))]
            ended = await asyncio.gather(*calls, return_exceptions=True)
            took = time.monotonic() - began
            await asyncio.sleep(max(0.0, 2 - took))
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        stop.set()
        await ticking
        assert [type(each) for each in ended] == [
            OutcomeUnknown,
            OutcomeUnknown,
            OutcomeUnknown,
            RedisUnavailable,
            OutcomeUnknown,
        ] or all(isinstance(each, RedisUnavailable) for each in ended), ended
        assert took < 2
        # A loaded machine delays single ticks; a blocked loop would show in all of them.
        gaps.sort()
        assert gaps[len(gaps) // 2] < 0.05
        assert gaps[-1] < 0.5
        await q.status()

    run(own_server.url, test, timeout=0.5, connect_timeout=0.5)


def test_waits_survive_a_restart_of_the_server(own_server: Server, queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)

    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        waits = [asyncio.create_task(q.wait(job_id, 60)) for job_id in "ab"]
        await until(lambda: subscriptions(own_server) == 2, "both are subscribed")
        await asyncio.to_thread(own_server.restart)
        worker.consumer.link.close()
        # "a" may end before the subscription is back, "b" ends later.
        await asyncio.to_thread(lambda: worker.turn(done="a", results={"a": "1"}, keep=1))
        assert await waits[0] == 1
        await until(lambda: subscriptions(own_server) == 1, "it is subscribed again")
        await asyncio.to_thread(lambda: worker.turn(done="b", results={"b": "2"}))
        assert await waits[1] == 2
        with pytest.raises(UnknownJob):
            await q.wait("c")

    run(own_server.url, test)


def test_a_wait_ends_at_its_timeout_while_redis_is_away(own_server: Server, queue: OneQueue) -> None:
    queue.enqueue("a")

    async def test(client: AsyncClient) -> None:
        wait = asyncio.create_task(client.queue("q").wait("a", 2))
        await until(lambda: queue.hash("waiters"), "it is registered")
        await asyncio.to_thread(own_server.kill)
        with pytest.raises(WaitTimeout, match="or its end is unknown"):
            await wait
        with pytest.raises(RedisUnavailable, match="cannot subscribe"):
            await client.queue("q").wait("a", 0.5)
        with pytest.raises(RedisUnavailable, match="cannot reach Redis"):
            await client.queue("q").enqueue(1)
        await asyncio.to_thread(own_server.start)
        assert await client.queue("q").enqueue(1, id="b") == "b"

    run(own_server.url, test)


def test_a_dequeue_survives_a_restart_of_the_server(own_server: Server) -> None:
    with gate(own_server.url, "on_request") as queue:

        async def test(client: AsyncClient) -> None:
            q = client.queue("q")
            wait = asyncio.create_task(q.dequeue(wait=60))
            await until(lambda: len(queue.hash("awaiters")) == 1, "it is registered")
            await asyncio.to_thread(own_server.restart)
            await until(lambda: subscriptions(own_server) == 1, "it is subscribed again")
            await q.enqueue("a")
            got = await wait
            assert got is not None
            assert got.data == "a"

        run(own_server.url, test)


def test_a_lost_reply_is_reported_and_never_repeated(own_server: Server, queue: OneQueue) -> None:
    with Proxy(own_server.socket) as proxy:

        async def test(client: AsyncClient) -> None:
            q = client.queue("q")
            await q.enqueue(1, id="first")
            proxy.drop_reply(text=b":1")
            with pytest.raises(OutcomeUnknown):
                await q.enqueue(2, id="second")
            assert queue.state().jobs == {"first", "second"}
            await q.enqueue(3, id="third")

        run(proxy.url, test)
    assert queue.state().jobs == {"first", "second", "third"}


def test_the_library_is_loaded_again_after_a_flush(queue: OneQueue) -> None:
    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        await q.enqueue(1)
        queue.redis.function_flush()
        await asyncio.gather(*(q.enqueue(number) for number in range(30)))
        assert (await q.status())["waiting"] == 31
        assert len(queue.redis.function_list()) == 1

    run(queue.url, test)


@pytest.mark.parametrize("rule", ["-function", "-function -fcall"])
def test_where_functions_are_refused_the_library_runs_through_eval(tmp_path: Path, rule: str) -> None:
    conf = tmp_path / "redis.conf"
    conf.write_text(f"user default on nopass ~* &* +@all {rule}\n")
    server = Server(include=conf)
    try:
        server.start()

        async def test(client: AsyncClient) -> None:
            q = await client.create_queue("q")
            await asyncio.gather(*(q.enqueue(number) for number in range(10)))
            assert (await q.status())["waiting"] == 10

        run(server.url, test)
    finally:
        server.remove()


def test_a_server_out_of_memory_is_back_pressure(own_server: Server, queue: OneQueue) -> None:
    async def test(client: AsyncClient) -> None:
        queue.redis.config_set("maxmemory", 1)
        with pytest.raises(BackPressure):
            await client.queue("q").enqueue(1)
        queue.redis.config_set("maxmemory", 0)
        await client.queue("q").enqueue(1)

    run(own_server.url, test)


def test_a_user_who_may_not_unsubscribe_can_wait(own_server: Server, queue: OneQueue) -> None:
    rules = ["on", "nopass", "~*", "&*", "+@all", "-unsubscribe", "-psubscribe"]
    queue.redis.execute_command("ACL", "SETUSER", "someone", *rules)
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    url = own_server.url.replace("unix://", "unix://someone:any@")

    async def test(client: AsyncClient) -> None:
        for job_id, keep in (("a", 1), ("b", 0)):
            wait = asyncio.create_task(client.queue("q").wait(job_id, 20))
            await until(lambda: queue.hash("waiters"), "it is registered")
            worker.turn(done=job_id, results={job_id: f'"{job_id}"'}, keep=keep)
            assert await wait == job_id

    run(url, test)


def test_each_event_loop_has_its_own_connections(own_server: Server, queue: OneQueue) -> None:
    client = AsyncClient(own_server.url)

    async def enqueue(count: int) -> None:
        q = client.queue("q")
        await asyncio.gather(*(q.enqueue(number) for number in range(count)))

    # Loops one after another, whose connections are left open.
    for _ in range(3):
        asyncio.run(enqueue(5))
    # And loops at the same time.
    errors: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(enqueue(50))
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert queue.inspector.counts().waiting == 215

    async def close() -> None:
        await enqueue(1)
        await until(lambda: names(own_server).count("forq-client") <= 1, "those of ended loops are closed")
        await client.aclose()

    asyncio.run(close())
    assert "forq-client" not in names(own_server)


def test_a_forked_process_opens_its_own_connections(own_server: Server, queue: OneQueue) -> None:
    client = AsyncClient(own_server.url)

    async def client_id() -> int:
        return int(await client._run(lambda one: one.link().call("CLIENT", "ID")))

    async def main() -> None:
        before = await client_id()
        waiting = asyncio.create_task(client.queue("q").wait("a", 60))
        queue.enqueue("a")
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            answer = b"?"
            try:
                answer = str(_in_new_thread(client_id)).encode()
            finally:
                os.write(write, answer)
                os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        found = os.read(read, 64)
        os.close(read)
        os.close(write)
        assert found.isdigit(), found
        assert int(found) != before
        assert await client_id() == before, "the parent's connection still works"
        with suppress(ForqError):
            waiting.cancel()
        await asyncio.wait([waiting])
        await client.aclose()

    asyncio.run(main())


def _in_new_thread(function: Callable[[], Awaitable[int]]) -> int:
    """A forked process cannot use the event loop in which it was forked."""
    results: list[int] = []

    async def call() -> None:
        results.append(await function())

    thread = threading.Thread(target=lambda: asyncio.run(call()))
    thread.start()
    thread.join(20)
    return results[0]


def test_closing_ends_the_calls_that_wait(own_server: Server) -> None:
    with gate(own_server.url, "on_request") as queue, one_queue(own_server.url, "work", keep_done_ms=HOUR_MS) as work:
        work.enqueue("a")

        async def main() -> None:
            client = AsyncClient(own_server.url)
            waits = [
                asyncio.create_task(client.queue("work").wait("a", 60)),
                asyncio.create_task(client.queue("q").dequeue(wait=60)),
            ]
            await until(lambda: queue.hash("awaiters") and work.hash("waiters"), "both are registered")
            await client.aclose()
            for wait in waits:
                with pytest.raises(ForqError, match="the client was closed during this call"):
                    await wait
            await until(lambda: not queue.hash("awaiters"), "it is unregistered")
            await until(lambda: "forq-waiter" not in names(own_server), "the subscription is closed")

        asyncio.run(main())


def test_closing_twice_or_before_use_is_allowed_and_calls_afterwards_connect_again(queue: OneQueue) -> None:
    async def main() -> None:
        client = AsyncClient(queue.url)
        await client.aclose()
        await client.queue("q").enqueue(1)
        await client.aclose()
        await client.aclose()
        await client.queue("q").enqueue(2)
        await client.aclose()

    asyncio.run(main())
    assert queue.inspector.counts().waiting == 2
