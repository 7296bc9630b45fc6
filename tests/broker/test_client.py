"""The Python client without a supervisor: pause, drain, delete, bulk calls for dead jobs, tokens."""

import threading
from collections.abc import Iterator

import pytest

from forq.broker.chunks import PartlyStored
from forq.client import Client, DeadChanged, Queue
from forq.errors import (
    BeingDeleted,
    Exists,
    ForqError,
    InvalidId,
    QueueFull,
    QueueNotEmpty,
    UnknownJob,
    UnknownQueue,
    UsageError,
    WaitTimeout,
)
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    client = Client(redis_url)
    yield client
    client.close()


@pytest.fixture
def q(client: Client) -> Queue:
    return client.queue("q")


def die(queue: OneQueue, *ids: str, worker: HandWorker | None = None) -> None:
    """Makes each of these jobs dead once more."""
    queue.enqueue(*ids)
    worker = worker or queue.worker()
    for job_id in ids:
        worker.turn(want=1)
        worker.turn(failed=job_id)


def refused(changed: DeadChanged) -> dict[str, type[ForqError]]:
    return {name: type(error) for name, error in changed.refused.items()}


def test_a_paused_queue_starts_no_job_until_it_is_resumed(queue: OneQueue, q: Queue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    for _ in range(2):
        q.pause()
        assert q.status()["paused"]
        assert worker.turn(want=1) == []
    for _ in range(2):
        q.resume()
        assert not q.status()["paused"]
    assert worker.turn(want=1) == ["a"]


def test_pause_applies_to_the_fail_queue_too(redis_url: str, client: Client) -> None:
    with one_queue(redis_url, "with-fails") as queue:
        queue.registry.create("with-fails", "work", 100, {}, {"fail_handler": 1}, fail_options={})
        die(queue, "a")
        client.queue("with-fails").pause()
        assert queue.claim_fail_job("r1") == []
        client.queue("with-fails").resume()
        assert queue.claim_fail_job("r2") != []


@pytest.mark.parametrize("call", ["pause", "resume", "drain"])
def test_an_unknown_queue_is_an_error(client: Client, call: str) -> None:
    with pytest.raises(UnknownQueue):
        getattr(client.queue("nowhere"), call)()


def test_drain_returns_when_no_job_waits_or_runs(queue: OneQueue, q: Queue) -> None:
    q.drain()
    queue.enqueue("a")
    q.enqueue(1, id="later", run_in=3600)
    worker = queue.worker()
    worker.turn(want=1)
    drained = threading.Event()

    def drain() -> None:
        q.drain(timeout=60)
        drained.set()

    thread = threading.Thread(target=drain)
    thread.start()
    assert not drained.wait(0.2)
    worker.turn(done="a")
    thread.join(30)
    assert drained.is_set()


def test_a_wait_that_times_out_names_the_command_that_explains_why(queue: OneQueue, q: Queue) -> None:
    queue.registry.configure("q", {"keep_done_ms": 3_600_000}, {})
    queue.enqueue("a")
    text = r"^job 'a' of queue 'q' has not ended within 0\.01 s; `forqctl why q a` explains why$"
    with pytest.raises(WaitTimeout, match=text):
        q.wait("a", timeout=0.01)


def test_a_drain_timeout_reports_what_is_left_and_why(queue: OneQueue, q: Queue) -> None:
    queue.enqueue("a", "b")
    with pytest.raises(
        WaitTimeout, match=r"^queue 'q' is not drained yet: 2 waiting, 0 active; no supervisor serves it$"
    ):
        q.drain(timeout=0)
    queue.worker().turn(want=1)
    with pytest.raises(WaitTimeout, match=r"^queue 'q' is not drained yet: 1 waiting, 1 active$"):
        q.drain(timeout=0.01)
    q.pause()
    with pytest.raises(WaitTimeout, match=r"1 waiting, 1 active; it is paused$"):
        q.drain(timeout=0.01)
    with pytest.raises(UsageError, match="a number of seconds"):
        q.drain(timeout=-1)


def test_an_empty_queue_is_deleted_and_its_name_is_free_at_once(redis_url: str, client: Client) -> None:
    with one_queue(redis_url, "empty") as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        worker.turn(done="a")
        assert client.delete_queue("empty") == 0
        assert "empty" not in client.queues()
        with pytest.raises(UnknownQueue):
            client.delete_queue("empty")
        client.create_queue("empty").enqueue(1)


def test_force_deletes_a_queue_with_jobs_and_leaves_them_to_a_supervisor(redis_url: str, client: Client) -> None:
    with one_queue(redis_url, "full") as queue:
        queue.enqueue("a", "b")
        with pytest.raises(QueueNotEmpty):
            client.delete_queue("full")
        assert client.queue("full").status()["waiting"] == 2
        assert client.delete_queue("full", force=True) == 2
        with pytest.raises(UnknownQueue):
            client.queue("full").enqueue(1)
        with pytest.raises(BeingDeleted):
            client.create_queue("full")
        # The supervisor's clerk does the same.
        written: list[object] = []
        while queue.registry.repair("full", lambda jobs: written.extend(job["id"] for job in jobs)):
            pass
        assert sorted(map(str, written)) == ["a", "b"]
        client.create_queue("full")


def test_bulk_retry_returns_retried_jobs_and_the_reason_for_each_refused_one(queue: OneQueue, q: Queue) -> None:
    die(queue, *"abcd")
    queue.enqueue("c")
    died = {job["id"]: f"{job['id']}@{job['fence']}" for job in q.dead().jobs}
    changed = q.retry_dead(["a", died["b"], "c", "gone", "a"])
    assert (changed.done, refused(changed)) == (2, {"c": Exists, "gone": UnknownJob})
    assert {job["id"] for job in q.dead().jobs} == {"c", "d"}
    assert sorted(job["id"] for job in q.jobs("waiting").jobs) == ["a", "b", "c"]
    again = q.retry_dead(iter([died["b"], "a"]))
    assert (again.done, refused(again)) == (0, {died["b"]: UnknownJob, "a": UnknownJob})
    assert q.retry_dead("d") == died["d"], "a single id returns id@fence"


def test_an_id_with_several_deaths_means_the_newest(queue: OneQueue, q: Queue) -> None:
    worker = queue.worker()
    die(queue, "a", worker=worker)
    die(queue, "a", worker=worker)
    newest, oldest = [f"a@{job['fence']}" for job in q.dead().jobs]
    assert q.discard_dead(["a"]) == DeadChanged(1, {})
    assert [f"a@{job['fence']}" for job in q.dead().jobs] == [oldest]
    assert q.discard_dead([newest, oldest]).done == 1


def test_all_dead_jobs_are_retried_or_discarded(queue: OneQueue, q: Queue) -> None:
    members = [f"j{number}@{number}" for number in range(250)]
    queue.redis.zadd(queue.key("dead"), dict.fromkeys(members, 5000))
    queue.redis.hset(queue.key("dead:jobs"), mapping=dict.fromkeys(members, b'p5 1000000\n[null,null,1]\n{"name":"E"}'))
    queue.enqueue("j7")
    changed = q.retry_dead(all=True)
    assert (changed.done, refused(changed)) == (249, {"j7@7": Exists})
    assert q.discard_dead(all=True) == DeadChanged(1, {})
    assert q.retry_dead(all=True) == DeadChanged(0, {})


def test_a_full_queue_refuses_dead_jobs_beyond_its_limit(queue: OneQueue, q: Queue) -> None:
    die(queue, *"abc")
    queue.set_options(max_items=2)
    changed = q.retry_dead(["c", "b", "a"])
    assert (changed.done, refused(changed)) == (2, {"a": QueueFull})
    assert refused(q.retry_dead(all=True)).popitem()[1] is QueueFull


def test_dead_jobs_are_given_either_by_ids_or_by_all(queue: OneQueue, q: Queue) -> None:
    with pytest.raises(UsageError, match="pass an id, several ids, or all=True"):
        q.retry_dead()  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="pass an id, several ids, or all=True"):
        q.discard_dead(["a"], all=True)  # type: ignore[call-overload]
    with pytest.raises(InvalidId):
        q.retry_dead(["a", "with a space"])
    assert q.retry_dead([]) == DeadChanged(0, {})


def test_a_bulk_enqueue_with_tokens_may_be_repeated(queue: OneQueue, q: Queue) -> None:
    tokens = [f"row-{number}" for number in range(1200)]
    ids = q.enqueue_many(range(1200), tokens=tokens)
    assert q.enqueue_many(iter(range(1200)), tokens=iter(tokens)) == ids
    assert q.status()["waiting"] == 1200
    more = q.enqueue_many(["a", "b"], tokens=["row-3", "new"])
    assert more[0] == ids[3]
    assert q.status()["waiting"] == 1201


def test_repeating_an_interrupted_bulk_enqueue_stores_the_rest(queue: OneQueue, q: Queue) -> None:
    tokens = [f"row-{number}" for number in range(700)]
    queue.set_options(max_items=600)
    with pytest.raises(PartlyStored) as caught:
        q.enqueue_many(range(700), tokens=tokens)
    queue.set_options(max_items=0)
    ids = q.enqueue_many(range(700), tokens=tokens)
    assert ids[: len(caught.value.stored)] == caught.value.stored
    assert (len(set(ids)), q.status()["waiting"]) == (700, 700)


def test_each_job_needs_its_own_token(queue: OneQueue, q: Queue) -> None:
    with pytest.raises(UsageError, match="2 jobs and 1 tokens"):
        q.enqueue_many([1, 2], tokens=["a"])
    with pytest.raises(UsageError, match="fewer tokens than jobs"):
        q.enqueue_many(iter([1, 2]), tokens=["a"])
    with pytest.raises(UsageError, match="fewer jobs than tokens"):
        q.enqueue_many(iter([1]), tokens=["a", "b"])
    with pytest.raises(UsageError, match="one token per job"):
        q.enqueue_many("ab", tokens="ab")
    with pytest.raises(InvalidId, match="token"):
        q.enqueue_many([1], tokens=["with a space"])
    assert q.status()["waiting"] == 0
