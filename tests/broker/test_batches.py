"""Batches: members in any queues, callbacks, reports between queues, members that are lost."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from forq.batch import Batch
from forq.broker.batches import StoredBatch
from forq.broker.enqueue import Producer
from forq.broker.reports import Reports
from forq.broker.scripts import script
from forq.client import Client, new_job
from forq.errors import BatchEnded, Exists, InvalidId, NoResult, OutcomeUnknown, TooLate, UnknownBatch, UsageError
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue

HOUR_MS = 3_600_000


@pytest.fixture
def other(redis_url: str) -> Iterator[OneQueue]:
    """A queue besides the batch's home."""
    with one_queue(redis_url, "other") as queue:
        yield queue


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    client = Client(redis_url)
    yield client
    client.close()


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


def callbacks(*names: str) -> dict[str, Any]:
    return {name: new_job(name) for name in names}


def ids(batch: Batch, *names: str) -> list[str]:
    return [f"{batch.id}:{name}" for name in names]


def deliver(*queues: OneQueue) -> None:
    for queue in queues:
        while Reports(queue.link, "forq:").deliver(queue.name):
            pass


def pass_hours(queue: OneQueue, hours: float) -> None:
    """Everything that is looked after is due that much earlier."""
    for member, at_ms in queue.redis.zrange(queue.key("checks"), 0, -1, withscores=True):
        queue.redis.zadd(queue.key("checks"), {member: at_ms - hours * HOUR_MS})
    age_members(queue, hours)


def age_members(queue: OneQueue, hours: float) -> None:
    """The numbers of members were reserved that much earlier."""
    for field, value in queue.hash("batch:members").items():
        member_queue, job_id, seconds, parent = value.split(" ")
        moved = f"{member_queue} {job_id} {int(seconds) - round(hours * 3600)} {parent}"
        queue.redis.hset(queue.key("batch:members"), field, moved)


def nonce_of(queue: OneQueue, batch_id: str) -> str:
    return queue.hash("batches")[batch_id].rpartition(" ")[2]


def set_nonce(queue: OneQueue, batch_id: str, nonce: str) -> None:
    fields = queue.hash("batches")[batch_id].rpartition(" ")[0]
    queue.redis.hset(queue.key("batches"), batch_id, f"{fields} {nonce}")


def is_clean(queue: OneQueue) -> bool:
    names = ("held", "held:open", "sources", "edges", "resolving", "batch:members", "reports")
    return not any(queue.redis.exists(queue.key(name)) for name in names)


def test_the_callback_runs_once_all_members_are_done(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q", **callbacks("on_done")) as batch:
        for name in "ab":
            batch.enqueue("q", name, id=name)
    assert worker.turn(5) == ["a", "b"]
    assert worker.turn(5, done="a", keep=1) == []
    assert batch.info()["progress"] == 0.5
    assert worker.turn(5, done="b") == ids(batch, "on_done")
    info = batch.info()
    assert (info["state"], info["members"], info["open"], info["done"]) == ("done", 2, 0, 2)
    assert is_clean(queue)


def test_an_empty_batch_fires_when_it_is_sealed(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    with client.batch("q", **callbacks("on_done", "on_end", "on_dead")) as batch:
        assert worker.turn(5) == []
    assert worker.turn(5) == ids(batch, "on_done", "on_end")
    batch.seal()
    assert worker.turn(5, keep=2) == []
    assert is_clean(queue)


def test_nothing_fires_before_the_batch_is_sealed(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    batch = client.batch("q", **callbacks("on_end"))
    batch.enqueue("q", 1, id="a")
    batch.flush()
    worker.turn(1)
    assert worker.turn(5, done="a") == []
    assert batch.info()["open"] == 0
    batch.seal()
    assert worker.turn(5) == ids(batch, "on_end")


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_a_member_that_is_not_done_fails_the_batch(
    client: Client, queue: OneQueue, worker: HandWorker, how: str
) -> None:
    with client.batch("q", **callbacks("on_done", "on_end", "on_dead")) as batch:
        batch.enqueue("q", 1, id="a")
        batch.enqueue("q", 1, id="b")
    fence = ""
    if how == "failed":
        assert worker.turn(2) == ["a", "b"]
        fence = worker.fence
        assert worker.turn(5, failed="a", keep=1) == ids(batch, "on_dead")
    else:
        queue.producer.cancel("a")
        assert worker.turn(1) == ["b"]
    assert worker.turn(5, done="b", keep=1 if fence else 0, fence=fence or None) == ids(batch, "on_end")
    assert batch.info()["state"] == "failed"
    assert ids(batch, "on_done")[0] in queue.state().dead
    assert ("cancelled", f"{batch.id}:on_dead") in queue.journal_events() or how == "failed"


def test_members_in_another_queue_are_reported_to_the_home(
    client: Client, queue: OneQueue, other: OneQueue, worker: HandWorker
) -> None:
    with client.batch("q", results=True, **callbacks("on_done")) as batch:
        batch.enqueue("other", 1, id="a")
        batch.enqueue("q", 1, id="b")
    runner = other.worker()
    record = runner.whole_turn(1).jobs[1]
    assert f"m=q:{batch.id}:1".encode() in record
    assert b"w=1" in record
    runner.turn(0, done="a", results={"a": "1"})
    assert worker.turn(1) == ["b"]
    assert worker.turn(1, done="b", results={"b": "2"}) == []
    deliver(other)
    assert worker.turn(1) == ids(batch, "on_done")
    assert batch.results() == [1, 2]
    assert is_clean(queue)
    assert is_clean(other)


def test_members_and_callbacks_name_their_batch(
    client: Client, queue: OneQueue, other: OneQueue, worker: HandWorker
) -> None:
    with client.batch("q", **callbacks("on_end")) as batch:
        batch.enqueue("q", 1, id="a")
        batch.enqueue("other", 1, id="b", run_in=60)
        batch.enqueue("q", 1, id="c", after="a")
    for each, name, number in ((queue, "a", 1), (other, "b", 2), (queue, "c", 3)):
        assert each.inspector.job(name)["member_of"] == {"queue": "q", "id": batch.id, "number": number}
        assert "batch" not in each.inspector.job(name)
    callback = queue.inspector.job(f"{batch.id}:on_end")
    assert callback["batch"] == batch.id
    assert "member_of" not in callback
    assert "options" not in callback
    worker.turn(1)
    assert queue.inspector.job("a")["member_of"]["number"] == 1


def test_a_report_that_arrives_twice_counts_once(
    client: Client, queue: OneQueue, other: OneQueue, worker: HandWorker
) -> None:
    with client.batch("q", **callbacks("on_done")) as batch:
        batch.enqueue("other", 1, id="a")
        batch.enqueue("other", 1, id="b")
    runner = other.worker()
    runner.turn(2)
    runner.turn(0, done="a", keep=1)
    lines = other.redis.lrange(other.key("reports:q"), 0, -1)
    for _ in range(3):
        assert queue.link.run(script("report"), queue.base, *lines) == [1, 1]
    deliver(other)
    assert (batch.info()["open"], batch.info()["done"]) == (1, 1)
    assert worker.turn(1) == []


def test_a_report_for_an_earlier_queue_of_the_name_is_dropped(client: Client, queue: OneQueue, other: OneQueue) -> None:
    with client.batch("q", id="same", **callbacks("on_done")) as batch:
        batch.enqueue("other", 1, id="a")
    nonce = nonce_of(queue, "same")
    runner = other.worker()
    runner.turn(1)
    queue.registry.delete("q", force=True)
    queue.registry.purge("q", lambda *_: None)
    queue.create()
    again = client.batch("q", id="same", **callbacks("on_done"))
    again.enqueue("other", 1, id="b")
    again.flush()
    # As if the server's clock had been set back between them.
    set_nonce(queue, "same", nonce)
    runner.turn(0, done="a")
    deliver(other)
    assert again.info()["open"] == 1
    assert not other.redis.exists(other.key("reports"))
    assert batch.id == again.id


def test_cancel_removes_members_that_have_not_begun(
    client: Client, queue: OneQueue, other: OneQueue, worker: HandWorker
) -> None:
    with client.batch("q", **callbacks("on_done", "on_end")) as batch:
        for number in range(3):
            batch.enqueue("q", number, id=f"{number}")
        batch.enqueue("other", 1, id="x")
    assert worker.turn(1) == ["0"]
    assert batch.cancel() == 3
    deliver(other)
    assert batch.info()["state"] == "cancelled"
    assert worker.turn(5, done="0") == ids(batch, "on_end")
    info = batch.info()
    assert (info["state"], info["done"], info["other"]) == ("failed", 1, 3)
    batch.enqueue("q", 9)
    with pytest.raises(BatchEnded):
        batch.flush()


def test_an_exception_in_the_block_cancels_the_batch(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    batch = client.batch("q", **callbacks("on_done", "on_end"))

    def use_it() -> None:
        with batch:
            batch.enqueue("q", 1, id="a")
            batch.flush()
            batch.enqueue("q", 1 // 0, id="b")

    with pytest.raises(ZeroDivisionError):
        use_it()
    assert batch.info()["state"] == "failed"
    assert worker.turn(5) == ids(batch, "on_end")


def test_a_batch_that_nobody_seals_is_abandoned(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    batch = client.batch("q", **callbacks("on_done", "on_end", "on_dead"))
    batch.enqueue("q", 1, id="a")
    batch.flush()
    pass_hours(queue, 0.9)
    queue.recovery().promote("q")
    assert batch.info()["state"] == "open"
    pass_hours(queue, 0.2)
    queue.recovery().promote("q")
    assert batch.info()["state"] == "abandoned"
    assert set(queue.state().dead) == set(ids(batch, "on_done", "on_end", "on_dead"))
    assert "ended as abandoned" in queue.inspector.job(f"{batch.id}:on_end")["error"]["message"]
    assert worker.turn(5) == ["a"]
    worker.turn(0, done="a")
    with pytest.raises(BatchEnded):
        client.batch("q", id=batch.id)


def test_an_ended_batch_is_forgotten_after_a_day(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    with client.batch("q", results=True) as batch:
        for number in range(1200):
            batch.enqueue("q", number)
    while jobs := worker.whole_turn(100).jobs:
        done = [part for job_id in jobs[::2] for part in (job_id, worker.fence, 7)]
        results: list[bytes | int | str] = [part for number in range(len(jobs) // 2) for part in (number + 1, b"1")]
        worker.number += 1
        worker.consumer.turn(worker.number, done, [], 0, 0, results)
    assert batch.results() == [1] * 1200
    pass_hours(queue, 23)
    queue.recovery().promote("q")
    assert batch.info()["state"] == "done"
    pass_hours(queue, 2)
    for _ in range(4):
        queue.recovery().promote("q")
    with pytest.raises(UnknownBatch):
        batch.info()
    assert not any(queue.redis.exists(queue.key(name)) for name in ("batches", "batch:results", "checks"))


def test_a_member_that_was_never_stored_is_lost(client: Client, queue: OneQueue, other: OneQueue) -> None:
    """Its place was reserved, and then the producer died."""
    with client.batch("q", **callbacks("on_end")) as batch:
        batch.enqueue("other", 1, id="a")
        batch.flush()
        batch._stored().reserve([("other", "never")])
    pass_hours(queue, 1)
    queue.recovery().promote("q")
    info = batch.info()
    assert (info["open"], info["other"]) == (1, 1)
    other.producer.cancel("a")
    deliver(other)
    assert batch.info()["state"] == "failed"


def test_a_member_that_is_about_to_be_stored_is_not_lost(client: Client, queue: OneQueue, other: OneQueue) -> None:
    """A running member adds it: its number was reserved just before pulse looks after the batch."""
    with client.batch("q", **callbacks("on_end")) as batch:
        batch.enqueue("other", 1, id="a")
    pass_hours(queue, 1)
    batch._stored().reserve([("other", "child")], parent=1)
    queue.recovery().promote("q")
    info = batch.info()
    assert (info["open"], info["other"]) == (2, 0)


def test_members_of_a_deleted_queue_are_counted(client: Client, queue: OneQueue, other: OneQueue) -> None:
    with client.batch("q", **callbacks("on_end")) as batch:
        batch.enqueue("other", 1, id="a")
    other.registry.delete("other", force=True)
    pass_hours(queue, 1)
    queue.recovery().promote("q")
    info = batch.info()
    assert (info["state"], info["open"], info["other"]) == ("failed", 0, 1)


def test_a_running_member_adds_members_and_a_second_attempt_adds_none_twice(
    client: Client, queue: OneQueue, worker: HandWorker
) -> None:
    with client.batch("q", **callbacks("on_done")) as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)

    def attempt() -> None:
        adding = Batch(client.link, client.prefix, "q", batch.id, parent=1, parent_id="a")
        adding.enqueue("q", "x")
        adding.enqueue("q", "y")
        adding.flush()

    attempt()
    attempt()
    assert batch.info()["members"] == 3
    children = worker.turn(2, done="a")
    assert len(children) == 2
    with pytest.raises(BatchEnded):
        attempt()
    number = worker.number + 1
    done = [part for child in children for part in (child.encode(), worker.fence, 7)]
    turn = worker.consumer.turn(number, done, [], 0, 5)
    assert [job_id.decode() for job_id in turn.jobs[::2]] == ids(batch, "on_done")


def test_a_second_attempt_does_not_repeat_a_child_that_has_ended(
    client: Client, queue: OneQueue, worker: HandWorker
) -> None:
    with client.batch("q") as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)
    second = queue.worker("w2")
    for _ in range(2):
        adding = Batch(client.link, client.prefix, "q", batch.id, parent=1, parent_id="a")
        child = adding.enqueue("q", "x")
        adding.flush()
        if second.turn(5) == [child]:
            second.consumer.turn(9, [child.encode(), second.fence, 7], [], 0, 0)
            second.number = 9
    assert [job for verb, job in queue.journal_events() if verb == "enqueued"] == ["a", child]


def test_a_job_can_wait_for_a_batch(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    with client.batch("q") as batch:
        batch.enqueue("q", 1, id="a")
    queue.producer.enqueue([new_job(1, id="z", after=[batch])])
    worker.turn(1)
    assert worker.turn(1, done="a") == ["z"]
    queue.producer.enqueue([new_job(1, id="later", after=[batch])])
    assert worker.turn(1, done="z") == ["later"]
    with pytest.raises(UnknownBatch):
        queue.producer.enqueue([new_job(1, id="never", after=[Batch(client.link, "forq:", "q", "no-such")])])


def test_a_member_with_a_known_id_is_refused(client: Client, queue: OneQueue) -> None:
    queue.enqueue("a")
    with pytest.raises(Exists), client.batch("q") as batch:
        batch.enqueue("q", 1, id="a")
    assert batch.info()["state"] == "cancelled"
    assert batch.info()["open"] == 1
    assert queue.state().jobs == {"a"}
    pass_hours(queue, 1)
    queue.recovery().promote("q")
    assert batch.info()["state"] == "failed"


def test_results_that_are_missing_are_reported(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    with client.batch("q", results=True) as batch:
        batch.enqueue("q", 1, id="a")
        batch.enqueue("q", 1, id="b")
    worker.turn(2)
    worker.turn(0, failed="a", done="b", results={"b": "!it is not JSON"})
    with pytest.raises(NoResult, match="member 2 is done, but has no result: it is not JSON"):
        batch.results()
    with client.batch("q") as without, pytest.raises(UsageError, match="keeps no results"):
        without.results()


def test_batch_ids_are_checked(client: Client) -> None:
    with pytest.raises(InvalidId, match="batch id"):
        client.batch("q", id="not allowed")


def test_a_deleted_home_leaves_nothing(client: Client, queue: OneQueue, other: OneQueue) -> None:
    with client.batch("q", **callbacks("on_done")) as batch:
        batch.enqueue("other", 1, id="a")
    assert queue.registry.delete("q", force=True) == 1
    assert is_clean(queue)
    other.producer.cancel("a")
    deliver(other)
    assert is_clean(other)
    assert batch.queue == "q"


def test_a_repeated_seal_sends_what_the_first_one_could_not(
    client: Client, queue: OneQueue, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OutcomeUnknown("the connection broke")

    batch = client.batch("q", **callbacks("on_done"))
    batch.enqueue("q", 1, id="a")
    with monkeypatch.context() as patched:
        patched.setattr(StoredBatch, "reserve", fail)
        with pytest.raises(OutcomeUnknown):
            batch.seal()
    batch.seal()
    assert worker.turn(5) == ["a"]
    assert worker.turn(5, done="a") == ids(batch, "on_done")


def test_reports_are_delivered_in_parts(client: Client, queue: OneQueue, other: OneQueue) -> None:
    """Reports are delivered in parts, and a part that arrives while others end counts once."""
    with client.batch("q", **callbacks("on_end")) as batch:
        for number in range(3000):
            batch.enqueue("other", number, id=f"m{number}")
    for number in range(3000):
        other.producer.cancel(f"m{number}")
    deliver(other)
    assert (batch.info()["state"], batch.info()["other"]) == ("failed", 3000)


def test_reports_that_come_during_a_delivery_are_delivered_by_it(
    client: Client, queue: OneQueue, other: OneQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first report wakes pulse: the others would wait for the next heartbeat."""
    with client.batch("q", **callbacks("on_end")) as batch:
        for number in range(10):
            batch.enqueue("other", number, id=f"m{number}")
    left, forget = iter(range(2, 10)), Reports._forget

    def while_others_end(reports: Reports, base: str, name: str, lines: Sequence[bytes]) -> None:
        if lines and (number := next(left, None)) is not None:
            other.producer.cancel(f"m{number}")
        forget(reports, base, name, lines)

    monkeypatch.setattr(Reports, "_forget", while_others_end)
    for number in range(2):
        other.producer.cancel(f"m{number}")
    deliver(other)
    assert batch.info()["open"] == 0
    assert is_clean(other)


def test_a_report_for_an_earlier_batch_of_the_id_does_not_count(
    client: Client, queue: OneQueue, other: OneQueue
) -> None:
    first = client.batch("q", id="same")
    first.enqueue("other", 1, id="old")
    first.flush()
    pass_hours(queue, 1.1)
    queue.recovery().promote("q")
    pass_hours(queue, 25)
    queue.recovery().promote("q")
    second = client.batch("q", id="same")
    second.enqueue("q", 1, id="new")
    second.seal()
    other.producer.cancel("old")
    deliver(other)
    assert (second.info()["open"], second.info()["other"]) == (1, 0)


def test_a_repeated_call_does_not_store_a_callback_again(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    batch = client.batch("q", id="B", **callbacks("on_dead"))
    batch.enqueue("q", 1, id="a")
    batch.flush()
    worker.turn(1)
    assert worker.turn(1, failed="a") == ["B:on_dead"]
    worker.consumer.turn(9, [b"B:on_dead", worker.fence, 7], [], 0, 0)
    worker.number = 9
    client.batch("q", id="B", **callbacks("on_dead"))
    assert worker.turn(5) == []


def test_a_member_that_comes_too_late_is_refused(client: Client, queue: OneQueue) -> None:
    batch = client.batch("q")
    batch._policy("q")
    terms, read_at = batch._terms["q"]
    batch._terms["q"] = terms._replace(now_ms=terms.now_ms - 400_000), read_at
    batch.enqueue("q", 1, id="a")
    with pytest.raises(TooLate):
        batch.flush()
    assert queue.state().jobs == set()


def test_a_child_that_its_parent_has_yet_to_store_is_not_lost(client: Client, queue: OneQueue) -> None:
    """The first attempt of the parent has reserved its number and died; the parent waits for its retry."""
    with client.batch("q") as batch:
        batch.enqueue("q", 1, id="a")
    queue.worker().turn(1)
    batch._stored().reserve([("q", "child")], parent=1)
    pass_hours(queue, 1)
    queue.recovery().promote("q")
    assert batch.info()["open"] == 2
    assert batch._stored().reserve([("q", "child")], parent=1) == [2]


def test_the_time_of_a_child_begins_again_with_the_next_attempt(client: Client, queue: OneQueue) -> None:
    with client.batch("q") as batch:
        batch.enqueue("q", 1, id="a")
    worker = queue.worker()
    worker.turn(1)
    stored = batch._stored()
    stored.reserve([("q", "child")], parent=1)
    pass_hours(queue, 1)
    stored.reserve([("q", "child")], parent=1)
    worker.turn(0, done="a")
    queue.recovery().promote("q")
    assert batch.info()["open"] == 1


def test_a_batch_that_is_opened_twice_has_the_members_of_both(
    client: Client, queue: OneQueue, worker: HandWorker
) -> None:
    for name in "ab":
        batch = client.batch("q", id="B")
        batch.enqueue("q", 1, id=name)
        batch.flush()
    batch.seal()
    worker.turn(2)
    worker.turn(0, done="ab")
    assert batch.info()["state"] == "done"


def test_a_home_of_mode_on_request_has_callbacks(redis_url: str, client: Client) -> None:
    with one_queue(redis_url, "items", "on_request") as items:
        with client.batch("items", on_end=new_job("callback")) as batch:
            batch.enqueue("items", 1, id="a")
        assert items.producer.cancel("a")
        release = client.queue("items").dequeue()
        assert release is not None
        assert release.id == f"{batch.id}:on_end"


def test_cancel_leaves_the_enqueue_that_is_blocked_behind_a_member(
    client: Client, queue: OneQueue, worker: HandWorker
) -> None:
    with client.batch("q", **callbacks("on_end")) as batch:
        batch.enqueue("q", 1, id="a")
    assert worker.turn(1) == ["a"]
    queue.producer.enqueue([new_job("not a member", id="a")])
    assert batch.cancel() == 0
    assert worker.turn(1, done="a") == ["a"]
    assert worker.turn(1, done="a") == ids(batch, "on_end")


def test_cancel_looks_at_each_member_once(
    client: Client, queue: OneQueue, other: OneQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at those whose ends are not reported yet."""
    monkeypatch.setattr("forq.batch.CANCELLED_PER_CALL", 1)
    with client.batch("q") as batch:
        for number in range(5):
            batch.enqueue("other", 1, id=f"m{number}")
    asked: list[str] = []
    cancel = Producer.cancel

    def ask(self: Producer, job_id: str, **about: Any) -> bool:
        asked.append(job_id)
        return cancel(self, job_id, **about)

    monkeypatch.setattr(Producer, "cancel", ask)
    assert batch.cancel() == 5
    assert asked == [f"m{number}" for number in range(5)]


def test_an_id_can_be_used_again_once_its_batch_is_forgotten(
    client: Client, queue: OneQueue, worker: HandWorker
) -> None:
    for _ in range(2):
        with client.batch("q", id="weekly", **callbacks("on_done")) as batch:
            batch.enqueue("q", 1, id="a")
        assert worker.turn(1) == ["a"]
        assert worker.turn(1, done="a") == ["weekly:on_done"]
        finish(worker, "weekly:on_done")
        pass_hours(queue, 25)
        queue.recovery().promote("q")
        assert not queue.redis.exists(queue.key("batches"))
        assert not list(queue.redis.scan_iter(match=queue.key("token:*")))


def test_a_batch_is_known_until_its_callbacks_have_ended(client: Client, queue: OneQueue, worker: HandWorker) -> None:
    """They read its results, though they waited for days."""
    with client.batch("q", results=True, **callbacks("on_done")) as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)
    worker.turn(0, done="a", results={"a": "7"})
    for _ in range(3):
        pass_hours(queue, 25)
        assert (queue.recovery().promote("q") or 0) > 300_000
    assert worker.turn(1) == ids(batch, "on_done")
    assert batch.results() == [7]
    finish(worker, *ids(batch, "on_done"))
    pass_hours(queue, 1)
    queue.recovery().promote("q")
    with pytest.raises(UnknownBatch):
        batch.results()


def test_children_of_batches_with_similar_ids_are_not_taken_for_one_another(client: Client, queue: OneQueue) -> None:
    added = []
    for tenant in "ab":
        with client.batch("q", id=f"tenant-{tenant}-import-of-the-night-of-2026-11-19") as batch:
            batch.enqueue("q", 1)
        parent = Batch(client.link, client.prefix, "q", batch.id, parent=1, parent_id="page-1" + "." * 122)
        added.append(parent.enqueue("q", 1))
        parent.flush()
    assert set(added) <= queue.state().jobs
    assert len(set(added)) == 2
    assert all(len(child) <= 128 for child in added)


def test_a_child_of_an_earlier_batch_of_the_id_does_not_stand_in_for_one(
    client: Client, queue: OneQueue, worker: HandWorker
) -> None:
    queue.set_options(dedup_ttl_ms=7 * 24 * HOUR_MS)
    for _ in range(2):
        with client.batch("q", id="weekly") as batch:
            batch.enqueue("q", 1, id="a")
        assert worker.turn(1) == ["a"]
        adding = Batch(client.link, client.prefix, "q", "weekly", parent=1, parent_id="a")
        child = adding.enqueue("q", 1)
        adding.flush()
        assert worker.turn(1, done="a") == [child]
        finish(worker, child)
        assert batch.info()["state"] == "done"
        pass_hours(queue, 25)
        queue.recovery().promote("q")


def test_a_lost_reply_does_not_cancel_a_batch_that_is_sealed(
    client: Client, queue: OneQueue, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StoredBatch._run
    lost: list[str] = []

    def lose_one_reply(self: StoredBatch, verb: str, *args: Any) -> list[Any]:
        reply = run(self, verb, *args)
        if verb == "seal_batch" and not lost:
            lost.append(verb)
            raise OutcomeUnknown("connection broke")
        return reply

    monkeypatch.setattr(StoredBatch, "_run", lose_one_reply)
    with client.batch("q", **callbacks("on_done")) as batch:
        batch.enqueue("q", 1, id="a")
    assert lost
    worker.turn(1)
    assert worker.turn(1, done="a") == ids(batch, "on_done")


@pytest.mark.parametrize("dies", [False, True])
def test_a_member_may_wait_for_another_batch(
    client: Client, queue: OneQueue, other: OneQueue, worker: HandWorker, dies: bool
) -> None:
    with client.batch("other", **callbacks("on_end")) as outer:
        with client.batch("q") as inner:
            inner.enqueue("other", 1, id="a")
            inner.enqueue("q", 1, id="b")
        outer.enqueue("q", 1, id="x", after=inner)
    assert worker.turn(5) == ["b"]
    worker.turn(0, done="b")
    runner = other.worker()
    assert runner.turn(5) == ["a"]
    runner.turn(0, done="" if dies else "a", failed="a" if dies else "")
    deliver(other)
    if not dies:
        assert outer.info()["open"] == 1
        assert worker.turn(5) == ["x"]
        worker.turn(0, done="x")
    deliver(queue)
    info = outer.info()
    assert (info["state"], info["done"], info["dead"]) == (("failed", 0, 1) if dies else ("done", 1, 0))
    assert runner.turn(5) == ids(outer, "on_end")


def finish(worker: HandWorker, *names: str) -> None:
    """Ends jobs whose ids are longer than one letter."""
    worker.number += 1
    settled = [value for name in names for value in (name.encode(), worker.fence, 7)]
    worker.consumer.turn(worker.number, settled, [], 0, 0)
