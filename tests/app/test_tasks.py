"""Apps and tasks: registering functions, enqueueing typed calls, and running them as a worker does."""

import asyncio
import copy
import inspect
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import forq
from forq.api_types import JobInfo
from forq.app.tasks import JobRef, Sender
from forq.client import Client
from forq.errors import InvalidData, InvalidTask, RedisUnavailable, Snooze, UsageError
from forq.job import Job
from tests.support.drive.one_queue import OneQueue, one_queue


@dataclass(frozen=True)
class Order:
    number: int
    total: Decimal
    paid_at: datetime | None = None


app = forq.App("q")


@app.task
def send(to: str, subject: str = "hi") -> str:
    """Sends a mail."""
    return f"{to}: {subject}"


@app.task(name="book", aliases=["old_book"], dead_on=(KeyError,))
def book_order(order: Order, *notes: str) -> Order:
    if order.number < 0:
        raise KeyError(order.number)
    if order.number == 0:
        raise ValueError("zero")
    return Order(order.number + 1, order.total * 2, order.paid_at)


@app.task(queue="slow")
async def digest(user: int) -> str:
    await asyncio.sleep(0)
    return f"{user} in {forq.current_job().id}"


ORDER = Order(7, Decimal("1.10"), datetime(2026, 11, 18, tzinfo=UTC))


@pytest.fixture
def queue(redis_url: str) -> Iterator[OneQueue]:
    with one_queue(redis_url, keep_done_ms=60_000) as queue:
        app._client = Client(redis_url)
        yield queue
        app._client.close()


def stored(queue: OneQueue, ref: JobRef[Any]) -> JobInfo:
    return Client(queue.link.url).queue(ref.queue).job(ref.id)


def run(task_type: str, data: Any) -> Any:
    """As a worker runs a job."""
    ended = app(data, Job("q", "j1", "j1", task_type, 5, 0.0, 1))
    if asyncio.iscoroutine(ended):
        ended = asyncio.run(ended)
    return ended.pack(ended.value)


def test_a_task_is_still_the_function() -> None:
    assert send("a@b.c", subject="yo") == "a@b.c: yo"
    assert send.__doc__ == "Sends a mail."
    assert (send.name, send.queue, digest.queue, book_order.name) == ("send", "q", "slow", "book")


def test_a_job_has_the_arguments_by_name_and_the_task_as_type(queue: OneQueue) -> None:
    ref = send.enqueue("a@b.c")
    job = stored(queue, ref)
    assert (job["type"], job["data"]) == ("send", {"to": "a@b.c"})
    job = stored(queue, book_order.enqueue(ORDER, "x", "y"))
    assert job["data"]["notes"] == ["x", "y"]


def test_wrong_arguments_are_a_type_error_at_the_call(queue: OneQueue) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'topic'"):
        send.enqueue("a", topic="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="argument to"):
        send.enqueue(7)  # type: ignore[arg-type]
    assert queue.state().jobs == set()


def test_options_of_a_job_do_not_mix_with_its_arguments(queue: OneQueue) -> None:
    ref = send.using(id="42", priority=0, run_in=60, identifier="mail").enqueue("a", subject="b")
    job = stored(queue, ref)
    assert (ref.id, job["state"], job["priority"], job["identifier"]) == ("42", "scheduled", 0, "mail")
    with pytest.raises(UsageError, match="no option 'prority'; did you mean priority"):
        send.using(prority=1)  # type: ignore[call-arg]


def test_a_token_gives_the_ref_of_the_earlier_job(queue: OneQueue) -> None:
    first = send.using(token="order-42").enqueue("a")
    assert send.using(token="order-42").enqueue("a") == first


def test_many_tasks_are_enqueued_in_one_call(queue: OneQueue) -> None:
    jobs = [send.prepare("a"), book_order.prepare(ORDER), send.using(id="third").prepare("c")]
    refs = app.enqueue_many(jobs)
    assert [stored(queue, ref)["type"] for ref in refs] == ["send", "book", "send"]
    assert refs[2].id == "third"
    assert len(queue.entries()) == 2, "created, and one bulk call"


def test_a_worker_calls_the_function_with_converted_arguments() -> None:
    data = book_order.prepare(ORDER).job.body
    assert b'"total":"1.10"' in data
    packed = run("book", {"order": {"number": 7, "total": "1.10", "paid_at": "2026-11-18T00:00:00Z"}})
    assert book_order.signature.unpack_result(packed) == Order(8, Decimal("2.20"), ORDER.paid_at)
    assert run("digest", {"user": 3}) == "3 in j1"


def test_jobs_under_an_alias_run_too() -> None:
    assert run("old_book", {"order": {"number": 1, "total": "1"}})["number"] == 2


def test_an_unknown_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(Snooze, match="no task 'nothing'; it has: book, digest, send"):
        run("nothing", {})


@pytest.mark.parametrize(("number", "kind"), [(-1, "permanent"), (0, None)])
def test_exceptions_of_dead_on_are_permanent(number: int, kind: str | None) -> None:
    with pytest.raises((KeyError, ValueError)) as caught:
        run("book", {"order": {"number": number, "total": "1"}})
    assert getattr(caught.value, "kind", None) == kind


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("delay", "send.enqueue(…), with options send.using(run_in=60, id=…).enqueue(…)"),
        ("apply_async", "send.enqueue(…), with options send.using(run_in=60, id=…).enqueue(…)"),
        ("send", "send.enqueue(…), with options send.using(run_in=60, id=…).enqueue(…)"),
        ("defer", "send.enqueue(…), with options send.using(run_in=60, id=…).enqueue(…)"),
        ("kiq", "await send.aenqueue(…), with options await send.using(run_in=60, id=…).aenqueue(…)"),
        ("s", "send.prepare(…), for app.enqueue_many and app.schedule"),
    ],
)
def test_the_methods_of_other_queues_name_those_of_forq(name: str, hint: str) -> None:
    for sender, kind in ((send, "SyncTask"), (send.using(id="42"), "Sender")):
        assert not hasattr(sender, name)
        with pytest.raises(AttributeError) as caught:
            getattr(sender, name)
        assert str(caught.value) == f"'{kind}' object has no attribute {name!r}; in forq: {hint}"
    with pytest.raises(AttributeError, match=r"in forq: (await )?task\."):
        getattr(app.task_ref("proj.send"), name)


def test_other_attributes_are_missing_as_usual() -> None:
    with pytest.raises(AttributeError) as caught:
        send.enqeue  # type: ignore[attr-defined]  # noqa: B018
    assert str(caught.value) == "'SyncTask' object has no attribute 'enqeue'"
    # Python needs both to print "Did you mean: 'enqueue'?".
    assert (caught.value.name, caught.value.obj) == ("enqeue", send)
    copied = copy.copy(send)
    assert (copied("a"), copied.name) == ("a: hi", "send")
    assert str(inspect.signature(send)) == "(to: str, subject: str = 'hi') -> str"
    assert not inspect.iscoroutinefunction(send)
    # Unpickled before its state is set.
    with pytest.raises(AttributeError, match="_task"):
        Sender.__new__(Sender).delay  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("is_async", [False, True])
def test_an_unreachable_redis_has_one_traceback_with_the_reason_in_its_message(tmp_path: Path, is_async: bool) -> None:
    away = forq.App("q", url=f"unix://{tmp_path}/none.sock").task_ref("any")
    with pytest.raises(RedisUnavailable, match=r"none.sock: .*No such file or directory") as caught:
        asyncio.run(away.aenqueue()) if is_async else away.enqueue()
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "/redis/" not in shown, "no frames of redis-py"


def test_there_is_no_current_job_outside_a_task() -> None:
    with pytest.raises(LookupError, match="no task"):
        forq.current_job()
    run("digest", {"user": 3})
    with pytest.raises(LookupError):
        forq.current_job()


def test_refs_show_the_state_and_cancel_the_job(queue: OneQueue) -> None:
    ref = send.enqueue("a")
    assert ref.state() == "waiting"
    assert send.ref(ref.id) == ref
    assert ref.cancel()
    assert (ref.state(), ref.cancel()) == ("gone", False)


def test_a_producer_without_the_code_enqueues_by_name(queue: OneQueue) -> None:
    remote = app.task_ref("send")
    ref = remote.using(id="42").enqueue(to="a@b.c", subject="yo")
    assert stored(queue, ref)["data"] == {"to": "a@b.c", "subject": "yo"}
    assert (stored(queue, ref)["type"], remote.ref("42")) == ("send", ref)
    assert app.task_ref("send", queue="other").queue == "other"
    with pytest.raises(TypeError, match="pass arguments by name"):
        remote.enqueue("a@b.c")
    with pytest.raises(InvalidData, match="Decimal"):
        remote.enqueue(to=Decimal(1))


def test_two_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidTask, match=r"two tasks of the name 'send'.*send.*name=…"):
        app.task(name="send")(book_order.function)
    assert app.tasks["send"] is send


def test_importing_an_app_opens_no_connection() -> None:
    assert forq.App("other", url="redis://nowhere.invalid")._client is None
