"""The journal: each call writes one entry with its events."""

from forq.broker.journal import Event
from forq.broker.recovery import Position
from tests.support.drive.one_queue import OneQueue, one_queue


def test_every_event_is_written_and_can_be_read(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.enqueue("c", "d", "e", "f")
    worker = queue.worker()
    worker.turn(want=5)
    fence = int(worker.fence)
    worker.turn(done="ab", failed="c", keep=2)
    queue.producer.cancel("f")
    queue.recover(worker, 0, running=True)
    queue.registry.pause(queue.name, paused=True)
    queue.registry.pause(queue.name, paused=False)
    queue.redis.rpush(queue.key("pending"), "lost")
    other = queue.worker("w2")
    other.turn(want=9)

    events = queue.events()
    assert [(event.verb, event.fence, event.job, event.micros, event.cause, event.actor) for event in events] == [
        ("created", 0, None, None, queue.hash("options")["epoch"], "-"),
        *[("enqueued", 0, job_id, None, None, "-") for job_id in "abcdef"],
        *[("claimed", fence, job_id, None, None, "w1") for job_id in "abcde"],
        *[("done", fence, job_id, 7, None, "w1") for job_id in "ab"],
        ("dead", fence, "c", 7, "-", "w1"),
        ("cancelled", 0, "f", None, None, "-"),
        ("stalled", fence, "d", None, "signal_9", "w1"),
        *[("returned", 0, job_id, None, None, "w1") for job_id in "de"],
        ("paused", 0, None, None, None, "-"),
        ("resumed", 0, None, None, None, "-"),
        ("dropped", 0, "lost", None, None, "w2"),
        *[("claimed", int(other.fence), job_id, None, None, "w2") for job_id in "de"],
    ]
    assert [event.attempt for event in events if event.verb == "claimed"] == [1, 1, 1, 1, 1, 2, 1]
    now_us = int(queue.redis.time()[0]) * 1_000_000
    assert all(now_us - 60_000_000 < event.time_us < now_us + 60_000_000 for event in events)


def test_jobs_settled_by_recovery_are_done_with_an_unknown_duration(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.recover(worker, 1)
    [done] = [event for event in queue.events() if event.verb == "done"]
    assert (done.job, done.fence, done.micros) == ("a", int(worker.fence), None)


def test_a_removed_job_is_cancelled_when_it_fails(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.producer.remove("a")
    worker.turn(failed="a")
    last = queue.events()[-1]
    assert (last.verb, last.job, last.fence) == ("cancelled", "a", int(worker.fence))


def test_settling_under_two_fences_of_which_one_is_refused_can_be_read(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    worker.number += 1
    worker.consumer.turn(worker.number, ["a", worker.fence, 5, "b", "123", 6], [], 0, 0)
    assert queue.journal_events()[-1] == ("done", "a")


def test_sequence_numbers_have_no_gaps_and_calls_without_changes_write_no_entry(queue: OneQueue) -> None:
    worker = queue.worker()
    for number in range(5):
        queue.enqueue(f"n{number}")
        worker.turn(want=0)
        queue.recovery().heartbeat(queue.name, 1000, [Position("w1", 1, 0, False)])
        queue.producer.cancel("nobody")
    assert [event.sequence for event in queue.events()] == [1, 2, 3, 4, 5, 6]


def test_the_size_limit_trims_the_older_half_and_counts_it(redis_url: str) -> None:
    with one_queue(redis_url, journal_max=2000) as queue:
        for number in range(100):
            queue.enqueue(f"n{number}")
        events = queue.events()
        journal = queue.inspector.counts().journal
        assert journal["entries"] == len(events)
        assert journal["trimmed"] == 101 - len(events)
        assert 0 < journal["bytes"] <= 2000
        assert [event.sequence for event in events] == list(range(102 - len(events), 102))
        assert isinstance(events[-1], Event)
        assert events[-1].job == "n99"


def test_a_disabled_journal_stays_empty(redis_url: str) -> None:
    with one_queue(redis_url, journal=0) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        worker.turn(done="a")
        assert queue.redis.exists(queue.key("events")) == 0
        queue.create(journal=1)
        queue.enqueue("b")
        assert [(event.sequence, event.verb, event.job) for event in queue.events()] == [(2, "enqueued", "b")]


def test_a_blocked_job_is_journaled_after_the_end_of_the_job_before_it(queue: OneQueue) -> None:
    worker = queue.worker()
    for end in ("done", "failed"):
        queue.enqueue("a")
        worker.turn(want=1)
        queue.enqueue("a", if_exists="update")
        worker.turn(done="a" * (end == "done"), failed="a" * (end == "failed"))
        assert queue.journal_events()[-2:] == [("done" if end == "done" else "dead", "a"), ("unblocked", "a")]
        queue.producer.cancel("a")


def test_the_ends_of_a_removed_job_and_of_the_one_blocked_behind_it_are_distinguished(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    queue.enqueue("a", if_exists="update")
    queue.producer.remove("a")
    queue.enqueue("a", if_exists="update")
    queue.recover(worker, running=True)
    fence = int(worker.fence)
    events = [(event.verb, event.fence) for event in queue.events()[-5:]]
    assert events == [("withdrawn", 0), ("marked", fence), ("blocked", 0), ("cancelled", fence), ("unblocked", 0)]
