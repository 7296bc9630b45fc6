"""Suspects: jobs that were running together when their process died. Each is retried alone, the oldest first."""

import re

import pytest

from forq.broker.enqueue import Update, new_job
from forq.broker.explain import why
from forq.broker.keys import DEFAULT_PREFIX, fail_queue
from forq.broker.recovery import Outcome
from forq.settings import stored_defaults
from tests.support.drive.limits import subscription
from tests.support.drive.one_queue import HandWorker, OneQueue, State, one_queue

FUTURE = 4_000_000_000  # epoch seconds


def enqueued_at(queue: OneQueue, job_id: str, ms: int) -> None:
    """Sets the enqueue time of a job."""
    record = queue.redis.hget(queue.key("jobs"), job_id).decode()
    queue.redis.hset(queue.key("jobs"), job_id, re.sub(r" \d+", f" {ms}000", record, count=1))


def suspect(queue: OneQueue, *ids: str) -> None:
    """Makes these jobs suspects: each ran in its own worker when the process of these workers died."""
    queue.enqueue(*ids)
    workers = [queue.worker(f"s{len(queue.workers)}") for _ in ids]
    for ms, (worker, job_id) in enumerate(zip(workers, ids, strict=True), 1000):
        assert worker.turn(want=1) == [job_id]
        enqueued_at(queue, job_id, ms)
    for worker in reversed(workers):
        queue.recover(worker, running=True, outcome="suspect")


@pytest.fixture
def retry(queue: OneQueue) -> HandWorker:
    return queue.worker("r1", lane="retry")


def test_a_suspect_waits_uncounted_in_its_own_list(queue: OneQueue) -> None:
    suspect(queue, "a", "b")
    assert queue.state() == State(jobs={"a", "b"}, suspects=["a", "b"])
    job = queue.inspector.job("a")
    assert (job["suspect"], job["stall_count"], job["state"]) == (True, 0, "waiting")
    assert [(attempt["outcome"], attempt["cause"]) for attempt in job["attempts"]] == [("interrupted", "signal 9")]
    assert [verb for verb, job_id in queue.journal_events() if job_id == "a"][-2:] == ["suspected", "returned"]
    assert queue.inspector.counts().waiting == 2
    assert queue.inspector.counts().oldest_waiting_seconds is not None


@pytest.mark.spec("Q16")
def test_only_the_retry_process_runs_suspects_one_at_a_time_before_its_lane(queue: OneQueue, retry: HandWorker) -> None:
    suspect(queue, "a", "b")
    queue.enqueue("m")
    assert queue.worker().turn(want=9) == ["m"]
    assert retry.turn(want=9) == ["a"]
    assert retry.turn(want=9, done="a") == ["b"]
    assert retry.turn(want=9, done="b") == []
    assert queue.state().jobs == {"m"}
    assert queue.inspector.counts().done == 2


def test_suspects_go_before_the_retry_lane_and_the_lane_yields_to_them(redis_url: str) -> None:
    with one_queue(redis_url, retry_lane_retries=2, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker, retry = queue.worker(), queue.worker("r1", lane="retry")
        queue.enqueue("z")
        worker.turn(want=1)
        worker.turn(failed="z")
        suspect(queue, "a")
        other = queue.worker("r2", lane="retry")
        assert retry.turn(want=1) == ["a"]
        retry.turn(failed="a", kind="timeout")
        assert other.turn(want=1) == ["a"], "the retry lane waits while a suspect waits"
        assert retry.turn(want=1) == ["z"], "the retry lane continues once the suspect runs"


@pytest.mark.parametrize("how", ["recover", "turn", "rescue", "update", "resume", "heartbeat", "promote"])
def test_every_way_to_make_a_suspect_wait_wakes_the_retry_process(queue: OneQueue, retry: HandWorker, how: str) -> None:
    suspect(queue, "a", "b")
    assert queue.redis.lrange(queue.key("failed"), 0, -1) == [b""]
    assert retry.block() == ""
    if how == "turn":
        assert retry.turn(want=1) == ["a"]
    elif how == "recover":
        queue.recover(retry)
    elif how == "heartbeat":
        queue.recovery().heartbeat(queue.name, 1000, [])
    elif how == "promote":
        queue.recovery().promote(queue.name)
    elif how == "resume":
        for paused in (True, False):
            queue.registry.pause(queue.name, paused=paused)
    elif how == "update":
        queue.producer.enqueue([new_job(1, id="a")], Update(reset_counts=False))
    else:
        queue.enqueue("x", "y")
        worker = queue.worker("w1")
        worker.turn(want=2)
        queue.rescue(worker, 0)
    assert queue.redis.lrange(queue.key("failed"), 0, -1) == [b""]


def helpers_wanted(queue: OneQueue, name: str | None = None) -> int:
    """Returns the number of helper processes that may be started."""
    return queue.recovery("p9").heartbeat(name or queue.name, 60_000, []).helpers_wanted


def test_a_heartbeat_returns_how_many_suspects_may_start(queue: OneQueue, retry: HandWorker) -> None:
    assert helpers_wanted(queue) == 0
    suspect(queue, "a", "b", "c")
    queue.enqueue("m")
    assert helpers_wanted(queue) == 3
    retry.turn(want=1)
    assert helpers_wanted(queue) == 2
    queue.registry.pause(queue.name, paused=True)
    assert helpers_wanted(queue) == 0
    queue.registry.pause(queue.name, paused=False)
    queue.set_options(max_active=2)
    assert helpers_wanted(queue) == 1, "only as many as the limits allow"


def test_a_heartbeat_requests_a_helper_for_waiting_fail_jobs(queue: OneQueue) -> None:
    fail_options = {"fail_handler": 1}
    queue.registry.create(queue.name, "work", 100, stored_defaults(), fail_options, fail_options={"max_retries": 1})
    fails = fail_queue(queue.name)
    assert helpers_wanted(queue, fails) == 0
    worker = queue.worker()
    queue.enqueue("a", "b")
    worker.turn(want=2)
    with subscription(queue) as pulse:
        worker.turn(failed="a", keep=1)
        assert pulse.messages() == ["fail"]
    assert (helpers_wanted(queue, fails), helpers_wanted(queue)) == (1, 0)
    worker.turn(failed="b")
    assert queue.redis.hlen(queue.key("fail:jobs")) == 2
    queue.claim_fail_job("r1")
    assert helpers_wanted(queue, fails) == 0, "the other fail job waits for the running one"
    queue.lose_fail_worker("r1", "interrupted")
    assert helpers_wanted(queue, fails) == 1
    queue.registry.pause(queue.name, paused=True)
    assert helpers_wanted(queue, fails) == 0


def test_a_job_that_dies_without_a_fail_handler_publishes_nothing(queue: OneQueue) -> None:
    worker = queue.worker()
    queue.enqueue("a")
    worker.turn(want=1)
    with subscription(queue) as pulse:
        worker.turn(failed="a")
        assert pulse.messages() == []


def test_no_process_is_woken_for_suspects_while_paused(queue: OneQueue, retry: HandWorker) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.registry.pause(queue.name, paused=True)
    queue.recover(worker, running=True, outcome="suspect")
    assert queue.state() == State(jobs={"a"}, suspects=["a"])
    assert queue.redis.exists(queue.key("failed")) == 0
    assert retry.turn(want=1) == []


def test_an_ordinary_waiting_job_does_not_wake_the_retry_process(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=1)
    queue.recover(worker, running=True)
    assert queue.redis.exists(queue.key("failed")) == 0


@pytest.mark.parametrize(
    ("outcome", "place", "stalls", "timeouts"),
    [
        ("stalled", ["a", "b"], 1, 0),
        ("timed_out", ["b", "a"], 0, 1),
        ("interrupted", ["a", "b"], 0, 0),
        ("suspect", ["a", "b"], 0, 0),
    ],
)
@pytest.mark.spec("Q19")
def test_a_suspect_whose_process_dies_again_stays_a_suspect_and_is_counted(
    queue: OneQueue, retry: HandWorker, outcome: Outcome, place: list[str], stalls: int, timeouts: int
) -> None:
    suspect(queue, "a", "b")
    retry.turn(want=1)
    queue.recover(retry, running=True, outcome=outcome)
    assert queue.state() == State(jobs={"a", "b"}, suspects=place)
    job = queue.inspector.job("a")
    assert (job["suspect"], job["stall_count"], job["timeout_count"]) == (True, stalls, timeouts)


def test_an_unstarted_suspect_stays_a_suspect(queue: OneQueue, retry: HandWorker) -> None:
    suspect(queue, "a", "b")
    retry.turn(want=1)
    assert retry.turn() == []
    assert queue.state() == State(jobs={"a", "b"}, suspects=["a", "b"])


def test_a_suspect_that_times_out_stays_a_suspect(queue: OneQueue, retry: HandWorker) -> None:
    suspect(queue, "a", "b")
    retry.turn(want=1)
    retry.turn(failed="a", kind="timeout")
    assert queue.state() == State(jobs={"a", "b"}, suspects=["b", "a"])
    assert queue.inspector.job("a")["timeout_count"] == 1


@pytest.mark.spec("Q36")
def test_a_suspect_whose_handler_raises_is_no_longer_a_suspect(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=1, min_backoff_ms=0, max_backoff_ms=0) as queue:
        retry = queue.worker("r1", lane="retry")
        suspect(queue, "a")
        retry.turn(want=1)
        retry.turn(failed="a")
        assert queue.state() == State(jobs={"a"}, waiting={5: ["a"]})
        job = queue.inspector.job("a")
        assert (job["suspect"], job["retry_count"]) == (False, 1)
        worker = queue.worker()
        assert worker.turn(want=1) == ["a"]
        worker.turn(failed="a")
        assert queue.state().dead == ["a"]


def test_a_suspect_without_retries_left_goes_to_the_retry_lane_or_dies(redis_url: str) -> None:
    for lane_retries, state in ((1, "retry"), (0, "dead")):
        name = f"q{lane_retries}"
        with one_queue(redis_url, name, retry_lane_retries=lane_retries, min_backoff_ms=0, max_backoff_ms=0) as queue:
            retry = queue.worker("r1", lane="retry")
            suspect(queue, "a")
            retry.turn(want=1)
            retry.turn(failed="a")
            assert queue.inspector.job("a")["state"] == state


@pytest.mark.spec("Q20")
def test_a_suspect_that_keeps_killing_its_process_is_buried_by_the_claim(redis_url: str) -> None:
    with one_queue(redis_url, max_stalls=1) as queue:
        suspect(queue, "a", "b")
        for number in range(2):
            retry = queue.worker(f"r{number}", lane="retry")
            assert retry.turn(want=1) == ["a"]
            queue.recover(retry, running=True)
        last = queue.worker("r9", lane="retry")
        assert last.turn(want=1) == ["b"]
        assert queue.state().dead == ["a"]
        assert queue.inspector.job("a")["error"]["name"] == "StallError"


@pytest.mark.parametrize(("size", "number", "at_once"), [(0, 150, 100), (2 << 20, 4, 2)])
def test_one_claim_buries_a_bounded_number_of_suspects(redis_url: str, size: int, number: int, at_once: int) -> None:
    """Burying a job costs as much as skipping ten hints, and more for large records; many would block the server."""
    with one_queue(redis_url, max_stalls=0) as queue:
        ids = [f"j{each}" for each in range(number)]
        queue.enqueue(*ids)
        for job_id in ids:
            queue.redis.hset(queue.key("jobs"), job_id, f'c5 1000000 0 1 0 -1\n[null,null,"{"x" * size}"]')
        queue.redis.zadd(queue.key("suspects"), dict.fromkeys(ids, 1000))
        queue.change_summary(suspects=len(ids))
        retry = queue.worker("r1", lane="retry")
        assert retry.turn(want=1) == []
        assert len(queue.state().dead) == at_once
        assert queue.state().retry_tokens == 1, "the next claim buries the rest"
        assert retry.turn(want=1) == []
        assert len(queue.state().dead) == min(2 * at_once, number)


def test_a_suspect_without_other_counts_keeps_its_mark_beside_one_retry(redis_url: str) -> None:
    with one_queue(redis_url, max_retries=5, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker = queue.worker()
        queue.enqueue("a")
        worker.turn(want=1)
        assert worker.turn(failed="a", want=1) == ["a"]
        queue.recover(worker, running=True, outcome="suspect")
        job = queue.inspector.job("a")
        assert (job["suspect"], job["retry_count"]) == (True, 1)
        assert queue.state() == State(jobs={"a"}, suspects=["a"])


def test_cancel_takes_a_suspect_and_its_hint(queue: OneQueue, retry: HandWorker) -> None:
    suspect(queue, "a", "b")
    assert queue.producer.cancel("b")
    assert queue.state() == State(jobs={"a"}, suspects=["a"])
    assert queue.producer.cancel("a")
    assert queue.state() == State(jobs=set())
    assert queue.summary().suspects == 0


def test_a_cancelled_suspect_leaves_no_hint_behind(queue: OneQueue, retry: HandWorker) -> None:
    suspect(queue, "a", "b")
    queue.producer.cancel("a")
    queue.enqueue("a")
    assert queue.state() == State(jobs={"a", "b"}, waiting={5: ["a"]}, suspects=["b"])
    assert queue.summary().suspects == 1
    assert retry.turn(want=1) == ["b"]
    assert queue.worker().turn(want=1) == ["a"]


def test_suspects_run_in_enqueue_order_whichever_process_died_first(queue: OneQueue) -> None:
    """Three processes died, the one with the youngest jobs first."""
    queue.enqueue(*"abcdef")
    workers = [queue.worker(f"s{number}") for number in range(6)]
    for ms, (job_id, worker) in enumerate(zip("abcdef", workers, strict=True), 1000):
        assert worker.turn(want=1) == [job_id]
        enqueued_at(queue, job_id, ms)
    for number in (5, 4, 0, 1, 3, 2):
        queue.recover(workers[number], running=True, outcome="suspect")
    assert queue.state().suspects == list("abcdef")
    retry, other = queue.worker("r1", lane="retry"), queue.worker("o1", lane="suspects")
    assert [retry.turn(want=1), other.turn(want=1)] == [["a"], ["b"]]
    assert retry.turn(want=1, done="a") == ["c"]


def test_suspects_enqueued_in_the_same_millisecond_run_in_the_order_of_their_return(queue: OneQueue) -> None:
    queue.enqueue(*"abc")
    workers = [queue.worker(f"s{number}") for number in range(3)]
    for job_id, worker in zip("abc", workers, strict=True):
        assert worker.turn(want=1) == [job_id]
        enqueued_at(queue, job_id, 1000)
    for number in (2, 0, 1):
        queue.recover(workers[number], running=True, outcome="suspect")
    assert queue.state().suspects == ["c", "a", "b"]


def test_a_helper_process_for_suspects_takes_nothing_else(redis_url: str) -> None:
    with one_queue(redis_url, retry_lane_retries=2, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker, retry = queue.worker(), queue.worker("r1", lane="retry")
        alone = [queue.worker(f"a{number}", lane="suspects") for number in range(3)]
        queue.enqueue("y", "z")
        worker.turn(want=2)
        worker.turn(failed="yz")
        suspect(queue, "a", "b")
        assert [each.turn(want=9) for each in alone] == [["a"], ["b"], []]
        queue.enqueue("m")
        assert alone[2].turn(want=9) == []
        assert worker.turn(want=1) == ["m"]
        assert alone[2].turn(want=9) == [], "it does not take jobs of the retry lane either"
        assert retry.turn(want=9) == ["y"], "the retry process takes them one at a time"
        assert alone[0].turn(done="a") == []
        assert alone[1].turn(failed="b") == []
        assert queue.inspector.counts().done == 1


@pytest.mark.spec("Q28")
def test_an_update_that_resets_counts_clears_the_suspect_mark(queue: OneQueue, retry: HandWorker) -> None:
    suspect(queue, "a")
    queue.enqueue("a", priority=3, if_exists="update")
    assert queue.state() == State(jobs={"a"}, waiting={3: ["a"]})
    assert queue.inspector.job("a")["suspect"] is False
    assert retry.turn(want=1) == []


def test_an_update_without_a_reset_leaves_a_suspect_in_place(queue: OneQueue) -> None:
    suspect(queue, "a")
    queue.producer.enqueue([new_job("new", id="a", priority=3)], Update(reset_counts=False))
    assert queue.state() == State(jobs={"a"}, suspects=["a"])
    job = queue.inspector.job("a")
    assert (job["data"], job["priority"], job["suspect"]) == ("new", 3, True)


def test_a_scheduled_suspect_comes_back_as_a_suspect(queue: OneQueue, retry: HandWorker) -> None:
    suspect(queue, "a")
    queue.producer.enqueue([new_job(1, id="a", run_at=FUTURE)], Update(reset_counts=False))
    assert queue.state() == State(jobs={"a"})
    assert queue.inspector.job("a")["state"] == "scheduled"
    queue.set_due({"a": 1})
    queue.redis.delete(queue.key("failed"))
    queue.recovery().promote(queue.name)
    assert queue.state() == State(jobs={"a"}, suspects=["a"])
    assert queue.redis.llen(queue.key("failed")) == 1


def test_a_dispatch_blocked_behind_a_suspect_updates_it_and_may_clear_the_mark(
    queue: OneQueue, retry: HandWorker
) -> None:
    for reset in (False, True):
        suspect(queue, "a")
        retry = queue.worker(f"r-{reset}", lane="retry")
        assert retry.turn(want=1) == ["a"]
        queue.producer.enqueue([new_job(1, id="a", priority=2)], Update(reset_counts=reset))
        queue.recover(retry, running=True)
        expected = State(jobs={"a"}, waiting={2: ["a"]}) if reset else State(jobs={"a"}, suspects=["a"])
        assert queue.state() == expected
        queue.producer.cancel("a")


def test_deleting_a_queue_deletes_its_suspects(queue: OneQueue) -> None:
    suspect(queue, "a")
    assert queue.registry.delete(queue.name, force=True) == 1
    assert queue.redis.exists(queue.key("suspects")) == 0


def test_suspects_are_listed_after_the_other_waiting_jobs(queue: OneQueue) -> None:
    suspect(queue, "a", "b")
    queue.enqueue("m", priority=9)
    page = queue.inspector.jobs("waiting")
    assert [(job["id"], job["state"]) for job in page.jobs] == [("m", "waiting"), ("a", "waiting"), ("b", "waiting")]
    seen: list[str] = []
    after = None
    for _ in range(6):
        page = queue.inspector.jobs("waiting", limit=1, after=after)
        seen += [job["id"] for job in page.jobs]
        after = page.next
        if after is None:
            break
    assert (seen, after) == (["m", "a", "b"], None)


def test_why_explains_that_a_suspect_waits(queue: OneQueue, retry: HandWorker) -> None:
    suspect(queue, "a", "b")
    reasons = [why(queue.link, DEFAULT_PREFIX, queue.name, job_id)[1] for job_id in "ab"]
    assert all("crashed with several jobs running" in reason and "retried alone" in reason for reason in reasons)
    assert reasons[0].endswith("it is next")
    assert reasons[1].endswith("1 suspect before it")


def test_in_the_retry_lane_and_in_the_fail_queue_jobs_run_alone_and_are_not_suspects(redis_url: str) -> None:
    with one_queue(redis_url, retry_lane_retries=2, min_backoff_ms=0, max_backoff_ms=0) as queue:
        worker, retry = queue.worker(), queue.worker("r1", lane="retry")
        queue.enqueue("z")
        worker.turn(want=1)
        worker.turn(failed="z")
        assert retry.turn(want=1) == ["z"]
        queue.recover(retry, running=True, outcome="suspect")
        assert (queue.state().suspects, queue.inspector.job("z")["state"]) == ([], "retry")
        assert queue.worker("r2", lane="retry").turn(want=1) == ["z"]
        queue.registry.create(
            queue.name, "work", 100, stored_defaults(), {"fail_handler": 1, "retry_lane_retries": 0}, fail_options={}
        )
        queue.enqueue("a")
        worker.turn(want=1)
        worker.turn(failed="a")
        job_id, _ = queue.claim_fail_job("r3")
        queue.lose_fail_worker("r3", "suspect")
        assert queue.claim_fail_job("r4")[0] == job_id
