"""Held jobs: repeated reports, broken records, results that are long or missing, and all that a held id is refused."""

from contextlib import nullcontext
from typing import Any

import orjson
import pytest

from forq.api_types import When
from forq.broker.chunks import NewJob
from forq.broker.dead import DeadJobs
from forq.broker.enqueue import Update, new_job
from forq.broker.recovery import Position
from forq.broker.scripts import script
from forq.errors import Exists, QueueFull, UnknownDependency, UsageError, WrongMode
from tests.broker.slow_flows import following_one_edge_per_call, remembering_few_ends
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue
from tests.support.drive.release_queue import gate
from tests.support.drive.scheduled_queue import ScheduleRig
from tests.support.models.held_checks import Flows
from tests.support.models.journal_replay import Replay


def after(job_id: str, *names: str, when: When = "done", **more: Any) -> NewJob:
    return new_job({"n": job_id}, id=job_id, after=names, when=when, **more)


def store(queue: OneQueue, *jobs: NewJob, **update: Any) -> list[str]:
    return queue.producer.enqueue(list(jobs), Update(**update))


def is_clean(queue: OneQueue) -> bool:
    names = ("held", "held:jobs", "held:open", "inputs", "sources", "edges", "resolving")
    return not any(queue.redis.exists(queue.key(name)) for name in names)


def lines(queue: OneQueue, verb: str) -> list[str]:
    return [line for event in queue.events() for line in (event.entry or "").split("\n") if line.startswith(f"{verb} ")]


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


def test_the_options_change_with_the_first_held_job_only(queue: OneQueue) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    version = queue.hash("options")["version"]
    store(queue, after("c", "b"))
    assert queue.hash("options")["version"] == version


def test_the_first_call_remembers_the_ends_in_it(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(keep_done_ms=60_000)
    queue.enqueue("a")
    worker.turn(1)
    worker.turn(0, done="a")
    store(queue, after("b", "a", when="dead"), after("c", "b", when="ended"), after("d", "b"))
    assert worker.turn(5) == ["c"]
    assert queue.hash("ends") == {"b": "cancelled", "d": "dead"}


def test_a_kept_job_counts_as_done_before_ends_are_remembered(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(keep_done_ms=60_000)
    queue.enqueue("a", "b")
    worker.turn(2)
    worker.turn(0, done="a", failed="b", results={"a": "7"})
    with pytest.raises(UnknownDependency, match="did not remember ended jobs before"):
        store(queue, after("c", "b"))
    store(queue, after("c", "a", with_results=True))
    assert queue.hash("inputs")["c 1"] == "done 7"
    assert worker.turn(1) == ["c"]


def test_ends_are_remembered_from_the_first_refusal_on(queue: OneQueue, worker: HandWorker) -> None:
    with pytest.raises(UnknownDependency):
        store(queue, after("b", "a"))
    queue.enqueue("a")
    worker.turn(1)
    worker.turn(0, failed="a")
    store(queue, after("b", "a", when="ended"))
    assert worker.turn(1) == ["b"]


def test_the_size_of_a_long_record_is_forgotten_when_no_job_is_left(queue: OneQueue) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"), new_job("x" * 100_000, id="long"))
    for job_id in ("long", "b", "a"):
        assert int(queue.hash("options")["largest_record"]) > 100_000
        queue.producer.cancel(job_id)
        queue.recovery().heartbeat("q", 15_000, [])
    assert int(queue.hash("options")["largest_record"]) < 100_000


def test_the_last_ends_are_remembered_and_older_ones_forgotten(redis_url: str) -> None:
    with remembering_few_ends(), one_queue(redis_url, flows=2) as queue:
        worker = queue.worker()
        for job_id in "abcdefg":
            queue.enqueue(job_id)
            worker.turn(1)
            worker.turn(0, done=job_id)
        assert (set(queue.hash("ends")), set(queue.hash("ends:old"))) == ({"g"}, set("def"))
        with pytest.raises(UnknownDependency):
            store(queue, after("x", "c"))
        store(queue, after("y", "d"), after("z", "g"))
        assert worker.turn(5) == ["y", "z"]


def test_an_end_that_is_reported_twice_counts_once(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), new_job(1, id="x"), after("c", "a", "b"))
    edge = next(edge for edge in queue.hash("edges").values() if edge.endswith(" 1 0"))
    queue.redis.hset(queue.key("edges"), "99 1", edge)
    queue.redis.hset(queue.key("sources"), "x", "99:1:0")
    worker.turn(3)
    fence = worker.fence
    assert worker.turn(5, done="ax", keep=1) == []
    assert worker.turn(5, done="b", fence=fence) == ["c"]


def test_a_broken_record_is_claimed_and_fails(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "a"), after("d", "c"))
    queue.redis.hset(queue.key("held:jobs"), "b", "broken")
    queue.redis.hdel(queue.key("held:jobs"), "c")
    worker.turn(1)
    assert worker.turn(5, done="a") == ["b", "c"]
    worker.turn(0, failed="bc")
    assert set(queue.state().dead) == {"b", "c", "d"}
    assert is_clean(queue)


def test_a_job_with_a_broken_record_dies_with_its_dependency(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "a"))
    queue.redis.hset(queue.key("held:jobs"), "b", "broken")
    queue.redis.hdel(queue.key("held:jobs"), "c")
    worker.turn(1)
    worker.turn(0, failed="a")
    assert set(queue.state().dead) == {"a", "b", "c"}
    assert is_clean(queue)


def test_a_broken_record_is_replaced_by_an_update(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"), after("c", "a"))
    for job_id in "bc":
        queue.redis.hset(queue.key("held:jobs"), job_id, "broken")
    store(queue, new_job({"new": 1}, id="b"), update_data=False)
    worker.turn(1)
    assert worker.turn(1, done="a") == ["b"]
    assert queue.inspector.job("b")["data"] == {"new": 1}


def test_an_update_moves_the_time_and_leaves_the_data(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", run_in=3600, expires_in=60), after("c", "a"))
    store(queue, new_job(2, id="b", run_in=60), update_data=False, update_run_at="if_earlier")
    store(queue, new_job(2, id="c", run_in=60), update_data=False, update_run_at=False)
    seconds, _ = queue.redis.time()
    worker.turn(1)
    assert worker.turn(5, done="a") == ["c"]
    job = queue.inspector.job("b")
    assert job["data"] == {"n": "b"}
    assert seconds + 115 < job["expires_at"] <= seconds + 130


def test_an_update_lists_what_the_job_still_waits_for(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "a", "b"))
    worker.turn(1)
    worker.turn(0, done="a")
    store(queue, new_job(2, id="c", max_retries=3, expires_in=60))
    assert lines(queue, "held") == ["held 0 c done a b", "held 0 c done b"]
    assert lines(queue, "options") == ["options 0 c r=3"]
    Replay().read_all(queue.entries())


def test_the_expiry_of_a_job_that_is_ready_is_journaled(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", expires_in=60, max_retries=3))
    worker.turn(1)
    worker.turn(1, done="a")
    before, now = lines(queue, "options")
    assert before == "options 0 b r=3"
    assert now.startswith("options 0 b r=3,x=1")


def test_a_held_job_has_not_waited_when_it_is_ready(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    worker.turn(1)
    worker.turn(0, done="a")
    assert queue.state().records["b"].startswith(b"d5 ")
    assert "idle_until_ms" in queue.hash("counts")


def test_a_job_that_is_ready_later_leaves_the_age_of_the_others(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="x"), after("b", "a", run_in=3600))
    worker.turn(1)
    worker.turn(0, done="a")
    assert "idle_until_ms" not in queue.hash("counts")


def test_a_doomed_job_has_no_fail_job(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(fail_handler=1)
    store(queue, new_job(1, id="a"), after("b", "a"))
    worker.turn(1)
    worker.turn(0, failed="a")
    assert [line.split()[4] for line in lines(queue, "dead")] == ["1", "0"]
    fail_jobs = queue.redis.hkeys(f"{queue.base}:fail:jobs")
    assert [job_id.partition(b":")[0] for job_id in fail_jobs] == [b"a"]
    written = [orjson.loads(line) for line in queue.redis.lrange(queue.key("outbox"), 0, -1)]
    assert [line["id"] for line in written] == ["a", "b"]


def test_the_error_of_a_doomed_job_names_any_id(queue: OneQueue, worker: HandWorker) -> None:
    name = 'a"\\'
    store(queue, new_job(1, id=name), after("b", name))
    queue.producer.cancel(name)
    assert queue.inspector.job("b")["error"]["message"] == f"job {name}, for which it waited, ended as cancelled"


@pytest.mark.parametrize("how", ["dead", "cancelled", "by a user"])
def test_a_job_that_ends_while_it_is_held_leaves_no_inputs(queue: OneQueue, worker: HandWorker, how: str) -> None:
    when: When = "dead" if how == "cancelled" else "done"
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "a", "b", when=when, with_results=True))
    worker.turn(2)
    fence = worker.fence
    worker.turn(0, done="a", keep=1, results={"a": "1"})
    assert queue.hash("inputs") == {"c 1": "done 1"}
    if how == "by a user":
        assert queue.producer.cancel("c")
    if how == "dead":
        worker.turn(0, failed="b", fence=fence)
    else:
        worker.turn(0, done="b", fence=fence)
    assert queue.inspector.counts().held == 0
    assert is_clean(queue)


def test_a_success_without_a_result_says_so(queue: OneQueue, worker: HandWorker) -> None:
    names = "ab"
    jobs = [new_job(1, id=name) for name in names]
    store(queue, *jobs, after("c", *names, when="ended", with_results=True))
    worker.turn(2)
    worker.turn(0, done="a", failed="b")
    assert queue.hash("inputs") == {"c": "2 1", "c 1": "done !its result was not kept", "c 2": "dead "}
    store(queue, after("d", "b", when="ended", with_results=True))
    assert queue.hash("inputs")["d 1"] == "dead "


def test_a_job_can_wait_for_one_that_runs(queue: OneQueue, worker: HandWorker) -> None:
    queue.enqueue("a")
    worker.turn(1)
    store(queue, after("b", "a"))
    assert worker.turn(1, done="a") == ["b"]


@pytest.mark.parametrize("apart", [False, True], ids=["in one group", "in groups of their own"])
def test_a_result_is_wanted_if_one_of_several_jobs_wants_it(redis_url: str, apart: bool) -> None:
    with following_one_edge_per_call() if apart else nullcontext(), one_queue(redis_url) as queue:
        worker = queue.worker()
        store(queue, new_job(1, id="a"), after("b", "a"))
        store(queue, after("c", "a", with_results=True))
        store(queue, after("d", "a"))
        assert b"w=1" in worker.whole_turn(1).jobs[1]
        queue.recover(worker, 1)
        assert queue.worker("w2").turn(1) == ["a"]


def test_the_dependants_of_a_job_join_one_group(queue: OneQueue, worker: HandWorker) -> None:
    """Up to 500: the entry of the job is written with each of them."""
    store(queue, new_job(1, id="a"), *(after(f"b{number}", "a") for number in range(499)))
    store(queue, after("c", "a"))
    assert queue.hash("sources") == {"a": "1:500:0"}
    store(queue, after("d", "a", with_results=True))
    store(queue, after("e", "a"))
    assert queue.hash("sources") == {"a": "1:500:0,2:2:1"}
    worker.turn(1)
    worker.turn(0, done="a", results={"a": "1"})
    queue.recovery().promote("q")
    assert queue.inspector.counts().held == 0


def test_a_job_whose_result_nobody_wants_is_done_when_its_worker_is_lost(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="x"), after("b", "a"), after("c", "x", with_results=True))
    jobs = worker.whole_turn(2).jobs
    assert [b"w=1" in record for record in jobs[1::2]] == [False, True]
    queue.recover(worker, 1)
    assert queue.worker("w2").turn(5) == ["x", "b"]


def test_records_are_marked_after_a_failure_in_the_same_turn(queue: OneQueue, worker: HandWorker) -> None:
    queue.enqueue("x")
    worker.turn(1)
    store(queue, new_job(1, id="a"), after("b", "a", with_results=True))
    turn = worker.whole_turn(1, failed="x")
    assert b"o5 " in turn.jobs[1]
    assert b"w=1\n" in turn.jobs[1]


def test_a_result_is_wanted_from_a_job_that_was_blocked(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("first", "a"))
    worker.turn(1)
    store(queue, new_job(2, id="a"))
    store(queue, after("b", "a", with_results=True), after("c", "a", with_results=True))
    assert sorted(queue.hash("sources")) == ["a", "a blocked"]
    turn = worker.whole_turn(1, done="a", results={"a": "1"})
    assert b"w=1" in turn.jobs[1]
    worker.turn(0, done="a", results={"a": "2"})
    assert queue.hash("inputs") == {"b": "1 1", "b 1": "done 2", "c": "1 1", "c 1": "done 2"}
    assert queue.hash("sources") == {}


def test_the_result_of_a_job_can_be_wanted_twice_while_it_runs(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", with_results=True))
    worker.turn(1)
    store(queue, after("c", "a", with_results=True))
    worker.turn(0, done="a", results={"a": "5"})
    assert queue.hash("inputs")["c 1"] == "done 5"


def test_long_results_are_copied_in_several_calls(queue: OneQueue, worker: HandWorker) -> None:
    names = [f"j{number}" for number in range(10)]
    store(queue, new_job(1, id="a"), *(after(name, "a", with_results=True) for name in names))
    worker.turn(1)
    result = '"' + "x" * 1_000_000 + '"'
    worker.turn(0, done="a", results={"a": result})
    assert queue.inspector.counts().held == 5
    assert len(Flows(queue).results) == 1
    assert queue.recovery().promote("q") is None
    assert queue.inspector.counts().held == 0
    Flows(queue).check()
    assert [queue.hash("inputs")[f"{name} 1"] == f"done {result}" for name in names] == [True] * 10
    assert not queue.redis.exists(queue.key("edges"))


def test_a_result_that_is_left_to_pulse_is_stored_once(redis_url: str) -> None:
    with following_one_edge_per_call(), one_queue(redis_url) as queue:
        worker = queue.worker()
        store(queue, new_job(1, id="a"), after("first", "a"))
        store(queue, after("b", "a", with_results=True), after("c", "a", with_results=True), after("d", "a"))
        worker.turn(1)
        worker.turn(0, done="a", results={"a": "7"})
        assert list(Flows(queue).results.values()) == [2]
        for waiting in (3, 2, 1, 0):
            Flows(queue).check()
            assert queue.inspector.counts().held == waiting
            queue.recovery().promote("q")
        assert queue.hash("inputs") == {"b": "1 1", "b 1": "done 7", "c": "1 1", "c 1": "done 7"}
        assert not queue.redis.exists(queue.key("edges"))


def test_several_ends_of_one_call_are_left_to_pulse_once(redis_url: str) -> None:
    with following_one_edge_per_call(), one_queue(redis_url) as queue:
        worker = queue.worker()
        store(queue, new_job(1, id="a"), new_job(1, id="x"), after("b", "a"), after("c", "a"), after("d", "x"))
        worker.turn(2)
        worker.turn(0, done="a", failed="x")
        assert queue.redis.llen(queue.key("resolving")) == 2
        Flows(queue).check()
        for _ in range(2):
            queue.recovery().promote("q")
        assert is_clean(queue)


def test_pulse_is_told_to_continue(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), *(after(f"j{number}", "a", run_in=3600) for number in range(400)))
    store(queue, *(after(f"k{number}", "a", run_in=3600) for number in range(400)))
    worker.turn(1)
    listener = queue.redis.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(queue.channel("due"))
    assert listener.get_message(timeout=1) is None
    worker.turn(0, done="a")
    told = []
    while message := listener.get_message(timeout=0.2):
        told.append(message["data"])
    listener.close()
    assert b"0" in told
    assert queue.recovery().heartbeat("q", 15_000, []).due_ms != 0
    assert queue.inspector.counts().held == 0
    assert is_clean(queue)


def test_calls_that_follow_edges_take_no_more_of_them_than_one_may(queue: OneQueue, worker: HandWorker) -> None:
    for name in "ab":
        store(queue, new_job(1, id=name), *(after(f"{name}{number}", name) for number in range(499)))
    store(queue, after("last", "a"))
    store(queue, new_job(1, id="c"), *(after(f"c{number}", "c") for number in range(400)))
    worker.turn(3)
    fence = worker.fence
    worker.turn(0, done="abc", fence=fence)
    assert queue.inspector.counts().held == 1400 - 1 - 500
    queue.recovery().promote("q")
    assert queue.inspector.counts().held == 1400 - 1 - 1000
    queue.recovery().promote("q")
    assert is_clean(queue)


@pytest.mark.parametrize("how", ["cancel", "withdraw", "enqueue"])
def test_a_worker_is_woken_for_a_job_that_a_call_lets_go(queue: OneQueue, worker: HandWorker, how: str) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    worker.turn(1)
    if how == "cancel":
        store(queue, after("c", "b", when="ended", priority=2))
        queue.producer.cancel("b")
    elif how == "withdraw":
        store(queue, new_job(2, id="a"))
        store(queue, after("c", "a", when="ended", priority=2))
        queue.producer.cancel("a")
    else:
        queue.producer.cancel("b")
        store(queue, after("c", "b", when="ended", priority=2))
    assert queue.state().tokens == 1
    assert worker.turn(1, done="a") == ["c"]


def test_a_held_id_is_in_use(queue: OneQueue, worker: HandWorker) -> None:
    queue.enqueue("b")
    worker.turn(1)
    worker.turn(0, failed="b")
    [member] = queue.redis.zrange(queue.key("dead"), 0, -1)
    store(queue, new_job(1, id="a"), after("b", "a"))
    reply = queue.link.run(script("revive"), queue.base, member.decode())
    assert isinstance(reply, list)
    assert reply[1] < 0
    with pytest.raises(UsageError, match="is held, not scheduled"):
        queue.producer.run_now("b")
    with pytest.raises(Exists):
        store(queue, new_job(1, id="b"), if_exists="refuse")
    assert store(queue, new_job(1, id="b"), if_exists="skip") == ["b"]
    assert queue.state().jobs == {"a"}
    Flows(queue).check()


def test_a_cancel_for_another_job_of_the_id_leaves_the_held_one(queue: OneQueue) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    reply = queue.link.run(script("cancel"), queue.base, "b", 0, "1 1")
    assert reply[1] == 0
    assert set(queue.hash("held")) == {"b"}


def test_max_items_counts_each_held_job_once(queue: OneQueue) -> None:
    queue.set_options(max_items=3)
    store(queue, new_job(1, id="a"), after("b", "a"))
    store(queue, new_job(2, id="b"), new_job(2, id="b"), after("c", "b"))
    with pytest.raises(QueueFull):
        store(queue, after("d", "b"))
    store(queue, new_job(2, id="b"), new_job(2, id="c"))


def test_a_deleted_queue_journals_its_held_jobs(queue: OneQueue) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    queue.redis.hset(queue.key("ends"), "x", "done")
    queue.redis.hset(queue.key("ends:old"), "y", "done")
    assert queue.registry.delete("q", force=True) == 2
    assert not queue.redis.exists(queue.key("ends"), queue.key("ends:old"))


def test_items_of_other_modes_wait_without_results(redis_url: str) -> None:
    with one_queue(redis_url, mode="on_request", item_timeout_ms=60_000) as queue:
        store(queue, new_job(1, id="a"), after("b", "a", when="ended"))
        assert queue.redis.zrange(queue.key("expiries"), 0, -1) == [b"a"]
        with pytest.raises(WrongMode, match="need a queue of mode work"):
            store(queue, after("c", "a", with_results=True))
        assert queue.producer.cancel("a")
        assert queue.redis.zrange(queue.key("expiries"), 0, -1) == [b"b"]


def test_a_released_item_counts_as_a_success(redis_url: str) -> None:
    with gate(redis_url, "auto_release") as queue:
        store(queue, new_job(1, id="a"), after("b", "a"))
        queue.ask("x")
        assert queue.release().leased
        queue.ack("x", queue.ask("x", register=False))
        assert queue.state().waiting == {5: ["b"]}
        assert queue.hash("ends") == {"a": "released"}
        Replay().read_all(queue.entries())


def test_a_held_job_counts_as_a_run_of_its_schedule(queue: OneQueue) -> None:
    rig = ScheduleRig(queue)
    rig.set()
    store(queue, new_job(1, id="a"), after("schedule:k", "a"))
    with pytest.raises(Exists):
        rig.schedules.trigger("k")
    rig.close()
    Flows(queue).check()


def test_a_rescue_returns_jobs_whose_results_are_wanted(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, *(new_job(1, id=name) for name in "axyz"), after("b", "a", with_results=True))
    worker.turn(4)
    assert queue.recovery().rescue("q", Position("w1", worker.number, 2, True)) == 1
    assert queue.worker("w2").turn(5) == ["a", "z"]
    assert queue.hash("ends") == {"x": "done"}


def test_a_hint_of_an_earlier_job_ends_nothing_of_a_held_one(queue: OneQueue, worker: HandWorker) -> None:
    queue.enqueue("b", "x")
    queue.redis.hdel(queue.key("jobs"), "b")
    store(queue, after("b", "x"), after("c", "b"))
    assert worker.turn(2) == ["x"]
    assert queue.inspector.counts().dropped == 1
    assert set(queue.hash("held")) == {"b", "c"}
    assert worker.turn(1, done="x") == ["b"]
    assert worker.turn(1, done="b") == ["c"]


def test_a_dead_job_is_retried_with_the_results_that_it_used(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a", with_results=True))
    worker.turn(1)
    worker.turn(1, done="a", results={"a": "7"})
    worker.turn(0, failed="b")
    assert not queue.redis.exists(queue.key("inputs"))
    DeadJobs(queue.link, "forq:", "q").retry("b")
    assert queue.hash("inputs") == {"b": "1 1", "b 1": "done 7"}
    record = worker.whole_turn(1).jobs[1]
    assert b"i=1,I=1" in record
    worker.turn(0, done="b")
    assert is_clean(queue)
    assert not queue.redis.exists(queue.key("dead:inputs"))


def test_a_dead_job_waits_again_for_the_one_that_failed(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "a", "b", with_results=True), after("d", "c"))
    worker.turn(2)
    worker.turn(0, done="a", failed="b", results={"a": "1"})
    dead = DeadJobs(queue.link, "forq:", "q")
    assert set(queue.state().dead) == {"b", "c", "d"}
    with pytest.raises(UsageError, match="is not done, and does not run: retry that first"):
        dead.retry("c")
    assert dead.retry_with_dependants("b").done == 3
    assert queue.inspector.counts().held == 2
    assert worker.turn(5) == ["b"]
    assert worker.turn(5, done="b", results={"b": "2"}) == ["c"]
    assert queue.hash("inputs") == {"c": "2 1", "c 1": "done 1", "c 2": "done 2"}
    assert worker.turn(5, done="c") == ["d"]
    worker.turn(0, done="d")
    assert is_clean(queue)
    assert not queue.redis.exists(queue.key("dead:holds"), queue.key("dead:inputs"))


def test_all_dead_jobs_are_retried_in_any_order(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="z"), after("y", "z"), after("x", "y"))
    worker.turn(1)
    worker.turn(0, failed="z")
    chunk = DeadJobs(queue.link, "forq:", "q").retry_some()
    assert (chunk.done, chunk.refused) == (3, 0)
    assert [worker.turn(1, done=done) for done in ("", "z", "y", "x")] == [["z"], ["y"], ["x"], []]


def test_a_dead_job_runs_once_what_it_waits_for_is_done(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), after("b", "a"))
    worker.turn(1)
    worker.turn(0, failed="a")
    dead = DeadJobs(queue.link, "forq:", "q")
    dead.retry("a")
    assert worker.turn(1) == ["a"]
    worker.turn(0, done="a")
    dead.retry("b")
    assert worker.turn(1) == ["b"]


def test_discarded_and_forgotten_dead_jobs_leave_nothing(queue: OneQueue, worker: HandWorker) -> None:
    store(queue, new_job(1, id="a"), new_job(1, id="b"), after("c", "a", "b", with_results=True))
    worker.turn(2)
    worker.turn(0, done="a", failed="b", results={"a": "1"})
    dead = DeadJobs(queue.link, "forq:", "q")
    dead.discard("c")
    assert not queue.redis.exists(queue.key("dead:holds"), queue.key("dead:inputs"))
