"""Results of done jobs: what is kept, for how long, and how it is dropped."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from forq.broker.explain import why
from forq.broker.keys import DEFAULT_PREFIX, fail_queue, queue_base
from forq.broker.results import LOST, ResultWaiter
from forq.errors import UnknownJob
from forq.result_wait import wait_for_result
from forq.values import show_time
from tests.support.drive.external_queue import ExternalQueue
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue

HOUR_MS = 3_600_000


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, keep_done_ms=HOUR_MS) as queue:
        yield queue


def run(queue: OneQueue, worker: HandWorker, ids: str, result: str = "1") -> None:
    """Enqueues these jobs and settles them as done in one turn."""
    queue.enqueue(*ids)
    worker.turn(want=len(ids))
    worker.turn(done=ids, results=dict.fromkeys(ids, result))


def kept(queue: OneQueue) -> list[str]:
    """Returns the kept ids, oldest first; checks that both keys agree."""
    ids = [job_id.decode() for job_id in queue.redis.zrange(queue.key("done"), 0, -1)]
    assert set(ids) == set(queue.hash("done:jobs"))
    return ids


def age(queue: OneQueue, *ids: str, ms: int = HOUR_MS + 1) -> None:
    for job_id in ids:
        queue.redis.zincrby(queue.key("done"), -ms, job_id)


def shown(queue: OneQueue, job_id: str, *fields: str) -> tuple[Any, ...]:
    job = queue.inspector.job(job_id)
    return tuple(job.get(field) for field in fields)


@pytest.mark.spec("M8")
def test_a_done_job_is_shown_with_its_record_and_its_result(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    worker.turn(done="a", results={"a": '{"n":[1,"ü"]}'})
    job = queue.inspector.job("a")
    assert (job["state"], job["result"], job["data"]) == ("done", {"n": [1, "ü"]}, {"n": "a"})
    assert (job["identifier"], job["priority"], job["retry_count"], job["attempts"]) == ("a", 5, 0, [])
    assert (job["fence"], job["run_seconds"], job["progress"]) == (int(worker.fence), 7e-6, None)
    assert abs(job["ended_at"] - queue.redis.time()[0]) < 60
    assert "result_error" not in job
    assert queue.state().jobs == set(), "it is not a live job"
    counts = queue.inspector.counts()
    assert (counts.kept, counts.done, counts.waiting) == (1, 1, 0)
    assert why(queue.link, DEFAULT_PREFIX, "q", "a") == ("done", f"it was done at {show_time(job['ended_at'])}")


def test_without_keep_done_no_result_is_kept(queue: OneQueue) -> None:
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    run(queue, queue.worker(), "a")
    assert kept(queue) == []
    with pytest.raises(UnknownJob):
        queue.inspector.job("a")


def test_a_turn_returns_the_maximum_size_of_a_result(queue: OneQueue) -> None:
    queue.registry.configure("q", {"max_data": 77}, {})
    worker = queue.worker()
    limits = worker.whole_turn().limits
    assert (limits.max_result_bytes, limits.keeps_results) == (77, True)
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    limits = worker.whole_turn().limits
    assert (limits.max_result_bytes, limits.keeps_results) == (77, False)


def test_each_result_belongs_to_its_job_in_a_mixed_settle(queue: OneQueue) -> None:
    queue.enqueue(*"abcdef")
    worker = queue.worker()
    worker.turn(want=6)
    worker.turn(done="abcd", failed="ef", results={"d": '"of d"', "b": '"of b"'})
    assert shown(queue, "b", "state", "result") == ("done", "of b")
    assert shown(queue, "d", "state", "result") == ("done", "of d")
    assert shown(queue, "a", "state", "result_error") == ("done", "it ran before its queue kept results")
    assert shown(queue, "e", "state") == ("dead",)
    assert kept(queue) == list("abcd")


def test_a_refused_job_does_not_shift_the_results_of_the_next(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.redis.hset(queue.key("active"), "a", "other:1")
    assert worker.whole_turn(done="ab", results={"a": '"of a"', "b": '"of b"'}).refused == [b"a"]
    assert shown(queue, "b", "result") == ("of b",)


def test_the_reason_for_a_missing_result_is_shown(queue: OneQueue) -> None:
    run(queue, queue.worker(), "a", "!it is a socket")
    assert shown(queue, "a", "state", "result_error") == ("done", "it is a socket")
    assert "result" not in queue.inspector.job("a")


def test_a_result_larger_than_max_data_is_not_kept(queue: OneQueue) -> None:
    queue.registry.configure("q", {"max_data": 30}, {})
    worker = queue.worker()
    run(queue, worker, "a", '"' + 28 * "x" + '"')
    run(queue, worker, "b", '"' + 29 * "x" + '"')
    run(queue, worker, "c", "!a reason may be as long as it is")
    assert shown(queue, "a", "result") == (28 * "x",)
    assert shown(queue, "b", "state", "result_error") == ("done", "it is longer than max_data = 30 bytes")
    assert shown(queue, "c", "result_error") == ("a reason may be as long as it is",)


def test_a_refused_settle_keeps_no_result(queue: OneQueue) -> None:
    queue.enqueue("a")
    first, second = queue.worker("w1"), queue.worker("w2")
    first.turn(want=1)
    queue.recover(first, running=True)
    second.turn(want=1)
    second.turn(done="a", fence=first.fence, results={"a": '"late"'}, keep=1)
    assert kept(queue) == []
    second.turn(done="a", results={"a": '"right"'})
    assert shown(queue, "a", "result", "stall_count") == ("right", 1)


def test_earlier_attempts_are_kept_with_the_result(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    worker.turn(failed="a", kind="timeout", keep=1)
    worker.turn(failed="a", done="b")
    worker.turn(want=1)
    worker.turn(failed="a", kind="timeout")
    queue.registry.configure("q", {"max_timeouts": 9}, {})
    worker.turn(want=1)
    worker.turn(done="a", results={"a": "null"})
    attempts = queue.inspector.job("a")["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["timed_out", "timed_out"]
    assert shown(queue, "a", "result", "timeout_count") == (None, 2)
    assert queue.inspector.job("b")["attempts"] == []
    assert not queue.redis.exists(queue.key("attempts"))


def test_a_newer_result_of_an_id_replaces_the_older_one(queue: OneQueue) -> None:
    worker = queue.worker()
    run(queue, worker, "a", '"first"')
    run(queue, worker, "a", '"second"')
    assert (kept(queue), shown(queue, "a", "result")) == (["a"], ("second",))


def test_a_live_job_of_the_id_is_shown_before_the_last_result(queue: OneQueue) -> None:
    worker = queue.worker()
    run(queue, worker, "a", '"first"')
    queue.enqueue("a")
    assert shown(queue, "a", "state") == ("waiting",)
    worker.turn(want=1)
    worker.turn(failed="a")
    assert shown(queue, "a", "state") == ("dead",)
    assert kept(queue) == ["a"]
    run(queue, worker, "a", '"second"')
    assert shown(queue, "a", "state", "result") == ("done", "second")


def test_the_result_of_a_removed_job_is_not_kept(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.producer.remove("a")
    worker.turn(done="ab", results={"a": "1", "b": "2"})
    assert kept(queue) == ["b"]


def test_a_done_job_without_a_record_is_settled(queue: OneQueue) -> None:
    queue.enqueue("a")
    worker = queue.worker()
    worker.turn(want=1)
    queue.redis.hdel(queue.key("jobs"), "a")
    worker.turn(done="a", results={"a": "1"})
    assert kept(queue) == []
    assert queue.state().active == {}


def test_jobs_finished_by_a_dead_worker_are_done_without_a_result(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    queue.recover(worker, 1)
    assert shown(queue, "a", "state", "result_error", "run_seconds") == ("done", LOST, None)
    assert shown(queue, "b", "state") == ("waiting",)


def test_at_most_done_max_results_are_kept_and_the_oldest_go_first(queue: OneQueue) -> None:
    queue.registry.configure("q", {"done_max": 3}, {})
    worker = queue.worker()
    run(queue, worker, "abc")
    assert kept(queue) == list("abc")
    age(queue, "b", ms=1000)
    run(queue, worker, "d")
    assert kept(queue) == list("acd")
    run(queue, worker, "efgh")
    assert kept(queue) == list("fgh")


def why_unknown(queue: OneQueue, job_id: str) -> str:
    """Returns the error text for a missing job."""
    with pytest.raises(UnknownJob) as looked_up:
        queue.inspector.job(job_id)
    _, _, reason = str(looked_up.value).partition("is not kept: ")
    waiter = ResultWaiter(queue.link, DEFAULT_PREFIX, queue.name, job_id)
    with pytest.raises(UnknownJob) as waited:
        wait_for_result(waiter, 0)
    assert str(waited.value).endswith(reason)
    return reason


def test_a_result_dropped_by_done_max_is_explained_with_how_to_keep_more(queue: OneQueue) -> None:
    queue.registry.configure("q", {"done_max": 3}, {})
    run(queue, queue.worker(), "abcde")
    assert re.fullmatch(
        r"its queue keeps the results of the last done_max = 3 jobs, currently those since \d{4}-\d\d-\d\dT[\d:]+Z; "
        r"`forqctl set q done_max=10000` keeps more",
        why_unknown(queue, "a"),
    )
    queue.registry.configure("q", {"done_max": 5_000_000}, {})
    assert why_unknown(queue, "a") == (
        "its queue keeps results for keep_done = 1h (done_max = 5000000, 3 are kept); "
        "`forqctl set q keep_done=2h` keeps them longer"
    )


def test_a_queue_that_keeps_no_results_explains_how_to_keep_them(queue: OneQueue) -> None:
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    with pytest.raises(UnknownJob, match=r"its queue keeps no results; `forqctl set q keep_done=1h` keeps those"):
        queue.inspector.job("a")


def test_a_queue_whose_tasks_keep_results_does_not_claim_to_keep_none(queue: OneQueue) -> None:
    run(queue, queue.worker(), "a")
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    with pytest.raises(UnknownJob, match=r"its queue keeps only results of tasks and jobs with their own keep_done; `"):
        queue.inspector.job("b")


def test_a_release_queue_does_not_mention_results(redis_url: str) -> None:
    with (
        one_queue(redis_url, "r", "on_request") as queue,
        pytest.raises(UnknownJob, match="a queue of mode on_request keeps no results"),
    ):
        queue.inspector.job("a")


def test_a_queue_without_a_stored_done_max_uses_a_default(queue: OneQueue) -> None:
    queue.redis.hdel(queue.key("options"), "done_max")
    run(queue, queue.worker(), "a")
    assert kept(queue) == ["a"]


def test_results_older_than_keep_done_are_dropped_when_another_job_ends(queue: OneQueue) -> None:
    worker = queue.worker()
    run(queue, worker, "abc")
    age(queue, "a", "c")
    age(queue, "b", ms=HOUR_MS - 60_000)
    run(queue, worker, "d")
    assert kept(queue) == list("bd")


def test_old_results_are_dropped_over_several_calls(queue: OneQueue) -> None:
    worker = queue.worker()
    old = {f"old{number:04}": number for number in range(1250)}
    queue.redis.zadd(queue.key("done"), old)
    queue.redis.hset(queue.key("done:jobs"), mapping=dict.fromkeys(old, "1 1 1\n1\n\n[]"))
    run(queue, worker, "a")
    assert kept(queue) == [*list(old)[100:], "a"]
    queue.recovery().promote("q")
    assert kept(queue) == [*list(old)[200:], "a"]
    queue.recovery().heartbeat("q", 15_000, [])
    assert kept(queue) == [*list(old)[1200:], "a"]
    queue.registry.configure("q", {"done_max": 20}, {})
    run(queue, worker, "b")
    assert kept(queue) == ["a", "b"], "too many or too old were kept"


def test_a_lower_done_max_is_reached_in_bounded_steps(queue: OneQueue) -> None:
    now_ms = queue.redis.time()[0] * 1000
    young = {f"j{number:04}": now_ms + number for number in range(250)}
    queue.redis.zadd(queue.key("done"), young)
    queue.redis.hset(queue.key("done:jobs"), mapping=dict.fromkeys(young, "1 1 1\n1\n\n[]"))
    queue.registry.configure("q", {"done_max": 50}, {})
    queue.recovery().promote("q")
    assert kept(queue) == list(young)[100:]
    queue.recovery().promote("q")
    assert kept(queue) == list(young)[200:]


@pytest.mark.parametrize("by", ["heartbeat", "promote"])
def test_old_results_are_dropped_even_if_no_job_ends(queue: OneQueue, by: str) -> None:
    run(queue, queue.worker(), "ab")
    age(queue, "a")
    recovery = queue.recovery()
    if by == "heartbeat":
        recovery.heartbeat("q", 15_000, [])
    else:
        recovery.promote("q")
    assert kept(queue) == ["b"]


def test_turning_keep_done_off_drops_all_results_with_one_heartbeat(queue: OneQueue) -> None:
    run(queue, queue.worker(), "abc")
    many = {f"old{number:04}": number for number in range(1500)}
    queue.redis.zadd(queue.key("done"), many)
    queue.redis.hset(queue.key("done:jobs"), mapping=dict.fromkeys(many, "1 1 1\n1\n\n[]"))
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    assert len(kept(queue)) == 1503
    queue.recovery().heartbeat("q", 15_000, [])
    assert kept(queue) == []


def test_pages_of_done_jobs_list_the_newest_first(queue: OneQueue) -> None:
    worker = queue.worker()
    for number, job_id in enumerate("abcde"):
        run(queue, worker, job_id)
        queue.redis.zadd(queue.key("done"), {job_id: queue.redis.time()[0] * 1000 + number})
    first = queue.inspector.jobs("done", limit=3)
    assert [job["id"] for job in first.jobs] == ["e", "d", "c"]
    assert first.jobs[0] == {"id": "e", "identifier": "e", "state": "done"}
    second = queue.inspector.jobs("done", limit=3, after=first.next)
    assert ([job["id"] for job in second.jobs], second.next) == (["b", "a"], None)
    assert queue.inspector.jobs().jobs == [], "without a state only live jobs are listed"


def test_an_invalid_entry_is_shown_as_far_as_possible(queue: OneQueue) -> None:
    run(queue, queue.worker(), "a")
    queue.redis.hset(queue.key("done:jobs"), "a", "nonsense")
    job = queue.inspector.job("a")
    assert (job["state"], job["ended_at"], job["result_error"]) == ("done", 0, LOST)
    assert "broken" in job["record_error"]
    queue.redis.hset(queue.key("done:jobs"), "a", "1 2 3\n{half\nx\ny")
    assert "not JSON" in queue.inspector.job("a")["result_error"]


def test_deleting_a_queue_deletes_its_results_and_needs_no_force_for_them(queue: OneQueue) -> None:
    run(queue, queue.worker(), "a")
    assert queue.registry.delete("q", force=False) == 0
    assert not queue.redis.exists(queue.key("done"), queue.key("done:jobs"))


def test_a_fail_queue_keeps_no_results(redis_url: str) -> None:
    with one_queue(redis_url, keep_done_ms=HOUR_MS, fail_handler=1) as queue:
        queue.enqueue("a")
        worker = queue.worker()
        worker.turn(want=1)
        worker.turn(failed="a")
        base = queue_base(DEFAULT_PREFIX, fail_queue("q"))
        assert queue.redis.hget(f"{base}:options", "keep_done_ms") in (None, b"0")


# Rescue: only the worker has the results of its finished jobs.


def slow_worker(queue: OneQueue) -> HandWorker:
    """Returns a worker that has finished a and b of abcde and is slow with c."""
    queue.enqueue(*"abcde")
    worker = queue.worker()
    worker.turn(want=5)
    assert queue.rescue(worker, 2) == 2
    return worker


def test_jobs_finished_before_a_slow_job_stay_with_their_worker_until_its_next_turn(queue: OneQueue) -> None:
    worker = slow_worker(queue)
    state = queue.state()
    assert (state.waiting, state.processing) == ({5: ["d", "e"]}, {"w1": ["a", "b", "c"]})
    assert set(state.active) == set("abc")
    turn = worker.whole_turn(done="abc", keep=2, results={"a": "1", "b": "2", "c": "3"})
    assert (turn.held, turn.refused) == (False, [])
    assert [queue.inspector.job(job_id)["result"] for job_id in "abc"] == [1, 2, 3]
    assert queue.state().waiting == {5: ["d", "e"]}


def test_a_second_rescue_of_the_same_position_changes_nothing(queue: OneQueue) -> None:
    worker = slow_worker(queue)
    before = queue.state()
    assert queue.rescue(worker, 2) == 0
    assert queue.state() == before


def test_jobs_finished_by_a_worker_that_dies_after_a_rescue_are_done(queue: OneQueue) -> None:
    worker = slow_worker(queue)
    queue.recover(worker, 2, running=True)
    assert [queue.inspector.job(job_id)["state"] for job_id in "abc"] == ["done", "done", "waiting"]
    assert (queue.stall_count("c"), kept(queue)) == (1, ["a", "b"])


def test_the_slow_job_is_done_too_if_the_worker_moved_on_after_the_rescue_and_died(queue: OneQueue) -> None:
    worker = slow_worker(queue)
    queue.recover(worker, 3)
    assert kept(queue) == ["a", "b", "c"]
    assert queue.state().waiting == {5: ["d", "e"]}


def test_a_stale_hint_of_a_finished_job_does_not_return_it(queue: OneQueue) -> None:
    queue.enqueue(*"abc")
    worker = queue.worker()
    worker.turn(want=3)
    queue.redis.rpush(queue.key("pending"), "a")
    queue.set_stale("5:a", 1)
    assert worker.block() == "a"
    assert queue.rescue(worker, 1) == 2
    state = queue.state()
    assert (state.waiting, state.processing, state.stale) == ({5: ["c"]}, {"w1": ["a", "b"]}, {})
    assert set(state.active) == {"a", "b"}


def test_without_keep_done_a_rescue_settles_finished_jobs(queue: OneQueue) -> None:
    queue.registry.configure("q", {"keep_done_ms": 0}, {})
    slow_worker(queue)
    assert queue.state().processing == {"w1": ["c"]}


# Mode external.


@pytest.fixture
def external(redis_url: str) -> Iterator[ExternalQueue]:
    queue = ExternalQueue(redis_url, keep_done_ms=HOUR_MS)
    yield queue
    queue.close()


def test_an_external_worker_sends_its_result_with_finish(external: ExternalQueue) -> None:
    external.enqueue("a", "b")
    external.work()
    for _ in range(2):
        external.external.finish("w1", "a", result=b'{"frames":30}')
    assert shown(external, "a", "state", "result") == ("done", {"frames": 30})
    assert external.inspector.job("a")["run_seconds"] is not None
    external.work()
    external.external.finish("w1", "b")
    assert shown(external, "b", "state", "result") == ("done", None)


def test_a_long_result_of_an_external_worker_is_not_kept(external: ExternalQueue) -> None:
    external.registry.configure("q", {"max_data": 30}, {})
    external.enqueue("a")
    external.work()
    external.external.finish("w1", "a", result=b'"' + 100 * b"x" + b'"')
    assert shown(external, "a", "state", "result_error") == ("done", "it is longer than max_data = 30 bytes")


def test_a_bridge_without_support_for_results_can_still_finish(external: ExternalQueue) -> None:
    external.enqueue("a")
    external.work()
    fence = external.inspector.job("a")["fence"]
    external.external._run("finish", "w1", "a", fence, "done")
    assert shown(external, "a", "state", "result_error") == ("done", LOST)
