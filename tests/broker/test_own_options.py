"""Options of one job: every way to give them, how they are shown, and the errors."""

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import forq
from forq.broker.explain import why
from forq.broker.keys import DEFAULT_PREFIX
from forq.client import Client, Queue, new_job
from forq.errors import UsageError
from tests.support.drive.one_queue import OneQueue, one_queue

GIVEN: dict[str, Any] = {
    "timeout": "5m",
    "max_retries": 1,
    "backoff": ["1s", 5, timedelta(minutes=1)],
    "keep_done": 7200,
}
SHOWN = {"timeout": "5m", "max_retries": 1, "backoff": ["1s", "5s", "1m"], "keep_done": "2h"}


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url) as queue:
        yield queue


@pytest.fixture
def client(queue: OneQueue) -> Iterator[Queue]:
    client = Client(queue.url)
    yield client.queue("q")
    client.close()


def in_loop(url: str, call: Callable[[forq.AsyncQueue], Any]) -> Any:
    async def main() -> Any:
        async with forq.AsyncClient(url) as client:
            return await call(client.queue("q"))

    return asyncio.run(main())


def by_task(queue: OneQueue) -> str:
    app = forq.App("q", url=queue.url)
    return app.task_ref("any").using(**GIVEN).enqueue(a=1).id


def by_prepared_task(queue: OneQueue) -> str:
    app = forq.App("q", url=queue.url)
    task = app.task_ref("any")
    return app.enqueue_many([task.prepare(a=0), task.using(**GIVEN).prepare(a=1)])[1].id


WAYS: dict[str, Callable[[OneQueue], str]] = {
    "enqueue": lambda queue: Client(queue.url).queue("q").enqueue(1, **GIVEN),
    "enqueue_with_token_and_time": lambda queue: Client(queue.url).queue("q").enqueue(1, token="t", run_in=60, **GIVEN),
    "enqueue_many": lambda queue: Client(queue.url).queue("q").enqueue_many([1, 2], **GIVEN)[1],
    "enqueue_many_with_tokens": lambda queue: Client(queue.url).queue("q").enqueue_many([1], tokens=["t"], **GIVEN)[0],
    "enqueue_jobs": lambda queue: Client(queue.url).queue("q").enqueue_jobs([new_job(1)], **GIVEN)[0],
    "new_job": lambda queue: Client(queue.url).queue("q").enqueue_jobs([new_job(1, **GIVEN)], timeout=1)[0],
    "async_enqueue": lambda queue: in_loop(queue.url, lambda q: q.enqueue(1, **GIVEN)),
    "async_enqueue_many": lambda queue: in_loop(queue.url, lambda q: q.enqueue_many([1], **GIVEN))[0],
    "async_enqueue_jobs": lambda queue: in_loop(queue.url, lambda q: q.enqueue_jobs([new_job(1)], **GIVEN))[0],
    "using": by_task,
    "prepare": by_prepared_task,
}


@pytest.mark.parametrize("way", WAYS)
def test_options_are_stored_with_the_job(queue: OneQueue, client: Queue, way: str) -> None:
    job = client.job(WAYS[way](queue))
    assert job.get("options") == SHOWN
    assert "expires_at" not in job


def test_plain_jobs_have_none(client: Queue) -> None:
    job = client.job(client.enqueue(1))
    assert "options" not in job
    assert "expires_at" not in job


def test_a_job_expires_after_the_time_it_may_run(client: Queue) -> None:
    now = time.time()
    soon = client.job(client.enqueue(1, expires_in="1h")).get("expires_at")
    later = client.job(client.enqueue(1, run_in=60, expires_in=timedelta(hours=1))).get("expires_at")
    assert soon == pytest.approx(now + 3600, abs=5)
    assert later == pytest.approx(now + 3660, abs=5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"timeout": "soon"}, "options of a job: timeout = 'soon' is not allowed: a duration from"),
        ({"timeout": -1}, "timeout = -1 is not allowed: a duration from"),
        ({"max_retries": 1.5}, "max_retries = 1.5 is not allowed: a whole number from 0 to"),
        ({"max_retries": -1}, "max_retries = -1 is not allowed: a whole number from 0 to"),
        ({"backoff": []}, "backoff = [] is not allowed: a delay, or a list of 1 to 20 delays"),
        ({"backoff": ["1s", "later"]}, "backoff = 'later' is not allowed: a duration from"),
        ({"expires_in": 0}, "expires_in = 0 is not allowed: a duration from 1ms to 365d"),
        ({"expires_in": "never"}, "expires_in = 'never' is not allowed: a duration from 1ms to 365d"),
        ({"keep_done": "400000d"}, "keep_done = '400000d' is not allowed: a duration from"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(client: Queue, given: dict[str, Any], text: str) -> None:
    app = forq.App("q", url="unix:///nowhere")
    for call in (
        lambda: client.enqueue(1, **given),
        lambda: client.enqueue_many([1], **given),
        lambda: client.enqueue_jobs([], **given),
        lambda: new_job(1, **given),
        lambda: app.task_ref("any").using(**given),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert text in str(caught.value)
    assert client.status()["waiting"] == 0


def test_an_unknown_option_is_refused(client: Queue) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'timout'"):
        client.enqueue(1, timout=5)  # type: ignore[call-arg]


def test_why_names_the_options_of_the_job(queue: OneQueue, client: Queue) -> None:
    client.enqueue(1, id="a", run_in=60, timeout="5m", backoff=[1, 5], expires_in="1h")
    state, text = why(queue.link, DEFAULT_PREFIX, "q", "a")
    assert state == "scheduled"
    assert "; it has its own timeout = 5m, backoff = 1s 5s; it expires at 20" in text
    client.enqueue(1, id="b", run_in=60)
    assert "its own" not in why(queue.link, DEFAULT_PREFIX, "q", "b")[1]
