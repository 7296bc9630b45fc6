"""Waiting for the end of a job: what wait returns or raises, and which waiters are notified."""

import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forq import Client
from forq.broker.enqueue import Update, new_job
from forq.broker.keys import DEFAULT_PREFIX, ended_channel
from forq.broker.pubsub import Subscription
from forq.broker.results import ResultWaiter, WaitStatus
from forq.errors import (
    BY_CODE,
    ForqError,
    JobDead,
    NoResult,
    RedisUnavailable,
    TimedOut,
    UnknownJob,
    UnknownQueue,
    UsageError,
    WaitTimeout,
)
from tests.support.drive.external_queue import ExternalQueue
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until

HOUR_MS = 3_600_000
VALID_MS = 60_000


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, keep_done_ms=HOUR_MS) as queue:
        yield queue


def script_calls(queue: OneQueue) -> int:
    found = queue.redis.info("commandstats")
    return sum(found[f"cmdstat_{name}"]["calls"] for name in ("fcall", "evalsha", "eval") if f"cmdstat_{name}" in found)


class Waiting:
    """Runs queue.wait in its own thread."""

    def __init__(self, queue: OneQueue, job_id: str = "a", timeout: float | None = 20.0) -> None:
        self._queue = queue
        self._id = job_id
        self._answer: list[Any] = []
        self._calls_before = script_calls(queue)
        self._client = Client(queue.url)
        self._thread = threading.Thread(target=self._wait, args=(timeout,), daemon=True)
        self._thread.start()

    def _wait(self, timeout: float | None) -> None:
        try:
            self._answer.append(self._client.queue(self._queue.name).wait(self._id, timeout))
        except ForqError as exc:
            self._answer.append(exc)
        finally:
            self._client.close()

    def begun(self) -> "Waiting":
        """It checks the job before it subscribes and again afterwards; from then on it depends on messages."""
        self.wait_until_registered()
        wait_until(lambda: script_calls(self._queue) >= self._calls_before + 2, what="it has checked twice")
        return self

    def wait_until_registered(self) -> None:
        wait_until(lambda: self._id in waiters(self._queue), what="it is registered")

    @property
    def waits(self) -> bool:
        return not self._answer

    def result(self) -> Any:
        """Returns what wait returned, or raises what it raised."""
        self._thread.join(20)
        assert self._answer, "wait has not returned"
        if isinstance(self._answer[0], Exception):
            raise self._answer[0]
        return self._answer[0]


def waiters(queue: OneQueue) -> dict[str, str]:
    return queue.hash("waiters")


def valid_until(queue: OneQueue, job_id: str = "a") -> int:
    return int(waiters(queue)[job_id].split(" ")[0])


def claimed(queue: OneQueue, *ids: str) -> HandWorker:
    queue.enqueue(*ids)
    worker = queue.worker()
    worker.turn(want=len(ids))
    return worker


def waiter(queue: OneQueue, job_id: str = "a") -> ResultWaiter:
    return ResultWaiter(queue.link, DEFAULT_PREFIX, queue.name, job_id)


@pytest.mark.spec("M8")
def test_wait_returns_the_result_when_the_job_is_done(queue: OneQueue) -> None:
    worker = claimed(queue, "a", "b")
    waiting = Waiting(queue).begun()
    worker.turn(done="b", results={"b": "2"}, keep=1)
    assert waiting.waits
    worker.turn(done="a", results={"a": '{"n":1}'})
    assert waiting.result() == {"n": 1}
    assert waiters(queue) == {}, "notified waiters are unregistered"


def test_a_result_that_exists_is_returned_at_once(queue: OneQueue) -> None:
    claimed(queue, "a").turn(done="a", results={"a": "[1]"})
    assert Client(queue.url).queue("q").wait("a", 0) == [1]
    assert waiters(queue) == {}


def test_the_last_ended_job_of_the_id_counts_even_if_it_is_dead(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    worker.turn(done="a", results={"a": '"first"'})
    queue.enqueue("a")
    worker.turn(want=1)
    worker.turn(failed="a", error='{"name":"Oops","message":"no"}')
    with pytest.raises(JobDead, match="Oops: no"):
        Client(queue.url).queue("q").wait("a", 0)
    queue.enqueue("a")
    worker.turn(want=1)
    worker.turn(done="a", results={"a": '"third"'})
    assert Client(queue.url).queue("q").wait("a", 0) == "third"


def test_a_retry_does_not_end_the_wait(queue: OneQueue) -> None:
    queue.registry.configure("q", {"max_retries": 5, "min_backoff_ms": 0}, {})
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    worker.turn(failed="a")
    worker.turn(want=1)
    assert "a" in waiters(queue)
    worker.turn(done="a", results={"a": '"at last"'})
    assert waiting.result() == "at last"


def test_a_permanent_failure_raises_its_error(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    worker.turn(failed="a", error='{"name":"Oops","message":"no"}')
    with pytest.raises(JobDead, match="Oops: no") as caught:
        waiting.result()
    assert caught.value.error == {"name": "Oops", "message": "no"}
    with pytest.raises(JobDead, match="Oops: no"):
        Client(queue.url).queue("q").wait("a", 0)


def test_the_death_of_a_job_that_is_not_kept_is_still_reported(queue: OneQueue) -> None:
    queue.registry.configure("q", {"dead_max": 0}, {})
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    worker.turn(failed="a")
    with pytest.raises(JobDead, match="no longer kept"):
        waiting.result()


def test_a_death_is_reported_even_if_the_next_job_of_the_id_is_live(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    queue.enqueue("a", if_exists="update")
    worker.turn(failed="a")
    assert queue.inspector.job("a")["state"] == "waiting"
    with pytest.raises(JobDead):
        waiting.result()


def test_a_claim_that_buries_a_job_notifies_too(queue: OneQueue) -> None:
    queue.registry.configure("q", {"max_stalls": 0}, {})
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    queue.recover(worker, running=True)
    queue.worker("w2").turn(want=1)
    with pytest.raises(JobDead, match="StallError"):
        waiting.result()


def test_wait_ignores_earlier_and_later_jobs_of_the_same_id(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    worker.turn(done="a", results={"a": '"first"'})
    queue.enqueue("a")
    waiting = Waiting(queue).begun()
    assert waiting.waits, "the first job is another one"
    worker.turn(want=1)
    queue.enqueue("a", if_exists="update")
    worker.turn(done="a", results={"a": '"second"'})
    assert waiting.result() == "second"
    assert queue.inspector.job("a")["state"] == "waiting", "the third job waits"


def cancel(queue: OneQueue, worker: HandWorker) -> None:
    assert queue.producer.cancel("w")


def remove_and_fail(queue: OneQueue, worker: HandWorker) -> None:
    queue.producer.remove("a")
    worker.turn(failed="a")


def remove_and_die(queue: OneQueue, worker: HandWorker) -> None:
    queue.producer.remove("a")
    queue.recover(worker, running=True)


def remove_and_finish(queue: OneQueue, worker: HandWorker) -> None:
    queue.producer.remove("a")
    worker.turn(done="a", results={"a": "1"})


@pytest.mark.parametrize(
    ("job_id", "end"), [("w", cancel), ("a", remove_and_fail), ("a", remove_and_die), ("a", remove_and_finish)]
)
def test_waiting_for_a_cancelled_or_removed_job_raises_unknown_job(
    queue: OneQueue, job_id: str, end: Callable[[OneQueue, HandWorker], None]
) -> None:
    worker = claimed(queue, "a")
    queue.enqueue("w")
    waiting = Waiting(queue, job_id).begun()
    end(queue, worker)
    with pytest.raises(UnknownJob):
        waiting.result()


def test_an_earlier_result_is_not_returned_for_a_cancelled_job(queue: OneQueue) -> None:
    claimed(queue, "a").turn(done="a", results={"a": '"earlier"'})
    queue.enqueue("a")
    waiting = Waiting(queue).begun()
    queue.producer.cancel("a")
    with pytest.raises(UnknownJob):
        waiting.result()


def test_an_earlier_result_is_not_returned_for_a_removed_job(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    worker.turn(done="a", results={"a": '"earlier"'})
    queue.enqueue("a")
    worker.turn(want=1)
    waiting = Waiting(queue).begun()
    queue.producer.remove("a")
    worker.turn(done="a", results={"a": '"removed"'})
    with pytest.raises(UnknownJob, match="is done, but its result is not kept"):
        waiting.result()


def test_waiting_for_an_unknown_job_raises_at_once(queue: OneQueue) -> None:
    jobs = Client(queue.url).queue("q")
    with pytest.raises(UnknownJob):
        jobs.wait("nothing", 5)
    with pytest.raises(UnknownQueue):
        Client(queue.url).queue("nowhere").wait("a", 5)
    for refused in (-1, True, "5"):
        with pytest.raises(UsageError):
            jobs.wait("a", refused)  # type: ignore[arg-type]
    assert waiters(queue) == {}


@pytest.mark.parametrize("option", ["keep_done_ms", "done_max"])
def test_a_queue_that_keeps_no_results_refuses_wait(queue: OneQueue, option: str) -> None:
    queue.registry.configure("q", {option: 0}, {})
    queue.enqueue("a")
    with pytest.raises(UsageError, match="keep_done"):
        Client(queue.url).queue("q").wait("a", 5)


def test_wait_reports_a_done_job_if_the_queue_stops_keeping_results(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    worker.turn(done="a")
    with pytest.raises(UnknownJob, match="is done, but its result is not kept"):
        waiting.result()


@pytest.mark.parametrize(("result", "reason"), [("!it is a socket", "it is a socket"), (None, "was lost")])
def test_a_missing_result_is_explained(queue: OneQueue, result: str | None, reason: str) -> None:
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    if result is None:
        queue.recover(worker, 1)
    else:
        worker.turn(done="a", results={"a": result})
    with pytest.raises(NoResult, match=reason):
        waiting.result()


def test_wait_times_out(queue: OneQueue) -> None:
    queue.enqueue("a")
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        Client(queue.url).queue("q").wait("a", 0.2)
    assert 0.2 <= time.monotonic() - began < 10
    assert issubclass(WaitTimeout, TimedOut)
    for code, error in (("wait_timeout", WaitTimeout), ("job_dead", JobDead), ("no_result", NoResult)):
        assert BY_CODE[code] is error
        assert str(BY_CODE[code]("text")) == "text"


def test_deleting_the_queue_ends_every_wait_with_unknown_queue(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    waiting = [Waiting(queue, job_id).begun() for job_id in "ab"]
    queue.registry.delete("q", force=True)
    for one in waiting:
        with pytest.raises(UnknownQueue):
            one.result()
    assert not queue.redis.exists(queue.key("waiters"))


def test_a_queue_with_very_many_waiters_can_be_deleted(queue: OneQueue) -> None:
    queue.redis.hset(queue.key("waiters"), mapping={f"j{number}": 1 for number in range(10_000)})
    assert published(queue, "j9999", lambda: queue.registry.delete("q", force=True)) == ["deleted 0 -"]
    assert queue.redis.keys("*:told:*") == []


def test_a_queue_deleted_and_created_again_unnoticed_ends_the_wait(queue: OneQueue) -> None:
    queue.enqueue("a")
    status = waiter(queue).check(None, VALID_MS)
    queue.registry.delete("q", force=True)
    while queue.registry.purge("q", lambda dropped: None):
        pass
    queue.create(keep_done_ms=HOUR_MS)
    queue.enqueue("a")
    with pytest.raises(UnknownQueue):
        waiter(queue).check(status.target, VALID_MS)


def test_many_waiters_of_one_job_and_one_waiter_for_each_of_many_jobs(queue: OneQueue) -> None:
    ids = "abcdefgh"
    worker = claimed(queue, *ids)
    waiting = [Waiting(queue, job_id) for job_id in ids for _ in range(5)]
    channels = [ended_channel(queue.base, 0, job_id) for job_id in ids]
    wait_until(lambda: [number for _, number in queue.redis.pubsub_numsub(*channels)] == [5] * len(ids))
    wait_until(lambda: set(waiters(queue)) == set(ids))
    worker.turn(done=ids, results={job_id: f'"of {job_id}"' for job_id in ids})
    assert [one.result() for one in waiting] == [f"of {job_id}" for job_id in ids for _ in range(5)]


def test_a_waiter_uses_one_connection_and_closes_it(queue: OneQueue) -> None:
    worker = claimed(queue, "a")

    def listening() -> int:
        return sum(client["name"] == "forq-waiter" for client in queue.redis.client_list())

    waiting = Waiting(queue).begun()
    assert listening() == 1
    worker.turn(done="a", results={"a": "1"})
    waiting.result()
    wait_until(lambda: listening() == 0)


def test_waiting_makes_no_calls_while_nothing_happens(queue: OneQueue) -> None:
    queue.enqueue("a")
    Waiting(queue, timeout=3).begun()
    time.sleep(0.2)
    before = queue.redis.info("stats")["total_commands_processed"]
    time.sleep(0.5)
    assert queue.redis.info("stats")["total_commands_processed"] - before <= 2


def test_a_job_that_ends_while_redis_is_restarted_is_found(redis_url: str) -> None:
    server = Server(appendonly=True)
    server.start()
    try:
        with one_queue(server.url, keep_done_ms=HOUR_MS, max_retries=0) as queue:
            worker = claimed(queue, "a", "b", "c", "d")
            waits = {job_id: Waiting(queue, job_id).begun() for job_id in "abcd"}
            server.stop()
            time.sleep(0.3)
            assert all(waiting.waits for waiting in waits.values())
            server.start()
            queue.link.close()
            worker.consumer.close()
            # If the job ends before the waiter has reconnected, the waiter's check finds it.
            queue.enqueue("b", if_exists="update")
            worker.turn(done="a", failed="b", keep=2, results={"a": '"kept"'})
            assert waits["a"].result() == "kept"
            with pytest.raises(JobDead):
                waits["b"].result()
            waits["c"].wait_until_registered()
            worker.turn(done="c", keep=1, results={"c": '"later"'})
            assert waits["c"].result() == "later"
            assert waits["d"].waits
            queue.registry.delete("q", force=True)
            with pytest.raises(UnknownQueue):
                waits["d"].result()
    finally:
        server.remove()


def test_without_redis_the_first_check_fails_and_later_ones_retry_until_the_timeout(redis_url: str) -> None:
    server = Server()
    server.start()
    try:
        with one_queue(server.url, keep_done_ms=HOUR_MS) as queue:
            queue.enqueue("a")
            waiting = Waiting(queue, timeout=1.0).begun()
            server.stop()
            with pytest.raises(WaitTimeout, match="or its end is unknown"):
                waiting.result()
            with pytest.raises(RedisUnavailable):
                Client(queue.url).queue("q").wait("a", 1.0)
    finally:
        server.remove()


def test_wait_works_while_the_server_is_out_of_memory(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    queue.redis.config_set("maxmemory", 1)
    waiting = Waiting(queue).begun()
    worker.turn(done="a", results={"a": "1"})
    assert waiting.result() == 1


# The script


def again(queue: OneQueue, status: WaitStatus, job_id: str = "a") -> WaitStatus:
    return waiter(queue, job_id).check(status.target, VALID_MS)


def run_next(queue: OneQueue, worker: HandWorker, result: str) -> None:
    """Claims the waiting job of the id and settles it as done."""
    assert worker.turn(want=1) == ["a"]
    worker.turn(done="a", results={"a": f'"{result}"'})


def test_waiters_of_one_job_share_a_mark_and_those_of_the_next_have_another(queue: OneQueue) -> None:
    queue.enqueue("a")
    first = waiter(queue).check(None, VALID_MS)
    worker = queue.worker()
    worker.turn(want=1)
    assert waiter(queue).check(None, VALID_MS).target == first.target, "the claimed job is still the same job"
    queue.enqueue("a", if_exists="update")
    worker.turn(done="a", results={"a": "1"})
    second = waiter(queue).check(None, VALID_MS)
    assert (second.state, second.target == first.target) == ("live", False)
    run_next(queue, worker, "second")
    last = waiter(queue).check(None, VALID_MS)
    assert (last.state, last.target.mark, last.fence) == ("done", "", int(worker.fence))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("behind", ["blocked", "afterwards"])
def test_the_result_of_the_next_job_of_the_id_is_never_returned(queue: OneQueue, begun: bool, behind: str) -> None:
    """Both are done before the waiter of the first one checks."""
    queue.enqueue("a")
    worker = queue.worker()
    if begun:
        worker.turn(want=1)
    status = waiter(queue).check(None, VALID_MS)
    if not begun:
        worker.turn(want=1)
    if behind == "blocked":
        queue.enqueue("a", if_exists="update")
    worker.turn(done="a", results={"a": '"first"'})
    if behind == "afterwards":
        queue.enqueue("a")
    other = waiter(queue).check(None, VALID_MS)
    run_next(queue, worker, "second")
    assert [again(queue, each).done.result for each in (status, other)] == ["first", "second"]  # type: ignore[union-attr]


def test_a_scheduled_job_that_is_updated_stays_the_same_job(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a", run_in=3600)])
    status = waiter(queue).check(None, VALID_MS)
    queue.producer.enqueue([new_job(2, id="a")], Update("update"))
    assert again(queue, status).target == status.target
    run_next(queue, queue.worker(), "updated")
    queue.enqueue("a")
    assert again(queue, status).done.result == "updated"  # type: ignore[union-attr]


def test_a_job_that_comes_back_with_a_merged_dispatch_stays_the_same_job(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    status = waiter(queue).check(None, VALID_MS)
    queue.enqueue("a", if_exists="update")
    queue.recover(worker)
    assert again(queue, status).state == "live"
    run_next(queue, queue.worker("w2"), "at last")
    assert again(queue, status).done.result == "at last"  # type: ignore[union-attr]


def test_a_cancelled_job_is_not_confused_with_the_next_one(queue: OneQueue) -> None:
    queue.enqueue("a")
    waiting = Waiting(queue).begun()
    status = waiter(queue).check(None, VALID_MS)
    queue.producer.cancel("a")
    queue.enqueue("a")
    with pytest.raises(UnknownJob, match="cancelled"):
        waiting.result()
    run_next(queue, queue.worker(), "of the other one")
    assert again(queue, status).state == "cancelled"


def test_a_dead_job_is_not_confused_with_the_next_done_one(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    status = waiter(queue).check(None, VALID_MS)
    queue.enqueue("a", if_exists="update")
    worker.turn(failed="a", error='{"name":"Oops","message":"no"}')
    died = int(worker.fence)
    run_next(queue, worker, "of the other one")
    seen = again(queue, status)
    assert (seen.state, seen.fence) == ("dead", died)
    assert waiter(queue).error_of_dead(died) == {"name": "Oops", "message": "no"}


def test_a_waiter_gets_a_result_that_is_no_longer_kept(queue: OneQueue) -> None:
    queue.registry.configure("q", {"done_max": 1}, {})
    worker = claimed(queue, "a", "b")
    status = waiter(queue).check(None, VALID_MS)
    worker.turn(done="a", keep=1, results={"a": '"first"'})
    worker.turn(done="b", results={"b": "2"})
    assert queue.hash("done:jobs").keys() == {"b"}
    assert again(queue, status).done.result == "first"  # type: ignore[union-attr]


def test_a_stored_end_expires_after_a_minute_and_its_result_after_ten_seconds(queue: OneQueue) -> None:
    """Otherwise results with waiters would use memory for a minute, whatever the queue keeps."""
    worker = claimed(queue, "a", "b", "c")
    of_a, of_b = (waiter(queue, job_id).check(None, VALID_MS).target.mark for job_id in "ab")
    worker.turn(done="ac", keep=1, results={"a": "1", "c": "3"})
    worker.turn(failed="b", kind="permanent")
    with_result, without = queue.key(f"told:{of_a}:a"), queue.key(f"told:{of_b}:b")
    assert sorted(key.decode() for key in queue.redis.keys("*:told:*")) == sorted((with_result, without))
    assert 1_000 < queue.redis.pttl(with_result) <= 10_000
    assert 50_000 < queue.redis.pttl(without) <= 60_000


def expire_waiters(queue: OneQueue) -> None:
    """The waiter was disconnected longer than its registration is valid."""
    queue.redis.delete(queue.key("waiters"), *queue.redis.keys("*:told:*"))


def test_an_expired_waiter_finds_its_job_by_the_enqueue_time(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    status = waiter(queue).check(None, VALID_MS)
    expire_waiters(queue)
    other = waiter(queue).check(None, VALID_MS)
    assert other.target != status.target
    seen = again(queue, status)
    assert (seen.state, seen.target) == ("live", other.target), "both waiters see the live job"
    worker.turn(done="a", results={"a": '"mine"'})
    expire_waiters(queue)
    assert again(queue, status).done.result == "mine"  # type: ignore[union-attr]
    queue.enqueue("a")
    assert again(queue, status).done.result == "mine", "another job is live"  # type: ignore[union-attr]
    run_next(queue, worker, "of the other one")
    assert again(queue, status).state == "gone"


def test_an_expired_waiter_finds_its_dead_job_by_the_enqueue_time(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    status = waiter(queue).check(None, VALID_MS)
    worker.turn(failed="a", error='{"name":"Oops"}')
    expire_waiters(queue)
    assert again(queue, status).state == "gone"
    assert waiter(queue).error_of_last_dead(status.target) == {"name": "Oops"}
    queue.enqueue("a")
    other = waiter(queue).check(None, VALID_MS)
    assert waiter(queue).error_of_last_dead(other.target) is None


def test_an_end_published_without_a_mark_is_found(queue: OneQueue) -> None:
    """As published by an earlier release."""
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    queue.redis.hset(queue.key("waiters"), "a", 2**42)
    assert waiter(queue).check(None, VALID_MS).state == "live"
    queue.redis.hdel(queue.key("waiters"), "a")
    worker.turn(done="a", results={"a": '"found"'})
    queue.redis.publish(ended_channel(queue.base, 0, "a"), f"done {worker.fence}")
    assert waiting.result() == "found"


def test_each_of_many_consecutive_jobs_of_one_id_returns_its_own_result(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    waits = []
    for number in range(30):
        waits.append(Waiting(queue).begun())
        queue.enqueue("a", if_exists="update")
        worker.turn(done="a", results={"a": str(number)})
        run_next(queue, worker, "of the other one")
        queue.enqueue("a")
        worker.turn(want=1)
    assert [waiting.result() for waiting in waits] == list(range(30))


def test_a_waiter_is_registered_for_a_limited_time_and_the_latest_expiry_counts(queue: OneQueue) -> None:
    queue.enqueue("a")
    waiter(queue).check(None, 60_000)
    seconds, micros = queue.redis.time()
    now_ms = seconds * 1000 + micros // 1000
    assert abs(valid_until(queue) - now_ms - 60_000) < 10_000
    waiter(queue).check(None, 1000)
    assert valid_until(queue) > now_ms + 40_000
    waiter(queue).check(None, 60_000)
    assert 100_000 < queue.redis.pttl(queue.key("waiters")) <= 120_000


def test_dead_waiters_are_removed_at_random(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.redis.hset(queue.key("waiters"), mapping={f"dead{number}": 1 for number in range(20)})

    def only_live_waiters() -> bool:
        waiter(queue).check(None, VALID_MS)
        return set(waiters(queue)) == {"a"}

    wait_until(only_live_waiters)


def published(queue: OneQueue, job_id: str, act: Callable[[], object]) -> list[str]:
    subscription = Subscription(queue.url, ended_channel(queue.base, 0, job_id), name="test", exact=True)
    subscription.connect()
    act()
    queue.redis.publish(ended_channel(queue.base, 0, job_id), "over")
    messages: list[str] = []
    while "over" not in messages:
        select.select([subscription], [], [], 10)
        messages += [text for _, text in subscription.receive()]
    subscription.close()
    return messages[:-1]


def test_only_waiters_are_notified_of_the_end_of_a_job_and_once(queue: OneQueue) -> None:
    worker = claimed(queue, "a", "b", "c", "d")
    queue.enqueue("waits", priority=9)
    mark = {job_id: waiter(queue, job_id).check(None, VALID_MS).target.mark for job_id in ("a", "b", "c", "waits")}
    fence = worker.fence
    assert published(queue, "a", lambda: worker.turn(done="a", keep=3)) == [f"done {fence} {mark['a']}"]
    assert published(queue, "b", lambda: worker.turn(failed="b", keep=2)) == [f"dead {fence} {mark['b']}"]
    queue.producer.remove("c")
    assert published(queue, "c", lambda: worker.turn(failed="c", keep=1)) == [f"cancelled 0 {mark['c']}"]
    assert published(queue, "d", lambda: worker.turn(done="d")) == []
    queue.enqueue("a")
    worker.turn(want=1)
    assert published(queue, "a", lambda: worker.turn(done="a")) == [], "the end was already published to other waiters"


def test_a_returned_job_does_not_end_the_wait(queue: OneQueue) -> None:
    worker = claimed(queue, "a", "b")
    queue.producer.remove("b")
    for job_id in "ab":
        waiter(queue, job_id).check(None, VALID_MS)
    assert published(queue, "a", lambda: queue.recover(worker, running=True)) == []
    assert set(waiters(queue)) == {"a"}, "the removed job has ended"


def test_the_end_of_an_external_job_is_published(redis_url: str) -> None:
    queue = ExternalQueue(redis_url, keep_done_ms=HOUR_MS)
    queue.enqueue("a")
    waiting = Waiting(queue).begun()
    queue.work()
    queue.external.finish("w1", "a", result=b"[1]")
    assert waiting.result() == [1]
    queue.close()


# Identities


def identified(queue: OneQueue) -> ResultWaiter:
    """Enqueues a job; returns a waiter that means this one."""
    ((_, identity),) = queue.producer.enqueue_identified([new_job(1, id="a")])
    assert identity is not None
    return ResultWaiter(queue.link, DEFAULT_PREFIX, queue.name, "a", identity)


def time_of(waiting: ResultWaiter) -> int:
    assert waiting.identity is not None
    return int(waiting.identity.enqueued_us)


def result(waiting: ResultWaiter) -> Any:
    """None if the job is not kept."""
    done = waiting.check(None, VALID_MS).done
    return done and done.result


def test_jobs_enqueued_in_one_millisecond_are_told_apart(queue: OneQueue) -> None:
    worker = queue.worker()
    for _ in range(1000):
        first = identified(queue)
        run_next(queue, worker, "first")
        second = identified(queue)
        same = time_of(first) // 1000 == time_of(second) // 1000
        assert (result(first), second.check(None, VALID_MS).state) == ("first", "live")
        run_next(queue, worker, "second")
        assert (result(first), result(second)) == (None, "second")
        if same:
            return
    raise AssertionError("no two jobs were enqueued in the same millisecond")


def test_a_blocked_job_is_not_confused_with_a_third_one(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    behind = identified(queue)
    worker.turn(done="a", results={"a": '"first"'})
    run_next(queue, worker, "behind")
    assert result(behind) == "behind"
    third = identified(queue)
    run_next(queue, worker, "third")
    assert (behind.check(None, VALID_MS).state, result(third)) == ("gone", "third")


def test_all_enqueues_behind_a_running_job_have_the_time_of_the_first(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    waits = [identified(queue) for _ in range(3)]
    assert {time_of(each) for each in waits} == {time_of(waits[0])}
    worker.turn(done="a", results={"a": '"first"'})
    run_next(queue, worker, "behind")
    assert [result(each) for each in waits] == ["behind"] * 3


def test_the_error_of_another_dead_job_of_the_id_is_not_returned(queue: OneQueue) -> None:
    worker = queue.worker()
    first = identified(queue)
    run_next(queue, worker, "first")
    second = identified(queue)
    worker.turn(want=1)
    worker.turn(failed="a", error='{"name":"Oops"}')
    ended = first.check(None, VALID_MS)
    assert first.error_of_last_dead(ended.target) is None
    assert second.error_of_last_dead(ended.target) == {"name": "Oops"}


def test_a_job_with_a_broken_record_is_waited_for(queue: OneQueue) -> None:
    waiting = identified(queue)
    queue.redis.hset(queue.key("jobs"), "a", "broken")
    status = waiting.check(None, VALID_MS)
    assert status.state == "live"
    expire_waiters(queue)
    assert again(queue, status).state == "live"


def test_an_enqueue_behind_a_running_job_with_a_broken_record_has_its_own_time(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    queue.redis.hset(queue.key("jobs"), "a", "broken")
    behind = identified(queue)
    worker.turn(done="a")
    run_next(queue, worker, "behind")
    assert result(behind) == "behind"


def test_an_update_of_a_broken_record_makes_a_new_job(queue: OneQueue) -> None:
    earlier = identified(queue)
    queue.redis.hset(queue.key("jobs"), "a", "broken")
    updated = identified(queue)
    run_next(queue, queue.worker(), "updated")
    assert (result(earlier), result(updated)) == (None, "updated")
    assert time_of(updated) > time_of(earlier)
