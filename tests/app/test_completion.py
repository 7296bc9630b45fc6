"""as_completed: the order of ended jobs, timeouts, outages, and what a loop leaves behind."""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest

import forq
from forq.app import completion
from forq.app.tasks import JobRef
from forq.broker.results import check_jobs
from forq.client import Client
from forq.errors import JobDead, RedisUnavailable, UnknownJob, UnknownQueue, UsageError, WaitTimeout
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until

HOUR_MS = 3_600_000
TIMEOUT = 20.0

# Collects the ids that a loop yields, and calls a function after each.
Loop = Callable[[Iterable[JobRef[Any]], float | None, Callable[[str], None]], list[str]]


def by_for(refs: Iterable[JobRef[Any]], timeout: float | None, then: Callable[[str], None]) -> list[str]:
    ids = []
    for ref in forq.as_completed(refs, timeout):
        ids.append(ref.id)
        then(ref.id)
    return ids


def by_async_for(refs: Iterable[JobRef[Any]], timeout: float | None, then: Callable[[str], None]) -> list[str]:
    given = list(refs)

    async def main() -> list[str]:
        ids = []
        try:
            async for ref in forq.as_completed(given, timeout):
                ids.append(ref.id)
                then(ref.id)
        finally:
            for app in {ref.app for ref in given}:
                await app.async_client.aclose()
        return ids

    return asyncio.run(main())


@pytest.fixture(params=[by_for, by_async_for], ids=["for", "async_for"])
def loop(request: pytest.FixtureRequest) -> Loop:
    return request.param  # type: ignore[no-any-return]


def refs_to(app: forq.App, *ids: str, queue: str = "q") -> list[JobRef[Any]]:
    task = app.task_ref("any", queue=queue)
    return [task.ref(id) for id in ids]


def claimed(queue: OneQueue, *ids: str) -> HandWorker:
    queue.enqueue(*ids)
    worker = queue.worker()
    worker.turn(want=len(ids))
    return worker


def nothing(_: str) -> None:
    pass


class InThread:
    """Runs a loop in a thread of its own."""

    def __init__(self, loop: Loop, refs: Iterable[JobRef[Any]], timeout: float | None = TIMEOUT) -> None:
        self.ids: list[str] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(loop, list(refs), timeout), daemon=True)
        self._thread.start()

    def _run(self, loop: Loop, refs: list[JobRef[Any]], timeout: float | None) -> None:
        try:
            loop(refs, timeout, self.ids.append)
        except Exception as exc:
            self.error = exc

    def registered(self, queue: OneQueue, count: int) -> "InThread":
        wait_until(lambda: len(queue.hash("waiters")) == count, what=f"{count} waiters are registered")
        return self

    def yielded(self, *ids: str) -> None:
        wait_until(lambda: self.ids == list(ids), what=f"yielded {ids}")

    def ended(self) -> list[str]:
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the loop has not ended"
        if self.error is not None:
            raise self.error
        return self.ids


def waiter_connections(server: Server) -> int:
    with server.connect() as client:
        return sum(one["name"] == "forq-waiter" for one in client.client_list())


def test_refs_come_in_the_order_of_their_ends(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    worker = claimed(queue, "a", "b", "c")
    waiting = InThread(loop, refs_to(app, "a", "b", "c")).registered(queue, 3)
    worker.turn(done="c", results={"c": "3"}, keep=2)
    waiting.yielded("c")
    worker.turn(done="a", results={"a": "1"}, keep=1)
    waiting.yielded("c", "a")
    worker.turn(done="b", results={"b": "2"})
    assert waiting.ended() == ["c", "a", "b"]
    assert queue.hash("waiters") == {}


def test_jobs_that_ended_before_come_first_by_the_time_of_their_end(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    worker = claimed(queue, "a", "b", "c", "d")
    for id, left in (("d", 3), ("b", 2)):
        worker.turn(done=id, results={id: "1"}, keep=left)
        time.sleep(0.002)
    worker.turn(failed="c", keep=1)
    time.sleep(0.002)
    queue.enqueue("e")
    second = queue.worker("w2")
    second.turn(want=1)
    second.turn(done="e", results={"e": "1"})
    waiting = InThread(loop, refs_to(app, "a", "b", "c", "d", "e")).registered(queue, 1)
    waiting.yielded("d", "b", "c", "e")
    worker.turn(done="a", results={"a": "1"})
    assert waiting.ended() == ["d", "b", "c", "e", "a"]


def test_jobs_that_end_while_the_waiters_are_registered_come_by_the_time_of_their_end(
    queue: OneQueue, app: forq.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is reported by a message, the second is found by a check."""
    monkeypatch.setattr(completion, "CHECK_BATCH", 1)
    worker = claimed(queue, "a", "b")
    checked = []

    def check(link: Any, base: str, name: str, jobs: Any, valid_ms: int) -> Any:
        checks = check_jobs(link, base, name, jobs, valid_ms)
        checked.append(jobs[0].id)
        if checked == ["a"]:
            for id, left in (("a", 1), ("b", 0)):
                worker.turn(done=id, results={id: "1"}, keep=left)
                time.sleep(0.002)
        return checks

    monkeypatch.setattr(completion, "check_jobs", check)
    assert by_for(refs_to(app, "a", "b"), TIMEOUT, nothing) == ["a", "b"]
    assert checked == ["a", "b", "a"], "a's time is looked up"


def test_results_of_yielded_refs(queue: OneQueue, app: forq.App) -> None:
    worker = claimed(queue, "a", "b", "c")
    worker.turn(done="a", results={"a": '"one"'}, keep=2)
    worker.turn(failed="b", error='{"name":"Oops","message":"no"}', keep=1)
    queue.enqueue("d")
    queue.producer.cancel("d")
    worker.turn(done="c", results={"c": "null"})
    found = {ref.id: ref for ref in forq.as_completed(refs_to(app, "a", "b", "c", "d", "never"), 0)}
    assert found["a"].result(0) == "one"
    assert found["c"].result(0) is None
    with pytest.raises(JobDead, match="Oops: no"):
        found["b"].result(0)
    for id in ("d", "never"):
        with pytest.raises(UnknownJob):
            found[id].result(0)

    async def results() -> list[Any]:
        seen = {ref.id: ref async for ref in forq.as_completed(refs_to(app, "a", "b"), 0)}
        try:
            return [await seen["a"].aresult(0), *await asyncio.gather(seen["b"].aresult(0), return_exceptions=True)]
        finally:
            await app.async_client.aclose()

    one, error = asyncio.run(results())
    assert one == "one"
    assert isinstance(error, JobDead)


@pytest.mark.parametrize("outcome", ["dead", "cancelled", "deleted"])
def test_jobs_that_are_not_done_come_too(queue: OneQueue, app: forq.App, loop: Loop, outcome: str) -> None:
    worker = claimed(queue, "a")
    queue.enqueue("b")
    waiting = InThread(loop, refs_to(app, "a", "b")).registered(queue, 2)
    if outcome == "dead":
        worker.turn(failed="a")
    elif outcome == "cancelled":
        queue.producer.cancel("b")
    else:
        queue.registry.delete("q", force=True)
        assert sorted(waiting.ended()) == ["a", "b"]
        with pytest.raises(UnknownQueue):
            refs_to(app, "a")[0].result(0)
        return
    waiting.yielded("a" if outcome == "dead" else "b")
    queue.producer.remove("b")
    worker.turn(done="" if outcome == "dead" else "a")
    assert sorted(waiting.ended()) == ["a", "b"]


def test_a_retry_is_not_the_end(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    queue.registry.configure("q", {"max_retries": 5, "min_backoff_ms": 0}, {})
    worker = claimed(queue, "a")
    waiting = InThread(loop, refs_to(app, "a")).registered(queue, 1)
    worker.turn(failed="a")
    assert waiting.ids == []
    worker.turn(want=1)
    worker.turn(done="a", results={"a": "1"})
    assert waiting.ended() == ["a"]


def test_a_timeout_names_how_many_are_left(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    worker = claimed(queue, "a", "b", "c")
    worker.turn(done="a", results={"a": "1"}, keep=2)
    yielded: list[str] = []
    with pytest.raises(WaitTimeout, match=r"2 of 3 jobs have not ended within 0\.2 s; `forqctl why q b` explains"):
        loop(refs_to(app, "a", "b", "c"), 0.2, yielded.append)
    assert yielded == ["a"]


def test_a_timeout_of_zero_yields_the_ended_ones(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    claimed(queue, "a", "b").turn(done="a", results={"a": "1"}, keep=1)
    yielded: list[str] = []
    with pytest.raises(WaitTimeout, match="1 of 2 jobs"):
        loop(refs_to(app, "a", "b"), 0, yielded.append)
    assert yielded == ["a"]


def test_jobs_that_end_in_a_slow_body_are_yielded_after_the_timeout(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    worker = claimed(queue, "a", "b")
    worker.turn(done="a", results={"a": "1"}, keep=1)

    def body(id: str) -> None:
        if id == "a":
            worker.turn(done="b", results={"b": "1"})
            time.sleep(0.2)

    assert loop(refs_to(app, "a", "b"), 0.1, body) == ["a", "b"]


def test_refs_of_several_queues_and_apps(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    other = forq.App("other", url=queue.url)
    with one_queue(queue.url, "other", keep_done_ms=HOUR_MS) as second:
        workers = claimed(queue, "a", "b"), claimed(second, "a")
        refs = [*refs_to(app, "a", "b"), *refs_to(other, "a", queue="other")]
        waiting = InThread(lambda r, t, f: loop(r, t, f), refs).registered(queue, 2).registered(second, 1)
        workers[0].turn(done="b", results={"b": "1"}, keep=1)
        waiting.yielded("b")
        workers[1].turn(done="a", results={"a": "1"})
        waiting.yielded("b", "a")
        assert len(queue.hash("waiters")) == 1
        workers[0].turn(done="a", results={"a": "1"})
        assert waiting.ended() == ["b", "a", "a"]
    other.client.close()


@pytest.mark.one_server
def test_refs_on_several_servers(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    with Server() as second_server, one_queue(second_server.url, keep_done_ms=HOUR_MS) as second:
        other = forq.App("other", url=second_server.url)
        workers = claimed(queue, "a"), claimed(second, "b")
        waiting = InThread(loop, [*refs_to(app, "a"), *refs_to(other, "b")])
        waiting.registered(queue, 1).registered(second, 1)
        workers[1].turn(done="b", results={"b": "1"})
        waiting.yielded("b")
        workers[0].turn(done="a", results={"a": "1"})
        assert waiting.ended() == ["b", "a"]
        other.client.close()


def test_the_same_job_comes_once(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    claimed(queue, "a").turn(done="a", results={"a": "1"})
    assert loop(refs_to(app, "a", "a"), 0, nothing) == ["a"]


def test_without_refs_the_loop_ends_at_once(app: forq.App, loop: Loop) -> None:
    assert loop([], 0, nothing) == []


def test_a_queue_that_keeps_nothing_is_an_error_before_waiting(redis_url: str, app: forq.App, loop: Loop) -> None:
    with one_queue(redis_url, keep_done_ms=0) as queue:
        queue.enqueue("a")
        with pytest.raises(UsageError, match="keeps no results"):
            loop(refs_to(app, "a"), TIMEOUT, nothing)


def test_only_refs_are_allowed(app: forq.App) -> None:
    with pytest.raises(UsageError, match=r"takes JobRefs.*'a' is not allowed"):
        forq.as_completed(["a"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="-1 is not allowed"):
        forq.as_completed(refs_to(app, "a"), timeout=-1)


@pytest.mark.one_server
def test_breaking_out_of_a_loop_closes_its_subscription(queue: OneQueue, app: forq.App, server: Server) -> None:
    claimed(queue, "a", "b").turn(done="a", results={"a": "1"}, keep=1)
    gc.disable()
    try:
        completed = forq.as_completed(refs_to(app, "a", "b"), TIMEOUT)
        for _ in completed:
            assert waiter_connections(server) == 1
            break
        wait_until(lambda: waiter_connections(server) == 0, what="the connection is closed")
        assert [ref.id for _, ref in zip("1", completed, strict=False)] == ["a"], "each loop starts anew"
    finally:
        gc.enable()


@pytest.mark.one_server
@pytest.mark.parametrize("how", ["break", "cancel"])
def test_leaving_an_async_loop_unsubscribes(queue: OneQueue, app: forq.App, server: Server, how: str) -> None:
    claimed(queue, "a", "b").turn(done="a", results={"a": "1"}, keep=1)

    def channels() -> int:
        with server.connect() as client:
            return len(client.pubsub_channels("*ended*"))

    async def loop(seen: asyncio.Event) -> None:
        async for _ in forq.as_completed(refs_to(app, "a", "b"), TIMEOUT):
            assert channels() == 2
            seen.set()
            if how == "break":
                break

    async def main() -> None:
        seen = asyncio.Event()
        task = asyncio.create_task(loop(seen))
        await seen.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() is (how == "cancel")
        async with asyncio.timeout(TIMEOUT):
            while await asyncio.to_thread(channels):
                await asyncio.sleep(0.01)
        await app.async_client.aclose()

    asyncio.run(main())


@pytest.mark.one_server
def test_all_jobs_share_one_subscription(queue: OneQueue, app: forq.App, server: Server) -> None:
    ids = [str(n) for n in range(1200)]
    queue.enqueue(*ids)

    async def main() -> None:
        loops = [asyncio.create_task(drain(forq.as_completed(refs_to(app, *ids)).__aiter__())) for _ in range(3)]
        async with asyncio.timeout(TIMEOUT):
            while len(await asyncio.to_thread(queue.hash, "waiters")) < len(ids):
                await asyncio.sleep(0.01)
        assert await asyncio.to_thread(waiter_connections, server) == 1
        for task in loops:
            task.cancel()
        await asyncio.wait(loops)
        await app.async_client.aclose()

    async def drain(refs: AsyncIterator[JobRef[Any]]) -> None:
        async for _ in refs:
            pass

    asyncio.run(main())
    queue.redis.delete(queue.key("waiters"))
    wait_until(lambda: waiter_connections(server) == 0, what="the connection is closed")
    waiting = InThread(by_for, refs_to(app, *ids)).registered(queue, len(ids))
    assert waiter_connections(server) == 1
    queue.registry.delete("q", force=True)
    assert sorted(waiting.ended()) == sorted(ids)


@pytest.mark.one_server
def test_a_lost_subscription_is_restored(queue: OneQueue, app: forq.App, loop: Loop, server: Server) -> None:
    worker = claimed(queue, "a", "b", "c")
    waiting = InThread(loop, refs_to(app, "a", "b", "c")).registered(queue, 3)
    with server.connect() as client:
        for one in client.client_list():
            if one["name"] == "forq-waiter":
                client.client_kill_filter(_id=one["id"])
    worker.turn(done="b", results={"b": "1"}, keep=2)
    waiting.yielded("b")
    worker.turn(done="a", results={"a": "1"}, keep=1)
    waiting.yielded("b", "a")
    worker.turn(done="c", results={"c": "1"})
    assert waiting.ended() == ["b", "a", "c"]


def test_registrations_are_renewed(queue: OneQueue, app: forq.App, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "REGISTRATION_SECONDS", 0.5)
    worker = claimed(queue, "a")
    waiting = InThread(loop, refs_to(app, "a")).registered(queue, 1)

    def valid_until() -> int:
        return int(queue.hash("waiters")["a"].split(" ")[0])

    first = valid_until()
    wait_until(lambda: valid_until() > first + 500, what="it is registered again")
    worker.turn(done="a", results={"a": "1"})
    assert waiting.ended() == ["a"]


def test_the_end_of_an_earlier_job_with_the_id_is_ignored(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    worker = claimed(queue, "a")
    waiting = InThread(loop, refs_to(app, "a")).registered(queue, 1)
    queue.redis.publish(queue.channel("ended:a"), "done 7 another-mark")
    worker.turn(done="a", results={"a": "1"})
    assert waiting.ended() == ["a"]


def test_a_message_without_a_mark_is_checked(queue: OneQueue, app: forq.App, loop: Loop) -> None:
    """As an earlier release sends it."""
    worker = claimed(queue, "a")
    waiting = InThread(loop, refs_to(app, "a")).registered(queue, 1)
    queue.redis.hdel(queue.key("waiters"), "a")
    queue.redis.publish(queue.channel("ended:a"), "done 7")
    waiting.registered(queue, 1)
    assert waiting.ids == []
    worker.turn(done="a", results={"a": "1"})
    assert waiting.ended() == ["a"]


def test_without_redis_the_first_check_fails_at_once(loop: Loop) -> None:
    app = forq.App("q", url="unix:///nowhere/redis.sock")
    with pytest.raises(RedisUnavailable):
        loop(refs_to(app, "a"), TIMEOUT, nothing)


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server of this test, whose data survives a restart."""
    with Server(appendonly=True) as server:
        yield server


@pytest.mark.one_server
def test_the_wait_survives_a_restart_of_redis(own_server: Server, loop: Loop) -> None:
    app = forq.App("q", url=own_server.url)
    with one_queue(own_server.url, keep_done_ms=HOUR_MS) as queue:
        worker = claimed(queue, "a", "b")
        waiting = InThread(loop, refs_to(app, "a", "b")).registered(queue, 2)
        own_server.restart()
        worker.consumer.close()
        worker.turn(done="b", results={"b": "1"}, keep=1)
        waiting.yielded("b")
        worker.turn(done="a", results={"a": "1"})
        assert waiting.ended() == ["b", "a"]


@pytest.mark.one_server
def test_a_timeout_during_an_outage_names_it(own_server: Server, loop: Loop) -> None:
    app = forq.App("q", url=own_server.url)
    with one_queue(own_server.url, keep_done_ms=HOUR_MS) as queue:
        queue.enqueue("a")
        waiting = InThread(loop, refs_to(app, "a"), 6.0).registered(queue, 1)
        own_server.kill()
        with pytest.raises(WaitTimeout, match=r"1 of 1 jobs .* Redis is unavailable"):
            waiting.ended()


def test_a_client_that_was_used_for_a_loop_works_on(queue: OneQueue, app: forq.App) -> None:
    claimed(queue, "a").turn(done="a", results={"a": "1"})
    assert by_for(refs_to(app, "a"), 0, nothing) == ["a"]
    assert Client(queue.url).queue("q").wait("a", 0) == 1
    assert refs_to(app, "a")[0].state() == "done"
