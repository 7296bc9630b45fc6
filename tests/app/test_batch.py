"""Batches of tasks, run by the test kit."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import forq
from forq import testing
from forq.async_batch import AsyncBatch
from forq.batch import Batch
from forq.client import new_job
from forq.errors import UnknownQueue, UsageError
from forq.job import Job
from forq.testing import Memory

app = forq.App("home")
seen: list[Any] = []


@app.task
def count(number: int) -> int:
    return 10 * number


@app.task(queue="others")
async def count_later(number: int) -> int:
    return 100 * number


@app.task
def summary(title: str) -> str:
    job = forq.current_job()
    assert job.batch is not None
    batch = app.client.find_batch(job.queue, job.batch)
    seen.append((title, batch.info()["state"]))
    return f"{title}: {batch.results()}"


@app.task
def say(text: str) -> None:
    seen.append(text)


@app.task(dead_on=(KeyError,))
def fail() -> None:
    raise KeyError("no")


@app.task
def spread(depth: int) -> int:
    with app.batch_of(forq.current_job()) as batch:
        for _ in range(2 if depth else 0):
            batch.add(spread.prepare(depth - 1))
    return depth


@app.task(backoff=0)
def spread_again(text: str) -> None:
    """Adds two jobs in two blocks, fails after that, and is run again."""
    job = forq.current_job()
    with app.batch_of(job) as batch:
        batch.add(say.prepare(f"{text} 1"))
    with app.batch_of(job) as first, app.batch_of(job) as second:
        second.add(say.prepare(f"{text} 2"))
        first.add(say.prepare(f"{text} 3"))
        second.add(say.prepare(f"{text} 4"))
    if job.attempt == 1:
        raise ValueError("once")


@app.task
async def spread_later() -> None:
    async with app.abatch_of(forq.current_job()) as batch:
        await batch.add(say.prepare("child"))
        await batch.enqueue("others", {"number": 1}, type="count_later")


@pytest.fixture
def memory() -> Iterator[Memory]:
    seen.clear()
    with testing.memory(app) as memory:
        yield memory


def tasks_of(memory: Memory) -> list[str | None]:
    return [attempt.task for attempt in memory.run_all(raises=False)]


def test_a_callback_reads_the_results_of_members_in_two_queues(memory: Memory) -> None:
    with app.batch(on_done=summary.prepare("all"), results=True) as batch:
        refs = [batch.add(count.prepare(1)), batch.add(count_later.prepare(2)), batch.add(count.prepare(3))]
        assert memory.jobs(count) == []
    assert batch.info()["members"] == 3
    assert tasks_of(memory) == ["count", "count", "count_later", "summary"]
    assert [ref.result() for ref in refs] == [10, 200, 30]
    assert summary.ref(f"{batch.id}:on_done").result() == "all: [10, 200, 30]"
    assert seen == [("all", "done")]
    assert batch.info()["progress"] == 1.0


def test_a_death_runs_the_callbacks_for_it(memory: Memory) -> None:
    callbacks: Any = {name: say.prepare(name) for name in ("on_done", "on_end", "on_dead")}
    with app.batch(**callbacks) as batch:
        batch.add(fail.prepare())
        batch.add(count.prepare(1))
    memory.run_all(raises=False)
    assert sorted(seen) == ["on_dead", "on_end"]
    assert batch.info()["state"] == "failed"
    assert say.ref(f"{batch.id}:on_done").state() == "dead"


def test_an_exception_in_the_block_cancels_what_was_added(memory: Memory) -> None:
    batch = app.batch(on_end=say.prepare("over"))

    def add() -> None:
        with batch:
            batch.add(count.prepare(1))
            batch.flush()
            batch.add(count.prepare(1 // 0))

    with pytest.raises(ZeroDivisionError):
        add()
    assert tasks_of(memory) == ["say"]
    assert (seen, batch.info()["members"], batch.info()["other"]) == (["over"], 1, 1)


def test_a_batch_can_be_cancelled_later(memory: Memory) -> None:
    with app.batch(on_end=say.prepare("over")) as batch:
        for number in range(5):
            batch.add((count if number % 2 else count_later).prepare(number))
    assert memory.run_one() is not None
    assert app.client.find_batch(batch.queue, batch.id).cancel() == 4
    memory.run_all()
    assert (seen, batch.info()["done"], batch.info()["other"]) == (["over"], 1, 4)


def test_jobs_of_a_queue_that_nothing_serves_are_reported_too(memory: Memory) -> None:
    raw = memory.client.create_queue("raw")
    with app.batch(on_end=say.prepare("over")) as batch:
        member = batch.enqueue("raw", 1)
    assert tasks_of(memory) == []
    assert raw.cancel(member)
    assert tasks_of(memory) == ["say"]


def test_running_members_add_others(memory: Memory) -> None:
    with app.batch(on_done=summary.prepare("tree"), results=True) as batch:
        batch.add(spread.prepare(2))
    assert tasks_of(memory) == ["spread"] * 7 + ["summary"]
    assert batch.results() == [2, 1, 1, 0, 0, 0, 0]


def test_a_second_attempt_adds_nothing_twice(memory: Memory) -> None:
    with app.batch(on_end=say.prepare("over")) as batch:
        batch.add(spread_again.prepare("a"))
        batch.add(spread_again.prepare("b"))
    memory.run_all(raises=False)
    assert sorted(seen[:-1]) == [f"{text} {number}" for text in "ab" for number in range(1, 5)]
    assert seen[-1] == "over"
    assert (batch.info()["members"], batch.info()["done"]) == (10, 10)


def test_an_async_member_adds_others(memory: Memory) -> None:
    async def main() -> None:
        async with app.abatch(on_end=say.prepare("over")) as batch:
            await batch.add(spread_later.prepare())
        await memory.arun_all()
        assert (await batch.info())["members"] == 3
        await app.async_client.aclose()

    asyncio.run(main())
    assert seen == ["child", "over"]


def test_batches_for_asyncio_do_the_same(memory: Memory) -> None:
    async def fail_in_the_block(batch: AsyncBatch) -> None:
        async with batch:
            await batch.add(count.prepare(1))
            await batch.flush()
            await batch.add(count.prepare(1 // 0))

    async def main() -> None:
        batch = app.abatch(on_done=summary.prepare("all"), results=True)
        refs = await asyncio.gather(*(batch.add(each.prepare(1)) for each in (count, count_later)))
        await batch.add_job("home", new_job({"number": 5}, type="count"))
        await batch.flush()
        assert len(memory.jobs(state="waiting")) == 3
        await batch.seal()
        await memory.arun_all()
        assert [await ref.aresult() for ref in refs] == [10, 100]
        found = app.async_client.find_batch(batch.queue, batch.id)
        assert await found.results() == [10, 100, 50]
        other = app.async_client.batch("home", on_end=new_job({"text": "over"}, type="say"))
        with pytest.raises(ZeroDivisionError):
            await fail_in_the_block(other)
        assert (await other.info())["state"] == "failed"
        third = app.abatch()
        await third.add(count.prepare(7))
        await third.flush()
        assert await third.cancel() == 1
        assert await memory.arun_all()
        await app.async_client.aclose()

    asyncio.run(main())
    assert seen == [("all", "done"), "over"]


def test_a_batch_is_opened_in_the_queue_of_its_callbacks(memory: Memory) -> None:
    assert app.batch().queue == "home"
    assert app.batch(queue="others").queue == "others"
    assert app.batch(on_done=count_later.prepare(1)).queue == "others"
    with pytest.raises(UsageError, match="the callbacks of a batch must be of one queue"):
        app.batch(on_done=count_later.prepare(1), on_end=say.prepare("x"))
    with pytest.raises(UsageError, match="the callbacks of a batch must be of one queue"):
        app.abatch(on_done=count_later.prepare(1), queue="home")


def test_queues_of_the_app_are_created_when_they_are_needed(memory: Memory) -> None:
    late = forq.App("late", url=memory.url)
    first, second = late.task(count.function), late.task(queue="later")(say.function)
    with late.batch(on_done=first.prepare(1)) as batch:
        batch.add(second.prepare("x"))
    assert {"late", "later"} <= set(memory.client.queues())
    with pytest.raises(UnknownQueue), late.batch() as batch:
        batch.add(first.using(queue="elsewhere").prepare(1))

    async def main() -> None:
        latest = forq.App("latest", url=memory.url)
        task = latest.task(count.function)
        async with latest.abatch() as batch:
            await batch.add(task.prepare(1))
            await batch.add(task.using(queue="home").prepare(1))
        await latest.async_client.aclose()

    asyncio.run(main())
    assert len(memory.jobs("latest")) == 1


@pytest.mark.parametrize("name", ["on_done", "on_end", "on_dead"])
def test_wrong_callbacks_are_refused(memory: Memory, name: str) -> None:
    for callback, message in {
        say: rf"is not a prepared job; pass one: app.batch\({name}=TASK.prepare\(…\)\)",
        say.using(id="mine").prepare("a"): f"{name}: the id of a callback is that of its batch and its name",
        say.using(after="a").prepare("a"): f"{name}: a callback waits for its batch, and for nothing else",
        say.using(token="t").prepare("a"): r"using\(token=…\) is not allowed for jobs of a batch",
    }.items():
        given: Any = {name: callback}
        with pytest.raises(UsageError, match=message):
            app.batch(**given)
    assert memory.jobs() == []


def test_wrong_members_are_refused(memory: Memory) -> None:
    batch: Any = app.batch()
    with pytest.raises(UsageError, match=r"is not a prepared job; pass one: batch.add\(TASK.prepare\(…\)\)"):
        batch.add(count)
    sender_of: Any = count.using
    for option in ({"token": "t"}, {"if_exists": "skip"}, {"durable": "replica"}):
        with pytest.raises(UsageError, match="is not allowed for jobs of a batch"):
            batch.add(sender_of(**option).prepare(1))
    with pytest.raises(UsageError, match="has no token of its own"):
        batch.enqueue("home", 1, token="t")
    adding: Any = Batch(app.client.link, "forq:", "home", batch.id, parent=1, parent_id="a")
    with pytest.raises(UsageError, match="id 'mine' is not allowed: the ids of jobs that a running member adds are"):
        adding.add(count.using(id="mine").prepare(1))


def test_a_job_outside_of_a_batch_adds_no_members(memory: Memory) -> None:
    job = Job("home", "j1", "j1", "count", 5, 0.0, 1)
    for call in (app.batch_of, app.abatch_of, app.client.batch_of, app.async_client.batch_of):
        with pytest.raises(UsageError, match="job 'j1' of queue 'home' is no member of a batch, so it cannot add jobs"):
            call(job)


def test_a_job_can_wait_for_a_batch(memory: Memory) -> None:
    with app.batch() as batch:
        batch.add(count_later.prepare(1))
    say.using(after=batch).enqueue("after it")
    assert tasks_of(memory) == ["count_later", "say"]


def test_a_batch_that_nobody_seals_is_abandoned_after_an_hour(memory: Memory) -> None:
    batch = app.batch(on_end=say.prepare("over"))
    memory.clock.tick(3601)
    memory.run_all()
    assert (batch.info()["state"], seen) == ("abandoned", [])
