"""enqueue stores a chunk completely or not at all."""

import json
import re
from collections import OrderedDict
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest

from forq.broker import record
from forq.broker.chunks import CHUNK_BYTES, CHUNK_JOBS, PartlyStored, chunks
from forq.broker.enqueue import Producer, Restored, Update, new_job
from forq.broker.keys import pending_key
from forq.broker.link import Link
from forq.broker.record import unpack
from forq.errors import Exists, IncompatibleProtocol, InvalidData, InvalidId, QueueFull, UnknownQueue, UsageError
from tests.support.drive.one_queue import OneQueue, State, one_queue


@pytest.mark.spec("R7", "M1", "M4", "M5", "M6")
def test_enqueue_stores_the_record_under_its_id_and_only_the_id_in_the_list(queue: OneQueue) -> None:
    assert queue.enqueue("a", "b") == ["a", "b"]

    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
    assert unpack(queue.hash("jobs")["a"].encode()).data == {"n": "a"}


@pytest.mark.spec("N20", "Q2")
def test_forq_generates_the_id_and_the_user_sets_the_identifier(queue: OneQueue) -> None:
    [job_id] = queue.producer.enqueue([new_job([1, None, "ü\n"], identifier="order 7", type="mail")])

    assert UUID(job_id).version == 7
    job = queue.inspector.job(job_id)
    assert job.pop("enqueued_at") == pytest.approx(float(queue.redis.time()[0]), abs=5)
    assert job == {
        "id": job_id,
        "identifier": "order 7",
        "state": "waiting",
        "data": [1, None, "ü\n"],
        "type": "mail",
        "priority": 5,
        "retry_count": 0,
        "stall_count": 0,
        "timeout_count": 0,
        "suspect": False,
        "run_at": None,
        "attempts": [],
        "blocked_behind": False,
        "progress": None,
    }


def test_the_id_is_the_default_identifier(queue: OneQueue) -> None:
    queue.enqueue("a")
    assert queue.inspector.job("a")["identifier"] == "a"


class Color(Enum):
    NONE = float("nan")


@pytest.mark.parametrize(
    ("data", "where"),
    [
        ({"order": {"total": Decimal(1)}}, "data['order']['total'] is of type Decimal; allowed are str, int"),
        ([1, {"id": UUID(int=1)}], "data[1]['id'] is of type UUID;"),
        ({"shade": Color.NONE}, "data['shade'] is of type Color, an Enum;"),
        ({"at": datetime.now(UTC)}, "data['at'] is of type datetime;"),
        ({"ids": [{7: 1}]}, "data['ids'][0] has the key 7, but keys must be str"),
        ({"none": None, "rate": float("inf")}, "data['rate'] is NaN or Infinity"),
    ],
)
def test_data_outside_json_is_refused_with_its_location(data: Any, where: str) -> None:
    with pytest.raises(InvalidData, match=f"^job data is not JSON: {re.escape(where)}"):
        new_job(data)


def test_locations_are_computed_only_for_refused_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing them takes five times as long as the rest of an enqueue."""
    monkeypatch.setattr(record, "_values", lambda data, root: pytest.fail("places were named"))
    new_job({"rows": [{"id": 1, "note": None}, (1.5, "null")]})


@pytest.mark.parametrize("data", [OrderedDict(a=1), {"pair": (1, 2)}, [True, None, 1.5, "ü"]])
def test_subclasses_of_json_types_and_tuples_are_stored(queue: OneQueue, data: Any) -> None:
    [job_id] = queue.producer.enqueue([new_job(data)])
    assert queue.inspector.job(job_id)["data"] == json.loads(json.dumps(data))


@pytest.mark.spec("Q22")
def test_a_producer_needs_no_worker_and_no_supervisor(queue: OneQueue) -> None:
    queue.enqueue("a")
    assert queue.redis.exists(queue.key("processors")) == 0
    assert queue.inspector.counts().waiting == 1


@pytest.mark.spec("R4", "Q24")
def test_all_keys_of_a_queue_have_its_name_as_hash_tag(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c", "e")
    queue.enqueue("d", priority=2, token="t")
    worker = queue.worker("w1", "p1")
    worker.turn(want=3)
    worker.turn(failed="a", done="d")
    queue.recovery("p1").heartbeat(queue.name, 1000, [])

    keys = {key.decode() for key in queue.redis.keys("*")} - {"forq:queues"}
    assert all(key.startswith("forq:queue:{q}:") for key in keys)
    named = {"pending", "processed:count", "failed:count", "jobs", "options", "events"}
    assert {f"forq:queue:{{q}}:{name}" for name in named} <= keys
    worker.turn(want=1)
    assert queue.redis.exists("forq:queue:{q}:processor:p1:worker:w1:processing") == 1


@pytest.mark.spec("N3")
def test_max_items_counts_waiting_and_active_and_refuses_a_whole_chunk(redis_url: str) -> None:
    with one_queue(redis_url, max_items=3) as queue:
        queue.enqueue("a", "b")
        queue.worker().turn(want=1)
        before = queue.state()
        with pytest.raises(QueueFull, match="max_items = 3"):
            queue.enqueue("c", "d")
        assert queue.state() == before
        assert queue.enqueue("c") == ["c"]
        with pytest.raises(QueueFull):
            queue.enqueue("d")


def test_jobs_skipped_by_token_or_id_do_not_count_towards_max_items(redis_url: str) -> None:
    with one_queue(redis_url, max_items=2) as queue:
        queue.enqueue("a", token="t")
        queue.enqueue("b")
        assert queue.enqueue("x", token="t") == ["a"]
        assert queue.enqueue("a", "b", if_exists="skip") == ["a", "b"]


def test_data_larger_than_max_data_stores_nothing(redis_url: str) -> None:
    with one_queue(redis_url, max_data=100) as queue:
        with pytest.raises(InvalidData, match="max_data = 100"):
            queue.producer.enqueue([new_job(1, id="a"), new_job("x" * 100, id="b")])
        with pytest.raises(InvalidData, match="max_data = 100"):
            queue.producer.enqueue([new_job("x" * 100, id="b")])
        assert queue.state() == State(jobs=set())


def test_a_live_id_is_refused_and_nothing_of_the_chunk_is_stored(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.worker().turn(want=1)
    before = queue.state()
    for taken in "ab":
        with pytest.raises(Exists):
            queue.enqueue("c", taken)
        with pytest.raises(Exists):
            queue.enqueue(taken)
    assert queue.state() == before


def test_skip_leaves_existing_jobs_and_stores_the_rest(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job("first", id="a")])
    assert queue.producer.enqueue([new_job("second", id="a"), new_job(1, id="b")], Update("skip")) == ["a", "b"]
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
    assert queue.inspector.job("a")["data"] == "first"


def test_the_same_id_twice_in_a_chunk_is_refused_or_stored_once(queue: OneQueue) -> None:
    with pytest.raises(Exists):
        queue.enqueue("a", "a")
    assert queue.state() == State(jobs=set())
    queue.enqueue("a", "a", if_exists="skip")
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_a_repeated_token_returns_the_first_id_and_stores_nothing(queue: OneQueue) -> None:
    assert queue.enqueue("a", token="t") == ["a"]
    assert queue.enqueue("b", token="t") == ["a"]
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_a_token_is_remembered_after_its_job_has_run(queue: OneQueue) -> None:
    queue.enqueue("a", token="t")
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(done="a")
    assert queue.enqueue("a", token="t") == ["a"]
    assert queue.state() == State(jobs=set())


def test_a_token_twice_in_one_chunk_stores_one_job(queue: OneQueue) -> None:
    assert queue.enqueue("a", "b", token="t") == ["a", "a"]
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})


def test_a_skipped_job_stays_skipped_when_the_call_is_repeated(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.enqueue("a", token="t", if_exists="skip")
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(done="a")
    assert queue.enqueue("a", token="t", if_exists="skip") == ["a"]
    assert queue.state() == State(jobs=set())


def test_a_job_not_restored_because_its_id_is_live_is_restored_by_a_later_call(queue: OneQueue) -> None:
    lines = [new_job(1, id="a", token="1"), new_job(2, id="a", token="2"), new_job(1, id="a", token="1")]
    assert queue.producer.restore(lines) == Restored(stored=1, known=1, skipped=[1])
    assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
    assert queue.producer.restore(lines) == Restored(stored=0, known=2, skipped=[1])
    worker = queue.worker()
    worker.turn(want=1)
    assert queue.producer.restore(lines) == Restored(stored=0, known=2, skipped=[1]), "the id is active"
    worker.turn(done="a")
    assert queue.producer.restore(lines) == Restored(stored=1, known=2, skipped=[])
    assert queue.inspector.job("a")["data"] == 2


def test_restore_reports_skipped_lines_by_their_index_over_all_chunks(queue: OneQueue) -> None:
    queue.enqueue("j3", "j700")
    assert queue.producer.restore(new_job(1, id=f"j{n}", token=f"t{n}") for n in range(800)) == Restored(
        798, 0, [3, 700]
    )


def test_a_token_of_a_refused_chunk_is_not_remembered(queue: OneQueue) -> None:
    queue.enqueue("b")
    with pytest.raises(Exists):
        queue.producer.enqueue([new_job(1, id="a", token="t"), new_job(1, id="b")], Update("refuse"))
    queue.producer.cancel("b")
    assert queue.enqueue("c", token="t") == ["c"]


def test_a_token_expires_with_dedup_ttl(redis_url: str) -> None:
    with one_queue(redis_url, dedup_ttl_ms=60_000) as queue:
        queue.enqueue("a", token="t")
        [token] = queue.redis.keys("*:token:*")
        assert 0 < queue.redis.pttl(token) <= 60_000


@pytest.mark.spec("P7")
def test_each_priority_has_its_own_list(queue: OneQueue) -> None:
    for priority, job_id in enumerate("abcdefghij"):
        queue.enqueue(job_id, priority=priority)
    assert queue.state().waiting == {priority: [job_id] for priority, job_id in enumerate("abcdefghij")}
    assert pending_key(queue.base, 5) == queue.key("pending")


def test_one_job_of_another_priority_wakes_a_worker(queue: OneQueue) -> None:
    queue.enqueue("a", priority=7)
    assert queue.redis.lrange(queue.key("pending"), 0, -1) == [b""]


def test_a_job_with_a_future_time_is_scheduled(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a", run_in=60)])
    assert queue.redis.zrange(queue.key("scheduled"), 0, -1) == [b"a"]
    assert queue.state() == State({"a"})


def test_an_empty_bulk_makes_no_call(queue: OneQueue) -> None:
    assert queue.producer.enqueue([]) == []


def test_an_unknown_queue_is_named_in_the_error(redis_url: str) -> None:
    with pytest.raises(UnknownQueue, match="nowhere"):
        Producer(Link(redis_url), "forq:", "nowhere").enqueue([new_job(1)])


def test_a_queue_of_another_protocol_is_refused(queue: OneQueue) -> None:
    queue.set_options(protocol=99)
    with pytest.raises(IncompatibleProtocol, match="uses protocol 99"):
        queue.enqueue("a")
    with pytest.raises(IncompatibleProtocol):
        queue.worker()
    assert queue.state() == State(jobs=set())


@pytest.mark.parametrize("bad", ["", " ", "a b", "a\n", "é", "x" * 129, 7])
def test_ids_and_tokens_that_the_journal_cannot_hold_are_refused(bad: object) -> None:
    with pytest.raises(InvalidId):
        new_job(1, id=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidId):
        new_job(1, token=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), {"a": [float("inf")]}, object(), {1, 2}, b"x"])
def test_data_that_is_not_json_is_refused(bad: object) -> None:
    with pytest.raises(InvalidData):
        new_job(bad)


@pytest.mark.parametrize("bad", [-1, 10, True, "5", 5.0])
def test_priorities_outside_0_to_9_are_refused(bad: object) -> None:
    with pytest.raises(UsageError):
        new_job(1, priority=bad)  # type: ignore[arg-type]


def test_bulk_is_split_by_count_and_by_bytes() -> None:
    many = [new_job(n) for n in range(CHUNK_JOBS + 1)]
    assert [len(chunk) for chunk in chunks(many)] == [CHUNK_JOBS, 1]
    large = [new_job("x" * (CHUNK_BYTES // 2)) for _ in range(3)]
    assert [len(chunk) for chunk in chunks(large)] == [1, 1, 1]


def test_bulk_keeps_its_order_across_chunks(queue: OneQueue) -> None:
    ids = [f"n{n}" for n in range(CHUNK_JOBS * 2 + 3)]
    assert queue.producer.enqueue_many(new_job(1, id=job_id) for job_id in ids) == ids
    assert queue.pending() == ids


def test_a_failed_bulk_reports_what_was_stored_before(queue: OneQueue) -> None:
    jobs = [new_job(1, id=f"n{n}") for n in range(CHUNK_JOBS)]
    with pytest.raises(PartlyStored, match=f"{CHUNK_JOBS} jobs were stored, 1 refused") as failed:
        queue.producer.enqueue_many([*jobs, new_job(1, id="n0")], Update("refuse"))
    assert failed.value.stored == [job.id for job in jobs]
    with pytest.raises(Exists):
        queue.producer.enqueue_many([new_job(1, id="n0")], Update("refuse"))


@pytest.mark.spec("Q8", "M9")
@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (datetime(2026, 12, 1, 9, tzinfo=timezone(timedelta(hours=1))), "1796112000000"),
        (datetime(2026, 12, 1, 8, 0, 0, 123_000, tzinfo=UTC), "1796112000123"),
        (datetime(2026, 12, 1, 8, 0, 0, 123_001, tzinfo=UTC), "1796112000124"),
        (1796112000.123, "1796112000123"),
        (1796112000.1234, "1796112000124"),
        (1, "1000"),
        (0, "0"),
        (9_007_199_254_740, "9007199254740000"),
    ],
)
def test_a_time_is_rounded_up_to_the_millisecond(given: datetime | float, stored: str) -> None:
    assert new_job(1, run_at=given).run_at == stored


@pytest.mark.spec("M9")
@pytest.mark.parametrize(
    ("given", "stored"), [(0, "+0"), (0.25, "+250"), (0.0101, "+11"), (timedelta(minutes=10), "+600000")]
)
def test_a_delay_is_rounded_up_to_the_millisecond(given: timedelta | float, stored: str) -> None:
    assert new_job(1, run_in=given).run_at == stored


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"run_at": datetime(2026, 12, 1, 9)}, "has no time zone"),
        ({"run_at": datetime(1969, 12, 31, tzinfo=UTC)}, "is not allowed"),
        ({"run_at": "soon"}, r"is not allowed: .*, or a datetime with a zone$"),
        ({"run_at": float("nan")}, "is not allowed"),
        ({"run_at": float("inf")}, "is not allowed"),
        ({"run_at": True}, "is not allowed"),
        ({"run_at": -1}, "is not allowed"),
        ({"run_in": -1}, "is not allowed"),
        ({"run_in": timedelta(seconds=-1)}, "is not allowed"),
        ({"run_in": "10m"}, r"is not allowed: .*, or a timedelta$"),
        ({"run_in": 1, "run_at": 1}, "give run_at or run_in, not both"),
    ],
)
def test_an_invalid_time_is_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        new_job(1, **given)


@pytest.mark.spec("M9")
def test_a_job_with_a_past_time_is_waiting_at_once(queue: OneQueue) -> None:
    queue.producer.enqueue([new_job(1, id="a", run_at=datetime(2001, 9, 9, tzinfo=UTC)), new_job(1, id="b", run_at=0)])
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a", "b"]})
