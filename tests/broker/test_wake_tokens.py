"""Wake tokens: an idle worker blocks on one list and is woken for work in any list."""

import threading
import time

import pytest

from forq.broker.enqueue import Update, new_job
from forq.broker.scripts import script
from tests.support.drive.limits import limited, wakes
from tests.support.drive.one_queue import EXPIRY_MS, OneQueue, State
from tests.support.drive.release_queue import gate


def test_work_in_another_priority_puts_one_token_into_an_empty_pending_list(queue: OneQueue) -> None:
    for job_id in "abc":
        queue.enqueue(job_id, priority=9)
    assert queue.pending() == [""]
    assert queue.state() == State(jobs={"a", "b", "c"}, waiting={9: ["a", "b", "c"]})


def test_pending_work_needs_no_token(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.enqueue("b", priority=0)
    assert queue.pending() == ["a"]


@pytest.mark.parametrize("step", ["turn", "cancel"])
def test_taking_the_last_pending_hint_leaves_a_token_for_the_other_lists(queue: OneQueue, step: str) -> None:
    queue.enqueue("a")
    queue.enqueue("b", priority=9)
    if step == "turn":
        assert queue.worker().turn(want=1) == ["a"]
    else:
        queue.producer.cancel("a")
    assert queue.pending() == [""]


def test_each_woken_worker_wakes_the_next_while_there_is_work(queue: OneQueue) -> None:
    for job_id in "abc":
        queue.enqueue(job_id, priority=1)
    for name, job_id in zip(("w1", "w2", "w3"), "abc", strict=True):
        worker = queue.worker(name)
        assert worker.block() == ""
        assert worker.turn(want=1) == [job_id]
    assert queue.pending() == []
    assert queue.state().processing == {"w1": ["a"], "w2": ["b"], "w3": ["c"]}


def test_a_token_lost_with_its_worker_is_replaced(queue: OneQueue) -> None:
    queue.enqueue("a", priority=1)
    for name, processor in (("w1", "p1"), ("w2", "p2")):
        worker = queue.worker(name, processor)
        worker.block()
        assert queue.pending() == []
        if processor == "p1":
            queue.recover(worker)
        else:
            queue.recovery().evict(queue.name, processor, "supervisor_lost")
        assert queue.pending() == [""]


def test_a_heartbeat_replaces_a_lost_token(queue: OneQueue) -> None:
    queue.enqueue("a", priority=1)
    queue.redis.delete(queue.key("pending"))
    queue.recovery().heartbeat(queue.name, 1000, [])
    assert queue.pending() == [""]


def test_a_token_is_never_treated_as_a_job(queue: OneQueue) -> None:
    queue.enqueue("a", priority=1)
    counts = queue.inspector.counts()
    assert (counts.waiting, counts.active, counts.dropped) == (1, 0, 0)
    assert [job["id"] for job in queue.inspector.jobs().jobs] == ["a"]


def test_no_worker_is_woken_while_paused_and_all_are_on_resume(queue: OneQueue) -> None:
    workers = [queue.worker("w1", "p1"), queue.worker("w2", "p2")]
    queue.registry.pause(queue.name, paused=True)
    queue.enqueue("a", priority=1)
    assert queue.pending() == []
    queue.registry.pause(queue.name, paused=False)
    assert queue.pending() == [""]
    for worker in workers:
        worker.consumer.wait_for_wake()  # would block for its whole timeout
        assert queue.redis.exists(queue.key(f"processor:{worker.processor}:worker:{worker.name}:wake")) == 0


def test_a_blocked_worker_wakes_for_any_priority(queue: OneQueue) -> None:
    for priority in (5, 0, 9):
        worker = queue.worker(f"w{priority}")
        woken: list[bool] = []
        thread = threading.Thread(target=lambda done=woken, to=worker: done.append(to.consumer.wait_for_job()))
        thread.start()
        queue.enqueue(f"n{priority}", priority=priority)
        thread.join(5)
        assert woken == [True]
        assert worker.turn(want=1) == [f"n{priority}"]


def test_a_woken_retry_process_keeps_no_token(queue: OneQueue) -> None:
    child = queue.worker("r1", lane="retry")
    for _ in range(3):
        queue.redis.rpush(queue.key("failed"), "")
        assert child.consumer.wait_for_job()
    assert child.held() == []
    assert queue.redis.exists(queue.key("failed")) == 0


def test_a_paused_retry_process_is_woken_for_fail_jobs(queue: OneQueue) -> None:
    queue.registry.pause(queue.name, paused=True)
    worker, child = queue.worker("w1"), queue.worker("r1", lane="retry")
    queue.redis.rpush(queue.key("failed"), "")
    queue.redis.lpush(queue.key("pending"), "")
    began = time.monotonic()
    child.consumer.wait_for_wake()
    assert time.monotonic() - began < 5
    waiting = threading.Thread(target=worker.consumer.wait_for_wake, daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive(), "a main worker is woken only by its own wake"
    queue.registry.pause(queue.name, paused=False)
    waiting.join(5)
    assert not waiting.is_alive()


# At its end each verb decides what else to do besides waking an idle worker.
NOBODY = ("p9", "w9")
RINGS: dict[str, tuple[object, ...]] = {
    "enqueue": (),
    "promote": (),
    "heartbeat": ("p9", EXPIRY_MS),
    "revive": ("gone@1",),
    "unawait": ("nobody", ""),
}
RINGS_NOBODY: dict[str, tuple[object, ...]] = {
    "cancel": ("b", 0, ""),
    "recover": (*NOBODY, 1, 0, 0, "interrupted", "left", "", "", ""),
    "evict": ("p9", "supervisor_lost"),
}


@pytest.mark.parametrize("verb", [*RINGS, *RINGS_NOBODY])
def test_only_a_verb_that_may_make_an_item_ready_notifies_an_awaiter(redis_url: str, verb: str) -> None:
    """Two items wait and an awaiter was not notified, as if the notified one had died."""
    with gate(redis_url, "on_request") as queue:
        queue.registry.pause(queue.name, paused=True)
        queue.enqueue("a", "b")
        assert queue.ask("x") is None
        queue.set_options(paused=0)
        if verb == "enqueue":
            queue.enqueue("c")
        else:
            queue.link.run(script(verb), queue.base, *(RINGS | RINGS_NOBODY)[verb])
        assert queue.list_of("x") == ([""] if verb in RINGS else [])


WAKES: dict[str, tuple[object, ...]] = {
    "promote": (),
    "heartbeat": ("p9", EXPIRY_MS),
    "recover": (*NOBODY, 1, 0, 0, "interrupted", "left", "", "", ""),
    "evict": ("p9", "supervisor_lost"),
    "turn": (),
    "rescue": (),
}
WAKES_NOBODY: dict[str, tuple[object, ...]] = {
    "cancel": ("d", 0, ""),
    "revive": ("gone@1",),
    "enqueue": (),
    "pause": (0,),
}


@pytest.mark.parametrize("verb", [*WAKES, *WAKES_NOBODY])
def test_only_a_verb_that_may_free_a_place_wakes_a_limited_worker(queue: OneQueue, verb: str) -> None:
    """A place is free and a limited worker was not woken, as if the call that freed the place had been lost."""
    queue.set_options(max_active=5)
    queue.enqueue("a", "b", "c", "d")
    # With max_active jobs are claimed one at a time, so only an earlier claim can be rescued.
    other, first = queue.worker("w2"), queue.worker("w1")
    other.turn(want=1)
    other.turn(want=1, keep=1)
    queue.redis.zadd(queue.key("limited"), {"p1 w1": 1})
    if verb == "turn":
        other.turn(keep=2)
    elif verb == "rescue":
        assert queue.rescue(other, 0) == 1
    elif verb == "enqueue":
        queue.enqueue("e")
        queue.enqueue("f", "g")
    else:
        if verb == "pause":
            queue.set_options(paused=1)
        queue.link.run(script(verb), queue.base, *(WAKES | WAKES_NOBODY)[verb])
    assert limited(queue) == ([] if verb in WAKES else ["p1 w1"])
    assert wakes(queue, first) == (1 if verb in {*WAKES, "pause"} else 0), "a resumed queue wakes every worker"


def test_without_limits_a_turn_does_not_look_for_limited_workers(queue: OneQueue) -> None:
    """Workers limited earlier are woken by promote, some per call."""
    queue.redis.zadd(queue.key("limited"), {"p1 w1": 1, "p1 w2": 2})
    queue.worker("w3").turn(want=1)
    assert limited(queue) == ["p1 w1", "p1 w2"]
    queue.recovery().promote(queue.name)
    assert limited(queue) == []


@pytest.mark.parametrize("verb", ["turn", "recover"])
def test_an_unblocked_job_of_a_work_queue_gets_no_item_timeout(queue: OneQueue, verb: str) -> None:
    queue.set_options(item_timeout_ms=60_000)
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    later = new_job(2, id="a", run_in=60)
    queue.producer.enqueue([later], Update())
    if verb == "turn":
        worker.turn(done="a")
    else:
        queue.recover(worker, 0, running=True)
    assert queue.redis.zscore(queue.key("scheduled"), "a")
    assert not queue.redis.exists(queue.key("expiries"))
