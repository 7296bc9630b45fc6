"""One snapshot per second for all viewers, none without one, and a new one after an action."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from forq.broker.registry import Registry
from forq.client import Client
from forq.errors import RedisUnavailable
from forq.web.feed import Feed, View
from forq.web.source import Source


class CountingSource(Source):
    """Counts the snapshots."""

    samples = 0
    before: Callable[[], None] = staticmethod(lambda: None)

    async def sample(self, work: Callable[[], Any]) -> Any:
        self.samples += 1
        self.before()
        return await super().sample(work)


def feed_of(url: str, now: Callable[[], float] | None = None) -> tuple[Feed, CountingSource]:
    source = CountingSource(url, "forq:")
    return (Feed(source) if now is None else Feed(source, now=now)), source


def test_pages_within_a_second_share_a_snapshot(redis_url: str) -> None:
    clock = [100.0]
    feed, source = feed_of(redis_url, lambda: clock[0])

    async def visit() -> list[int]:
        first = await asyncio.gather(*(feed.current() for _ in range(50)))
        clock[0] += 0.9
        second = await feed.current()
        clock[0] += 0.2
        third = await feed.current()
        return [*{view.number for view in first}, second.number, third.number]

    assert asyncio.run(visit()) == [0, 0, 1]
    assert source.samples == 2


def test_fifty_viewers_get_the_same_views(redis_url: str) -> None:
    feed, source = feed_of(redis_url)

    async def watch() -> list[View]:
        found = []
        async for view in feed.views():
            found.append(view)
            if len(found) == 3:
                break
        return found

    async def all_watch() -> list[list[View]]:
        return await asyncio.gather(*(watch() for _ in range(50)))

    seen = asyncio.run(all_watch())
    assert all(views == seen[0] for views in seen)
    assert source.samples == 3


def test_an_action_makes_the_next_page_take_a_new_snapshot(redis_url: str) -> None:
    feed, _ = feed_of(redis_url, lambda: 100.0)
    queue = Client(redis_url).create_queue("mails")

    async def act() -> tuple[str, str]:
        before = await feed.current()
        queue.pause()
        feed.expire()
        after = await feed.current()
        return before.queues["mails"].state, after.queues["mails"].state

    assert asyncio.run(act()) == ("unserved", "paused")


def test_an_action_during_a_snapshot_makes_another_one(redis_url: str) -> None:
    """The snapshot under way may have read what the action changes."""
    feed, source = feed_of(redis_url, lambda: 100.0)
    expired: list[bool] = []

    def expire_once() -> None:
        if not expired:
            expired.append(True)
            feed.expire()

    source.before = expire_once
    view = asyncio.run(feed.current())
    assert (view.number, source.samples) == (1, 2)


def test_slow_snapshots_become_rarer(redis_url: str) -> None:
    clock = [100.0]
    feed, source = feed_of(redis_url, lambda: clock[0])

    def take_half_a_second() -> None:
        clock[0] += 0.5

    source.before = take_half_a_second

    async def visit() -> list[int]:
        numbers = []
        for _ in range(12):
            numbers.append((await feed.current()).number)
            clock[0] += 1.0
        return numbers

    assert asyncio.run(visit()) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]


def test_an_answer_is_computed_once_for_all_viewers_of_a_view(redis_url: str) -> None:
    feed, _ = feed_of(redis_url)
    computed = []

    async def compute() -> int:
        computed.append(1)
        await asyncio.sleep(0)
        return 7

    async def ask() -> list[int]:
        view = await feed.current()
        leaving = asyncio.ensure_future(feed.shared(view, "key", compute))
        await asyncio.sleep(0)
        leaving.cancel()
        return await asyncio.gather(*(feed.shared(view, "key", compute) for _ in range(10)))

    assert asyncio.run(ask()) == [7] * 10
    assert len(computed) == 1


def test_an_answer_that_took_long_is_kept_for_further_views_but_not_after_an_action(redis_url: str) -> None:
    clock = [100.0]
    feed, _ = feed_of(redis_url, lambda: clock[0])

    async def compute() -> float:
        began = clock[0]
        clock[0] += 0.3
        return began

    async def ask() -> float:
        return await feed.shared(await feed.current(), "key", compute)

    async def watch() -> list[float]:
        found = []
        for _ in range(6):
            found.append(await ask())
            clock[0] += 1.1
        feed.expire()
        return [*found, await ask()]

    first, *later, last = asyncio.run(watch())
    # 3 s of rest.
    assert later == [first, first, pytest.approx(first + 3.6), later[2], later[2]]
    assert last > later[2]


def test_rates_come_from_two_snapshots(redis_url: str) -> None:
    clock = [100.0]
    feed, source = feed_of(redis_url, lambda: clock[0])
    Client(redis_url).create_queue("mails")
    base = "forq:queue:{mails}"

    async def visit() -> list[object]:
        first = (await feed.current()).queues["mails"].rates.done
        source.link().call("HINCRBY", f"{base}:counts", "done", 0)
        clock[0] += 2.0
        second = (await feed.current()).queues["mails"].rates.done
        clock[0] += 60.0
        third = (await feed.current()).queues["mails"].rates.done
        return [first, second, third]

    assert asyncio.run(visit()) == [None, 0.0, None]


def test_a_deleted_queue_is_gone_from_the_next_view(redis_url: str) -> None:
    feed, source = feed_of(redis_url, lambda: 100.0)
    client = Client(redis_url)
    client.create_queue("mails")

    async def visit() -> tuple[list[str], list[str]]:
        before = list((await feed.current()).queues)
        Registry(source.link(), "forq:").delete("mails", force=True)
        feed.expire()
        return before, list((await feed.current()).queues)

    assert asyncio.run(visit()) == (["mails"], [])


def test_without_redis_the_view_says_why(tmp_path: Any) -> None:
    feed, _ = feed_of(f"unix://{tmp_path}/none.sock")
    view = asyncio.run(feed.current())
    assert view.queues == {}
    assert "cannot reach Redis" in view.redis_error
    assert [fault.check for fault in view.faults] == ["redis"]
    assert view.total("waiting") is None or view.total("waiting") == 0


def test_after_a_snapshot_that_failed_slowly_the_next_one_comes_soon(tmp_path: Any) -> None:
    """Its time was a timeout, not work."""
    clock = [100.0]
    feed, source = feed_of(f"unix://{tmp_path}/none.sock", lambda: clock[0])

    def take_five_seconds() -> None:
        clock[0] += 5.0

    source.before = take_five_seconds

    async def visit() -> list[int]:
        first = (await feed.current()).number
        clock[0] += 2.1
        return [first, (await feed.current()).number]

    assert asyncio.run(visit()) == [0, 1]


def test_reads_fail_at_once_while_redis_does_not_answer(tmp_path: Any) -> None:
    feed, source = feed_of(f"unix://{tmp_path}/none.sock")

    reads: list[int] = []

    async def read() -> None:
        await feed.current()
        await source.run(lambda: reads.append(1))

    with pytest.raises(RedisUnavailable, match="cannot reach Redis"):
        asyncio.run(read())
    assert not reads
