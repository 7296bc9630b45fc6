"""Producers that start before any supervisor: enqueueing a task creates its queue."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

import forq
from forq.app.tasks import JobRef
from forq.broker.keys import deleted_queues_key, queue_base
from forq.client import Client
from forq.errors import QueueFull, UnknownQueue
from forq.settings import stored_defaults

Enqueue = Callable[[str], JobRef[Any]]
app = forq.App("shop")
app.queue("mails", max_items=2, timeout="5m")


@app.task(queue="mails")
def send(to: str) -> None: ...


async def asynchronously(call: Callable[[], Awaitable[JobRef[None]]]) -> JobRef[None]:
    try:
        return await call()
    finally:
        await app.async_client.aclose()


WAYS: dict[str, Enqueue] = {
    "enqueue": send.enqueue,
    "using": lambda to: send.using(id=to).enqueue(to),
    "aenqueue": lambda to: asyncio.run(asynchronously(lambda: send.aenqueue(to))),
    "enqueue_many": lambda to: app.enqueue_many([send.prepare(to)])[0],
}


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    app._url = redis_url
    yield app.client
    app.client.close()
    app._client = app._async_client = None
    app._queues.clear()


def options(client: Client, name: str) -> dict[str, str]:
    flat = client.link().call("HGETALL", f"{queue_base(client.prefix, name)}:options")
    return {key.decode(): value.decode() for key, value in zip(flat[::2], flat[1::2], strict=True)}


@pytest.mark.parametrize("way", WAYS)
def test_a_task_creates_its_absent_queue_with_the_declared_options(client: Client, way: str) -> None:
    ref = WAYS[way]("a")
    assert client.queue("mails").job(ref.id)["data"] == {"to": "a"}
    found = options(client, "mails")
    assert (found["max_items"], found["timeout_ms"], found["mode"]) == ("2", "300000", "work")
    assert found["max_retries"] == str(stored_defaults()["max_retries"])
    WAYS[way]("b")
    with pytest.raises(QueueFull):
        WAYS[way]("c")


@pytest.mark.parametrize("way", WAYS)
def test_options_of_an_existing_queue_stay(client: Client, way: str) -> None:
    client.create_queue("mails", max_items=7)
    before = options(client, "mails")
    WAYS[way]("a")
    assert options(client, "mails") == before


def test_options_stay_if_another_client_creates_the_queue_meanwhile(client: Client) -> None:
    client.create_queue("mails", max_items=7)
    app.create_absent_queue("mails")
    found = options(client, "mails")
    assert (found["max_items"], found["timeout_ms"]) == ("7", "60000")


def test_many_producers_may_create_it_at_once(client: Client) -> None:
    app_of_many = forq.App("many", url=client.url)
    task = app_of_many.task(send.function)
    with ThreadPoolExecutor(8) as threads:
        refs = list(threads.map(lambda number: task.using(id=str(number)).enqueue("a"), range(40)))
    assert len({ref.id for ref in refs}) == 40
    assert client.queue("many").status()["waiting"] == 40


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forgotten", [False, True], ids=["just now", "days ago"])
def test_a_deleted_queue_is_not_created(client: Client, redis_url: str, way: str, forgotten: bool) -> None:
    client.create_queue("mails")
    client.delete_queue("mails")
    if forgotten:
        # The mark that expires after a day.
        client.link().call("DEL", f"{queue_base(client.prefix, 'mails')}:deleted")
    with pytest.raises(UnknownQueue, match=r"queue 'mails' was deleted; to create it again: forq app \S+:app --create"):
        WAYS[way]("a")
    assert client.queues() == {}


def test_a_queue_that_is_deleted_during_the_creation_stays_deleted(client: Client) -> None:
    client.create_queue("mails")
    client.delete_queue("mails")
    client.link().call("DEL", deleted_queues_key(client.prefix))
    with pytest.raises(UnknownQueue, match="was deleted"):
        app.create_absent_queue("mails")


def test_a_queue_that_the_app_does_not_declare_is_not_created(client: Client) -> None:
    with pytest.raises(UnknownQueue, match=r"no queue 'mials'.*app 'shop' does not declare it; did you mean mails\?"):
        send.using(queue="mials").enqueue("a")
    with pytest.raises(UnknownQueue, match=r"to declare it: app\.queue\('other'\)"):
        app.task_ref("send", queue="other").enqueue(to="a")
    with pytest.raises(UnknownQueue, match=r"app 'bare' does not declare it; to declare it: app\.queue\('bare'\)"):
        forq.App("bare", url=client.url).task_ref("send").enqueue(to="a")
    assert client.queues() == {}


@pytest.mark.one_server
def test_without_permission_the_error_names_the_command(client: Client, redis_url: str) -> None:
    admin = redis.Redis.from_url(redis_url)
    send.enqueue("load the library")
    admin.flushdb()
    admin.acl_setuser("producer", enabled=True, passwords=["+secret"], keys=["forq:queue:*"], categories=["+@all"])
    try:
        limited = forq.App("shop", url=redis_url.replace("://", "://producer:secret@"))
        task = limited.task(queue="mails")(send.function)
        with pytest.raises(UnknownQueue, match=r"may not create it; .*: forq app MODULE:APP --create \(.*NOPERM"):
            task.enqueue("a")
        limited.client.close()
    finally:
        admin.acl_deluser("producer")
