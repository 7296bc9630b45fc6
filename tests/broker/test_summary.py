"""The summary of a queue (lua/summary.lua): what it says of the queue, what calls save by it, and what happens if it is
lost, or changed by another library."""

from collections.abc import Callable, Iterator
from itertools import cycle

import pytest

from forq.broker.claim import report_progress
from forq.broker.enqueue import Update, new_job
from forq.broker.journal import read_summary, unpack_entry
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import Link
from forq.broker.scripts import OK, Script, script
from forq.errors import UnknownQueue
from forq.settings import stored_defaults
from tests.guards.model_runs import dump
from tests.support.drive.one_queue import EXPIRY_MS, HandWorker, OneQueue, State, one_queue
from tests.support.drive.server import Server

pytestmark = pytest.mark.one_server

FUTURE = 4_000_000_000  # epoch seconds
FUTURE_MS = FUTURE * 1000
SOME_KINDS = ("exists", "zrangebyscore", "zrange", "hgetall", "set")


def schedule(queue: OneQueue, job_id: str, seconds: float) -> None:
    queue.producer.enqueue([new_job(1, id=job_id, run_at=seconds)], Update("refuse"))


def fail(worker: HandWorker, job_id: str, retry_at: int | str = 1) -> None:
    worker.number += 1
    worker.consumer.turn(worker.number, [], [job_id, worker.fence, 1, "{}", "{}", "retriable", retry_at, "0.5"], 0, 0)


def wait_for(queue: OneQueue, job_id: str) -> None:
    assert queue.link.run(script("wait"), queue.base, job_id, "", "", 60_000, 1, "")[0] == OK


def progress(queue: OneQueue, worker: HandWorker, job_id: str) -> None:
    assert report_progress(queue.link, DEFAULT_PREFIX, "q", worker.name, job_id, int(worker.fence), 0.5, "half")


def last_hash(queue: OneQueue) -> str:
    return unpack_entry(queue.entries()[-1]).hash


def commands(queue: OneQueue, act: Callable[[], object]) -> dict[str, int]:
    """How often `act` makes the server run each of SOME_KINDS."""
    queue.redis.config_resetstat()
    act()
    stats = queue.redis.info("commandstats")
    return {kind: stats[f"cmdstat_{kind}"]["calls"] for kind in SOME_KINDS if f"cmdstat_{kind}" in stats}


def steps(queue: OneQueue) -> Iterator[object]:
    """Every kind of value in the summary changes in some step, and a later step depends on it."""
    one, two = queue.worker("w1"), queue.worker("w2")
    yield queue.enqueue("a")
    yield queue.enqueue("b", "c", "d", priority=3)
    yield one.turn(want=2)
    yield queue.enqueue("b", if_exists="update")
    yield one.turn(done="b", failed="c", want=1)
    yield queue.producer.cancel("a")
    yield queue.enqueue("a", "e", "f", "g")
    yield two.turn(want=3)
    schedule(queue, "s", FUTURE)
    schedule(queue, "t", FUTURE - 5)
    yield queue.redis.zadd(queue.key("scheduled"), {"t": 1000})
    queue.change_summary(first_due_ms=1000)
    yield one.turn(want=1, done="d")
    progress(queue, two, "a")
    yield None
    yield two.turn(done="a", keep=2)
    queue.set_due({"s": 1000})
    yield None
    queue.registry.configure("q", {"max_data": 500, "timeout_ms": 9000}, {})
    yield None
    yield one.turn(want=1, keep=1)
    yield queue.recover(two, 0, running=True, outcome="suspect")
    yield one.turn(want=9)
    yield queue.worker("w3", lane="suspects").turn(want=1)
    queue.registry.pause("q", paused=True)
    yield None
    yield one.turn(want=9, keep=9)
    queue.registry.pause("q", paused=False)
    yield None
    yield one.turn(want=9)
    yield queue.enqueue(*"ijklmn")
    yield [queue.producer.cancel(job_id) for job_id in "ikm"]
    yield queue.recovery().heartbeat("q", EXPIRY_MS, [])
    yield one.turn(want=9)
    queue.registry.configure("q", {"journal": 0}, {})
    yield None
    yield queue.enqueue("o")
    queue.registry.configure("q", {"journal": 1}, {})
    yield None
    yield queue.enqueue("p")
    yield one.turn(want=1)
    yield one.turn(done="o", want=1)


def run_steps(server: Server, monkeypatch: pytest.MonkeyPatch, *ways: str) -> list[object]:
    """Runs the steps; their calls run in these ways by turns. Returns replies and all keys after each step."""
    way = cycle(ways)

    def command(link: Link, its: Script, *call: object) -> tuple[object, ...]:
        return ("EVAL", its.source, 1, *call, its.verb) if next(way) == "eval" else ("FCALL", its.name, 1, *call)

    server.flush()
    seen: list[object] = []
    with monkeypatch.context() as patch, one_queue(server.url, max_retries=0) as queue:
        patch.setattr(Link, "_command", command)
        for reply in steps(queue):
            seen += [repr(reply) if isinstance(reply, list | bool | int) else None, dump(server)]
            numbers = [event.sequence for event in queue.events()]
            assert numbers == sorted(numbers)
    return seen


@pytest.mark.parametrize("ways", [("function",), ("function", "eval"), ("function", "function", "eval")], ids=" ".join)
def test_calls_of_several_libraries_continue_each_other(
    server: Server, monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...]
) -> None:
    """EVAL keeps nothing between calls, so it reads all that others have stored, and others read what it stores."""
    fresh = run_steps(server, monkeypatch, "eval")
    found = run_steps(server, monkeypatch, *ways)
    for number, (one, other) in enumerate(zip(found, fresh, strict=True)):
        assert one == other, number


def test_a_queue_begins_with_certain_values(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    queue.worker().turn(want=2)
    summary = queue.summary()
    assert summary[5:] == (0, 0, 0, 0, False, True)
    assert summary.fence == queue.state().owners["a"].removeprefix("w1:")
    assert (summary.sequence, summary.hash) == (3, last_hash(queue))


def test_a_call_that_changes_nothing_writes_nothing(queue: OneQueue) -> None:
    worker = queue.worker()
    worker.turn(want=1)
    assert "set" not in commands(queue, lambda: worker.turn(want=1))
    queue.change_summary(fence=7)
    assert "set" not in commands(queue, lambda: worker.turn(want=1)), "nor after another library has changed something"


def test_a_call_about_an_absent_queue_leaves_no_summary(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.registry.delete("q", force=True)
    with pytest.raises(UnknownQueue):
        queue.enqueue("b", "c")
    with pytest.raises(UnknownQueue):
        queue.enqueue("b")
    assert queue.redis.get(queue.key("summary")) is None


def test_the_first_due_time_is_that_of_the_first_scheduled_job_or_earlier(queue: OneQueue) -> None:
    def first_due() -> float:
        return queue.summary().first_due_ms / 1000

    worker = queue.worker()
    worker.turn()
    assert first_due() == 0
    for job_id, seconds, first in (("a", 5, 5), ("b", 7, 5), ("c", 3, 3), ("d", 4, 3)):
        schedule(queue, job_id, FUTURE + seconds)
        assert first_due() == FUTURE + first
    queue.producer.cancel("c")
    worker.turn()
    assert first_due() == FUTURE + 3, "too early does no harm"
    queue.set_due({"d": 1000})
    assert worker.turn(want=5) == ["d"]
    assert first_due() == FUTURE + 5
    queue.set_due({"a": 1000, "b": 1000})
    assert worker.turn(want=5, done="d") == ["a", "b"]
    assert first_due() == 0
    schedule(queue, "e", FUTURE + 9)
    assert first_due() == FUTURE + 9


def test_turns_look_for_due_jobs_only_when_there_may_be_one(queue: OneQueue) -> None:
    worker = queue.worker()
    worker.turn()
    assert "zrangebyscore" not in commands(queue, worker.turn)
    schedule(queue, "a", FUTURE)
    assert "zrangebyscore" not in commands(queue, worker.turn)
    queue.set_due({"a": 1000})
    assert "zrangebyscore" in commands(queue, worker.turn)
    assert "zrangebyscore" not in commands(queue, worker.turn)


def test_a_claim_looks_for_stale_hints_only_while_there_may_be_some(queue: OneQueue) -> None:
    queue.enqueue(*"abcdefgh")
    worker = queue.worker()
    assert commands(queue, lambda: worker.turn(want=2))["exists"] == 1, "a new queue may have any"
    # Those of other keys.
    others = commands(queue, lambda: worker.turn(done="ab", want=2)).get("exists", 0)
    assert others <= 1
    queue.producer.cancel("f")
    assert queue.summary().may_be_stale
    assert commands(queue, lambda: worker.turn(want=1, keep=2))["exists"] == 1
    assert queue.state().stale == {"5:f": 1}
    assert commands(queue, lambda: worker.turn(want=9, keep=3))["exists"] == 1, "once per call"
    assert queue.state().stale == {}
    queue.enqueue(*"ijk")
    worker.turn(want=1, keep=5)
    assert not queue.summary().may_be_stale
    assert "exists" not in commands(queue, lambda: worker.turn(want=1, keep=6))


def add_blocked(queue: OneQueue, worker: HandWorker) -> None:
    queue.enqueue("a", if_exists="update")


def add_progress(queue: OneQueue, worker: HandWorker) -> None:
    progress(queue, worker, "a")


def add_waiter(queue: OneQueue, worker: HandWorker) -> None:
    wait_for(queue, "a")


def add_attempt(queue: OneQueue, worker: HandWorker) -> None:
    fail(worker, "a")
    assert worker.turn(want=1) == ["a"]


RARE = {"blocked": add_blocked, "progress": add_progress, "waiters": add_waiter, "attempts": add_attempt}


@pytest.mark.parametrize(("name", "add"), RARE.items(), ids=RARE)
def test_rare_keys_are_looked_for_while_they_may_exist(
    redis_url: str, name: str, add: Callable[[OneQueue, HandWorker], None]
) -> None:
    with one_queue(redis_url, max_retries=3) as queue:
        queue.enqueue("z")
        worker = queue.worker()
        worker.turn(want=1)
        worker.turn(done="z")
        assert not queue.summary().may_be_rare
        queue.enqueue("a")
        worker.turn(want=1)
        assert "exists" not in commands(queue, queue.summary)
        add(queue, worker)
        assert queue.redis.exists(queue.key(name)), "else this test shows nothing"
        assert queue.summary().may_be_rare
        worker.turn(done="a")
        assert not queue.redis.exists(queue.key(name))
        assert queue.state() == (State(jobs={"a"}, waiting={5: ["a"]}) if name == "blocked" else State(jobs=set()))
        queue.enqueue("b")
        claimed = worker.turn(want=2)
        worker.turn(done="".join(claimed))
        assert not queue.summary().may_be_rare
        queue.enqueue("c", "d")
        worker.turn(want=1)
        assert commands(queue, lambda: worker.turn(done="c")).get("exists", 0) == 0


def test_the_flag_of_rare_keys_stays_while_one_of_them_exists(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn(want=2)
    progress(queue, worker, "b")
    worker.turn(done="a", keep=1)
    assert queue.summary().may_be_rare
    worker.turn(done="b")
    assert queue.hash("progress") == {}


def test_calls_without_a_summary_find_everything_again(queue: OneQueue) -> None:
    """Only its counts of hints in other lists are lost, as those were in `counts`."""
    queue.enqueue("a", "b", "c", "d")
    worker = queue.worker()
    assert worker.turn(want=1) == ["a"]
    queue.enqueue("a", if_exists="update")
    queue.producer.cancel("b")
    queue.enqueue("b")
    schedule(queue, "s", FUTURE)
    queue.redis.zadd(queue.key("scheduled"), {"s": 1000})
    fence = worker.fence
    queue.redis.delete(queue.key("summary"))
    assert queue.summary() == read_summary(None)
    assert worker.turn(done="a", want=9) == ["c", "d", "b", "a", "s"]
    assert int(worker.fence) > int(fence)
    summary = queue.summary()
    assert (summary.sequence, summary.hash) == (1, last_hash(queue))
    assert summary.options.split(" ") == [queue.hash("options")["epoch"], queue.hash("options")["version"]]


@pytest.mark.parametrize("verb", ["enqueue", "cancel", "turn", "heartbeat", "counts", "pause", "configure", "delete"])
def test_each_call_works_without_a_summary(queue: OneQueue, verb: str) -> None:
    queue.enqueue("a", "b", priority=3)
    worker = queue.worker()
    acts: dict[str, Callable[[], object]] = {
        "enqueue": lambda: queue.enqueue("c", "d"),
        "cancel": lambda: queue.producer.cancel("a"),
        "turn": lambda: worker.turn(want=1),
        "heartbeat": lambda: queue.recovery().heartbeat("q", EXPIRY_MS, []),
        "counts": lambda: queue.inspector.counts(),
        "pause": lambda: queue.registry.pause("q", paused=True),
        "configure": lambda: queue.registry.configure("q", {"timeout_ms": 5000}, {}),
        "delete": lambda: queue.registry.delete("q", force=True),
    }
    queue.redis.delete(queue.key("summary"))
    acts[verb]()
    assert (queue.redis.get(queue.key("summary")) is None) == (verb in ("counts", "delete"))


def test_a_summary_set_back_by_a_restart_is_used_as_it_is(queue: OneQueue) -> None:
    """The server has lost its last second: all its keys are older, and so is the summary."""
    queue.enqueue("a", "b")
    worker = queue.worker()
    before = queue.redis.get(queue.key("summary"))
    queue.enqueue("c", priority=0)
    queue.redis.set(queue.key("summary"), before)
    queue.redis.delete(queue.key("pending:0"))
    queue.redis.hdel(queue.key("jobs"), "c")
    assert worker.turn(want=3) == ["a", "b"]
    assert queue.summary().other_hints == 0
    assert queue.summary().sequence == read_summary(before).sequence + 1


def test_options_changed_by_a_call_without_an_event_apply_to_the_next_call(queue: OneQueue) -> None:
    worker = queue.worker()
    assert worker.whole_turn().limits.timeout_ms == 60_000
    queue.registry.configure("q", {"timeout_ms": 5000}, {})
    assert queue.summary().options.split(" ")[1] == queue.hash("options")["version"]
    assert worker.whole_turn().limits.timeout_ms == 5000


def test_a_deleted_queue_has_no_summary(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.registry.delete("q", force=True)
    assert not queue.redis.exists(queue.key("summary"))


def large_permanent_failure(queue: OneQueue, *, lost: bool) -> None:
    queue.registry.create(
        "q", "work", 100, stored_defaults(), {"fail_handler": 1, "max_data": 10**6}, fail_options={"max_retries": 1}
    )
    queue.producer.enqueue([new_job("x" * 100_000, id="a")], Update("refuse"))
    worker = queue.worker()
    worker.turn(want=1)
    assert queue.claim_fail_job("r1") == []
    if lost:
        queue.redis.delete(f"{queue.base}:fail:summary")
    worker.turn(failed="a", kind="permanent")


def test_a_large_fail_job_gives_the_options_of_its_queue_a_new_version(queue: OneQueue) -> None:
    large_permanent_failure(queue, lost=False)
    options = queue.redis.hgetall(f"{queue.base}:fail:options")
    summary = read_summary(queue.redis.get(f"{queue.base}:fail:summary"))
    assert int(options[b"largest_record"]) > 100_000
    assert summary.options.encode() == options[b"epoch"] + b" " + options[b"version"]
    assert summary[1:] != read_summary(None)[1:], "the rest is kept"
    assert queue.claim_fail_job("r2") != []


def test_a_permanent_failure_succeeds_though_its_fail_queue_has_lost_its_summary(queue: OneQueue) -> None:
    large_permanent_failure(queue, lost=True)
    assert queue.state() == State(jobs=set(), dead=["a"])
    assert queue.claim_fail_job("r2") != []


def test_a_heartbeat_that_trims_the_journal_stores_its_size(queue: OneQueue) -> None:
    for number in range(10):
        queue.enqueue(f"n{number}")
    last = queue.redis.xrevrange(queue.key("events"), count=1)[0][0]
    queue.redis.hset(queue.key("journal:watermarks"), "history", last)
    before = queue.summary().bytes
    queue.recovery().heartbeat("q", EXPIRY_MS, [])
    assert queue.redis.xlen(queue.key("events")) == 1
    assert queue.summary().bytes == before // 11


@pytest.mark.parametrize("ahead", [5 * 10**15, 10**16])
def test_no_fence_is_lower_than_the_last_one(queue: OneQueue, ahead: int) -> None:
    """`ahead` has as many digits as a time, or more."""
    queue.enqueue("a", "b")
    worker = queue.worker()
    worker.turn()
    queue.change_summary(fence=ahead)
    worker.turn(want=2)
    assert int(worker.fence) >= ahead
