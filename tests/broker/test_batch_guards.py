"""Batches: calls for what does not exist, limits of one call, wakes, the journal, and what is left of ended batches."""

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from forq.batch import Batch
from forq.broker import flows
from forq.broker.batches import StoredBatch
from forq.broker.dependencies import AS_ARGUMENT, AS_LIST
from forq.broker.enqueue import Update
from forq.broker.flows import FlowJob, store_flow
from forq.broker.link import READ_BYTES
from forq.broker.recovery import Position
from forq.broker.reports import Reports
from forq.broker.scripts import FLOWS_OFF, NO_QUEUE, OK, OTHER_PROTOCOL, script
from forq.client import Client, new_job
from forq.errors import BatchEnded, Exists, FlowsOff, NoResult, UnknownBatch
from forq.version import PROTOCOL
from tests.broker.slow_flows import following_one_edge_per_call
from tests.broker.test_batches import age_members, callbacks, deliver, ids, nonce_of, pass_hours, set_nonce
from tests.broker.test_held_guards import lines
from tests.support.drive.one_queue import HandWorker, OneQueue, one_queue
from tests.support.drive.release_queue import gate

PREFIX = "forq:"
TEN_MINUTES_MS = 600_000


@pytest.fixture
def other(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, "other") as queue:
        yield queue


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    client = Client(redis_url)
    yield client
    client.close()


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


def promote(queue: OneQueue, times: int = 1) -> None:
    for _ in range(times):
        queue.recovery().promote(queue.name)


def child_of(client: Client, batch: Batch, number: int, job_id: str) -> Batch:
    return Batch(client.link, client.prefix, "q", batch.id, parent=number, parent_id=job_id)


def lose(queue: OneQueue, what: str, *numbers: int) -> None:
    """As pulse does, long after their numbers were reserved."""
    age_members(queue, 1)
    entry = queue.hash("batches" if what[0] == "b" else "held").get(what[1:], "0").split(" ")
    nonce = entry[-1] if what[0] == "b" else entry[0]
    queue.link.run(script("lose"), queue.base, "lost", what, nonce, *numbers)


def ms_until_check(queue: OneQueue, what: str) -> float:
    seconds, micros = queue.redis.time()
    at_ms: float = queue.redis.zscore(queue.key("checks"), what)
    now_ms: float = seconds * 1000 + micros / 1000
    return at_ms - now_ms


def flow_job(name: str, queue: str, *needs: int, use: int = 0) -> FlowJob:
    return FlowJob(queue, new_job({"n": name}, id=name), needs, use=use)


def keys_of(queue: OneQueue, base: str | None = None) -> set[str]:
    return {key.decode() for key in queue.redis.scan_iter(f"{base or queue.base}:*")}


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("open_batch", [PROTOCOL, "b", 0]),
        ("add_members", ["b", "", 0, "q a"]),
        ("seal_batch", ["b", 0]),
        ("report", ["done 1 job a 1 1 0\n"]),
        ("attach", ["b", "to q 1 job a 1 1 0"]),
        ("verify", ["q", "a", "job a 1 1 0"]),
        ("lose", ["lost", "bb", 1]),
        ("describe_flow", ["f", 1000, "[]"]),
    ],
)
def test_a_queue_that_does_not_exist_gets_no_keys(queue: OneQueue, verb: str, args: list[Any]) -> None:
    base = f"{queue.base}none"
    assert queue.link.run(script(verb), base, *args) == [NO_QUEUE]
    assert keys_of(queue, base) == set()


def test_a_client_of_another_protocol_opens_no_batch(queue: OneQueue) -> None:
    assert queue.link.run(script("open_batch"), queue.base, "0", "b", 0)[0] == OTHER_PROTOCOL
    assert not queue.redis.exists(queue.key("batches"))


def test_no_batch_and_no_flow_begins_where_flows_are_off(queue: OneQueue, client: Client) -> None:
    queue.set_options(flows=0)
    with pytest.raises(FlowsOff):
        client.batch("q")
    assert queue.link.run(script("describe_flow"), queue.base, "f", 1000, "[]") == [FLOWS_OFF]
    assert not queue.redis.exists(queue.key("batches"))


def test_a_queue_where_flows_are_off_has_no_members(queue: OneQueue, other: OneQueue, client: Client) -> None:
    other.set_options(flows=0)
    batch = client.batch("q", **callbacks("on_end"))
    with pytest.raises(FlowsOff, match="forqctl set other flows=auto"), batch:
        batch.enqueue("other", 1, id="x")
    assert other.state().jobs == set()
    assert "flows_used" not in other.hash("options")
    assert batch.info()["state"] == "cancelled"


def test_a_flow_over_a_queue_where_flows_are_off_is_not_stored(queue: OneQueue, other: OneQueue) -> None:
    other.set_options(flows=0)
    for first, second in (("q", "other"), ("other", "q")):
        with pytest.raises(FlowsOff):
            store_flow(queue.link, PREFIX, "f", [flow_job("a", first), flow_job("b", second, 0)])
        deliver(queue, other)
        for each in (queue, other):
            assert each.state().jobs == set()
            assert not any(each.redis.exists(each.key(name)) for name in ("held", "edges", "sources", "flow:f"))


def test_an_unknown_batch_gets_no_members_edges_or_end(queue: OneQueue, client: Client) -> None:
    unknown = Batch(client.link, PREFIX, "q", "no-such")
    with pytest.raises(UnknownBatch):
        unknown.seal()
    unknown.enqueue("q", 1)
    with pytest.raises(UnknownBatch):
        unknown.flush()
    with pytest.raises(UnknownBatch):
        unknown._stored().attach(["to other 1 job a 1 1 0"])


def test_a_queue_without_flows_reads_none_of_their_keys(queue: OneQueue) -> None:
    """Each would cost every call a command."""
    queue.redis.zadd(queue.key("checks"), {"bx": 1})
    queue.redis.hset(queue.key("reports"), "x", 1)
    queue.redis.hset(queue.key("inputs"), mapping={"a": "1 2", "gone": "1 2"})
    queue.enqueue("a")
    assert queue.recovery().promote("q") is None
    assert queue.redis.exists(queue.key("checks"))
    worker = queue.worker()
    assert not queue.recovery().heartbeat("q", 1000, [Position("w1", 0, 0, False)]).has_reports
    assert b"i=1" not in worker.whole_turn(1).jobs[1]
    queue.redis.rpush(queue.key("pending"), "gone")
    assert worker.turn(1, done="a") == []
    assert queue.redis.hexists(queue.key("inputs"), "gone")


def test_a_batch_is_in_the_journal_with_what_its_end_does(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q", id="B", **callbacks("on_done")) as batch:
        assert lines(queue, "batch_opened") == ["batch_opened 0 B"]
    assert lines(queue, "batch_ended") == ["batch_ended 0 B done 0"]
    assert lines(queue, "held") == ["held 0 B:on_done done+"]
    assert lines(queue, "met") == ["met 0 B:on_done"]
    assert worker.turn(1) == ids(batch, "on_done")


def test_what_reports_and_losses_do_is_in_the_journal(queue: OneQueue, other: OneQueue, client: Client) -> None:
    for name in ("R", "L"):
        with client.batch("q", id=name, **callbacks("on_end")) as batch:
            batch.enqueue("other", 1, id=f"m{name}")
    other.producer.cancel("mR")
    deliver(other)
    assert lines(queue, "met") == ["met 0 R:on_end"]
    lose(queue, "bL", 1)
    assert lines(queue, "met") == ["met 0 R:on_end", "met 0 L:on_end"]


def test_an_idle_worker_is_woken_for_a_callback(queue: OneQueue, other: OneQueue, client: Client) -> None:
    for step, name in enumerate(("sealed", "reported", "lost")):
        with client.batch("q", id=name, on_end=new_job(1, priority=9)) as batch:
            if name != "sealed":
                batch.enqueue("other", 1, id=name)
        if name == "reported":
            other.producer.cancel(name)
            deliver(other)
        elif name == "lost":
            lose(queue, "blost", 1)
        assert queue.pending() == [""], name
        worker = queue.worker(f"w{step}")
        assert worker.turn(1) == [f"{name}:on_end"]
        queue.redis.delete(queue.key("pending"))


def test_a_batch_has_ended_when_it_was_sealed(queue: OneQueue, client: Client) -> None:
    with client.batch("q", id="B"):
        *fields, _, nonce = queue.hash("batches")["B"].split(" ")
        queue.redis.hset(queue.key("batches"), "B", " ".join([*fields, "1000", nonce]))
    ended_at = client.find_batch("q", "B").info()["ended_at"]
    assert ended_at is not None
    assert ended_at > 1


def test_a_second_open_joins_the_batch(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    for job_id in "ab":
        batch = client.batch("q", id="B", **callbacks("on_done"))
        batch.enqueue("q", 1, id=job_id)
        batch.flush()
    assert batch.info()["members"] == 2
    batch.seal()
    assert worker.turn(5) == ["a", "b"]
    assert worker.turn(5, done="ab") == ids(batch, "on_done")


def test_a_second_open_does_not_repeat_a_callback_that_has_run(
    queue: OneQueue, client: Client, worker: HandWorker
) -> None:
    batch = client.batch("q", id="B", **callbacks("on_dead"))
    batch.enqueue("q", 1, id="a")
    batch.flush()
    worker.turn(1)
    assert worker.turn(1, failed="a") == ids(batch, "on_dead")
    worker.consumer.turn(9, [b"B:on_dead", worker.fence, 7], [], 0, 0)
    client.batch("q", id="B", **callbacks("on_dead"))
    assert queue.state().jobs == set()


def test_a_sealed_batch_takes_members_of_running_members_only(
    queue: OneQueue, client: Client, worker: HandWorker
) -> None:
    with client.batch("q") as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)
    batch.enqueue("q", 1)
    with pytest.raises(BatchEnded):
        batch.flush()
    child = child_of(client, batch, 1, "a")
    child.enqueue("q", 1)
    child.flush()
    assert batch.info()["members"] == 2


def test_the_place_of_a_child_that_has_ended_is_not_given_again(
    queue: OneQueue, client: Client, worker: HandWorker
) -> None:
    """Whether or not its token is still known."""
    with client.batch("q", id="B") as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)
    stored = batch._stored()
    assert stored.reserve([("q", "x"), ("q", "y")], parent=1) == [2, 3]
    epoch, nonce = queue.hash("options")["epoch"], queue.hash("batches")["B"].split(" ")[8]
    queue.link.run(script("report"), queue.base, f"done {epoch} batch B {nonce} 2 0\n")
    assert stored.reserve([("q", "x"), ("q", "y"), ("q", "z")], parent=1) == [0, 3, 4]


def test_a_running_member_adds_none_to_a_cancelled_or_abandoned_batch(
    queue: OneQueue, client: Client, worker: HandWorker
) -> None:
    with client.batch("q") as cancelled:
        cancelled.enqueue("q", 1, id="a")
    abandoned = client.batch("q")
    abandoned.enqueue("q", 1, id="b")
    abandoned.flush()
    assert worker.turn(2) == ["a", "b"]
    cancelled.cancel()
    pass_hours(queue, 1.1)
    promote(queue)
    for batch, job_id in ((cancelled, "a"), (abandoned, "b")):
        child = child_of(client, batch, 1, job_id)
        child.enqueue("q", 1)
        with pytest.raises(BatchEnded):
            child.flush()
        assert batch.info()["members"] == 1


def test_a_member_of_an_abandoned_batch_counts_when_it_ends(
    queue: OneQueue, client: Client, worker: HandWorker
) -> None:
    batch = client.batch("q", **callbacks("on_end"))
    batch.enqueue("q", 1, id="a")
    batch.flush()
    pass_hours(queue, 1.1)
    promote(queue)
    worker.turn(1)
    worker.turn(0, done="a")
    info = batch.info()
    assert (info["state"], info["open"], info["done"]) == ("abandoned", 0, 1)
    assert queue.state().dead == ids(batch, "on_end")


def test_a_cancelled_batch_fails_though_all_members_are_done(
    queue: OneQueue, client: Client, worker: HandWorker
) -> None:
    with client.batch("q", **callbacks("on_done", "on_end")) as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)
    batch.cancel()
    batch.seal()
    assert batch.info()["state"] == "cancelled"
    assert worker.turn(5, done="a") == ids(batch, "on_end")
    assert (batch.info()["state"], batch.info()["done"]) == ("failed", 1)


def test_a_batch_that_is_done_stays_done(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q", **callbacks("on_done", "on_end")) as batch:
        pass
    assert batch.cancel() == 0
    assert batch.info()["state"] == "done"
    assert worker.turn(5) == ids(batch, "on_done", "on_end")
    assert len(lines(queue, "batch_ended")) == 1


def test_a_released_member_is_done(redis_url: str, client: Client) -> None:
    with gate(redis_url, "auto_release") as queue:
        with client.batch("q") as batch:
            batch.enqueue("q", 1, id="a")
        queue.ask("x")
        assert queue.release().leased
        queue.ack("x", queue.ask("x", register=False))
        info = batch.info()
        assert (info["state"], info["done"]) == ("done", 1)


def test_results_are_kept_only_if_they_are_wanted(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q") as batch:
        batch.enqueue("q", 1, id="a")
    assert b"w=1" not in worker.whole_turn(1).jobs[1]
    worker.turn(0, done="a", results={"a": "1"})
    assert batch.info()["state"] == "done"
    assert not queue.redis.exists(queue.key("batch:results"))


def test_a_member_without_a_result_is_told_from_one_that_is_not_done(
    queue: OneQueue, other: OneQueue, client: Client, worker: HandWorker
) -> None:
    with client.batch("q", id="B", results=True) as batch:
        for job_id in "ab":
            batch.enqueue("q", 1, id=job_id)
        batch.enqueue("other", 1, id="c")
    assert worker.turn(2) == ["a", "b"]
    worker.turn(0, done="a", failed="b")
    runner = other.worker()
    runner.turn(1)
    runner.turn(0, done="c")
    deliver(other)
    missing = "done !its result was not kept"
    assert queue.hash("batch:results") == {"B 1": missing, "B 2": "dead ", "B 3": missing}
    with pytest.raises(NoResult, match="its result was not kept"):
        batch.results()


def test_jobs_wait_for_the_end_of_a_batch_or_for_its_first_death(
    queue: OneQueue, client: Client, worker: HandWorker
) -> None:
    with client.batch("q") as batch:
        for job_id in "ab":
            batch.enqueue("q", 1, id=job_id)
    add = queue.producer.enqueue
    add([new_job(1, id="early", after=[batch], when="dead")])
    assert worker.turn(2) == ["a", "b"]
    fence = worker.fence
    assert worker.turn(5, failed="a", keep=1) == ["early"]
    add([new_job(1, id="z", after=[batch], when="ended")])
    add([new_job(1, id="late", after=[batch], when="dead")])
    assert worker.turn(5, keep=2) == ["late"]
    assert worker.turn(5, done="b", keep=2, fence=fence) == ["z"]
    add([new_job(1, id="last", after=[batch], when="dead")])
    assert worker.turn(5, keep=3) == ["last"]


def test_a_job_that_waits_for_a_death_in_a_batch_that_is_done_is_cancelled(queue: OneQueue, client: Client) -> None:
    with client.batch("q") as batch:
        pass
    queue.producer.enqueue([new_job(1, id="z", after=[batch], when="dead")])
    assert lines(queue, "cancelled") == ["cancelled 0 z"]


def test_a_callback_can_be_waited_for(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q", id="B", **callbacks("on_done")):
        queue.producer.enqueue([new_job(1, id="z", after="B:on_done")])
    assert worker.turn(5) == ["B:on_done"]
    number = worker.number + 1
    turn = worker.consumer.turn(number, [b"B:on_done", worker.fence, 7], [], 0, 5)
    assert turn.jobs[::2] == [b"z"]


def test_an_update_of_a_callback_shows_that_it_waits_for_a_batch(queue: OneQueue, client: Client) -> None:
    client.batch("q", id="B", **callbacks("on_end"))
    queue.producer.enqueue([new_job(2, id="B:on_end")], Update("update"))
    assert lines(queue, "held") == ["held 0 B:on_end ended+"] * 2


def test_a_member_does_not_update_a_job_with_its_id(queue: OneQueue, client: Client) -> None:
    queue.enqueue("a")
    batch = client.batch("q", id="B")
    number = batch._stored().reserve([("q", "a")])[0]
    edge = batch._stored().edge(number, "q", keeps_results=False)
    with pytest.raises(Exists):
        queue.producer.enqueue([new_job(2, id="a")._replace(edges=(edge,))], Update("update"))
    assert queue.inspector.job("a")["data"] == {"n": "a"}


def test_the_ends_of_members_count_in_a_queue_without_held_jobs(
    queue: OneQueue, other: OneQueue, client: Client
) -> None:
    with client.batch("q") as batch:
        batch.enqueue("other", 1, id="a")
        batch.flush()
    assert other.hash("options")["flows_used"] == "1"
    other.producer.cancel("a")
    deliver(other)
    assert batch.info()["state"] == "failed"


def test_reports_are_announced_once_until_they_are_delivered(queue: OneQueue, other: OneQueue, client: Client) -> None:
    with client.batch("q") as batch:
        for job_id in "abc":
            batch.enqueue("other", 1, id=job_id)
    channel = other.channel("due")
    heard = other.redis.pubsub()
    heard.subscribe(channel)
    for job_id in "ab":
        other.producer.cancel(job_id)
    beat = other.recovery().heartbeat("other", 1000, [])
    assert beat.has_reports
    deliver(other)
    assert not other.recovery().heartbeat("other", 1000, []).has_reports
    other.producer.cancel("c")
    other.redis.publish(channel, "last")
    said: list[bytes] = []
    while not said or said[-1] != b"last":
        message = heard.get_message(ignore_subscribe_messages=True, timeout=10)
        if message is not None:
            said.append(message["data"])
    heard.close()
    assert said.count(b"report") == 2


def test_reports_behind_those_that_were_delivered_are_not_forgotten(
    queue: OneQueue, other: OneQueue, client: Client
) -> None:
    with client.batch("q") as batch:
        for job_id in "ab":
            batch.enqueue("other", 1, id=job_id)
    other.producer.cancel("a")
    lines_then = other.redis.lrange(other.key("reports:q"), 0, -1)
    other.producer.cancel("b")
    assert queue.link.run(script("report"), queue.base, *lines_then) == [OK, 1]
    Reports(other.link, PREFIX)._forget(other.base, "reports:q", lines_then)
    deliver(other)
    assert batch.info()["state"] == "failed"


def test_one_call_applies_a_limited_number_of_reports(queue: OneQueue, other: OneQueue) -> None:
    """Burying a job costs as much as ten edges."""
    count = 60
    store_flow(
        queue.link,
        PREFIX,
        "f",
        [flow_job(f"x{n}", "other") for n in range(count)] + [flow_job(f"z{n}", "q", n) for n in range(count)],
    )
    for number in range(count):
        other.producer.cancel(f"x{number}")
    waiting = other.redis.lrange(other.key("reports:q"), 0, -1)
    assert len(waiting) == count
    assert queue.link.run(script("report"), queue.base, *waiting) == [OK, 46]
    deliver(other)
    assert len(queue.state().dead) == count


def test_one_call_stores_a_limited_length_of_reported_results(queue: OneQueue, other: OneQueue, client: Client) -> None:
    with client.batch("q", id="B", results=True) as batch:
        for number in range(3):
            batch.enqueue("other", 1, id=f"{number}")
    epoch = queue.hash("options")["epoch"]
    long = '"' + "x" * (READ_BYTES // 2 + 100) + '"'
    nonce = queue.hash("batches")["B"].split(" ")[8]
    reports = [f"done {epoch} batch B {nonce} {number} 1\n{long}" for number in (1, 2, 3)]
    assert queue.link.run(script("report"), queue.base, *reports) == [OK, 2]
    assert queue.link.run(script("report"), queue.base, *reports[2:]) == [OK, 1]
    assert batch.info()["state"] == "done"


def test_one_call_reports_a_limited_length_of_results(queue: OneQueue, other: OneQueue) -> None:
    jobs = [flow_job("x", "other")] + [flow_job(f"z{n}", "q", 0, use=AS_ARGUMENT) for n in range(3)]
    store_flow(queue.link, PREFIX, "f", jobs)
    deliver(queue)
    runner = other.worker()
    assert runner.turn(1) == ["x"]
    runner.turn(0, done="x", results={"x": '"' + "x" * (READ_BYTES // 2 + 100) + '"'})
    assert other.redis.llen(other.key("reports:q")) == 2
    promote(other)
    assert other.redis.llen(other.key("reports:q")) == 3


def test_a_result_is_reported_to_those_only_that_want_it(queue: OneQueue, other: OneQueue) -> None:
    jobs = [flow_job("x", "other"), flow_job("y", "q", 0), flow_job("z", "q", 0, use=AS_LIST)]
    store_flow(queue.link, PREFIX, "f", jobs)
    deliver(queue)
    runner = other.worker()
    runner.turn(1)
    runner.turn(0, done="x", results={"x": "77"})
    reports = [line.partition(b"\n") for line in other.redis.lrange(other.key("reports:q"), 0, -1)]
    assert sorted((edge.split(b" ")[3], result) for edge, _, result in reports) == [(b"y", b""), (b"z", b"77")]


def test_an_edge_from_a_batch_that_has_ended_is_followed_at_once(
    queue: OneQueue, other: OneQueue, client: Client
) -> None:
    with client.batch("q", id="B") as batch:
        pass
    batch._stored().attach(["to other 5 job z 1 1 0"])
    assert queue.redis.lrange(queue.key("reports:other"), 0, -1) == [b"done 5 job z 1 1 0\n"]
    assert not queue.redis.exists(queue.key("sources"), queue.key("edges"))


def test_one_call_looks_after_a_limited_number_of_batches(queue: OneQueue, client: Client) -> None:
    for number in range(21):
        client.batch("q", id=f"b{number}")
    pass_hours(queue, 1.1)
    assert queue.recovery().promote("q") == 0
    states = [entry.split(" ")[0] for entry in queue.hash("batches").values()]
    assert (states.count("open"), states.count("abandoned")) == (1, 20)
    promote(queue)
    assert not any(entry.startswith("open") for entry in queue.hash("batches").values())


def test_an_open_batch_has_an_hour_from_its_last_member_on(queue: OneQueue, client: Client) -> None:
    batch = client.batch("q", id="B")
    pass_hours(queue, 0.9)
    batch.enqueue("q", 1, id="a")
    batch.flush()
    pass_hours(queue, 0.2)
    promote(queue)
    assert batch.info()["state"] == "open"


def test_pulse_comes_back_to_look_after_a_batch(queue: OneQueue, other: OneQueue, client: Client) -> None:
    with client.batch("q", id="B") as batch:
        batch.enqueue("other", 1, id="a")
    due_ms = queue.recovery().promote("q")
    assert due_ms is not None
    assert due_ms <= TEN_MINUTES_MS
    pass_hours(queue, 0.5)
    promote(queue)
    assert TEN_MINUTES_MS / 2 < ms_until_check(queue, "bB") <= TEN_MINUTES_MS
    assert batch.info()["open"] == 1


def test_a_child_does_not_delay_the_search_for_lost_members(
    queue: OneQueue, client: Client, worker: HandWorker
) -> None:
    with client.batch("q", id="B") as batch:
        batch.enqueue("q", 1, id="a")
    worker.turn(1)
    child = child_of(client, batch, 1, "a")
    child.enqueue("q", 1)
    child.flush()
    assert ms_until_check(queue, "bB") <= TEN_MINUTES_MS


def test_a_job_with_the_id_of_a_batch_is_not_taken_for_it(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q", id="same") as batch:
        batch.enqueue("q", 1, id="a")
    queue.redis.zadd(queue.key("checks"), {"jsame": 1})
    promote(queue)
    assert queue.redis.zrange(queue.key("checks"), 0, -1) == [b"bsame"]
    age_members(queue, 1)
    queue.link.run(script("lose"), queue.base, "lost", "jsame", nonce_of(queue, "same"), 1)
    assert batch.info()["open"] == 1
    queue.producer.enqueue([new_job(1, id="same", after="a")])
    # As if both had been stored in the same microsecond.
    set_nonce(queue, "same", queue.hash("held")["same"].split(" ")[0])
    client.batch("q", id="z")
    worker.turn(1)
    lose(queue, "bsame", 1)
    assert batch.info()["open"] == 0
    assert queue.redis.hexists(queue.key("held"), "same")


def test_a_member_whose_report_is_on_its_way_is_not_lost(queue: OneQueue, other: OneQueue, client: Client) -> None:
    with client.batch("q", id="B") as batch:
        batch.enqueue("other", 1, id="a")
    runner = other.worker()
    runner.turn(1)
    runner.turn(0, done="a")
    pass_hours(queue, 0.5)
    promote(queue)
    assert batch.info()["open"] == 1
    deliver(other)
    assert batch.info()["state"] == "done"


def test_a_member_whose_edges_are_still_followed_is_not_lost(redis_url: str, client: Client) -> None:
    with following_one_edge_per_call(), one_queue(redis_url) as queue, one_queue(redis_url, "other") as other:
        with client.batch("q", id="B") as batch:
            for job_id in "ab":
                batch.enqueue("other", 1, id=job_id)
        runner = other.worker()
        runner.turn(2)
        runner.turn(0, done="ab")
        deliver(other)
        assert batch.info()["open"] == 1
        pass_hours(queue, 0.5)
        promote(queue)
        assert batch.info()["open"] == 1
        promote(other)
        deliver(other)
        assert batch.info()["state"] == "done"


def test_a_lost_member_is_noticed_though_another_job_has_its_id(
    queue: OneQueue, other: OneQueue, client: Client
) -> None:
    with client.batch("q", id="first") as first:
        first.enqueue("other", 1, id="a")
    second = client.batch("q", id="second")
    second.enqueue("other", 1, id="a")
    with pytest.raises(Exists):
        second.flush()
    assert second.cancel() == 0
    assert other.state().jobs == {"a"}
    pass_hours(queue, 0.5)
    promote(queue)
    assert (first.info()["open"], second.info()["open"]) == (1, 0)
    assert second.info()["other"] == 1


def test_a_job_with_several_edges_is_not_lost(queue: OneQueue, other: OneQueue) -> None:
    jobs = [flow_job("x", "other"), *(flow_job(f"z{n}", "q", 0) for n in range(3))]
    store_flow(queue.link, PREFIX, "f", jobs)
    pass_hours(queue, 0.5)
    promote(queue)
    assert queue.inspector.counts().held == 3
    assert all(ms_until_check(queue, f"jz{n}") > TEN_MINUTES_MS / 2 for n in range(3))


def test_a_dependant_of_a_job_with_many_edges_is_not_lost(queue: OneQueue, other: OneQueue) -> None:
    jobs = [flow_job("x", "other"), *(flow_job(f"z{n}", "q", 0) for n in range(501))]
    store_flow(queue.link, PREFIX, "f", jobs)
    found = queue.link.run(script("verify"), other.base, "q", "x", edges_of(other)[-1], "x", "none")
    assert found == [OK, 1, 0]


def edges_of(queue: OneQueue) -> list[str]:
    """Of one group, in their order."""
    return [edge for _, edge in sorted(queue.hash("edges").items(), key=lambda pair: int(pair[0].split(" ")[1]))]


def test_an_abandoned_batch_is_forgotten_with_its_open_members(queue: OneQueue, client: Client) -> None:
    batch = client.batch("q", id="B")
    batch.enqueue("q", 1, id="a")
    batch.flush()
    pass_hours(queue, 2)
    promote(queue)
    assert queue.redis.exists(queue.key("batch:members"))
    pass_hours(queue, 25)
    promote(queue)
    with pytest.raises(UnknownBatch):
        batch.info()
    assert not any(queue.redis.exists(queue.key(name)) for name in ("batches", "batch:members", "checks"))


def test_an_ended_batch_without_members_is_forgotten(queue: OneQueue, client: Client) -> None:
    with client.batch("q", id="B"):
        pass
    promote(queue)
    assert "B" in queue.hash("batches")
    pass_hours(queue, 25)
    promote(queue)
    assert not queue.redis.exists(queue.key("batches"), queue.key("checks"))


def test_a_member_with_many_children_is_forgotten_in_parts(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q", id="B") as batch:
        batch.enqueue("q", 1, id="a")
    count = 9_000
    stored = StoredBatch(queue.link, PREFIX, "q", "B")
    stored.reserve([("q", f"c{number}") for number in range(count)], parent=1)
    worker.turn(1)
    worker.turn(0, done="a")
    age_members(queue, 1)
    nonce = queue.hash("batches")["B"].split(" ")[8]
    for first in range(2, count + 2, 500):
        numbers = range(first, min(first + 500, count + 2))
        queue.link.run(script("lose"), queue.base, "lost", "bB", nonce, *numbers)
    assert batch.info()["state"] == "failed"
    pass_hours(queue, 25)
    promote(queue)
    assert batch.info()["members"] == count + 1 - 500
    promote(queue, 18)
    assert not any(queue.redis.exists(queue.key(name)) for name in ("batches", "batch:children", "checks"))


def test_nothing_of_batches_is_left_of_a_deleted_queue(
    queue: OneQueue, other: OneQueue, client: Client, worker: HandWorker
) -> None:
    with client.batch("q", id="B", results=True) as batch:
        for job_id in "ab":
            batch.enqueue("q", 1, id=job_id)
    with client.batch("other", id="C") as elsewhere:
        elsewhere.enqueue("q", 1, id="c")
    assert worker.turn(2) == ["a", "b"]
    child = child_of(client, batch, 1, "a")
    child.enqueue("q", 1)
    child.flush()
    worker.turn(0, done="b", keep=1, results={"b": "1"})
    queue.producer.cancel("c")
    names = (
        "batches", "batch:members", "batch:results", "batch:children", "checks", "reports", "reports:other",
    )  # fmt: skip
    assert all(queue.redis.exists(queue.key(name)) for name in names)
    queue.registry.delete("q", force=True)
    assert not any(queue.redis.exists(queue.key(name)) for name in names)


def test_the_record_of_a_member_names_its_batch(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q", id="B") as batch:
        batch.enqueue("q", 1, id="a")
        batch.enqueue("q", 1, id="b", max_retries=3)
    queue.producer.enqueue([new_job(1, id="c"), new_job(1, id="d", after="c"), new_job(1, id="e")])
    assert options_of(worker.whole_turn(5).jobs) == {"a": "m=:B:1", "b": "r=3,m=:B:2", "c": "", "e": ""}


def test_a_member_is_claimed_though_its_edges_were_lost(queue: OneQueue, client: Client, worker: HandWorker) -> None:
    with client.batch("q", id="B") as batch:
        batch.enqueue("q", 1, id="a")
    queue.redis.delete(queue.key("edges"))
    assert options_of(worker.whole_turn(1).jobs) == {"a": ""}


def options_of(jobs: list[bytes]) -> dict[str, str]:
    """By job: its own options as its worker gets them."""
    heads = [record.partition(b"\n")[0][3:].split(b" ") for record in jobs[1::2]]
    return {
        job_id.decode(): head[6].decode() if len(head) > 6 and head[6] != b"-" else ""
        for job_id, head in zip(jobs[::2], heads, strict=True)
    }


def test_a_death_names_the_queue_of_the_other_job(queue: OneQueue, other: OneQueue, client: Client) -> None:
    store_flow(queue.link, PREFIX, "f", [flow_job("x:y:z", "other"), flow_job("b", "q", 0)])
    other.producer.cancel("x:y:z")
    deliver(other)
    error = queue.inspector.job("b")["error"]["message"]
    assert error == "job x:y:z of queue other, for which it waited, ended as cancelled"
    assert lines(queue, "unmet") == ["unmet 0 b - cancelled"]
    client.batch("q", id="B", **callbacks("on_end"))
    pass_hours(queue, 1.1)
    promote(queue)
    error = queue.inspector.job("B:on_end")["error"]["message"]
    assert error == "batch B, for which it waited, ended as abandoned"


def test_a_death_names_the_gate_of_a_flow(queue: OneQueue, other: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows._StoreBackwards, "_withdraw", lambda _: None)
    monkeypatch.setattr(StoredBatch, "seal", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store_flow(queue.link, PREFIX, "f", [flow_job("a", "q"), flow_job("x", "other")])
    pass_hours(queue, 1.1)
    promote(queue)
    deliver(queue)
    message = other.inspector.job("x")["error"]["message"]
    assert re.fullmatch("batch f[.][0-9a-f]{32} of queue q, for which it waited, ended as abandoned", message)


def test_the_plan_of_a_flow_is_kept_for_a_limited_time(queue: OneQueue) -> None:
    store_flow(queue.link, PREFIX, "f", [flow_job("a", "q")])
    assert queue.redis.pttl(queue.key("flow:f")) > 0
    assert orjson.loads(queue.redis.get(queue.key("flow:f")))[0]["id"] == "a"
