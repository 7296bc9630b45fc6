"""Dead jobs: reading, listing, reviving, discarding."""

import json
from typing import Any

import pytest

from forq.broker.dead import CHUNK, DeadJobs, read_dead
from forq.broker.keys import DEFAULT_PREFIX
from forq.client import Client
from forq.errors import Exists, InvalidData, InvalidId, QueueFull, UnknownJob, UnknownQueue, UsageError
from tests.support.drive.one_queue import OneQueue, State, one_queue

ERROR = {"name": "ValueError", "message": "no", "kind": "retriable", "traceback": "line 1\nline 2"}
ATTEMPTS = [{"outcome": "failed", "cause": "timeout"}, {"outcome": "failed", "cause": "exception"}]


def pack(priority: int = 5, data: Any = None, identifier: str | None = None, attempts: Any = ATTEMPTS) -> bytes:
    body = json.dumps([identifier, None, data], separators=(",", ":"))
    parts = [f"c{priority} 1000000 3 2 1", body, json.dumps(ERROR)]
    return "\n".join(parts + ([] if attempts is None else [json.dumps(attempts)])).encode()


def bury(queue: OneQueue, member: str, packed: bytes | None = None, died_ms: int = 5000) -> None:
    queue.redis.zadd(queue.key("dead"), {member: died_ms})
    queue.redis.hset(queue.key("dead:jobs"), member, pack() if packed is None else packed)


def dead_of(queue: OneQueue) -> DeadJobs:
    return DeadJobs(queue.link, DEFAULT_PREFIX, queue.name)


def test_a_dead_job_is_read_with_and_without_attempts() -> None:
    record = pack(attempts=None).rpartition(b"\n")[0]
    assert read_dead(pack(attempts=None)) == (record, ERROR, [])
    assert read_dead(pack()) == (record, ERROR, ATTEMPTS)
    assert read_dead(record + b"\nnot json") == (record, "not json", [])


def test_pages_list_the_newest_first_and_continue_where_the_last_ended(queue: OneQueue) -> None:
    for number in range(5):
        bury(queue, f"j{number}@{number}", pack(identifier=f"name {number}"), died_ms=1000 + number)
    dead = dead_of(queue)
    first = dead.page(limit=2)
    assert [job["id"] for job in first.jobs] == ["j4", "j3"]
    assert first.jobs[0] == {
        "id": "j4",
        "fence": 4,
        "identifier": "name 4",
        "type": None,
        "died_at": 1.004,
        "attempts": 2,
        "error": "ValueError",
        "message": "no",
    }
    bury(queue, "new@9", died_ms=9000)
    dead.discard("j3")
    second = dead.page(limit=2, after=first.next)
    assert [job["id"] for job in second.jobs] == ["j2", "j1"]
    assert [job["id"] for job in dead.page(limit=2, after=second.next).jobs] == ["j0"]
    assert dead.page(limit=2, after=second.next).next is None
    with pytest.raises(UsageError, match="cursor"):
        dead.page(after="7")


def test_show_returns_every_field(queue: OneQueue) -> None:
    bury(queue, "a@7", pack(data={"x": [1]}, priority=2))
    assert dead_of(queue).show("a") == {
        "id": "a",
        "state": "dead",
        "fence": 7,
        "priority": 2,
        "enqueued_at": 1.0,
        "retry_count": 3,
        "stall_count": 2,
        "timeout_count": 1,
        "identifier": "a",
        "type": None,
        "data": {"x": [1]},
        "died_at": 5.0,
        "error": ERROR,
        "attempts": ATTEMPTS,
    }


def test_an_id_means_its_newest_death_and_id_at_fence_a_specific_one(queue: OneQueue) -> None:
    for member in ("a@9", "a@10", "a@b@11", "aa@12", "*@13"):
        bury(queue, member)
    dead = dead_of(queue)
    assert dead.find("a") == "a@10"
    assert dead.find("a@9") == "a@9"
    assert dead.find("a@b") == "a@b@11"
    assert dead.find("*") == "*@13"
    with pytest.raises(UnknownJob, match="a@8"):
        dead.find("a@8")
    with pytest.raises(InvalidId):
        dead.find("a b")
    with pytest.raises(UnknownQueue):
        DeadJobs(queue.link, DEFAULT_PREFIX, "other").find("a")


@pytest.mark.spec("M13")
@pytest.mark.parametrize("attempts", [None, ATTEMPTS])
@pytest.mark.parametrize("data", [{"a": ["\n{", "["]}, [], None, "x"])
def test_revive_makes_the_job_waiting_with_counts_reset(queue: OneQueue, attempts: Any, data: Any) -> None:
    queue.enqueue("first", priority=2)
    bury(queue, "a@7", pack(priority=2, data=data, identifier="Ann", attempts=attempts))
    assert dead_of(queue).retry("a") == "a@7"
    assert queue.state() == State(jobs={"first", "a"}, waiting={2: ["first", "a"]})
    job = queue.inspector.job("a")
    assert (job["data"], job["identifier"], job["priority"]) == (data, "Ann", 2)
    assert (job["retry_count"], job["stall_count"], job["timeout_count"]) == (0, 0, 0)
    assert not queue.redis.exists(queue.key("dead"), queue.key("dead:jobs"))
    assert [(e.verb, e.fence, e.job) for e in queue.events()][-1] == ("revived", 7, "a")
    worker = queue.worker()
    assert worker.turn(want=2) == ["first", "a"]


def test_a_job_that_really_died_can_be_revived_and_run(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(failed="a")
    member = dead_of(queue).retry("a")
    assert worker.turn(want=1) == ["a"]
    assert worker.fence > member.partition("@")[2]
    worker.turn(done="a")
    assert queue.state() == State(jobs=set())


def test_revive_is_refused_while_a_live_job_has_the_id(queue: OneQueue) -> None:
    bury(queue, "a@7")
    queue.enqueue("a")
    before = queue.state(), queue.events()
    with pytest.raises(Exists):
        dead_of(queue).retry("a")
    assert (queue.state(), queue.events()) == before


def test_revive_is_refused_by_a_full_queue_and_for_an_invalid_record(redis_url: str) -> None:
    with one_queue(redis_url, max_items=1) as queue:
        bury(queue, "a@7")
        bury(queue, "bad@8", b"rubbish")
        with pytest.raises(InvalidData, match="discarded"):
            dead_of(queue).retry("bad")
        queue.enqueue("x")
        with pytest.raises(QueueFull, match="max_items = 1"):
            dead_of(queue).retry("a")
        with pytest.raises(QueueFull):
            dead_of(queue).retry_some()
        assert sorted(queue.state().dead) == ["a", "bad"]
        assert "broken" in dead_of(queue).show("bad")["record_error"]
        assert [job["id"] for job in dead_of(queue).page().jobs] == ["bad", "a"]


def test_discard_leaves_nothing_but_the_event(queue: OneQueue) -> None:
    bury(queue, "a@7")
    bury(queue, "a@8")
    assert dead_of(queue).discard("a") == "a@8"
    assert dead_of(queue).discard("a@7") == "a@7"
    assert queue.state() == State(jobs=set())
    assert not queue.redis.exists(queue.key("dead:jobs"))
    assert [(e.verb, e.fence, e.job) for e in queue.events()][1:] == [("discarded", 8, "a"), ("discarded", 7, "a")]
    with pytest.raises(UnknownJob):
        dead_of(queue).discard("a")


def test_retrying_all_works_in_chunks_skips_refused_jobs_and_leaves_later_deaths(queue: OneQueue) -> None:
    for number in range(CHUNK + 20):
        bury(queue, f"j{number}@{number}", died_ms=number)
    bury(queue, "bad@500", b"rubbish", died_ms=0)
    queue.enqueue("j3")
    dead = dead_of(queue)
    first = dead.retry_some()
    assert (first.done, first.refused, first.left) == (CHUNK - 2, 2, 21)
    bury(queue, "again@900", died_ms=2**41)
    second = dead.retry_some(first.next)
    assert (second.done, second.refused, second.left, second.next) == (21, 0, 0, None)
    assert sorted(queue.state().dead) == ["again", "bad", "j3"]


def test_discarding_all_leaves_none(queue: OneQueue) -> None:
    for number in range(CHUNK + 1):
        bury(queue, f"j{number}@{number}")
    dead = dead_of(queue)
    first = dead.discard_some()
    assert (first.done, first.left) == (CHUNK, 1)
    assert dead.discard_some(first.next).next is None
    assert not queue.redis.exists(queue.key("dead"), queue.key("dead:jobs"))


def test_large_records_are_moved_in_smaller_chunks(queue: OneQueue) -> None:
    for number in range(8):
        bury(queue, f"j{number}@{number}", pack(data="x" * 1_000_000), died_ms=number)
    first = dead_of(queue).retry_some()
    assert 0 < first.done < 8
    assert dead_of(queue).retry_some(first.next).done == 8 - first.done


def test_a_dead_entry_without_a_record_does_not_stop_the_iteration(queue: OneQueue) -> None:
    queue.redis.zadd(queue.key("dead"), {"ghost@1": 1})
    bury(queue, "a@2", died_ms=2)
    chunk = dead_of(queue).retry_some()
    assert (chunk.done, chunk.left, chunk.next) == (1, 0, None)


def test_the_python_api_lists_retries_and_discards(queue: OneQueue) -> None:
    bury(queue, "a@7")
    bury(queue, "b@8", died_ms=6000)
    client = Client(queue.url)
    api = client.queue(queue.name)
    page = api.dead(limit=1)
    assert [job["id"] for job in page.jobs] == ["b"]
    assert [job["id"] for job in api.dead(after=page.next).jobs] == ["a"]
    assert api.retry_dead("a") == "a@7"
    assert api.discard_dead("b") == "b@8"
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
    client.close()
