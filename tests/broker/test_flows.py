"""Flows: jobs that wait for one another, stored together, in one queue or several."""

from collections.abc import Iterator
from typing import Any

import pytest

from forq.broker import flows
from forq.broker.batches import StoredBatch
from forq.broker.dependencies import AS_ARGUMENT, AS_LIST
from forq.broker.explain import why
from forq.broker.flows import FlowJob, find_flow, read_flow, store_flow
from forq.client import Client, new_job
from forq.errors import BackPressure, Exists, OutcomeUnknown, TooLate, UnknownFlow, UsageError
from tests.broker.test_batches import deliver, pass_hours
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue

PREFIX = "forq:"


@pytest.fixture
def other(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, "other") as queue:
        yield queue


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


def job(name: str, *needs: int, queue: str = "q", when: str = "done", use: int = 0) -> FlowJob:
    return FlowJob(queue, new_job({"n": name}, id=name), needs, when, use, name)


def store(queue: OneQueue, *jobs: FlowJob, flow: str = "f") -> None:
    store_flow(queue.link, PREFIX, flow, jobs)


def states(queue: OneQueue, flow: str = "f") -> dict[str, str]:
    return {each["id"]: each["state"] for each in read_flow(queue.link, PREFIX, "q", flow)}


def is_clean(*queues: OneQueue) -> bool:
    names = ("held", "held:jobs", "held:open", "inputs", "sources", "edges", "resolving", "reports")
    return not any(queue.redis.exists(queue.key(name)) for queue in queues for name in names)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_diamond_runs_in_its_order(
    queue: OneQueue, worker: HandWorker, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if not at_once:
        monkeypatch.setattr(flows, "_fits_into_one_call", lambda jobs: False)
    store(queue, job("a"), job("b", 0, use=AS_ARGUMENT), job("c", 0), job("d", 1, 2, use=AS_LIST))
    assert states(queue) == {"a": "waiting", "b": "held", "c": "held", "d": "held"}
    assert worker.turn(5) == ["a"]
    assert sorted(worker.turn(5, done="a", results={"a": "1"})) == ["b", "c"]
    assert worker.turn(5, done="bc", results={"b": "2", "c": "3"}) == ["d"]
    assert queue.hash("inputs") == {"d": "2 3", "d 1": "done 2", "d 2": "done 3"}
    worker.turn(0, done="d")
    assert is_clean(queue)
    assert set(states(queue).values()) == {"done"}


def test_a_flow_over_two_queues(queue: OneQueue, other: OneQueue, worker: HandWorker) -> None:
    store(
        queue,
        job("a"),
        job("x", queue="other"),
        job("b", 0, 1, queue="other", use=AS_LIST),
        job("c", 2, use=AS_ARGUMENT),
    )
    runner = other.worker()
    assert worker.turn(5) == ["a"]
    assert runner.turn(5) == []
    deliver(queue)
    assert runner.turn(5) == ["x"]
    worker.turn(0, done="a", results={"a": '"from q"'})
    runner.turn(0, done="x", results={"x": "2"})
    deliver(queue, other)
    assert other.hash("inputs") == {"b": "2 3", "b 1": 'done "from q"', "b 2": "done 2"}
    assert runner.turn(5) == ["b"]
    runner.turn(0, done="b", results={"b": "[1]"})
    deliver(queue, other)
    assert worker.turn(5) == ["c"]
    worker.turn(0, done="c")
    assert is_clean(queue, other)


def test_a_death_dooms_the_jobs_behind_it_in_all_queues(queue: OneQueue, other: OneQueue, worker: HandWorker) -> None:
    store(queue, job("a"), job("b", 0, queue="other"), job("c", 1), job("d", 1, when="ended"))
    worker.turn(1)
    worker.turn(0, failed="a")
    deliver(queue, other)
    deliver(queue, other)
    assert other.state().dead == ["b"]
    assert set(queue.state().dead) == {"a", "c"}
    assert worker.turn(5) == ["d"]
    assert "job b of queue other" in queue.inspector.job("c")["error"]["message"]


def test_more_jobs_than_fit_into_one_call(queue: OneQueue, worker: HandWorker) -> None:
    count = 1200
    middle = [job(f"m{number}", 0) for number in range(count)]
    store(queue, job("a"), *middle, job("z1", *range(1, 601)), job("z2", *range(601, 1201)), job("end", 1201, 1202))
    assert worker.turn(5) == ["a"]
    worker.turn(0, done="a")
    for _ in range(5):
        queue.recovery().promote("q")
    assert queue.inspector.counts().waiting == count
    while jobs := worker.whole_turn(100).jobs[::2]:
        worker.number += 1
        worker.consumer.turn(worker.number, [part for each in jobs for part in (each, worker.fence, 7)], [], 0, 0)
    assert is_clean(queue)
    assert set(states(queue).values()) == {"done"}


def test_nothing_is_left_of_a_flow_whose_storing_fails(queue: OneQueue, other: OneQueue, worker: HandWorker) -> None:
    other.enqueue("taken")
    with pytest.raises(Exists):
        store(queue, job("a"), job("taken", 0, queue="other"), job("c", 1))
    assert queue.state().jobs == set()
    assert queue.inspector.counts().held == 0
    assert other.state().jobs == {"taken"}
    assert is_clean(queue, other)


@pytest.mark.parametrize("needs", [(), (0,)])
def test_nothing_is_left_of_a_flow_of_which_some_calls_were_refused(
    queue: OneQueue, other: OneQueue, needs: tuple[int, ...]
) -> None:
    """The last job of a level is refused; those before it were stored by another call."""
    other.enqueue("taken")
    many = [job(f"m{number}", *needs, queue="other") for number in range(600)]
    with pytest.raises(Exists):
        store(queue, job("a"), *many, job("taken", *needs, queue="other"))
    assert other.state().jobs == {"taken"}
    assert (other.state().dead, queue.state().dead) == ([], [])


def test_nothing_is_left_of_a_level_that_was_stored_in_part(queue: OneQueue, other: OneQueue) -> None:
    other.enqueue("m600")
    middle = [job(f"m{number}", 0, queue="other", when="ended") for number in range(700)]
    with pytest.raises(Exists):
        store(queue, job("a"), *middle)
    assert other.state().jobs == {"m600"}
    assert [each.inspector.counts().held for each in (queue, other)] == [0, 0]
    assert is_clean(queue, other)


def test_a_flow_whose_producer_dies_never_starts(
    queue: OneQueue, other: OneQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise OutcomeUnknown("the connection broke")

    monkeypatch.setattr(flows._StoreBackwards, "_open_gate_elsewhere", die)
    monkeypatch.setattr(flows._StoreBackwards, "_withdraw", lambda _: None)
    with pytest.raises(OutcomeUnknown):
        store(queue, job("a"), job("x", queue="other"), job("b", 0, 1), job("always", 0, when="ended"))
    pass_hours(queue, 1.1)
    pass_hours(other, 1.1)
    queue.recovery().promote("q")
    other.recovery().promote("other")
    deliver(queue, other)
    deliver(queue, other)
    assert set(queue.state().dead) == {"a", "b", "always"}
    assert other.state().dead == ["x"]
    assert is_clean(queue, other)


def test_a_dependency_that_was_never_stored_is_lost(
    queue: OneQueue, other: OneQueue, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer died between two levels."""
    stored: list[object] = []
    store_level = flows._StoreBackwards._store_level

    def store_one(self: flows._StoreBackwards, level: list[int]) -> None:
        if stored:
            raise OutcomeUnknown("the connection broke")
        stored.append(level)
        store_level(self, level)

    monkeypatch.setattr(flows._StoreBackwards, "_store_level", store_one)
    monkeypatch.setattr(flows._StoreBackwards, "_withdraw", lambda _: None)
    with pytest.raises(OutcomeUnknown):
        store(queue, job("a", queue="other"), job("b", 0))
    assert queue.inspector.counts().held == 1
    pass_hours(queue, 0.5)
    queue.recovery().promote("q")
    assert queue.state().dead == ["b"]
    assert "ended as lost" in queue.inspector.job("b")["error"]["message"]


def test_a_job_names_dependencies_in_other_queues(queue: OneQueue, other: OneQueue) -> None:
    store(queue, job("a"), job("x", queue="other"), job("b", 0, 1), job("c", 2, queue="other"))
    assert queue.inspector.job("b")["waits_for"] == [
        {"kind": "job", "id": "a", "state": "waiting"},
        {"kind": "job", "id": "x", "state": None, "queue": "other"},
    ]
    # Its gate was opened, which the other queue has not been told yet.
    (gate,) = other.inspector.job("x")["waits_for"]
    assert gate == {"kind": "batch", "id": gate["id"], "state": None, "queue": "q"}
    assert gate["id"].startswith("f.")
    reason = why(queue.link, PREFIX, "q", "b")[1]
    assert reason.startswith("it waits for jobs a and x of queue other to be done: a is waiting")
    assert why(queue.link, PREFIX, "other", "x")[1] == f"it waits for batch {gate['id']} of queue q to be done"
    assert "member_of" not in queue.inspector.job("a")


def test_the_limits_of_a_flow(queue: OneQueue) -> None:
    with pytest.raises(UsageError, match="1001 jobs: at most 1000"):
        store(queue, *(job(f"{number}") for number in range(1001)), job("z", *range(1001)))
    with pytest.raises(UsageError, match="10001 jobs: allowed are 1 to 10000"):
        store(queue, *(job(f"{number}") for number in range(10_001)))
    assert queue.state().jobs == set()


def test_a_flow_is_found_by_its_id(queue: OneQueue, other: OneQueue) -> None:
    store(queue, job("a"), job("b", 0))
    assert find_flow(queue.link, PREFIX, ["other", "q"], "f") == "q"
    plan = read_flow(queue.link, PREFIX, "q", "f")
    assert plan[1] == {"queue": "q", "id": "b", "label": "b", "needs": [0], "when": "done", "state": "held"}
    with pytest.raises(UnknownFlow):
        find_flow(queue.link, PREFIX, ["other", "q"], "no-such-flow")


def test_why_names_dependencies_in_other_queues(queue: OneQueue, other: OneQueue) -> None:
    store(queue, job("a", queue="other"), job("b", 0), job("c"))
    assert why(queue.link, PREFIX, "q", "b") == ("held", "it waits for job a of queue other to be done")
    waits_for = queue.inspector.job("b")["waits_for"]
    assert waits_for == [{"kind": "job", "id": "a", "state": None, "queue": "other"}]
    (gate,) = queue.inspector.job("c")["waits_for"]
    assert gate == {"kind": "batch", "id": gate["id"], "state": None, "queue": "other"}


def test_a_member_shows_its_batch_and_a_callback_too(queue: OneQueue, other: OneQueue) -> None:
    client = Client(queue.url)
    with client.batch("q", id="B", on_done=new_job(1)) as batch:
        batch.enqueue("other", 1, id="x")
        batch.enqueue("q", 1, id="y")
    assert other.inspector.job("x")["member_of"] == {"queue": "q", "id": "B", "number": 1}
    assert queue.inspector.job("y")["member_of"] == {"queue": "q", "id": "B", "number": 2}
    assert queue.inspector.job("B:on_done")["batch"] == "B"
    assert why(queue.link, PREFIX, "q", "B:on_done")[1].startswith("it waits for batch B to be done")
    client.close()


def test_what_an_earlier_producer_has_left_does_not_start_with_the_next_flow_of_the_id(
    queue: OneQueue, other: OneQueue, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(StoredBatch, "seal", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store(queue, job("a"), job("x", queue="other"), job("b", 0, 1))
    store(queue, job("a2"), job("x2", queue="other"), job("b2", 0, 1))
    store(queue, job("a3"), job("x3", queue="other"), job("b3", 0, 1))
    deliver(queue, other)
    assert worker.turn(5) == ["a2", "a3"]
    assert other.worker().turn(5) == ["x2", "x3"]


def test_a_refused_flow_is_not_found_by_its_id(queue: OneQueue, other: OneQueue) -> None:
    other.enqueue("taken")
    queue.enqueue("taken")
    for place in ("q", "other"):
        with pytest.raises(Exists):
            store(queue, job("a"), job("taken", 0, queue=place))
        with pytest.raises(UnknownFlow):
            states(queue)
    store(queue, job("b"), job("c", 0))
    with pytest.raises(Exists):
        store(queue, job("d"), job("c", 0))
    assert states(queue) == {"b": "waiting", "c": "held"}


def test_a_flow_that_may_have_been_stored_is_found_by_its_id(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    run = flows._store_at_once

    def lose_the_reply(*args: Any) -> None:
        run(*args)
        raise OutcomeUnknown("connection broke")

    monkeypatch.setattr(flows, "_store_at_once", lose_the_reply)
    with pytest.raises(OutcomeUnknown):
        store(queue, job("a"), job("b", 0))
    assert states(queue) == {"a": "waiting", "b": "held"}


def test_a_flow_that_may_have_begun_is_not_withdrawn(
    queue: OneQueue, other: OneQueue, worker: HandWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its first jobs would run, and those behind them would not."""
    run = StoredBatch._run

    def lose_the_reply(self: StoredBatch, verb: str, *args: Any) -> list[Any]:
        reply = run(self, verb, *args)
        if verb == "seal_batch":
            raise OutcomeUnknown("connection broke")
        return reply

    monkeypatch.setattr(StoredBatch, "_run", lose_the_reply)
    with pytest.raises(OutcomeUnknown):
        store(queue, job("a"), job("x", 0, queue="other"))
    assert worker.turn(1) == ["a"]
    worker.turn(0, done="a")
    deliver(queue)
    assert other.worker().turn(1) == ["x"]


def test_a_flow_whose_start_is_refused_is_withdrawn(
    queue: OneQueue, other: OneQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = StoredBatch.seal

    def refuse(self: StoredBatch, *, cancel: bool = False) -> int:
        if not cancel:
            raise BackPressure("out of memory")
        return seal(self, cancel=True)

    monkeypatch.setattr(StoredBatch, "seal", refuse)
    with pytest.raises(BackPressure):
        store(queue, job("a"), job("x", 0, queue="other"))
    deliver(queue, other)
    assert is_clean(queue, other)
    assert [each.state().jobs for each in (queue, other)] == [set(), set()]


def test_a_flow_that_was_stored_too_slowly_is_withdrawn(
    queue: OneQueue, other: OneQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first jobs in other queues may count as lost already."""
    open_elsewhere = flows._StoreBackwards._open_gate_elsewhere

    def late(self: flows._StoreBackwards) -> None:
        (gate, entry), *_ = queue.hash("batches").items()
        *fields, at_ms, nonce = entry.split(" ")
        queue.redis.hset(queue.key("batches"), gate, " ".join([*fields, str(int(at_ms) - 301_000), nonce]))
        open_elsewhere(self)

    monkeypatch.setattr(flows._StoreBackwards, "_open_gate_elsewhere", late)
    with pytest.raises(TooLate):
        store(queue, job("a"), job("x", queue="other"), job("b", 0, 1))
    deliver(queue, other)
    assert is_clean(queue, other)
    assert [each.state().jobs for each in (queue, other)] == [set(), set()]
