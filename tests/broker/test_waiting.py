"""Waiting for the end of a job: what it returns or raises, whatever happens meanwhile; and who is told what."""

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


class Waiting:
    """queue.wait in a thread of its own."""

    def __init__(self, queue: OneQueue, job_id: str = "a", timeout: float | None = 20.0) -> None:
        self._queue = queue
        self._id = job_id
        self._answer: list[Any] = []
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
        wait_until(lambda: self._id in waiters(self._queue), what="it is written down")
        return self

    @property
    def waits(self) -> bool:
        return not self._answer

    def result(self) -> Any:
        """What it returned; raises what it raised."""
        self._thread.join(20)
        assert self._answer, "it still waits"
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
def test_wait_returns_what_the_handler_returned_when_the_job_is_done(queue: OneQueue) -> None:
    worker = claimed(queue, "a", "b")
    waiting = Waiting(queue).begun()
    worker.turn(done="b", results={"b": "2"}, keep=1)
    assert waiting.waits
    worker.turn(done="a", results={"a": '{"n":1}'})
    assert waiting.result() == {"n": 1}
    assert waiters(queue) == {}, "who was told is written down no more"


def test_what_was_done_before_is_returned_at_once(queue: OneQueue) -> None:
    claimed(queue, "a").turn(done="a", results={"a": "[1]"})
    assert Client(queue.url).queue("q").wait("a", 0) == [1]
    assert waiters(queue) == {}


def test_of_jobs_that_have_ended_the_last_one_counts_if_it_is_dead(queue: OneQueue) -> None:
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


def test_a_retry_is_no_end(queue: OneQueue) -> None:
    queue.registry.configure("q", {"max_retries": 5, "min_backoff_ms": 0}, {})
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    worker.turn(failed="a")
    worker.turn(want=1)
    assert "a" in waiters(queue)
    worker.turn(done="a", results={"a": '"at last"'})
    assert waiting.result() == "at last"


def test_a_job_that_fails_for_good_raises_with_its_error(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    worker.turn(failed="a", error='{"name":"Oops","message":"no"}')
    with pytest.raises(JobDead, match="Oops: no") as caught:
        waiting.result()
    assert caught.value.error == {"name": "Oops", "message": "no"}
    with pytest.raises(JobDead, match="Oops: no"):
        Client(queue.url).queue("q").wait("a", 0)


def test_a_death_that_nobody_kept_is_told_all_the_same(queue: OneQueue) -> None:
    queue.registry.configure("q", {"dead_max": 0}, {})
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    worker.turn(failed="a")
    with pytest.raises(JobDead, match="no longer kept"):
        waiting.result()


def test_a_death_is_told_although_the_next_job_of_that_id_is_live(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    queue.enqueue("a", if_exists="update")
    worker.turn(failed="a")
    assert queue.inspector.job("a")["state"] == "waiting"
    with pytest.raises(JobDead):
        waiting.result()


def test_a_claim_that_buries_a_job_tells_too(queue: OneQueue) -> None:
    queue.registry.configure("q", {"max_stalls": 0}, {})
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    queue.recover(worker, running=True)
    queue.worker("w2").turn(want=1)
    with pytest.raises(JobDead, match="StallError"):
        waiting.result()


def test_the_job_that_is_waited_for_counts_and_not_those_of_that_id_before_and_after(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    worker.turn(done="a", results={"a": '"first"'})
    queue.enqueue("a")
    waiting = Waiting(queue).begun()
    assert waiting.waits, "the first one is another job"
    worker.turn(want=1)
    queue.enqueue("a", if_exists="update")
    worker.turn(done="a", results={"a": '"second"'})
    assert waiting.result() == "second"
    assert queue.inspector.job("a")["state"] == "waiting", "the third one"


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
def test_a_job_that_is_taken_away_is_unknown(
    queue: OneQueue, job_id: str, end: Callable[[OneQueue, HandWorker], None]
) -> None:
    worker = claimed(queue, "a")
    queue.enqueue("w")
    waiting = Waiting(queue, job_id).begun()
    end(queue, worker)
    with pytest.raises(UnknownJob):
        waiting.result()


def test_an_earlier_result_is_not_that_of_a_job_that_was_cancelled(queue: OneQueue) -> None:
    claimed(queue, "a").turn(done="a", results={"a": '"earlier"'})
    queue.enqueue("a")
    waiting = Waiting(queue).begun()
    queue.producer.cancel("a")
    with pytest.raises(UnknownJob):
        waiting.result()


def test_an_earlier_result_is_not_that_of_a_job_that_was_removed(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    worker.turn(done="a", results={"a": '"earlier"'})
    queue.enqueue("a")
    worker.turn(want=1)
    waiting = Waiting(queue).begun()
    queue.producer.remove("a")
    worker.turn(done="a", results={"a": '"removed"'})
    with pytest.raises(UnknownJob, match="is done, but its result is not kept"):
        waiting.result()


def test_who_waits_for_nothing_is_told_at_once(queue: OneQueue) -> None:
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
def test_a_queue_that_keeps_nothing_cannot_be_waited_for(queue: OneQueue, option: str) -> None:
    queue.registry.configure("q", {option: 0}, {})
    queue.enqueue("a")
    with pytest.raises(UsageError, match="keep_done"):
        Client(queue.url).queue("q").wait("a", 5)


def test_a_queue_that_ceases_to_keep_results_says_that_its_job_is_done(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    worker.turn(done="a")
    with pytest.raises(UnknownJob, match="is done, but its result is not kept"):
        waiting.result()


@pytest.mark.parametrize(("result", "reason"), [("!it is a socket", "it is a socket"), (None, "was lost")])
def test_a_job_without_a_result_says_why(queue: OneQueue, result: str | None, reason: str) -> None:
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    if result is None:
        queue.recover(worker, 1)
    else:
        worker.turn(done="a", results={"a": result})
    with pytest.raises(NoResult, match=reason):
        waiting.result()


def test_time_is_up(queue: OneQueue) -> None:
    queue.enqueue("a")
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        Client(queue.url).queue("q").wait("a", 0.2)
    assert 0.2 <= time.monotonic() - began < 10
    assert issubclass(WaitTimeout, TimedOut)
    for code, error in (("wait_timeout", WaitTimeout), ("job_dead", JobDead), ("no_result", NoResult)):
        assert BY_CODE[code] is error
        assert str(BY_CODE[code]("text")) == "text"


def test_a_queue_that_is_deleted_is_unknown_to_all_who_wait(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    waiting = [Waiting(queue, job_id).begun() for job_id in "ab"]
    queue.registry.delete("q", force=True)
    for one in waiting:
        with pytest.raises(UnknownQueue):
            one.result()
    assert not queue.redis.exists(queue.key("waiters"))


def test_a_queue_for_which_very_many_wait_can_be_deleted(queue: OneQueue) -> None:
    queue.redis.hset(queue.key("waiters"), mapping={f"j{number}": 1 for number in range(10_000)})
    assert heard(queue, "j9999", lambda: queue.registry.delete("q", force=True)) == ["deleted 0 -"]
    assert queue.redis.keys("*:told:*") == []


def test_a_queue_that_was_made_again_while_nobody_heard_is_another(queue: OneQueue) -> None:
    queue.enqueue("a")
    status = waiter(queue).check(None, VALID_MS)
    queue.registry.delete("q", force=True)
    while queue.registry.purge("q", lambda dropped: None):
        pass
    queue.create(keep_done_ms=HOUR_MS)
    queue.enqueue("a")
    with pytest.raises(UnknownQueue):
        waiter(queue).check(status.target, VALID_MS)


def test_many_wait_for_one_job_and_one_for_each_of_many(queue: OneQueue) -> None:
    ids = "abcdefgh"
    worker = claimed(queue, *ids)
    waiting = [Waiting(queue, job_id) for job_id in ids for _ in range(5)]
    channels = [ended_channel(queue.base, 0, job_id) for job_id in ids]
    wait_until(lambda: [number for _, number in queue.redis.pubsub_numsub(*channels)] == [5] * len(ids))
    wait_until(lambda: set(waiters(queue)) == set(ids))
    worker.turn(done=ids, results={job_id: f'"of {job_id}"' for job_id in ids})
    assert [one.result() for one in waiting] == [f"of {job_id}" for job_id in ids for _ in range(5)]


def test_a_waiter_has_one_connection_and_leaves_none(queue: OneQueue) -> None:
    worker = claimed(queue, "a")

    def listening() -> int:
        return sum(client["name"] == "forq-waiter" for client in queue.redis.client_list())

    waiting = Waiting(queue).begun()
    assert listening() == 1
    worker.turn(done="a", results={"a": "1"})
    waiting.result()
    wait_until(lambda: listening() == 0)


def test_waiting_asks_nothing_while_nothing_happens(queue: OneQueue) -> None:
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
            # Whoever is faster: what ends before a waiter is back is found by its check.
            queue.enqueue("b", if_exists="update")
            worker.turn(done="a", failed="b", keep=2, results={"a": '"kept"'})
            assert waits["a"].result() == "kept"
            with pytest.raises(JobDead):
                waits["b"].result()
            waits["c"].begun()
            worker.turn(done="c", keep=1, results={"c": '"later"'})
            assert waits["c"].result() == "later"
            assert waits["d"].waits
            queue.registry.delete("q", force=True)
            with pytest.raises(UnknownQueue):
                waits["d"].result()
    finally:
        server.remove()


def test_without_redis_the_first_look_fails_and_a_later_one_waits_until_time_is_up(redis_url: str) -> None:
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


def test_out_of_memory_one_can_still_wait(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    queue.redis.config_set("maxmemory", 1)
    waiting = Waiting(queue).begun()
    worker.turn(done="a", results={"a": "1"})
    assert waiting.result() == 1


# The script.


def again(queue: OneQueue, status: WaitStatus, job_id: str = "a") -> WaitStatus:
    return waiter(queue, job_id).check(status.target, VALID_MS)


def run_next(queue: OneQueue, worker: HandWorker, result: str) -> None:
    """The job of that id that waits is claimed and done."""
    assert worker.turn(want=1) == ["a"]
    worker.turn(done="a", results={"a": f'"{result}"'})


def test_all_who_wait_for_one_job_have_its_mark_and_those_of_the_next_another(queue: OneQueue) -> None:
    queue.enqueue("a")
    first = waiter(queue).check(None, VALID_MS)
    worker = queue.worker()
    worker.turn(want=1)
    assert waiter(queue).check(None, VALID_MS).target == first.target, "it is claimed, and the same job"
    queue.enqueue("a", if_exists="update")
    worker.turn(done="a", results={"a": "1"})
    second = waiter(queue).check(None, VALID_MS)
    assert (second.state, second.target == first.target) == ("live", False)
    run_next(queue, worker, "second")
    last = waiter(queue).check(None, VALID_MS)
    assert (last.state, last.target.mark, last.fence) == ("done", "", int(worker.fence))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("behind", ["blocked", "afterwards"])
def test_the_result_of_the_next_job_of_that_id_is_never_taken_for_its_own(
    queue: OneQueue, begun: bool, behind: str
) -> None:
    """Both are done before who waits for the first one looks."""
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


def test_a_job_that_waits_for_its_time_and_is_updated_stays_the_same(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a", run_in=3600)])
    status = waiter(queue).check(None, VALID_MS)
    queue.producer.enqueue([new_job(2, id="a")], Update("update"))
    assert again(queue, status).target == status.target
    run_next(queue, queue.worker(), "updated")
    queue.enqueue("a")
    assert again(queue, status).done.result == "updated"  # type: ignore[union-attr]


def test_a_job_that_comes_back_with_what_was_blocked_behind_it_stays_the_same(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    status = waiter(queue).check(None, VALID_MS)
    queue.enqueue("a", if_exists="update")
    queue.recover(worker)
    assert again(queue, status).state == "live"
    run_next(queue, queue.worker("w2"), "at last")
    assert again(queue, status).done.result == "at last"  # type: ignore[union-attr]


def test_a_cancelled_job_is_not_the_one_that_was_enqueued_after_it(queue: OneQueue) -> None:
    queue.enqueue("a")
    waiting = Waiting(queue).begun()
    status = waiter(queue).check(None, VALID_MS)
    queue.producer.cancel("a")
    queue.enqueue("a")
    with pytest.raises(UnknownJob, match="cancelled"):
        waiting.result()
    run_next(queue, queue.worker(), "of the other one")
    assert again(queue, status).state == "cancelled"


def test_a_dead_job_is_not_the_one_that_was_done_after_it(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    status = waiter(queue).check(None, VALID_MS)
    queue.enqueue("a", if_exists="update")
    worker.turn(failed="a", error='{"name":"Oops","message":"no"}')
    died = int(worker.fence)
    run_next(queue, worker, "of the other one")
    seen = again(queue, status)
    assert (seen.state, seen.fence) == ("dead", died)
    assert waiter(queue).error_of_dead(died) == {"name": "Oops", "message": "no"}


def test_a_result_that_is_kept_no_more_is_still_told_to_who_waits(queue: OneQueue) -> None:
    queue.registry.configure("q", {"done_max": 1}, {})
    worker = claimed(queue, "a", "b")
    status = waiter(queue).check(None, VALID_MS)
    worker.turn(done="a", keep=1, results={"a": '"first"'})
    worker.turn(done="b", results={"b": "2"})
    assert queue.hash("done:jobs").keys() == {"b"}
    assert again(queue, status).done.result == "first"  # type: ignore[union-attr]


def test_what_was_told_is_forgotten_after_a_minute_and_a_result_after_ten_seconds(queue: OneQueue) -> None:
    """Else results that are waited for would take memory for a minute, however few of them the queue keeps."""
    worker = claimed(queue, "a", "b", "c")
    of_a, of_b = (waiter(queue, job_id).check(None, VALID_MS).target.mark for job_id in "ab")
    worker.turn(done="ac", keep=1, results={"a": "1", "c": "3"})
    worker.turn(failed="b", kind="permanent")
    with_result, without = queue.key(f"told:{of_a}:a"), queue.key(f"told:{of_b}:b")
    assert sorted(key.decode() for key in queue.redis.keys("*:told:*")) == sorted((with_result, without))
    assert 1_000 < queue.redis.pttl(with_result) <= 10_000
    assert 50_000 < queue.redis.pttl(without) <= 60_000


def forget_who_waits(queue: OneQueue) -> None:
    """He was away for longer than he was written down for."""
    queue.redis.delete(queue.key("waiters"), *queue.redis.keys("*:told:*"))


def test_who_was_away_for_long_finds_his_job_by_the_time_it_was_enqueued(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    status = waiter(queue).check(None, VALID_MS)
    forget_who_waits(queue)
    other = waiter(queue).check(None, VALID_MS)
    assert other.target != status.target
    seen = again(queue, status)
    assert (seen.state, seen.target) == ("live", other.target), "both are told"
    worker.turn(done="a", results={"a": '"mine"'})
    forget_who_waits(queue)
    assert again(queue, status).done.result == "mine"  # type: ignore[union-attr]
    time.sleep(0.002)
    queue.enqueue("a")
    assert again(queue, status).done.result == "mine", "another one is live"  # type: ignore[union-attr]
    run_next(queue, worker, "of the other one")
    assert again(queue, status).state == "gone"


def test_who_was_away_for_long_finds_a_dead_job_by_the_time_it_was_enqueued(queue: OneQueue) -> None:
    worker = claimed(queue, "a")
    status = waiter(queue).check(None, VALID_MS)
    worker.turn(failed="a", error='{"name":"Oops"}')
    forget_who_waits(queue)
    assert again(queue, status).state == "gone"
    assert waiter(queue).error_of_last_dead(status.target) == {"name": "Oops"}
    time.sleep(0.002)
    queue.enqueue("a")
    other = waiter(queue).check(None, VALID_MS)
    assert waiter(queue).error_of_last_dead(other.target) is None


def test_an_end_that_is_told_without_a_mark_is_found(queue: OneQueue) -> None:
    """By an earlier release."""
    worker = claimed(queue, "a")
    waiting = Waiting(queue).begun()
    queue.redis.hset(queue.key("waiters"), "a", 2**42)
    assert waiter(queue).check(None, VALID_MS).state == "live"
    queue.redis.hdel(queue.key("waiters"), "a")
    worker.turn(done="a", results={"a": '"found"'})
    queue.redis.publish(ended_channel(queue.base, 0, "a"), f"done {worker.fence}")
    assert waiting.result() == "found"


def test_many_jobs_of_one_id_one_behind_the_other_give_each_its_own_result(queue: OneQueue) -> None:
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


def test_a_waiter_is_written_down_for_a_while_and_the_last_to_go_counts(queue: OneQueue) -> None:
    queue.enqueue("a")
    waiter(queue).check(None, 60_000)
    seconds, micros = queue.redis.time()
    now_ms = seconds * 1000 + micros // 1000
    assert abs(valid_until(queue) - now_ms - 60_000) < 10_000
    waiter(queue).check(None, 1000)
    assert valid_until(queue) > now_ms + 40_000
    waiter(queue).check(None, 60_000)
    assert 100_000 < queue.redis.pttl(queue.key("waiters")) <= 120_000


def test_waiters_that_died_are_forgotten_by_chance(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.redis.hset(queue.key("waiters"), mapping={f"dead{number}": 1 for number in range(20)})

    def only_the_living() -> bool:
        waiter(queue).check(None, VALID_MS)
        return set(waiters(queue)) == {"a"}

    wait_until(only_the_living)


def heard(queue: OneQueue, job_id: str, act: Callable[[], object]) -> list[str]:
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


def test_only_who_waits_is_told_how_a_job_ended_and_once(queue: OneQueue) -> None:
    worker = claimed(queue, "a", "b", "c", "d")
    queue.enqueue("waits", priority=9)
    mark = {job_id: waiter(queue, job_id).check(None, VALID_MS).target.mark for job_id in ("a", "b", "c", "waits")}
    fence = worker.fence
    assert heard(queue, "a", lambda: worker.turn(done="a", keep=3)) == [f"done {fence} {mark['a']}"]
    assert heard(queue, "b", lambda: worker.turn(failed="b", keep=2)) == [f"dead {fence} {mark['b']}"]
    queue.producer.remove("c")
    assert heard(queue, "c", lambda: worker.turn(failed="c", keep=1)) == [f"cancelled 0 {mark['c']}"]
    assert heard(queue, "d", lambda: worker.turn(done="d")) == []
    queue.enqueue("a")
    worker.turn(want=1)
    assert heard(queue, "a", lambda: worker.turn(done="a")) == [], "that was told to somebody else"


def test_what_is_given_back_is_no_end(queue: OneQueue) -> None:
    worker = claimed(queue, "a", "b")
    queue.producer.remove("b")
    for job_id in "ab":
        waiter(queue, job_id).check(None, VALID_MS)
    assert heard(queue, "a", lambda: queue.recover(worker, running=True)) == []
    assert set(waiters(queue)) == {"a"}, "the removed one has ended"


def test_the_end_of_an_external_job_is_told(redis_url: str) -> None:
    queue = ExternalQueue(redis_url, keep_done_ms=HOUR_MS)
    queue.enqueue("a")
    waiting = Waiting(queue).begun()
    queue.work()
    queue.external.finish("w1", "a", result=b"[1]")
    assert waiting.result() == [1]
    queue.close()
