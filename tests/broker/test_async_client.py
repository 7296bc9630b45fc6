"""AsyncClient: every method has the outcome of Client's, waits share one subscription, connections are pooled."""

import asyncio
import inspect
import random
import subprocess
import sys
import typing
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import forq
from forq.async_client import AsyncClient, AsyncQueue, AsyncRelease
from forq.broker import async_subscription
from forq.broker.async_connection import run_blocking, wait_for
from forq.broker.enqueue import new_job
from forq.client import Client, Queue, Release
from forq.errors import (
    ConfigError,
    ForqError,
    JobDead,
    LeaseLapsed,
    NoResult,
    QueueFull,
    RedisUnavailable,
    UnknownJob,
    UnknownQueue,
    UsageError,
    WaitTimeout,
    WrongMode,
)
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue
from tests.support.drive.release_queue import gate
from tests.support.drive.server import Server

HOUR_MS = 3_600_000


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, keep_done_ms=HOUR_MS) as queue:
        yield queue


def run(url: str, test: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    """Runs a test in an event loop, with a client that is closed at its end."""

    async def main() -> Any:
        async with AsyncClient(url, **options) as client:
            return await test(client)

    return asyncio.run(main())


async def until(condition: Callable[[], Any], what: str) -> Any:
    """Polls without blocking the event loop."""
    async with asyncio.timeout(20):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


def connections(server: Server, name: str) -> list[dict[str, str]]:
    """The connections with this name, without those that the server is about to close."""
    with server.connect() as client:
        return [one for one in client.client_list() if one["name"] == name]


def claimed(queue: OneQueue, *ids: str) -> HandWorker:
    queue.enqueue(*ids)
    worker = queue.worker()
    worker.turn(want=len(ids))
    return worker


@pytest.mark.parametrize(
    ("blocking", "other", "renamed"),
    [
        (Client, AsyncClient, {"close": "aclose", "link": ""}),
        (Queue, AsyncQueue, {}),
        (Release, AsyncRelease, {}),
    ],
)
def test_every_public_method_exists_with_the_same_parameters(
    blocking: type, other: type, renamed: dict[str, str]
) -> None:
    own = {"from_config": {"max_connections"}}
    for name, method in inspect.getmembers(blocking, callable):
        same = renamed.get(name, name)
        if name.startswith("_") or not same:
            continue
        expected, found = inspect.signature(method), inspect.signature(getattr(other, same))
        kept = [each for each in found.parameters.values() if each.name not in own.get(name, ())]
        assert list(expected.parameters.values()) == kept, name
        # These do not call Redis.
        if name not in ("queue", "from_config", "batch", "find_batch", "batch_of"):
            assert inspect.iscoroutinefunction(getattr(other, same)), name


def test_every_method_refers_to_the_one_it_repeats() -> None:
    for other, blocking in ((AsyncClient, Client), (AsyncQueue, Queue)):
        for name, method in vars(other).items():
            if not name.startswith("_") and inspect.iscoroutinefunction(method) and hasattr(blocking, name):
                assert (method.__doc__ or "").startswith(f"See {blocking.__name__}.{name}."), name
    assert typing.get_overloads(AsyncQueue.retry_dead)


def test_other_clients_do_not_load_its_modules() -> None:
    program = "import sys, forq, forq.client; forq.Client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"asyncio", "greenlet", "redis", "forq.async_client"} & set(done.stdout.split())
    assert forq.AsyncClient is AsyncClient


# The same operations through both clients. Each returns what can be compared.

IDS = [f"j{number}" for number in range(6)]
KEYS = ["k1", "k2"]
Operation = tuple[str, tuple[Any, ...], dict[str, Any]]


def random_operation(chance: random.Random) -> Operation:
    one = chance.choice(IDS)
    choices: list[Operation] = [
        ("enqueue", ({"n": chance.randrange(9)},), {"id": one, "priority": chance.randrange(10)}),
        (
            "enqueue",
            (chance.randrange(9),),
            {"id": one, "if_exists": chance.choice(["skip", "refuse", "no"])},
        ),
        ("enqueue", (1,), {"id": one, "run_in": 3600, "update_data": False, "update_run_at": "if_later"}),
        ("enqueue", (1,), {"id": one, "token": f"t-{one}", "type": "mail", "identifier": "i"}),
        ("enqueue", (1,), {"id": "not allowed"}),
        ("enqueue_jobs", ([new_job(1, id=one), new_job(2, id=chance.choice(IDS))],), {"if_exists": "skip"}),
        ("cancel", (one,), {}),
        ("remove", (one,), {}),
        ("job", (one,), {}),
        ("jobs", (), {"limit": chance.randrange(1, 5)}),
        ("jobs", ("waiting",), {}),
        ("dead", (), {}),
        ("retry_dead", (one,), {}),
        ("retry_dead", (), {"all": True}),
        ("retry_dead", ([one, "gone"],), {}),
        ("discard_dead", (one,), {}),
        ("discard_dead", (), {}),
        ("pause", (), {}),
        ("resume", (), {}),
        ("schedule", (chance.choice(KEYS),), {"cron": "0 4 1 1 *", "data": 1}),
        ("schedules", (), {}),
        ("unschedule", (chance.choice(KEYS),), {}),
        ("pause_schedule", (chance.choice(KEYS),), {}),
        ("resume_schedule", (chance.choice(KEYS),), {}),
        ("run_now", (one,), {}),
        ("trigger", (chance.choice(KEYS),), {}),
        ("drain", (), {"timeout": 0}),
        ("wait", (one,), {"timeout": 0}),
        ("dequeue", (), {}),
        ("wait_release", (one,), {"timeout": 0}),
        ("next_release", (), {"timeout": 0}),
        ("status", (), {}),
        ("turn", (chance.choice(["done", "failed"]),), {}),
    ]
    return chance.choice(choices)


VOLATILE = ("at", "fence", "seconds", "epoch", "hash", "died", "ended", "next", "created", "bytes")


def comparable(value: Any) -> Any:
    """Without times, fences and generated ids."""
    if isinstance(value, ForqError):
        return type(value), "".join(sign for sign in str(value) if not sign.isdigit())
    if isinstance(value, dict):
        return {key: comparable(each) for key, each in value.items() if not any(word in str(key) for word in VOLATILE)}
    if isinstance(value, list | tuple):
        return [comparable(each) for each in value]
    if isinstance(value, str):
        return value.partition("@")[0] if value.partition("@")[0] in IDS else value[:3]
    return value if isinstance(value, int | None) else type(value).__name__


def dump(queue: OneQueue) -> Any:
    """All jobs, as they are stored: without times and generated ids."""
    ids = sorted(job_id for job_id in queue.state().jobs if job_id in IDS)
    kept = [comparable(queue.inspector.job(job_id)) for job_id in ids]
    return kept, len(queue.state().jobs), queue.state().waiting.keys(), len(queue.state().dead), queue.hash("schedules")


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_have_the_same_outcome_as_through_a_client(redis_url: str, seed: int) -> None:
    operations = [random_operation(random.Random(f"{seed} {number}")) for number in range(150)]
    with (
        one_queue(redis_url, "same-1", keep_done_ms=HOUR_MS) as first,
        one_queue(redis_url, "same-2", keep_done_ms=HOUR_MS) as second,
    ):
        workers = {queue.name: queue.worker() for queue in (first, second)}

        def turn(queue: OneQueue, how: str) -> Any:
            worker = workers[queue.name]
            claimed_id = next((one for one in worker.turn(want=1) if one in IDS), None)
            if claimed_id is not None:
                # OneQueue's workers take ids of one letter: settle by the consumer itself.
                worker.number += 1
                settled: list[Any] = [claimed_id, worker.fence, 7]
                failure = ['{"name":"E"}', '{"name":"E"}', "retriable", "", "0.5"]
                done, failed = (settled, []) if how == "done" else ([], settled + failure)
                worker.consumer.turn(worker.number, done, failed, 0, 0, [])
            return claimed_id

        async def both(client: AsyncClient) -> None:
            blocking, other = Client(redis_url), client.queue("same-2")
            for name, args, options in operations:
                found: list[Any] = []
                for queue, target in ((first, blocking.queue("same-1")), (second, other)):
                    if name == "turn":
                        found.append(turn(queue, *args))
                        continue
                    try:
                        value = getattr(target, name)(*args, **options)
                        found.append(await value if inspect.isawaitable(value) else value)
                    except ForqError as exc:
                        found.append(exc)
                shown = [str(comparable(vars(each) if hasattr(each, "__dict__") else each)) for each in found]
                assert shown[0] == shown[1], (name, args, options)
                assert dump(first) == dump(second), (name, args, options)
            blocking.close()

        run(redis_url, both)


def test_queues_are_created_listed_and_deleted(redis_url: str) -> None:
    async def test(client: AsyncClient) -> None:
        made = await client.create_queue("made", mode="on_request", max_items=1)
        await made.enqueue(1)
        with pytest.raises(QueueFull):
            await made.enqueue(2)
        assert await client.queues() == {"made": "on_request"}
        assert await client.delete_queue("made", force=True) == 1
        assert await client.queues() == {"made": "deleting"}
        with pytest.raises(UnknownQueue):
            await made.status()

    run(redis_url, test)


def test_bulk_enqueues_are_sent_in_chunks(queue: OneQueue) -> None:
    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        tokens = [f"row-{number}" for number in range(1200)]
        ids = await q.enqueue_many(range(1200), tokens=tokens)
        assert await q.enqueue_many(iter(range(1200)), tokens=iter(tokens)) == ids
        assert len(await q.enqueue_many(range(700))) == 700
        assert (await q.status())["waiting"] == 1900

    run(queue.url, test)


variable: ContextVar[str] = ContextVar("variable")


def test_context_variables_of_the_caller_are_visible(queue: OneQueue) -> None:
    async def test(client: AsyncClient) -> None:
        variable.set("outside")
        assert await run_blocking(variable.get) == "outside"
        seen: list[str] = []

        def jobs() -> Iterator[int]:
            seen.append(variable.get())
            yield 1

        await client.queue("q").enqueue_many(jobs())
        assert seen == ["outside"]

    run(queue.url, test)


def test_a_call_continues_after_the_garbage_collector_has_closed_another() -> None:
    async def main() -> None:
        abandoned = run_blocking(lambda: wait_for(asyncio.get_running_loop().create_future()))
        abandoned.send(None)

        def call() -> str:
            # As the garbage collector does at any place.
            abandoned.close()
            wait_for(asyncio.sleep(0))
            return "done"

        assert await run_blocking(call) == "done"
        assert await run_blocking(lambda: wait_for(asyncio.sleep(0, "next"))) == "next"

    asyncio.run(main())


def test_200_calls_at_once_use_at_most_the_allowed_connections(server: Server, queue: OneQueue) -> None:
    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        ids = await asyncio.gather(*(q.enqueue(number) for number in range(200)))
        assert len(set(ids)) == 200
        assert (await q.status())["waiting"] == 200
        if server.running and queue.url == server.url:
            assert len(connections(server, "forq-client")) <= 8

    run(queue.url, test, max_connections=7)


@pytest.mark.one_server
def test_200_waits_share_one_subscription(server: Server, queue: OneQueue) -> None:
    names = [f"w{number}" for number in range(200)]

    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        jobs = [new_job(name, id=name) for name in names]
        await q.enqueue_jobs(jobs)
        waits = [asyncio.create_task(q.wait(name, timeout=60)) for name in names]
        await until(lambda: len(queue.hash("waiters")) == 200, "all are registered")
        subscribed = connections(server, "forq-waiter")
        assert [int(one["sub"]) for one in subscribed] == [200]
        worker = queue.worker()
        claimed_ids = [job_id.decode() for job_id in worker.whole_turn(want=200).jobs[::2]]
        worker.number += 1
        settled: list[Any] = [part for job_id in claimed_ids for part in (job_id, worker.fence, 7)]
        results: list[Any] = [
            part for at, job_id in enumerate(claimed_ids) for part in (at + 1, f'"{job_id}"'.encode())
        ]
        worker.consumer.turn(worker.number, settled, [], 0, 0, results)
        assert await asyncio.gather(*waits) == names
        await until(lambda: [int(one["sub"]) for one in connections(server, "forq-waiter")] == [0], "none is left")

    run(queue.url, test)


@pytest.mark.one_server
def test_an_idle_subscription_is_closed(server: Server, queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_subscription, "IDLE_SECONDS", 0.05)
    claimed(queue, "a").turn(done="a", results={"a": "1"})

    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        for _ in range(3):
            assert await q.wait("a") == 1
            await until(lambda: not connections(server, "forq-waiter"), "it is closed")

    run(queue.url, test)


def test_the_errors_of_a_wait_are_those_of_a_client(queue: OneQueue) -> None:
    worker = claimed(queue, "a", "b", "c")
    worker.turn(done="a", results={"a": "!too large"}, keep=2)
    worker.turn(failed="b", error='{"name":"Oops","message":"no"}', keep=1)

    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        with pytest.raises(NoResult, match="too large"):
            await q.wait("a")
        with pytest.raises(JobDead, match="Oops: no"):
            await q.wait("b")
        with pytest.raises(WaitTimeout):
            await q.wait("c", timeout=timedelta(milliseconds=20))
        with pytest.raises(UnknownJob, match="there is no job 'd'"):
            await q.wait("d")
        with pytest.raises(UnknownQueue):
            await client.queue("nowhere").wait("a")
        with pytest.raises(UsageError, match="a number of seconds"):
            await q.wait("a", timeout=-1)

    run(queue.url, test)


def test_items_are_released_to_coroutines_that_wait(redis_url: str) -> None:
    with gate(redis_url, "on_request") as queue:

        async def test(client: AsyncClient) -> None:
            q = client.queue("q")
            assert await q.dequeue() is None
            assert await q.dequeue(wait=0.02) is None
            waits = [asyncio.create_task(q.dequeue(wait=60)) for _ in range(100)]
            chosen = asyncio.create_task(q.dequeue("chosen", wait=60, lease=60))
            await until(lambda: len(queue.hash("awaiters")) == 101, "all are registered")
            await q.enqueue_many(range(100))
            await q.enqueue("mine", id="chosen")
            got = await asyncio.gather(*waits)
            assert sorted(one.data for one in got if one is not None) == list(range(100))
            leased = await chosen
            assert leased is not None
            assert (leased.id, leased.data, leased.lease_seconds) == ("chosen", "mine", 60)
            assert (await q.status())["active"] == 1
            assert await leased.give_back()
            assert not await leased.give_back()
            with pytest.raises(LeaseLapsed):
                await leased.ack()
            again = await q.dequeue(lease=60)
            assert again is not None
            await again.ack()
            await again.ack()
            assert queue.state().jobs == set()
            with pytest.raises(UsageError, match="lease 0 is not allowed"):
                await q.dequeue(lease=0)
            with pytest.raises(WrongMode):
                await q.next_release(timeout=0)

        run(redis_url, test)


def test_released_items_reach_coroutines_that_wait(redis_url: str) -> None:
    with gate(redis_url, "auto_release") as queue:

        async def test(client: AsyncClient) -> None:
            q = client.queue("q")
            await q.enqueue("a", id="a")
            await q.enqueue("b", id="b")
            one, any_one = asyncio.create_task(q.wait_release("b", 60)), asyncio.create_task(q.next_release(60))
            await until(lambda: len(queue.hash("awaiters")) == 2, "both are registered")
            for _ in range(2):
                queue.attempt()
            first, second = await one, await any_one
            assert (first and first.data, second and second.data) == ("b", "a")

        run(redis_url, test)


def test_a_cancelled_dequeue_returns_its_item(redis_url: str) -> None:
    with gate(redis_url, "on_request") as queue:

        async def test(client: AsyncClient) -> None:
            q = client.queue("q")
            wait = asyncio.create_task(q.dequeue(wait=60))
            await until(lambda: len(queue.hash("awaiters")) == 1, "it is registered")
            wait.cancel()
            with pytest.raises(asyncio.CancelledError):
                await wait
            await until(lambda: not queue.hash("awaiters"), "it is unregistered")
            await q.enqueue("a")
            got = await q.dequeue()
            assert got is not None
            assert got.data == "a"

        run(redis_url, test)


def test_drain_waits_without_blocking_the_loop(queue: OneQueue) -> None:
    worker = claimed(queue, "a")

    async def test(client: AsyncClient) -> None:
        q = client.queue("q")
        with pytest.raises(WaitTimeout, match=r"0 waiting, 1 active$"):
            await q.drain(timeout=0)
        drained = asyncio.create_task(q.drain(timeout=60))
        assert not (await asyncio.wait([drained], timeout=0.1))[0]
        worker.turn(done="a")
        await drained

    run(queue.url, test)


def test_a_call_that_finds_no_free_connection_in_time_was_not_sent(queue: OneQueue) -> None:
    async def test(client: AsyncClient) -> None:
        pool = client._here().pool
        held = await pool.take()
        with pytest.raises(RedisUnavailable, match=r"none of the 1 connections .* within 0.1 s; raise max_connections"):
            await client.queue("q").enqueue(1)
        waiting = asyncio.create_task(client.queue("q").enqueue(2))
        await asyncio.sleep(0)
        pool.give_back(held)
        await waiting
        assert queue.inspector.counts().waiting == 1

    run(queue.url, test, max_connections=1, timeout=0.1)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("name", ["timeout", "connect_timeout"])
def test_timeouts_have_a_range(kind: type, name: str) -> None:
    for allowed in (0.1, 20, timedelta(seconds=3)):
        assert getattr(kind("redis://h", **{name: allowed}), f"{name}_seconds") > 0
    for refused in (0, -1, 21, "5", True, float("nan"), None):
        with pytest.raises(UsageError, match=rf"^{name} .* is not allowed: 0.1 to 20 seconds"):
            kind("redis://h", **{name: refused})


@pytest.mark.parametrize("refused", [0, -1, True, 2.5, 10_001])
def test_the_number_of_connections_has_a_range(refused: Any) -> None:
    with pytest.raises(UsageError, match="max_connections"):
        AsyncClient(max_connections=refused)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_url_and_prefix_come_from_the_environment_or_a_config_file(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORQ_REDIS", "FORQ_PREFIX", "FORQ_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "forq.toml"
    file.write_text('redis = "redis://in-file"\nprefix = "file:"\n[queues.q]\nhandler = "m:f"\n')
    made = kind.from_config(file, timeout=3)  # type: ignore[attr-defined]
    assert (made.url, made.prefix, made.timeout_seconds) == ("redis://in-file", "file:", 3.0)
    monkeypatch.setenv("FORQ_CONFIG", str(file))
    monkeypatch.setenv("FORQ_REDIS", "redis://in-environment")
    assert kind.from_config().url == "redis://in-environment"  # type: ignore[attr-defined]
    monkeypatch.setenv("FORQ_PREFIX", "env:")
    assert (kind().url, kind().prefix) == ("redis://in-environment", "env:")
    file.write_text(f'state_dir = "{tmp_path}"\n')
    monkeypatch.delenv("FORQ_REDIS")
    assert kind.from_config().url == f"unix://{tmp_path}/redis.sock"  # type: ignore[attr-defined]
    for wrong, text in (("redis = ", "not valid TOML"), ("nonsense = 1", "nonsense")):
        file.write_text(wrong)
        with pytest.raises(ForqError, match=text):
            kind.from_config()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot be read"):
        kind.from_config(tmp_path / "none")  # type: ignore[attr-defined]
