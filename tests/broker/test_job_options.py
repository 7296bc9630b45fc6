"""Options of one job, in its record or from its task: retries, backoff, expiry, results; and snoozes."""

from collections.abc import Iterator

import pytest

from forq.broker.chunks import NewJob
from forq.broker.claim import Settled, Turn
from forq.broker.dead import DeadJobs
from forq.broker.enqueue import JobIdentity, Update, new_job
from forq.broker.explain import why
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.record import stored_options, unpack
from forq.broker.results import ResultWaiter, WaitStatus
from forq.broker.scripts import Fate
from forq.errors import UsageError, WrongMode
from forq.values import show_time
from tests.support.drive.one_queue import NO, HandWorker, OneQueue, one_queue

HOUR_MS = 3_600_000


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, max_retries=2, min_backoff_ms=1000, max_backoff_ms=9000, jitter=0) as queue:
        yield queue


def job(job_id: str = "a", options: str = "", run_in: float | None = None) -> NewJob:
    return new_job({"n": job_id}, id=job_id, options=options, run_in=run_in)


def enqueue(queue: OneQueue, options: str, job_id: str = "a", **update: object) -> None:
    queue.producer.enqueue([job(job_id, options)], Update(**update))  # type: ignore[arg-type]


def fail(
    worker: HandWorker, job_id: str = "a", kind: str = "retriable", retry_at: str = "", task_options: str = ""
) -> Fate:
    worker.number += 1
    chance = f"0.5 {task_options}" if task_options else "0.5"
    failed: Settled = [job_id, worker.fence, 7, NO, NO, kind, retry_at, chance]
    (fate,) = worker.consumer.turn(worker.number, [], failed, len(worker.held()) - 1, 0).fates
    return fate


def settle(worker: HandWorker, job_id: str, result: str, keep_ms: int | None) -> Turn:
    worker.number += 1
    number = 1 if keep_ms is None else f"1 {keep_ms}"
    done: Settled = [job_id, worker.fence, 7]
    return worker.consumer.turn(worker.number, done, [], len(worker.held()) - 1, 0, [number, result.encode()])


def make_due(queue: OneQueue, *ids: str) -> None:
    for job_id in ids or ("a",):
        queue.set_due({job_id: 1})


def options_of(queue: OneQueue, job_id: str = "a") -> str:
    found = stored_options(queue.redis.hget(queue.key("jobs"), job_id))
    return "" if found is None else found.pack()


def expires_ms(queue: OneQueue, job_id: str = "a") -> int | None:
    found = stored_options(queue.redis.hget(queue.key("jobs"), job_id))
    return None if found is None else found.expires_ms


def server_ms(queue: OneQueue) -> int:
    seconds, micros = queue.redis.time()
    return int(seconds) * 1000 + int(micros) // 1000


def noted_options(queue: OneQueue) -> list[tuple[str | None, str | None]]:
    return [(event.job, event.cause) for event in queue.events() if event.verb == "options"]


def test_a_job_without_options_has_a_plain_record(queue: OneQueue) -> None:
    enqueue(queue, "")
    assert queue.redis.hget(queue.key("jobs"), "a").startswith(b"p5 ")
    assert noted_options(queue) == []


def test_options_stand_in_the_head_of_the_record_and_in_the_journal(queue: OneQueue) -> None:
    queue.producer.enqueue([job("a", "t=5000,r=7"), job("b"), job("c", "k=0", run_in=60)])
    records = {name: unpack(packed) for name, packed in queue.state().records.items()}
    assert queue.redis.hget(queue.key("jobs"), "a").startswith(b"o5 ")
    assert queue.redis.hget(queue.key("jobs"), "c").startswith(b"O5 "), "delayed"
    assert (options_of(queue, "a"), options_of(queue, "b"), options_of(queue, "c")) == ("t=5000,r=7", "", "k=0")
    assert [records[name].data for name in "abc"] == [{"n": "a"}, {"n": "b"}, {"n": "c"}]
    assert noted_options(queue) == [("a", "t=5000,r=7"), ("c", "k=0")]
    assert queue.worker().turn(want=5) == ["a", "b"]


def test_an_own_max_retries_replaces_that_of_the_queue(queue: OneQueue) -> None:
    queue.producer.enqueue([job("a", "r=0"), job("b", "r=3")])
    worker = queue.worker()
    worker.turn(want=2)
    assert fail(worker, "a") == Fate("dead", 0, 1, 1)
    assert fail(worker, "b") == Fate("retried", 1000, 1, 4)


def test_own_backoffs_are_used_in_turn_and_the_last_one_repeats(queue: OneQueue) -> None:
    enqueue(queue, "r=9,b=300:50000")
    worker = queue.worker()
    waits = []
    for _ in range(3):
        worker.turn(want=1)
        waits.append(fail(worker).wait_ms)
        make_due(queue)
    assert waits == [300, 50_000, 50_000]


def test_the_options_of_a_task_apply_unless_the_job_has_its_own(queue: OneQueue) -> None:
    queue.producer.enqueue([job("a"), job("b", "r=1,b=400")])
    worker = queue.worker()
    worker.turn(want=2)
    assert fail(worker, "a", task_options="r=5,b=200") == Fate("retried", 200, 1, 6)
    assert fail(worker, "b", task_options="r=5,b=200") == Fate("retried", 400, 1, 2)


def test_a_retried_job_keeps_its_options(queue: OneQueue) -> None:
    enqueue(queue, "t=1,r=5")
    worker = queue.worker()
    worker.turn(want=1)
    fail(worker)
    make_due(queue)
    worker.turn(want=1)
    queue.recover(worker, running=True)
    record = unpack(queue.state().records["a"])
    assert (options_of(queue), record.retry_count, record.stall_count) == ("t=1,r=5", 1, 1)


def test_an_update_replaces_the_options_if_it_replaces_the_data(queue: OneQueue) -> None:
    enqueue(queue, "r=5")
    enqueue(queue, "r=6", update_data=False)
    assert options_of(queue) == "r=5"
    enqueue(queue, "r=7")
    assert options_of(queue) == "r=7"
    enqueue(queue, "")
    assert (options_of(queue), queue.state().records["a"][:2]) == ("", b"p5")
    assert noted_options(queue) == [("a", "r=5"), ("a", "r=7"), ("a", "-")]


def test_a_blocked_job_has_its_own_options_when_it_is_unblocked(queue: OneQueue) -> None:
    enqueue(queue, "r=5")
    worker = queue.worker()
    worker.turn(want=1)
    enqueue(queue, "r=3")
    enqueue(queue, "r=6,b=1")
    assert options_of(queue) == "r=5"
    worker.turn(done="a")
    assert options_of(queue) == "r=6,b=1"
    assert noted_options(queue) == [("a", "r=5"), ("a", "r=6,b=1")]


def test_a_blocked_update_without_data_keeps_the_options_of_the_first(queue: OneQueue) -> None:
    enqueue(queue, "r=5")
    worker = queue.worker()
    worker.turn(want=1)
    enqueue(queue, "r=6")
    enqueue(queue, "r=7", update_data=False)
    worker.turn(done="a")
    assert options_of(queue) == "r=6"


def test_a_blocked_job_gives_its_options_to_the_one_that_returns(queue: OneQueue) -> None:
    enqueue(queue, "r=5")
    worker = queue.worker()
    worker.turn(want=1)
    enqueue(queue, "r=6")
    queue.recover(worker, running=True)
    assert options_of(queue) == "r=6"
    assert noted_options(queue) == [("a", "r=5"), ("a", "r=6")]


def test_a_merge_without_data_keeps_the_options(queue: OneQueue) -> None:
    enqueue(queue, "r=5")
    worker = queue.worker()
    worker.turn(want=1)
    enqueue(queue, "r=6", update_data=False)
    queue.recover(worker, running=True)
    assert (options_of(queue), noted_options(queue)) == ("r=5", [("a", "r=5")])


def test_an_expiry_counts_from_run_at_or_else_from_the_enqueue(queue: OneQueue) -> None:
    before_ms = server_ms(queue)
    queue.producer.enqueue([job("a", "x=5000"), job("b", "x=5000", run_in=60), job("c", "r=1,x=7000")])
    after_ms = server_ms(queue)
    for job_id, ms in (("a", 5000), ("b", 65_000), ("c", 7000)):
        found = expires_ms(queue, job_id)
        assert found is not None
        assert before_ms + ms <= found <= after_ms + ms
    assert options_of(queue, "c") == "r=1"


def test_an_expired_job_is_dead_when_a_worker_claims_it(queue: OneQueue) -> None:
    queue.producer.enqueue([job("a", "r=3,x=1"), job("b")])
    while server_ms(queue) <= (expires_ms(queue) or 0):
        pass
    worker = queue.worker()
    assert worker.turn(want=2) == ["b"]
    shown = queue.inspector.job("a")
    assert (shown["state"], shown["error"]["name"], shown["error"]["kind"]) == ("dead", "Expired", "expired")
    (dead,) = [event for event in queue.events() if event.verb == "dead"]
    assert (dead.job, dead.cause, dead.micros) == ("a", "Expired", None)


def test_a_job_that_has_not_expired_runs(queue: OneQueue) -> None:
    enqueue(queue, "x=60000")
    assert queue.worker().turn(want=1) == ["a"]


def test_a_revived_job_keeps_its_options_but_not_its_expiry(queue: OneQueue) -> None:
    queue.producer.enqueue([job("a", "x=60000,k=5"), job("b", "k=5,x=60000"), job("c", "x=60000")])
    worker = queue.worker()
    worker.turn(want=3)
    for job_id in "abc":
        fail(worker, job_id, kind="permanent")
    dead = DeadJobs(queue.link, DEFAULT_PREFIX, "q")
    for job_id in "abc":
        dead.retry(job_id)
    assert [options_of(queue, job_id) for job_id in "abc"] == ["k=5", "k=5", ""]
    assert [expires_ms(queue, job_id) for job_id in "abc"] == [None, None, None]
    assert noted_options(queue)[3:] == [("a", "k=5"), ("b", "k=5")]


def test_the_failed_log_has_the_options(queue: OneQueue) -> None:
    queue.producer.enqueue([job("a", "r=0"), job("b")])
    worker = queue.worker()
    worker.turn(want=2)
    fail(worker, "a")
    fail(worker, "b", kind="permanent")
    with_options, without = queue.redis.lrange(queue.key("outbox"), 0, -1)
    assert b'"options":"r=0","body":' in with_options
    assert b"options" not in without


@pytest.mark.parametrize("mode", ["on_request", "external", "auto_release"])
def test_options_need_a_queue_of_mode_work(redis_url: str, mode: str) -> None:
    with one_queue(redis_url, mode=mode) as other:
        with pytest.raises(WrongMode, match=f"is of mode {mode}: timeout, max_retries.*need a queue of mode work"):
            other.producer.enqueue([job("a"), job("b", "r=1")])
        assert other.state().jobs == set()


def test_a_snoozed_job_runs_again_without_being_counted(queue: OneQueue) -> None:
    enqueue(queue, "")
    worker = queue.worker()
    worker.turn(want=1)
    assert fail(worker, kind="snooze", retry_at="+5000") == Fate("snoozed", 5000, 1, 1)
    shown = queue.inspector.job("a")
    assert (shown["state"], shown["snooze_count"], shown["retry_count"], shown["attempts"]) == ("scheduled", 1, 0, [])
    assert why(queue.link, DEFAULT_PREFIX, "q", "a") == (
        "scheduled",
        f"it is scheduled for {show_time(shown['run_at'])}; it was snoozed: `forqctl logs q --job a` shows why",
    )
    make_due(queue)
    worker.turn(want=1)
    fail(worker, kind="snooze", retry_at="1")
    assert [event.attempt for event in queue.events() if event.verb == "claimed"] == [1, 1]
    assert [(event.job, event.micros) for event in queue.events() if event.verb == "snoozed"] == [("a", 7), ("a", 7)]
    assert worker.turn(want=1) == ["a"], "a time in the past means at once"
    assert unpack(queue.state().records["a"]).snooze_count == 2


def test_a_snooze_without_a_time_means_at_once(queue: OneQueue) -> None:
    enqueue(queue, "")
    worker = queue.worker()
    worker.turn(want=1)
    assert fail(worker, kind="snooze") == Fate("snoozed", 0, 1, 1)
    assert worker.turn(want=1) == ["a"]


def test_counts_are_kept_through_a_snooze_and_a_reset_clears_it(queue: OneQueue) -> None:
    enqueue(queue, "")
    worker = queue.worker()
    worker.turn(want=1)
    fail(worker)
    make_due(queue)
    worker.turn(want=1)
    assert fail(worker, kind="snooze", retry_at="+5000").attempt == 2
    record = unpack(queue.state().records["a"])
    assert (record.retry_count, record.snooze_count) == (1, 1)
    enqueue(queue, "")
    record = unpack(queue.state().records["a"])
    assert (record.retry_count, record.snooze_count) == (0, 0)


def test_a_job_that_snoozes_for_ever_is_dead(queue: OneQueue) -> None:
    enqueue(queue, "")
    packed = queue.redis.hget(queue.key("jobs"), "a")
    head, _, body = packed.partition(b"\n")
    queue.redis.hset(queue.key("jobs"), "a", b"o" + head[1:] + b" 0 0 0 0 999 -\n" + body)
    worker = queue.worker()
    worker.turn(want=1)
    assert fail(worker, kind="snooze", retry_at="1").kind == "snoozed"
    worker.turn(want=1)
    assert fail(worker, kind="snooze", retry_at="1").kind == "dead"
    shown = queue.inspector.job("a")
    assert (shown["error"]["name"], shown["error"]["message"]) == ("TooManySnoozes", "it was snoozed 1000 times")


def test_a_suspect_that_snoozes_is_no_longer_one(queue: OneQueue) -> None:
    enqueue(queue, "")
    worker = queue.worker()
    worker.turn(want=1)
    queue.recover(worker, running=True, outcome="suspect")
    alone = queue.worker("w2", lane="suspects")
    assert alone.turn(want=1) == ["a"]
    fail(alone, kind="snooze", retry_at="1")
    assert queue.worker("w3").turn(want=1) == ["a"]


def test_a_snoozed_job_takes_what_was_blocked_behind_it(queue: OneQueue) -> None:
    enqueue(queue, "")
    worker = queue.worker()
    worker.turn(want=1)
    enqueue(queue, "r=1", update_run_at=False)
    fail(worker, kind="snooze", retry_at="+60000")
    assert (options_of(queue), queue.inspector.job("a")["state"]) == ("r=1", "scheduled")


def kept_until(queue: OneQueue) -> dict[str, int]:
    found = queue.redis.zrange(queue.key("done:own"), 0, -1, withscores=True)
    return {job_id.decode(): int(until) for job_id, until in found}


def test_a_job_with_its_own_keep_done_is_kept_so_long(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    before_ms = server_ms(queue)
    settle(worker, "a", '"yes"', HOUR_MS)
    worker.turn(done="b")
    assert before_ms + HOUR_MS <= kept_until(queue)["a"] <= server_ms(queue) + HOUR_MS
    assert queue.inspector.job("a")["result"] == "yes"
    assert set(queue.hash("done:jobs")) == {"a"}
    assert queue.inspector.counts().kept == 1
    assert [shown["id"] for shown in queue.inspector.jobs("done").jobs] == ["a"]


def test_a_job_keeps_its_own_time_if_its_worker_dies(queue: OneQueue) -> None:
    queue.producer.enqueue([job("a", f"k={HOUR_MS}"), job("b"), job("c")])
    worker = queue.worker()
    worker.turn(want=3)
    queue.recover(worker, index=2)
    assert queue.inspector.job("a")["result_error"].startswith("its result was lost")
    assert set(queue.hash("done:jobs")) == set(kept_until(queue)) == {"a"}
    queue.registry.configure("q", {"keep_done_ms": HOUR_MS}, {})
    queue.producer.enqueue([job("d", "k=0"), job("e")])
    worker = queue.worker("w2")
    assert worker.turn(want=3) == ["c", "d", "e"]
    queue.recover(worker, index=3)
    assert set(queue.hash("done:jobs")) == {"a", "c", "e"}


def test_a_job_may_keep_nothing_in_a_queue_that_keeps_results(queue: OneQueue) -> None:
    queue.registry.configure("q", {"keep_done_ms": HOUR_MS}, {})
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    settle(worker, "a", "1", 0)
    settle(worker, "b", "2", None)
    assert set(queue.hash("done:jobs")) == {"b"}
    assert queue.redis.zrange(queue.key("done"), 0, -1) == [b"b"]


def test_an_id_is_kept_once(queue: OneQueue) -> None:
    queue.registry.configure("q", {"keep_done_ms": HOUR_MS}, {})
    worker = queue.worker()
    for keep_ms in (None, HOUR_MS, None):
        queue.enqueue("a")
        worker.turn(want=1)
        settle(worker, "a", "1", keep_ms)
        assert queue.inspector.counts().kept == 1
    assert kept_until(queue) == {}
    queue.enqueue("a")
    worker.turn(want=1)
    settle(worker, "a", "1", HOUR_MS)
    assert queue.redis.zcard(queue.key("done")) == 0


def test_done_jobs_with_their_own_keep_done_are_forgotten_in_time(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    settle(worker, "a", "1", HOUR_MS)
    settle(worker, "b", "1", HOUR_MS)
    queue.redis.zadd(queue.key("done:own"), {"a": 1})
    queue.recovery().promote("q")
    assert set(queue.hash("done:jobs")) == set(kept_until(queue)) == {"b"}


def test_without_keep_done_only_the_own_ones_stay(queue: OneQueue) -> None:
    queue.registry.configure("q", {"keep_done_ms": HOUR_MS}, {})
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    settle(worker, "a", "1", HOUR_MS)
    settle(worker, "b", "1", None)
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    while server_ms(queue) <= queue.redis.zscore(queue.key("done"), "b"):
        pass
    queue.recovery().promote("q")
    assert set(queue.hash("done:jobs")) == {"a"}


def test_done_max_counts_both_kinds_and_the_queues_own_go_first(queue: OneQueue) -> None:
    queue.registry.configure("q", {"keep_done_ms": HOUR_MS, "done_max": 2}, {})
    worker = queue.worker()
    kept = []
    for job_id, keep_ms in (("a", HOUR_MS), ("b", None), ("c", 2 * HOUR_MS), ("d", 2 * HOUR_MS)):
        queue.enqueue(job_id)
        worker.turn(want=1)
        settle(worker, job_id, "1", keep_ms)
        kept.append("".join(sorted(queue.hash("done:jobs"))))
    assert kept == ["a", "ab", "ac", "cd"]


def test_pages_of_done_jobs_have_both_kinds(queue: OneQueue) -> None:
    queue.registry.configure("q", {"keep_done_ms": HOUR_MS}, {})
    worker = queue.worker()
    for number, job_id in enumerate("abcde"):
        queue.enqueue(job_id)
        worker.turn(want=1)
        settle(worker, job_id, "1", HOUR_MS if number < 3 else None)
    found, after = [], None
    while True:
        page = queue.inspector.jobs("done", 2, after)
        found += [shown["id"] for shown in page.jobs]
        after = page.next
        if after is None:
            break
    assert sorted(found) == list("abcde")


def test_a_deleted_queue_leaves_no_done_jobs(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    settle(worker, "a", "1", HOUR_MS)
    queue.registry.delete("q", force=False)
    assert queue.redis.exists(queue.key("done:own"), queue.key("done:jobs")) == 0


def test_a_rescue_leaves_jobs_with_results_to_their_worker(queue: OneQueue) -> None:
    queue.enqueue(*"abc")
    worker = queue.worker()
    worker.turn(want=3)
    assert queue.recovery("p1").rescue("q", worker.position(1, running=True), has_results=True) == 1
    assert worker.held() == ["a", "b"]
    worker.number += 1
    worker.consumer.turn(worker.number, ["a", worker.fence, 7], [], 1, 0, [f"1 {HOUR_MS}", b'"of a"'])
    assert queue.inspector.job("a")["result"] == "of a"


def wait(queue: OneQueue, identity: JobIdentity | None = None, *, keeps: bool = False) -> WaitStatus:
    return ResultWaiter(queue.link, DEFAULT_PREFIX, "q", "a", identity, keeps=keeps).check(None, 60_000)


def test_waiting_needs_a_result_that_will_be_kept(queue: OneQueue) -> None:
    enqueue(queue, "r=1")
    with pytest.raises(UsageError, match="keeps no results"):
        wait(queue)
    assert wait(queue, keeps=True).state == "live"
    enqueue(queue, "k=0")
    with pytest.raises(UsageError, match="keeps no results"):
        wait(queue)
    enqueue(queue, "r=1,k=5000")
    assert wait(queue).state == "live"
    queue.registry.configure("q", {"done_max": 0}, {})
    with pytest.raises(UsageError, match="keeps no results"):
        wait(queue, keeps=True)


def stored(queue: OneQueue) -> JobIdentity:
    ((_, identity),) = queue.producer.enqueue_identified([job()])
    assert identity is not None
    return identity


def run(queue: OneQueue, worker: HandWorker, result: str) -> None:
    worker.turn(want=1)
    settle(worker, "a", result, HOUR_MS)


def test_an_identity_finds_its_own_job_only(queue: OneQueue) -> None:
    worker = queue.worker()
    first = stored(queue)
    assert wait(queue, first, keeps=True).state == "live"
    run(queue, worker, "1")
    status = wait(queue, first, keeps=True)
    assert status.done is not None
    assert status.done.result == 1
    second = stored(queue)
    assert wait(queue, first, keeps=True).done is not None, "while the second one lives"
    run(queue, worker, "2")
    assert wait(queue, first, keeps=True).state == "gone"
    found = wait(queue, second, keeps=True).done
    assert found is not None
    assert found.result == 2


def test_an_identity_of_a_blocked_job_does_not_find_the_one_before(queue: OneQueue) -> None:
    worker = queue.worker()
    first = stored(queue)
    worker.turn(want=1)
    second = stored(queue)
    assert (first.ahead_us, second.ahead_us) == ("", first.enqueued_us)
    waiter = ResultWaiter(queue.link, DEFAULT_PREFIX, "q", "a", second, keeps=True)
    target = waiter.check(None, 60_000).target
    settle(worker, "a", "1", HOUR_MS)
    status = waiter.check(target, 60_000)
    assert waiter.is_other_job(status)
    assert waiter.check(None, 60_000).state == "live"
    run(queue, worker, "2")
    found = waiter.check(None, 60_000).done
    assert found is not None
    assert found.result == 2
    assert not waiter.is_other_job(waiter.check(None, 60_000))


def test_an_identity_of_a_withdrawn_job_does_not_find_the_one_before(queue: OneQueue) -> None:
    worker = queue.worker()
    stored(queue)
    worker.turn(want=1)
    second = stored(queue)
    assert queue.producer.cancel("a")
    settle(worker, "a", "1", HOUR_MS)
    assert wait(queue, second, keeps=True).state == "gone"


def test_an_identity_of_an_updated_job_finds_it(queue: OneQueue) -> None:
    worker = queue.worker()
    stored(queue)
    second = stored(queue)
    run(queue, worker, "1")
    found = wait(queue, second, keeps=True).done
    assert found is not None
    assert found.result == 1


def test_an_identity_of_a_blocked_job_that_was_merged_finds_the_returned_one(queue: OneQueue) -> None:
    worker = queue.worker()
    stored(queue)
    worker.turn(want=1)
    second = stored(queue)
    fail(worker)
    make_due(queue)
    run(queue, worker, "1")
    found = wait(queue, second, keeps=True).done
    assert found is not None
    assert found.result == 1


def test_a_known_token_has_the_id_of_the_earlier_job_and_no_identity(queue: OneQueue) -> None:
    ((_, identity),) = queue.producer.enqueue_identified([new_job(1, id="a", token="t")])
    assert identity is not None
    assert queue.producer.enqueue_identified([new_job(1, id="b", token="t")]) == [("a", None)]


def test_an_identity_of_another_epoch_finds_nothing(queue: OneQueue) -> None:
    identity = stored(queue)
    queue.registry.delete("q", force=True)
    while queue.registry.purge("q", lambda lines: None):
        pass
    queue.create()
    queue.enqueue("a")
    with pytest.raises(Exception, match="no queue 'q'"):
        wait(queue, identity, keeps=True)


def test_the_lane_and_the_snoozes_of_a_record_are_read() -> None:
    record = unpack(b"o5 1000000 1 2 3 4 5 T=77\n[null,null,1]")
    assert (record.retry_count, record.stall_count, record.timeout_count) == (1, 2, 3)
    assert (record.lane, record.suspect, record.snooze_count) == (4, False, 5)
    assert record.options is not None
    assert record.options.tick_ms == 77
    assert unpack(b"o5 1000000 0 0 0 -1 5 -\n[null,null,1]").suspect
