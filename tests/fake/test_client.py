"""The Client on fakeredis, with a worker that the test drives step by step."""

import select
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from forq.api_types import UpdateRunAt
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.results import ResultWaiter
from forq.client import Client, Queue
from forq.errors import Exists, InvalidData, InvalidId, JobDead, UnknownJob, UnknownQueue, UsageError, WaitTimeout
from forq.testing.fake_server import FakeServer
from tests.support.drive.one_queue import HandWorker, OneQueue


def ids(q: Queue, state: str | None = None) -> list[str]:
    return [job["id"] for job in q.jobs(state).jobs]  # type: ignore[arg-type]


def test_jobs_run_by_priority_and_then_in_the_order_of_enqueue(q: Queue, worker: HandWorker) -> None:
    for job_id, priority in [("a", 5), ("b", 9), ("c", 0), ("d", 5)]:
        assert q.enqueue({"n": 1}, id=job_id, priority=priority) == job_id
    assert ids(q) == ["c", "a", "d", "b"]
    assert worker.turn(want=4) == ["c", "a", "d", "b"]
    assert q.status()["active"] == 4


def test_ids_are_generated_and_bulk_jobs_are_stored_in_order(q: Queue) -> None:
    made = q.enqueue_many([{"n": n} for n in range(300)])
    assert len(set(made)) == 300
    assert q.status()["waiting"] == 300
    page = q.jobs(limit=200)
    assert [job["id"] for job in (*page.jobs, *q.jobs(limit=200, after=page.next).jobs)] == made


def test_a_repeated_token_returns_the_same_id(q: Queue) -> None:
    first = q.enqueue(1, token="order-7")
    assert q.enqueue(2, token="order-7") == first
    assert q.job(first)["data"] == 1


@pytest.mark.parametrize(
    ("flags", "data", "priority"),
    [
        ({}, "new", 2),
        ({"update_data": False}, "old", 5),
        ({"if_exists": "skip"}, "old", 5),
    ],
)
def test_enqueueing_a_known_id_updates_the_job(q: Queue, flags: dict[str, Any], data: str, priority: int) -> None:
    q.enqueue("old", id="a")
    assert q.enqueue("new", id="a", priority=2, **flags) == "a"
    job = q.job("a")
    assert (job["data"], job["priority"], q.status()["waiting"]) == (data, priority, 1)


def test_refuse_raises_exists_and_changes_nothing(q: Queue) -> None:
    q.enqueue("old", id="a")
    with pytest.raises(Exists):
        q.enqueue("new", id="a", if_exists="refuse")
    assert q.job("a")["data"] == "old"


@pytest.mark.parametrize(
    ("update_run_at", "later", "moves"),
    [(True, True, True), (True, False, True), (False, True, False), ("if_later", True, True),
     ("if_later", False, False), ("if_earlier", True, False), ("if_earlier", False, True)],
)  # fmt: skip
def test_update_run_at_controls_the_new_time(q: Queue, update_run_at: UpdateRunAt, later: bool, moves: bool) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    before, after = now + timedelta(hours=2), now + timedelta(hours=3 if later else 1)
    q.enqueue(1, id="a", run_at=before)
    q.enqueue(1, id="a", run_at=after, update_run_at=update_run_at)
    assert q.job("a")["run_at"] == (after if moves else before).timestamp()
    assert ids(q, "scheduled") == ["a"]


def test_a_job_enqueued_while_its_id_runs_is_blocked_behind_it(q: Queue, worker: HandWorker) -> None:
    q.enqueue("first", id="a")
    assert worker.turn(want=1) == ["a"]
    q.enqueue("second", id="a")
    assert ids(q, "blocked") == ["a"]
    worker.turn(done="a")
    assert worker.turn(want=1) == ["a"]
    assert q.job("a")["data"] == "second"


def test_cancel_takes_only_waiting_jobs(q: Queue, worker: HandWorker) -> None:
    q.enqueue(1, id="a")
    q.enqueue(1, id="b", run_in=3600)
    assert (q.cancel("a"), q.cancel("b"), q.cancel("c")) == (True, True, False)
    q.enqueue(1, id="a")
    worker.turn(want=1)
    assert not q.cancel("a")
    assert q.remove("a")
    worker.turn(done="a")
    assert ids(q, "done") == [], "it was removed"


def test_a_paused_queue_starts_no_jobs(q: Queue, worker: HandWorker) -> None:
    q.enqueue(1, id="a")
    q.pause()
    assert worker.turn(want=1) == []
    q.resume()
    assert worker.turn(want=1) == ["a"]


def test_wait_returns_the_result_of_the_handler(q: Queue, worker: HandWorker) -> None:
    q.enqueue(1, id="a")
    with pytest.raises(WaitTimeout):
        q.wait("a", timeout=0)
    worker.turn(want=1)
    worker.turn(done="a", results={"a": '{"sum":3}'})
    assert q.wait("a", timeout=0) == {"sum": 3}
    with pytest.raises(UnknownJob):
        q.wait("b", timeout=0)


def test_a_subscriber_receives_the_end_of_a_job(queue: OneQueue, q: Queue, worker: HandWorker) -> None:
    """fakeredis delivers messages published by the library, and the subscription's descriptor can be polled."""
    q.enqueue(1, id="a")
    worker.turn(want=1)
    waiter = ResultWaiter(queue.link, DEFAULT_PREFIX, queue.name, "a")
    subscription, poll = waiter.subscription(), select.poll()
    subscription.connect()
    poll.register(subscription.fileno(), select.POLLIN)
    assert waiter.check(None, 60_000).state == "live"
    assert poll.poll(0) == []
    worker.turn(done="a")
    assert poll.poll(0)
    assert [message.split()[0] for _, message in subscription.receive()] == ["done"]
    subscription.close()


def test_a_dead_job_is_listed_retried_and_discarded(q: Queue, worker: HandWorker) -> None:
    for job_id in "ab":
        q.enqueue(1, id=job_id)
    worker.turn(want=2)
    worker.turn(failed="ab", error='{"name":"ValueError","message":"no"}')
    assert {job["id"] for job in q.dead().jobs} == {"a", "b"}
    with pytest.raises(JobDead, match="ValueError: no"):
        q.wait("a", timeout=0)
    assert q.retry_dead("a").startswith("a@")
    assert q.discard_dead("b").startswith("b@")
    assert (ids(q, "waiting"), q.dead().jobs) == (["a"], [])
    with pytest.raises(UnknownJob):
        q.retry_dead("b")


def test_schedules_are_set_listed_triggered_and_ended(q: Queue) -> None:
    tick = q.schedule("nightly", cron="0 3 * * *", data={"n": 1}, overlap="skip")
    assert (tick.hour, tick.minute) == (3, 0)
    q.schedule("often", every="5m")
    assert sorted(each["key"] for each in q.schedules()) == ["nightly", "often"]
    job_id = q.trigger("nightly")
    assert q.job(job_id)["data"] == {"n": 1}
    with pytest.raises(Exists):
        q.trigger("nightly")
    assert (q.unschedule("often"), q.unschedule("often")) == (True, False)


def test_invalid_arguments_are_refused_before_anything_is_stored(q: Queue) -> None:
    with pytest.raises(InvalidData):
        q.enqueue({1, 2})
    with pytest.raises(InvalidId):
        q.enqueue(1, id="a b")
    with pytest.raises(UsageError):
        q.enqueue(1, priority=10)
    assert q.status()["waiting"] == 0


def test_queues_are_created_listed_and_deleted(fake: FakeServer) -> None:
    client = Client(fake.url)
    with pytest.raises(UnknownQueue):
        client.queue("other").enqueue(1)
    client.create_queue("other", mode="on_request").enqueue({"n": 1}, id="x")
    assert client.queues() == {"other": "on_request"}
    assert client.queue("other").dequeue("x").data == {"n": 1}  # type: ignore[union-attr]
    assert client.delete_queue("other") == 0
    assert client.queues() == {}
    client.close()
