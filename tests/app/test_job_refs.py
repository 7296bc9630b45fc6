"""A ref means the job that its call stored, even if the id is used again."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import forq
from forq.app.tasks import JobRef
from forq.broker.results import ResultWaiter
from forq.errors import ForqError, JobDead, UnknownJob, UnknownQueue, UsageError
from forq.result_wait import ResultWait
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue
from tests.support.drive.wait import wait_until

HOUR_MS = 3_600_000
Read = Callable[[JobRef[Any]], Any]


def by_result(ref: JobRef[Any]) -> Any:
    return ref.result(5)


def by_aresult(ref: JobRef[Any]) -> Any:
    async def main() -> Any:
        try:
            return await ref.aresult(5)
        finally:
            await ref.app.async_client.aclose()

    return asyncio.run(main())


def by_as_completed(ref: JobRef[Any]) -> Any:
    (ended,) = forq.as_completed([ref], 5)
    return ended.result(0)


def by_async_as_completed(ref: JobRef[Any]) -> Any:
    async def main() -> Any:
        try:
            async for ended in forq.as_completed([ref], 5):
                return await ended.aresult(0)
        finally:
            await ref.app.async_client.aclose()

    return asyncio.run(main())


@pytest.fixture(params=[by_result, by_aresult, by_as_completed, by_async_as_completed])
def read(request: pytest.FixtureRequest) -> Read:
    return request.param  # type: ignore[no-any-return]


def enqueue(app: forq.App, **options: Any) -> JobRef[Any]:
    return app.task_ref("any").using(id="a", **options).enqueue()


def run_next(worker: HandWorker, result: str) -> None:
    assert worker.turn(want=1) == ["a"]
    worker.turn(done="a", results={"a": result})


class InThread:
    def __init__(self, read: Read, ref: JobRef[Any]) -> None:
        self._answer: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(read, ref), daemon=True)
        self._thread.start()

    def _run(self, read: Read, ref: JobRef[Any]) -> None:
        try:
            self._answer.append(read(ref))
        except ForqError as exc:
            self._answer.append(exc)

    def result(self) -> Any:
        self._thread.join(20)
        if isinstance(self._answer[0], Exception):
            raise self._answer[0]
        return self._answer[0]


def enqueued_us(ref: JobRef[Any]) -> int:
    assert ref._identity is not None
    return int(ref._identity.enqueued_us)


def two_in_one_millisecond(queue: OneQueue, app: forq.App) -> tuple[JobRef[Any], JobRef[Any]]:
    """Refs of a job that is done, and of one with its id that was enqueued in the same millisecond and waits."""
    worker = queue.worker()
    for _ in range(1000):
        first = enqueue(app)
        run_next(worker, '"first"')
        second = enqueue(app)
        if enqueued_us(first) // 1000 == enqueued_us(second) // 1000:
            return first, second
        run_next(worker, '"another"')
    raise AssertionError("no two jobs were enqueued in the same millisecond")


def date(queue: OneQueue, enqueued_us: int) -> None:
    """Changes the enqueue time of the job, as if the server's clock had been different then."""
    flag, _, body = queue.redis.hget(queue.key("jobs"), "a").partition(b"\n")
    queue.redis.hset(queue.key("jobs"), "a", flag[:3] + str(enqueued_us).encode() + b"\n" + body)


def registered(queue: OneQueue) -> None:
    wait_until(lambda: "a" in queue.hash("waiters"), what="it waits")


def test_the_result_of_a_later_job_is_not_returned(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    first = enqueue(app)
    run_next(worker, '"first"')
    assert read(first) == "first"
    second = enqueue(app)
    run_next(worker, '"second"')
    assert read(second) == "second"
    with pytest.raises(UnknownJob):
        read(first)
    assert (first.state(), second.state()) == ("gone", "done")


def test_the_result_of_an_earlier_job_is_not_returned(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    enqueue(app)
    run_next(worker, '"first"')
    second = enqueue(app)
    waiting = InThread(read, second)
    registered(queue)
    run_next(worker, '"second"')
    assert waiting.result() == "second"


def test_a_job_behind_a_running_one_has_its_own_result(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    first = enqueue(app)
    assert worker.turn(want=1) == ["a"]
    behind = enqueue(app)
    waits = InThread(read, first), InThread(read, behind)
    wait_until(lambda: queue.redis.pubsub_numsub(queue.channel("ended:a"))[0][1] == 2, what="both wait")
    registered(queue)
    worker.turn(done="a", results={"a": '"first"'})
    assert waits[0].result() == "first"
    registered(queue)
    run_next(worker, '"behind"')
    assert waits[1].result() == "behind"


def test_the_error_of_an_earlier_job_is_not_raised(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    first = enqueue(app)
    worker.turn(want=1)
    worker.turn(failed="a", error='{"name":"Oops","message":"no"}')
    second = enqueue(app)
    run_next(worker, '"second"')
    assert read(second) == "second"
    with pytest.raises((JobDead, UnknownJob)):
        read(first)


def test_an_update_of_a_waiting_job_means_the_same_job(queue: OneQueue, app: forq.App, read: Read) -> None:
    refs = enqueue(app), enqueue(app)
    run_next(queue.worker(), '"once"')
    assert [read(ref) for ref in refs] == ["once", "once"]


def test_a_skipped_job_means_the_job_that_is_there(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    enqueue(app)
    worker.turn(want=1)
    skipped = enqueue(app, if_exists="skip")
    worker.turn(done="a", results={"a": '"there"'})
    assert read(skipped) == "there"


def test_a_known_token_gives_the_earlier_job(queue: OneQueue, app: forq.App, read: Read) -> None:
    task = app.task_ref("any")
    first = task.using(token="order-42").enqueue()
    again = task.using(token="order-42").enqueue()
    assert again == first
    worker = queue.worker()
    worker.turn(want=1)
    worker.whole_turn(done=[first.id], results={first.id: '"once"'})  # type: ignore[arg-type]
    assert (read(first), read(again)) == ("once", "once")


def test_the_job_of_a_deleted_queue_is_gone_even_if_it_is_created_again(
    queue: OneQueue, app: forq.App, read: Read
) -> None:
    ref = enqueue(app)
    queue.registry.delete("q", force=True)
    while queue.registry.purge("q", lambda dropped: None):
        pass
    queue.create(keep_done_ms=HOUR_MS)
    enqueue(app)
    run_next(queue.worker("w2"), '"other"')
    with pytest.raises((UnknownQueue, UnknownJob)):
        read(ref)


def test_refs_with_the_same_id_are_waited_for_separately(queue: OneQueue, app: forq.App) -> None:
    worker = queue.worker()
    first = enqueue(app)
    worker.turn(want=1)
    behind = enqueue(app)
    iterator = iter(forq.as_completed([first, behind], 20))
    ended = InThread(lambda _: next(iterator), first)
    registered(queue)
    worker.turn(done="a", results={"a": '"first"'})
    assert ended.result() is first
    run_next(worker, '"behind"')
    assert next(iterator) is behind
    assert list(iterator) == []


def test_a_ref_made_from_an_id_means_the_last_job(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    for result in ('"first"', '"second"'):
        enqueue(app)
        run_next(worker, result)
    assert read(app.task_ref("any").ref("a")) == "second"


def test_without_kept_results_the_call_fails_before_waiting(redis_url: str, app: forq.App, read: Read) -> None:
    with one_queue(redis_url, keep_done_ms=0):
        with pytest.raises(UsageError, match="keeps no results"):
            read(enqueue(app))
        assert enqueue(app, keep_done="1h").state() == "waiting"


def test_the_error_of_a_job_with_a_keep_done_of_its_own_is_raised(redis_url: str, app: forq.App, read: Read) -> None:
    with one_queue(redis_url, keep_done_ms=0, max_retries=0, retry_lane_retries=0) as queue:
        worker = queue.worker()
        ref = enqueue(app, keep_done="1h")
        worker.turn(want=1)
        worker.turn(failed="a", error='{"name":"Oops","message":"no"}')
        with pytest.raises(JobDead, match="Oops"):
            read(ref)


def test_a_job_behind_a_dead_one_is_found_after_a_long_outage(queue: OneQueue, app: forq.App) -> None:
    queue.set_options(max_retries=0, retry_lane_retries=0)
    worker = queue.worker()
    enqueue(app)
    worker.turn(want=1)
    behind = enqueue(app)
    wait = ResultWait("q", "a", None)
    waiter = ResultWaiter(app.client.link(), app.client.prefix, "q", "a", behind._identity)
    assert wait.check(waiter) is None
    worker.turn(failed="a", error='{"name":"Oops","message":"no"}')
    # Its registration and the stored end have expired meanwhile.
    queue.redis.delete(queue.key("waiters"), *queue.redis.keys("*:told:*"))
    assert wait.check(waiter) is None
    run_next(worker, '"behind"')
    done = wait.check(waiter)
    assert done is not None
    assert done.result == "behind"


def test_cancel_leaves_a_later_job_with_the_id_alone(queue: OneQueue, app: forq.App) -> None:
    first = enqueue(app)
    run_next(queue.worker(), '"first"')
    second = enqueue(app)
    assert not first.cancel()
    assert second.state() == "waiting"
    assert second.cancel()
    assert second.state() == "gone"


def test_two_jobs_enqueued_in_one_millisecond_are_told_apart(queue: OneQueue, app: forq.App, read: Read) -> None:
    first, second = two_in_one_millisecond(queue, app)
    assert (first.state(), second.state()) == ("gone", "waiting")
    assert read(first) == "first"
    run_next(queue.worker("w2"), '"second"')
    assert read(second) == "second"
    with pytest.raises(UnknownJob):
        read(first)


def test_cancel_leaves_a_job_of_the_same_millisecond_alone(queue: OneQueue, app: forq.App) -> None:
    first, second = two_in_one_millisecond(queue, app)
    assert not first.cancel()
    assert second.state() == "waiting"
    assert second.cancel()


def test_a_ref_of_a_blocked_job_does_not_mean_a_third_one(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    enqueue(app)
    worker.turn(want=1)
    behind = enqueue(app)
    worker.turn(done="a", results={"a": '"first"'})
    run_next(worker, '"behind"')
    third = enqueue(app)
    assert not behind.cancel()
    run_next(worker, '"third"')
    with pytest.raises(UnknownJob):
        read(behind)
    assert behind.state() == "gone"
    assert read(third) == "third"


def test_enqueues_behind_a_running_job_mean_the_same_job(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    enqueue(app)
    worker.turn(want=1)
    refs = enqueue(app), enqueue(app)
    worker.turn(done="a", results={"a": '"first"'})
    assert queue.inspector.job("a")["enqueued_at"] == enqueued_us(refs[0]) / 1e6
    run_next(worker, '"behind"')
    assert [read(ref) for ref in refs] == ["behind", "behind"]


def test_a_blocked_job_that_was_merged_means_the_job_ahead(queue: OneQueue, app: forq.App, read: Read) -> None:
    worker = queue.worker()
    first = enqueue(app)
    worker.turn(want=1)
    behind = enqueue(app)
    queue.recover(worker)
    last = queue.worker("w2")
    assert last.turn(want=1) == ["a"]
    later = enqueue(app)
    last.turn(done="a", results={"a": '"merged"'})
    assert (first.state(), behind.state(), later.state()) == ("gone", "gone", "waiting")
    assert [read(ref) for ref in (first, behind)] == ["merged", "merged"]
    run_next(last, '"later"')
    assert read(later) == "later"


def test_cancel_of_a_running_job_leaves_the_one_blocked_behind_it_alone(queue: OneQueue, app: forq.App) -> None:
    first = enqueue(app)
    queue.worker().turn(want=1)
    behind = enqueue(app)
    assert not first.cancel()
    assert behind.cancel()
    assert not behind.cancel()


def test_cancel_of_a_job_that_was_blocked_leaves_a_later_blocked_one_alone(queue: OneQueue, app: forq.App) -> None:
    worker = queue.worker()
    enqueue(app)
    worker.turn(want=1)
    behind = enqueue(app)
    assert worker.turn(want=1, done="a") == ["a"]
    later = enqueue(app)
    assert not behind.cancel()
    assert later.cancel()


def test_a_later_job_with_an_earlier_time_is_another_one(queue: OneQueue, app: forq.App, read: Read) -> None:
    """The server's clock was set back."""
    first = enqueue(app)
    worker = queue.worker()
    run_next(worker, '"first"')
    enqueue(app)
    date(queue, enqueued_us(first) - 1)
    assert not first.cancel()
    run_next(worker, '"second"')
    with pytest.raises(UnknownJob):
        read(first)
    assert first.state() == "gone"


def test_an_update_after_the_clock_was_set_back_means_the_job(queue: OneQueue, app: forq.App, read: Read) -> None:
    ref = enqueue(app)
    date(queue, enqueued_us(ref) + 3_600_000_000)
    updated = enqueue(app)
    assert (ref.state(), updated.state()) == ("gone", "waiting")
    run_next(queue.worker(), '"updated"')
    assert read(updated) == "updated"
