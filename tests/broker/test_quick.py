"""The short forms of enqueue, turn and settle (lua/quick.lua) do exactly what the verbs do, whatever state the queue
is in.

Each test makes the same call twice, as a function and through EVAL, which knows no short forms and caches nothing. Both
must return the same and leave the same keys. An EVAL is also what another release's library is to this one: a change of
which it knows nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from forq.broker.claim import report_progress
from forq.broker.enqueue import Update, new_job
from forq.broker.journal import entry_hash, unpack_entry
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.scripts import NO_QUEUE, OK, OTHER_PROTOCOL, STALE, TOO_LARGE, script
from forq.errors import ForqError
from forq.settings import stored_defaults
from forq.version import PROTOCOL
from tests.guards.model_runs import dump, normal
from tests.support.drive.one_queue import HandWorker, OneQueue, State, one_queue
from tests.support.drive.server import Server

# The server itself is looked at.
pytestmark = pytest.mark.one_server

FUTURE = 4_000_000_000  # epoch seconds
AHEAD = 5 * 10**15  # as a fence
BODY = '[null,null,{"n":"new"}]'
REFUSE = "refuse 0 false 0"


@dataclass
class Scene:
    """A queue in which one verb is about to be called, by w1."""

    queue: OneQueue
    worker: HandWorker
    verb: str

    def function(self, verb: str, *args: Any) -> Any:
        return self._reply("FCALL", script(verb).name, 1, self.queue.base, *args)

    def eval(self, verb: str, *args: Any) -> Any:
        return self._reply("EVAL", script(verb).source, 1, self.queue.base, *args, verb)

    def _reply(self, *command: Any) -> Any:
        try:
            return self.queue.link.call(*command)
        except ForqError as exc:
            return str(exc)

    def epoch(self) -> str:
        return self.queue.summary().options.split(" ")[0]

    def args(self) -> list[Any]:
        """Of the most common call."""
        who = (self.epoch(), self.worker.processor, self.worker.name)
        match self.verb:
            case "enqueue":
                return [PROTOCOL, REFUSE, "new", "5", BODY]
            case "turn":
                return [*who, self.worker.number + 1, 1, 0, "waiting", 0, 0]
            case _:
                return [*who, self.worker.fence, 1, "a 7", "a"]

    def look(self) -> None:
        """This library reads summary and options."""
        self.queue.inspector.counts()

    def change(self, **options: int | str) -> None:
        """Changes options in a way that this library notices."""
        self.queue.set_options(**options)  # type: ignore[arg-type]
        self.look()

    def add_record(self, job_id: str, flag: str = "p") -> None:
        self.queue.redis.hset(self.queue.key("jobs"), job_id, f"{flag}5 1\n{BODY}")


@contextmanager
def scene(server: Server, verb: str) -> Iterator[Scene]:
    """`a` is waiting (enqueue), moved to the worker by BLMOVE (turn), or run by the worker (settle)."""
    server.flush()
    with one_queue(server.url) as queue:
        its = Scene(queue, queue.worker(), verb)
        # The first claim of a queue is never short.
        queue.enqueue("f")
        its.worker.turn(want=1)
        its.worker.turn(done="f")
        queue.enqueue("a")
        if verb != "enqueue":
            its.worker.block()
        if verb == "settle":
            assert its.worker.turn(want=1) == ["a"]
        yield its


Prepare = Callable[[Scene], object]
Change = Callable[[Scene, list[Any]], object]


def put(at: int, value: object) -> Change:
    """Changes one argument of the call."""
    return lambda its, args: args.__setitem__(at, value)


def outcome(
    server: Server, verb: str, how: str, prepare: Prepare | None, change: Change | None
) -> tuple[str, str, str, list[object], bool]:
    """What the call returned, all keys after it, those after two more calls, what `dump` hides after each, and whether
    the call was short."""
    with scene(server, verb) as its:
        args = its.args()
        if prepare:
            prepare(its)
        if change:
            change(its, args)
        its.queue.redis.config_resetstat()
        reply = (its.function if how == "function" else its.eval)(verb, *args)
        # Only the verbs read the summary with GET.
        is_short = "cmdstat_get" not in its.queue.redis.info("commandstats")
        left, hidden = dump(server), hidden_values(its.queue)
        its.function("enqueue", PROTOCOL, REFUSE, "later", "5", BODY)
        its.function("enqueue", PROTOCOL, REFUSE, "last", "5", BODY)
        check_chain(its.queue)
        return normal(repr(reply)), left, dump(server), hidden + hidden_values(its.queue), is_short


def hidden_values(queue: OneQueue) -> list[object]:
    """The size of the journal, and the jobs of the newest claim."""
    state = queue.state()
    newest = [job_id for job_id, owner in state.owners.items() if owner.endswith(state.summary.fence)]
    return [state.summary.bytes, *newest]


def check_chain(queue: OneQueue) -> None:
    """Each entry continues the one before it."""
    if queue.redis.type(queue.key("events")) != b"stream":
        return
    before = None
    for fields in queue.entries():
        entry = unpack_entry(fields)
        assert before is None or entry.sequence in (1, before.sequence + 1)
        previous = before.hash if before and entry.sequence > 1 else ""
        # The first entry of all may have been trimmed.
        if before or entry.sequence == 1:
            assert entry.hash == entry_hash(previous, *entry[:4], entry.text)
        before = entry


def same(server: Server, verb: str, prepare: Prepare | None = None, change: Change | None = None) -> bool:
    """Checks that the short form and the verb do the same; returns whether the former did it."""
    short = outcome(server, verb, "function", prepare, change)
    full = outcome(server, verb, "eval", prepare, change)
    assert short[:-1] == full[:-1]
    assert not full[-1]
    return short[-1]


def waiting_in_retry_lane(its: Scene) -> None:
    its.queue.redis.rpush(its.queue.key("retry"), "r")
    its.add_record("r")
    its.queue.change_summary(lane=1)
    its.look()


def waiting_suspect(its: Scene) -> None:
    its.queue.redis.zadd(its.queue.key("suspects"), {"s": 1})
    its.add_record("s")
    its.queue.change_summary(suspects=1)
    its.look()


def waiting_in_priority_3(its: Scene) -> None:
    its.queue.enqueue("p", priority=3)
    # Another worker has taken the token.
    its.queue.redis.lrem(its.queue.key("pending"), 0, "")


def journal_full(its: Scene) -> None:
    its.change(journal_max=its.queue.summary().bytes + 100)


def journal_refused(its: Scene) -> None:
    its.queue.redis.set(its.queue.key("events"), "no stream")


def options_changed_elsewhere(its: Scene) -> None:
    its.eval("configure", "max_data", 8, "timeout_ms", 77)


def options_changed_here(its: Scene) -> None:
    its.function("configure", "max_data", 8, "timeout_ms", 77)


def another_call_elsewhere(its: Scene) -> None:
    its.eval("enqueue", PROTOCOL, REFUSE, "o", "5", BODY)


def summary_lost(its: Scene) -> None:
    its.queue.redis.delete(its.queue.key("summary"))


def summary_set_back(its: Scene) -> None:
    """As by a restart from older data, with a library that has not forgotten the newer values."""
    queue = its.queue
    before = queue.redis.get(queue.key("summary"))
    queue.enqueue("o")
    queue.redis.set(queue.key("summary"), before)
    queue.redis.hdel(queue.key("jobs"), "o")
    queue.redis.lrem(queue.key("pending"), 0, "o")
    queue.redis.xdel(queue.key("events"), queue.redis.xrevrange(queue.key("events"), count=1)[0][0])


def deleted_elsewhere(its: Scene) -> None:
    its.eval("delete", its.epoch(), 1)


def deleted_here(its: Scene) -> None:
    its.function("delete", its.epoch(), 1)


def deleted_and_created_again(its: Scene) -> None:
    its.queue.registry.delete("q", force=True)
    while its.queue.registry.purge("q", lambda jobs: None):
        pass
    its.queue.create()
    its.look()


def library_loaded_again(its: Scene) -> None:
    its.queue.link.call("FUNCTION", "FLUSH")
    its.queue.link.load_library(script("turn"))


def due_job(its: Scene) -> None:
    its.queue.producer.enqueue([new_job(1, id="d", run_at=FUTURE)], Update("refuse"))
    its.queue.set_due({"d": 1000})
    its.look()


def later_job(its: Scene) -> None:
    its.queue.producer.enqueue([new_job(1, id="d", run_at=FUTURE)], Update("refuse"))


def rare(its: Scene) -> None:
    its.queue.change_summary(may_be_rare=True)
    its.look()


def blocked(its: Scene) -> None:
    its.queue.enqueue("a", if_exists="update")


def progress(its: Scene) -> None:
    fence = int(its.worker.fence or 0)
    report_progress(its.queue.link, DEFAULT_PREFIX, "q", "w1", "a", fence, 0.5, "half")


def stale_hint(its: Scene) -> None:
    """The id in the worker's list is a hint of a cancelled job; its next job waits."""
    its.queue.producer.cancel("a")
    its.queue.enqueue("a")


def active_elsewhere(its: Scene) -> None:
    its.queue.redis.hset(its.queue.key("active"), "a", "w9:1")


def marked_for_removal(its: Scene) -> None:
    its.queue.producer.remove("a")


def removed_worker(its: Scene) -> None:
    its.queue.redis.hdel(its.queue.key("processor:p1:workers"), "w1")


def paused(its: Scene) -> None:
    its.queue.registry.pause("q", paused=True)
    its.look()


def limited(its: Scene) -> None:
    its.change(max_active=1)
    its.queue.redis.hset(its.queue.key("active"), "b", "w9:1")
    its.queue.redis.zadd(its.queue.key("limited"), {"p1 w2": 1})


def worker_held_back(its: Scene) -> None:
    its.change(max_active=1)
    its.queue.redis.zadd(its.queue.key("limited"), {"p1 w2": 1})


def in_list(*ids: str) -> Prepare:
    def prepare(its: Scene) -> None:
        its.queue.redis.delete(its.worker.processing)
        for job_id in ids:
            its.queue.redis.rpush(its.worker.processing, job_id)
        its.add_record("b")

    return prepare


def fence_ahead(its: Scene) -> None:
    its.queue.change_summary(fence=AHEAD)
    its.look()


def fence_with_more_digits(its: Scene) -> None:
    its.queue.change_summary(fence=10**16)
    its.look()


def record_gone(its: Scene) -> None:
    its.queue.redis.hdel(its.queue.key("jobs"), "a")


def record_with_counts(its: Scene) -> None:
    its.queue.redis.hset(its.queue.key("jobs"), "a", f"c5 1 9 9 9 0\n{BODY}")


def claimed_again(its: Scene) -> None:
    """By the same worker: the job had been returned."""
    its.queue.redis.hset(its.queue.key("active"), "a", f"w1:{int(its.worker.fence) + 1}")


def turned_and_moved(its: Scene) -> None:
    its.worker.turn()
    its.worker.block()


def wake_token_with_record(its: Scene) -> None:
    in_list("")(its)
    its.add_record("")


ANY_CALL: dict[str, Prepare] = {
    "a job of another priority waits": waiting_in_priority_3,
    "a job waits in the retry lane": waiting_in_retry_lane,
    "a suspect waits": waiting_suspect,
    "the journal is full": journal_full,
    "the journal is off": lambda its: its.change(journal=0),
    "the queue uses flows": lambda its: its.change(flows=2),
    "another library changed the options": options_changed_elsewhere,
    "this library changed the options": options_changed_here,
    "another library made a call": another_call_elsewhere,
    "the summary is lost": summary_lost,
    "the summary was set back": summary_set_back,
    "another library deleted the queue": deleted_elsewhere,
    "this library deleted the queue": deleted_here,
    "the queue was deleted and created again": deleted_and_created_again,
    "the library was loaded again": library_loaded_again,
    "the queue has max_items": lambda its: its.change(max_items=1),
}
ENQUEUE: dict[str, tuple[Prepare | None, Change | None]] = {
    "another protocol": (None, put(0, "999")),
    "another priority": (None, put(3, "3")),
    "a time": (None, put(3, f"5 {FUTURE}000 ")),
    "a token": (None, put(3, "5  t")),
    "two jobs": (None, lambda its, args: args.extend(["other", "5", BODY])),
    "a large record": (None, put(4, f'[null,null,"{"x" * 8000}"]')),
    "data longer than allowed": (lambda its: its.change(max_data=8), None),
    "the id of a waiting job": (None, put(2, "a")),
    "the id of a running job": (lambda its: its.worker.turn(want=1), put(2, "a")),
}
TURN: dict[str, tuple[Prepare | None, Change | None]] = {
    "a turn that was not sent with BLMOVE": (None, put(6, "main")),
    "a turn of the retry process": (None, put(6, "retry")),
    "a worker that wants two": (lambda its: its.queue.enqueue("b"), put(4, 2)),
    "a worker that wants none": (None, put(4, 0)),
    "a worker that keeps a job": (None, put(5, 1)),
    "another epoch": (None, put(0, "1")),
    "a late turn": (turned_and_moved, None),
    "a removed worker": (removed_worker, None),
    "a paused queue": (paused, None),
    "limits": (limited, None),
    "a stale hint": (stale_hint, None),
    "a due job": (due_job, None),
    "an id that came later": (in_list("a", "b"), None),
    "nothing moved": (in_list(), None),
    "a wake token": (in_list(""), None),
    "a wake token of the same text as a job": (wake_token_with_record, None),
    "a job without a record": (record_gone, None),
    "a job that failed before": (record_with_counts, None),
    "a job that another worker runs": (active_elsewhere, None),
    "a fence ahead of the clock": (fence_ahead, None),
    "a fence with more digits": (fence_with_more_digits, None),
}
SETTLE: dict[str, tuple[Prepare | None, Change | None]] = {
    "another epoch": (None, put(0, "1")),
    "another fence": (None, put(3, "1")),
    "two jobs": (
        lambda its: its.queue.enqueue("b") and its.worker.turn(want=1, keep=1),
        lambda its, args: args.__setitem__(slice(3, None), [its.queue.state().owners["a"][3:], 2, "a 7 b 7", "a", "b"]),
    ),
    "a queue that keeps results": (lambda its: its.change(keep_done_ms=60_000), None),
    "limits": (worker_held_back, None),
    "a job blocked behind it": (blocked, None),
    "progress": (progress, None),
    "a job of another worker": (active_elsewhere, None),
    "a job that the worker claimed again": (claimed_again, None),
    "a job marked for removal": (marked_for_removal, None),
    "a list that begins with another id": (in_list("b", "a"), None),
    "an empty list": (in_list(), None),
}


@pytest.mark.parametrize("verb", ["enqueue", "turn", "settle"])
def test_the_most_common_call_is_short_and_does_what_the_verb_does(server: Server, verb: str) -> None:
    assert same(server, verb)


@pytest.mark.parametrize("prepare", ANY_CALL.values(), ids=ANY_CALL)
@pytest.mark.parametrize("verb", ["enqueue", "turn", "settle"])
def test_a_call_does_what_the_verb_does_though(server: Server, verb: str, prepare: Prepare) -> None:
    same(server, verb, prepare)


@pytest.mark.parametrize(("prepare", "change"), ENQUEUE.values(), ids=ENQUEUE)
def test_an_enqueue_does_what_the_verb_does_with(
    server: Server, prepare: Prepare | None, change: Change | None
) -> None:
    same(server, "enqueue", prepare, change)


@pytest.mark.parametrize(("prepare", "change"), TURN.values(), ids=TURN)
def test_a_turn_does_what_the_verb_does_with(server: Server, prepare: Prepare | None, change: Change | None) -> None:
    same(server, "turn", prepare, change)


@pytest.mark.parametrize(("prepare", "change"), SETTLE.values(), ids=SETTLE)
def test_a_settle_does_what_the_verb_does_with(server: Server, prepare: Prepare | None, change: Change | None) -> None:
    same(server, "settle", prepare, change)


SHORT: dict[str, tuple[str, Prepare]] = {
    "a later job is scheduled": ("turn", later_job),
    "the server refuses the entry of an enqueue": ("enqueue", journal_refused),
    "the server refuses the entry of a claim": ("turn", journal_refused),
    "the server refuses the entry of a settle": ("settle", journal_refused),
    "BLMOVE has moved another id": ("settle", in_list("a", "b")),
    "BLMOVE has moved a wake token": ("settle", in_list("a", "")),
    "the queue is paused while a job is stored": ("enqueue", paused),
    "the queue is paused while a job ends": ("settle", paused),
    "the record of the job is gone": ("settle", record_gone),
}


@pytest.mark.parametrize(("verb", "prepare"), SHORT.values(), ids=SHORT)
def test_a_call_is_short_and_does_what_the_verb_does_though(server: Server, verb: str, prepare: Prepare) -> None:
    assert same(server, verb, prepare)


def test_a_job_stored_in_a_fail_queue_wakes_the_retry_process(server: Server) -> None:
    server.flush()
    with one_queue(server.url, fail_handler=1) as queue:
        queue.registry.create("q", "work", 100, stored_defaults(), {}, fail_options={"max_retries": 1})
        for job_id in "ab":
            queue.redis.delete(queue.key("failed"))
            command = ("FCALL", script("enqueue").name, 1, f"{queue.base}:fail", PROTOCOL, REFUSE, job_id, "5", BODY)
            assert queue.link.call(*command)[0] == OK
            assert queue.state().retry_tokens == 1


def test_short_calls_in_turn_leave_one_chain_of_entries(server: Server) -> None:
    """Each uses what the one before has cached."""

    def run(how: str) -> tuple[object, ...]:
        server.flush()
        with one_queue(server.url) as queue:
            its = Scene(queue, queue.worker(), "turn")
            call = its.function if how == "function" else its.eval
            its.look()
            queue.enqueue("first")
            for number in range(4):
                call("enqueue", PROTOCOL, REFUSE, f"n{number}", "5", BODY)
                its.worker.block()
                call("turn", *its.args())
                its.worker.number += 1
                [(job_id, owner)] = queue.state().owners.items()
                epoch, fence = its.epoch(), owner.split(":")[1]
                call("settle", epoch, "p1", "w1", fence, 1, f"{job_id} 7", job_id)
            queue.enqueue("x", "y", priority=3)
            its.worker.turn(want=2)
            counts = queue.inspector.counts()
            assert counts.journal_sequence == queue.summary().sequence == queue.events()[-1].sequence
            assert queue.redis.get(queue.key("processed:count")) == b"4"
            return dump(server), *hidden_values(queue)

    assert run("function") == run("eval")


def test_a_late_or_repeated_settle_is_refused_and_changes_nothing(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    worker = queue.worker()
    its = Scene(queue, worker, "settle")
    worker.turn(want=1)
    late = its.args()
    assert its.function("settle", *late) == [OK, []]
    worker.turn(want=1)
    before, journal = queue.state(), queue.journal_events()
    for args in (late, [*late[:4], 1, "b 7", "b"], [*late[:3], worker.fence, 1, "a 7", "a"]):
        assert its.function("settle", *args) == [OK, [args[6].encode()]]
    assert (queue.state(), queue.journal_events()) == (before, journal)
    assert its.function("settle", *its.args()[:4], 1, "b 7", "b") == [OK, []]
    assert queue.state() == State(jobs=set())


def test_a_time_of_the_first_milliseconds_of_a_second_is_stored_in_full(queue: OneQueue) -> None:
    queue.enqueue("a")
    while queue.redis.time()[1] < 990_000:
        pass
    began = queue.redis.time()[0]
    number = 0
    while queue.redis.time()[0] == began:
        pass
    while queue.redis.time()[1] < 9_000:
        number += 1
        queue.enqueue(f"n{number}")
    times = [record.split(b"\n")[0].split(b" ")[1] for record in queue.state().records.values()]
    assert number > 0
    assert {len(time) for time in times} == {16}


def test_calls_of_the_short_forms_are_refused_like_others(queue: OneQueue) -> None:
    its = Scene(queue, queue.worker(), "turn")
    queue.enqueue("a")
    its.worker.block()
    args = its.args()
    assert its.function("turn", *args)[0] == OK
    assert its.function("turn", *args)[0] == STALE
    assert its.function("enqueue", "999", REFUSE, "b", "5", BODY)[0] == OTHER_PROTOCOL
    queue.registry.configure("q", {"max_data": 8}, {})
    assert its.function("enqueue", PROTOCOL, REFUSE, "b", "5", BODY)[0] == TOO_LARGE
    assert its.function("settle", "1", *args[1:3], "1", 1, "a 7", "a")[0] == NO_QUEUE
