"""Journal events of the rarer transitions; the replay accepts them in this order only."""

from typing import Any

import pytest

from forq.broker.enqueue import Update, new_job
from forq.broker.journal import Event, read_entry
from forq.broker.recovery import Outcome
from forq.settings import stored_defaults
from forq.workers.attempt import describe_failure
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.models.journal_replay import ImpossibleEvent, Replay

FUTURE_MS = 4_000_000_000_000
LATER_MS = 5_000_000_000_000


def replayed(queue: OneQueue) -> Replay:
    return Replay().read_all(queue.entries())


def last_entry(queue: OneQueue) -> list[tuple[str, Any]]:
    """Returns the events of the last entry as (verb, job); checks that the replay accepts it."""
    replayed(queue)
    return [(event.verb, event.job) for event in read_entry(queue.entries()[-1])]


def dispatch(queue: OneQueue, *ids: str, at_ms: int | None = None, **update: Any) -> None:
    jobs = [new_job({"n": 1}, id=job_id, run_at=at_ms and at_ms / 1000) for job_id in ids]
    queue.producer.enqueue(jobs, Update("update", **update))


def events_about(queue: OneQueue, job_id: str) -> list[Event]:
    return [event for event in queue.events() if event.job == job_id]


def test_a_delayed_job_is_journaled_with_its_time(queue: OneQueue) -> None:
    dispatch(queue, "a", "b", at_ms=FUTURE_MS)
    assert last_entry(queue) == [("enqueued", "a"), ("enqueued", "b"), ("scheduled", "a"), ("scheduled", "b")]
    assert events_about(queue, "a")[-1].due_us == FUTURE_MS * 1000


def test_an_update_journals_the_new_place_even_if_it_is_unchanged(queue: OneQueue) -> None:
    dispatch(queue, "a", at_ms=FUTURE_MS)
    dispatch(queue, "a", update_run_at=False)
    assert last_entry(queue) == [("updated", "a"), ("scheduled", "a")]
    assert replayed(queue).ready == {"a": FUTURE_MS}
    dispatch(queue, "a", at_ms=LATER_MS)
    assert replayed(queue).ready == {"a": LATER_MS}
    dispatch(queue, "a")
    assert last_entry(queue) == [("updated", "a")]
    assert replayed(queue).ready == {"a": None}
    dispatch(queue, "a", at_ms=FUTURE_MS)
    assert last_entry(queue) == [("updated", "a"), ("scheduled", "a")]


def test_a_blocked_delayed_job_is_journaled_with_its_time(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a", "b")
    worker.turn(want=2)
    dispatch(queue, "a", at_ms=FUTURE_MS)
    dispatch(queue, "b")
    worker.turn(done="ab")
    assert last_entry(queue) == [
        *[("done", "a"), ("done", "b")],
        *[("unblocked", "a"), ("unblocked", "b"), ("scheduled", "a")],
    ]


@pytest.mark.parametrize("end", ["timeout", "crash"])
def test_a_merged_dispatch_is_journaled_before_the_job_returns(queue: OneQueue, end: str) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    dispatch(queue, "a", at_ms=FUTURE_MS)
    if end == "timeout":
        worker.turn(failed="a", kind="timeout")
    else:
        queue.recover(worker, running=True)
    lost = "timed_out" if end == "timeout" else "stalled"
    assert last_entry(queue) == [(lost, "a"), ("merged", "a"), ("returned", "a"), ("scheduled", "a")]


def test_a_retry_is_journaled_after_the_merge_and_before_its_time(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=9) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        worker.turn(want=1)
        dispatch(queue, "a", at_ms=FUTURE_MS)
        worker.turn(failed="a")
        assert last_entry(queue) == [("merged", "a"), ("retried", "a"), ("scheduled", "a")]
        assert replayed(queue).ready == {"a": FUTURE_MS}


def test_the_attempt_number_counts_failures_and_losses(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=9, min_backoff_ms=0, max_backoff_ms=0) as queue:
        queue.enqueue("a", "b", "c")
        worker = queue.worker()
        worker.turn(want=3)
        worker.turn(failed="a", done="c", keep=1)
        queue.recover(worker, running=True)
        queue.enqueue("d")
        other = queue.worker("w2")
        other.turn(want=3)
        claims = {event.job: event.attempt for event in queue.events() if event.fence == int(other.fence)}
        assert claims == {"a": 2, "b": 2, "d": 1}
        other.turn(failed="ab", done="d")
        other.turn(want=3)
        assert [event.attempt for event in queue.events()[-2:]] == [3, 3]


@pytest.mark.parametrize(("outcome", "verb"), [("interrupted", "interrupted"), ("suspect", "suspected")])
def test_a_lost_attempt_is_journaled_with_a_one_word_cause_and_its_duration(
    queue: OneQueue, outcome: Outcome, verb: str
) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    at = worker.position(0, running=True)
    queue.recovery().recover(queue.name, "p1", at, outcome=outcome, cause="signal 9\nof a\tkind", micros=12)
    lost = events_about(queue, "a")[-2]
    assert (lost.verb, lost.cause, lost.micros) == (verb, "signal_9_of_a_kind", 12)
    assert last_entry(queue) == [(verb, "a"), ("returned", "a")]


def test_a_lost_attempt_without_a_cause_can_be_read(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    queue.recovery().recover(queue.name, "p1", worker.position(0, running=True), outcome="stalled", cause="")
    assert events_about(queue, "a")[-2].cause == "-"


NAMES = [
    ("ValueError", "ValueError"),
    ("", "-"),
    ("a b\tc", "a_b_tc"),
    ('say "no"', "say__"),
    ("C:\\d", "C:__d"),
    ("Maßlos", "Ma__los"),
    ("E" * 70, "E" * 64),
    ("E" * 63 + "ß", "E" * 63 + "_"),
]


@pytest.mark.parametrize("end", ["retried", "retried in the lane", "dead"])
@pytest.mark.parametrize(("name", "cause"), NAMES)
def test_a_failure_is_journaled_with_the_name_of_its_exception_as_one_word(
    redis_url: str, name: str, cause: str, end: str
) -> None:
    with one_queue(redis_url, max_retries=int(end == "retried"), retry_lane_retries=int("lane" in end)) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        worker.turn(want=1)
        raised = describe_failure(type(name, (Exception,), {})('{"name":"Other"}'))
        worker.turn(failed="a", error=raised.error.decode())
        event = next(event for event in events_about(queue, "a") if event.verb in ("retried", "dead"))
        assert (event.verb, event.cause, event.micros) == (end.partition(" ")[0], cause, 7)
        replayed(queue)


@pytest.mark.parametrize("end", ["retried", "dead"])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("{}", "-"),
        ("null", "-"),
        ('{"message":"no"}', "-"),
        ('{"name":null}', "-"),
        ('{"name":"A\n\t\x00\x7fB"}', "A____B"),
        ('{"name":"First","message":"","context":{"name":"Second"}}', "First"),
    ],
)
def test_a_failure_with_a_foreign_description_can_be_read(redis_url: str, error: str, cause: str, end: str) -> None:
    with one_queue(redis_url, max_retries=int(end == "retried")) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        worker.turn(want=1)
        worker.turn(failed="a", error=error)
        event = next(event for event in events_about(queue, "a") if event.verb in ("retried", "dead"))
        assert (event.verb, event.cause) == (end, cause)


@pytest.mark.parametrize(("kind", "cause"), [("stall", "StallError"), ("timeout", "TimeoutError")])
def test_a_job_buried_by_a_claim_is_journaled_with_its_error(redis_url: str, kind: str, cause: str) -> None:
    with one_queue(redis_url, max_stalls=0, max_timeouts=0) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        worker.turn(want=1)
        if kind == "timeout":
            worker.turn(failed="a", kind="timeout")
        else:
            queue.recover(worker, running=True)
        assert queue.worker("w2").turn(want=1) == []
        claimed, dead = events_about(queue, "a")[-2:]
        assert (claimed.verb, dead.verb, dead.cause, dead.micros) == ("claimed", "dead", cause, None)
        assert claimed.sequence == dead.sequence
        replayed(queue)


def test_removing_a_running_job_is_journaled_once(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    queue.producer.remove("a")
    assert last_entry(queue) == [("marked", "a")]
    assert replayed(queue).marked == {"a"}
    length = len(queue.events())
    queue.producer.remove("a")
    queue.producer.cancel("a")
    assert len(queue.events()) == length
    worker.turn(done="a")
    assert replayed(queue).active == {}


def test_dead_jobs_that_expire_are_forgotten_one_by_one(redis_url: str) -> None:
    with one_queue(redis_url, dead_max=1) as queue:
        worker = queue.worker()
        fences = []
        for job_id in ("a", "b@1"):
            queue.enqueue(job_id)
            worker.turn(want=1)
            fences.append(int(worker.fence))
            worker.consumer.turn(worker.number + 1, [], [job_id, worker.fence, 7, "{}", "{}", "", "", "0"], 0, 0)
            worker.number += 1
        assert last_entry(queue) == [("dead", "b@1"), ("forgotten", "a")]
        assert replayed(queue).archived == {f"b@1@{fences[1]}"}
        queue.registry.configure(queue.name, {"dead_ttl_ms": 0}, {})
        queue.enqueue("c")
        worker.turn(want=1)
        worker.turn(failed="c")
        assert {verb for verb, _ in last_entry(queue)} == {"dead", "forgotten"}
        assert replayed(queue).archived == set()


@pytest.mark.parametrize("fail_handler", [0, 1])
def test_dead_journals_whether_a_fail_job_follows(queue: OneQueue, fail_handler: int) -> None:
    options = {"fail_handler": fail_handler}
    queue.registry.create(queue.name, "work", 9, stored_defaults(), options, fail_options={"max_retries": 0})
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    worker.turn(failed="a")
    assert last_entry(queue) == [("dead", "a"), ("failing", "a")][: 1 + fail_handler]
    assert events_about(queue, "a")[2].fail_job is bool(fail_handler)
    births = replayed(queue).births
    assert births == ({f"a:{worker.fence}"} if fail_handler else set())
    queue.claim_fail_job("r1")
    entries = queue.redis.xrange(queue.key("fail:events"))
    assert set(Replay(births).read_all(fields for _, fields in entries).active) == births


def test_a_scheduled_job_without_a_record_is_dropped_when_due(queue: OneQueue) -> None:
    dispatch(queue, "a", "b", at_ms=FUTURE_MS)
    for job_id in "ab":
        queue.set_due({job_id: 1})
    queue.redis.hdel(queue.key("jobs"), "a")
    queue.recovery().promote(queue.name)
    assert [(event.verb, event.job) for event in queue.events()[-2:]] == [("dropped", "a"), ("promoted", "b")]
    assert queue.inspector.counts().dropped == 1


def test_a_held_hint_without_a_record_is_dropped_when_it_goes_back(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    assert worker.block() == "a"
    queue.redis.hdel(queue.key("jobs"), "a")
    queue.recover(worker)
    assert last_entry(queue) == [("dropped", "a")]
    assert queue.inspector.counts().dropped == 1
    assert replayed(queue).ready == {}


def test_a_held_hint_of_a_cancelled_job_is_not_dropped(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    assert worker.block() == "a"
    queue.producer.cancel("a")
    queue.recover(worker)
    assert last_entry(queue) == [("cancelled", "a")]
    assert queue.inspector.counts().dropped == 0


def test_a_held_wake_token_is_not_a_lost_job(queue: OneQueue) -> None:
    queue.enqueue("a", priority=1)
    worker = queue.worker()
    assert worker.block() == ""
    queue.recover(worker)
    assert last_entry(queue) == [("enqueued", "a")]


def test_a_held_hint_of_a_job_that_another_worker_runs_is_not_dropped(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker, other = queue.worker(), queue.worker("w2")
    other.turn(want=1)
    queue.redis.rpush(worker.processing, "a")
    queue.recover(worker)
    assert last_entry(queue) == [("claimed", "a")]
    assert queue.inspector.counts().dropped == 0


@pytest.mark.parametrize(
    "text",
    [
        *("claimed 5 1 z", "done 5 r 1", "done 6 a 1", "enqueued 0 a", "enqueued 0 r", "promoted 0 r", "blocked 0 r"),
        *(
            "unblocked 0 r",
            "unblocked 0 a",
            "merged 0 a",
            "withdrawn 0 a",
            "returned 0 r",
            "cancelled 0 a",
            "updated 0 a",
        ),
        *(
            "cancelled 5 r",
            "stalled 5 a x",
            "stalled 6 a x\nreturned 0 a",
            "dead 5 a 1 1 E",
            "failing 5 a",
            "marked 5 r",
        ),
        *(
            "dead 5 a 1 0 E\nfailing 5 a",
            "revived 5 r",
            "discarded 5 a",
            "forgotten 5 a",
            "retried 5 r 1 E",
            "scheduled 0 a 1",
        ),
        *("released 5 r 1", "released 6 a 1", "stalled 5 a x\nreleased 5 a 1", "released 5 a 1\nreleased 5 a 1"),
        *("claimed 6 1 r\nretried 5 r - E", "claimed 6 1 r\ndead 6 r - 1 E", "claimed 6 1 a\nretried 6 a - E"),
        *("resumed 0", "created 0 1", "deleted 0 1", "stalled 5 a x\ndone 5 a 1", "marked 5 a\nretried 5 a 1 E"),
        *(
            "blocked 0 a\nreturned 0 a",
            "blocked 0 a\nmerged 0 a\ndone 5 a 1",
            "scheduled 0 r 4000000000000\npromoted 0 r",
        ),
    ],
)
def test_the_replay_refuses_impossible_events(text: str) -> None:
    """`r` is ready, `a` is active under fence 5."""
    entries = ["created 0 7", "enqueued 0 r a", "claimed 5 1 a"]
    replay = Replay()
    for entry in entries:
        replay.read(replay.next_entry(7, entry))
    with pytest.raises(ImpossibleEvent):
        replay.read(replay.next_entry(7, text))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("released 5 a 12", {"r"}),
        ("marked 5 a\nreleased 5 a -", {"r"}),
        ("blocked 0 a\nreleased 5 a 12\nunblocked 0 a", {"r", "a"}),
        ("released 5 a 12\nenqueued 0 a", {"r", "a"}),
        ("claimed 6 1 r\nretried 6 r - NotAwaited\nscheduled 0 r 9", {"r", "a"}),
        ("claimed 6 1 r\ndead 6 r - 0 NotAwaited", {"a"}),
    ],
)
def test_the_replay_accepts_events_of_leases(text: str, left: set[str]) -> None:
    """`r` is ready, `a` is active under fence 5."""
    replay = Replay()
    for entry in ["created 0 7", "enqueued 0 r a", "claimed 5 1 a", text]:
        replay.read(replay.next_entry(7, entry))
    assert {*replay.ready, *replay.active} == left
    assert replay.marked == replay.blocked == set()
    assert replay.archived == ({"r@6"} if "dead" in text else set())
