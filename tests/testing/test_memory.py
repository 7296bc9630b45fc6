"""What is special about jobs in memory: the clock, errors, waits, redirected clients."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import ModuleType
from unittest.mock import ANY

import fakeredis
import pytest

import forq
from forq import result_wait, testing
from forq.app import completion
from forq.errors import CannotImport, RedisUnavailable, UnknownJob, UsageError, WaitTimeout
from forq.testing import LimitReached, Memory
from tests.support.drive.wait import wait_until
from tests.testing import examples
from tests.testing.examples import Address, app, fetch, move, seen, send


@pytest.fixture
def memory() -> Iterator[Memory]:
    seen.clear()
    with testing.memory(app) as memory:
        yield memory


def test_jobs_are_listed_with_their_arguments(memory: Memory) -> None:
    send.using(priority=2, run_in=60).enqueue("a", copies=3)
    move.enqueue(Address("High Street", 7))
    app.client.create_queue("raw").enqueue([1], type="odd")
    scheduled, moved = memory.jobs("mails")[0], memory.jobs(move)[0]
    assert scheduled.args == {"to": "a", "subject": "hi", "copies": 3}
    assert (scheduled.data, scheduled.state, scheduled.priority) == ({"to": "a", "copies": 3}, "scheduled", 2)
    assert scheduled.run_at is not None
    assert abs(scheduled.run_at - memory.clock.now() - timedelta(seconds=60)) < timedelta(seconds=5)
    assert moved.args == {"to": Address("High Street", 7)}
    assert [(job.queue, job.task, job.args) for job in memory.jobs("raw")] == [("raw", "odd", {})]
    assert len(memory.jobs()) == 3
    assert memory.jobs("unknown") == []


def test_held_jobs_are_listed_and_run_after_those_that_they_wait_for(memory: Memory) -> None:
    first = send.enqueue("a")
    held = memory.queue("mails").enqueue({"to": "b"}, type=send.name, after=first)
    assert [(job.id, job.state) for job in memory.jobs(send)] == [(first.id, "waiting"), (held, "held")]
    assert memory.assert_enqueued(send, "b").state == "held"
    assert send.ref(held).state() == "held"
    assert [job.id for job in memory.run_all()] == [first.id, held]


def test_assert_enqueued_compares_calls_and_not_their_spelling(memory: Memory) -> None:
    send.enqueue("a", "hi")
    assert memory.assert_enqueued(send).state == "waiting"
    memory.assert_enqueued(send, to="a")
    memory.assert_enqueued(send, "a", subject="hi", copies=1)
    memory.assert_enqueued(send, ANY, copies=ANY)
    memory.assert_not_enqueued(send, "b")
    memory.assert_not_enqueued(move)
    memory.queue("mails").enqueue({"n": 1}, type="other")
    memory.assert_enqueued("mails", {"n": 1})
    memory.assert_not_enqueued("mails", {"n": 2})


def test_failed_assertions_show_what_is_enqueued(memory: Memory) -> None:
    send.using(id="1").enqueue("a")
    with pytest.raises(AssertionError) as missing:
        memory.assert_enqueued(send, "b")
    assert str(missing.value) == (
        "not enqueued: send(to='b', subject='hi', copies=1)\n"
        "enqueued (1):\n"
        "  mails: send(to='a', subject='hi', copies=1) waiting, id 1"
    )
    with pytest.raises(AssertionError, match="enqueued: a job of task send\n  mails: send"):
        memory.assert_not_enqueued(send)
    memory.run_all()
    with pytest.raises(AssertionError, match="no job is enqueued; ended: 1 done"):
        memory.assert_enqueued(send)
    with pytest.raises(TypeError, match=r"send\(\): .*too many"):
        memory.assert_enqueued(send, 1, 2, 3)


def test_run_all_returns_what_ran(memory: Memory) -> None:
    send.using(id="x").enqueue("a")
    fetch.using(id="y").enqueue(1)
    assert {(ran.id, ran.task, ran.outcome, ran.number) for ran in memory.run_all()} == {
        ("x", "send", "done", 1),
        ("y", "fetch", "done", 1),
    }
    assert memory.run_all() == []
    assert memory.run_one() is None


def test_run_one_runs_one_job(memory: Memory) -> None:
    for to in "ab":
        send.using(id=to).enqueue(to)
    ran = memory.run_one()
    assert ran is not None
    assert (ran.id, [job.id for job in memory.jobs(send)]) == ("a", ["b"])


def test_the_first_exception_is_raised_after_its_job_is_settled(memory: Memory) -> None:
    failed, other = send.enqueue("nobody"), send.enqueue("b")
    with pytest.raises(ValueError, match="no such person") as raised:
        memory.run_all()
    (note,) = raised.value.__notes__
    assert note.startswith("job failed: attempt 1 of ")
    assert note.endswith(f"queue=mails job={failed.id}")
    assert raised.traceback[-1].name == "send"
    assert (failed.state(), other.state()) == ("scheduled", "waiting")
    memory.run_all()
    assert other.result() == "hi b x1"


def test_with_raises_false_failures_are_kept_as_in_production(memory: Memory) -> None:
    failed, other = send.using(max_retries=0).enqueue("nobody"), send.enqueue("b")
    memory.client.create_queue("mails", retry_lane_retries=0)
    outcomes = [(ran.outcome, type(ran.error)) for ran in memory.run_all(raises=False)]
    assert outcomes == [("dead", ValueError), ("done", type(None))]
    assert (failed.state(), other.state()) == ("dead", "done")
    assert memory.jobs(send, "dead")[0].error["message"] == "no such person"


def test_ctrl_c_in_a_job_is_always_raised(memory: Memory) -> None:
    examples.interrupt.enqueue()
    with pytest.raises(KeyboardInterrupt):
        memory.run_all(raises=False)


@pytest.mark.parametrize("end", [pytest.fail, pytest.skip])
def test_what_pytest_raises_in_a_job_is_always_raised(memory: Memory, end: Callable[[str], None]) -> None:
    """pytest-timeout fails the test that way: it must not pass instead."""
    with testing.memory(handlers={"slow": lambda data, job: end("too long")}) as slow:
        slow.client.queue("slow").enqueue(1)
        with pytest.raises((pytest.fail.Exception, pytest.skip.Exception), match="too long"):
            slow.run_all(raises=False)
        assert slow.jobs()[0].state == "scheduled"


def test_endless_jobs_reach_the_limit(memory: Memory) -> None:
    examples.again.enqueue()
    with pytest.raises(LimitReached, match=r"20 jobs have run and more are due; of the last 20: 20 of again\."):
        memory.run_all(limit=20)
    with pytest.raises(UsageError, match="limit 0 is not allowed"):
        memory.run_all(limit=0)


def test_a_limit_that_is_just_enough_is_no_error(memory: Memory) -> None:
    for _ in range(3):
        send.enqueue("a")
    assert len(memory.run_all(limit=3)) == 3


def test_the_clock_moves_due_times_tokens_and_results(memory: Memory) -> None:
    job = send.using(run_in=timedelta(hours=2), token="t", keep_done="1h").enqueue("a")
    before = memory.clock.now()
    assert memory.run_all() == []
    memory.clock.tick(timedelta(hours=2))
    assert memory.clock.now() - before >= timedelta(hours=2)
    assert [ran.id for ran in memory.run_all() if ran.task == "send"] == [job.id]
    assert send.using(token="t").enqueue("a").id == job.id
    memory.clock.tick(86_400)
    assert send.using(token="t").enqueue("a").id != job.id, "a token is remembered for a day"
    memory.run_all()
    assert job.state() == "gone"


def test_run_at_of_user_code_is_due_when_the_clock_has_moved_as_far(memory: Memory) -> None:
    ref = send.using(run_at=datetime.now(UTC) + timedelta(minutes=5)).enqueue("a")
    memory.clock.tick(300)
    memory.run_all()
    assert ref.state() == "done"


def test_schedules_of_the_app_tick(memory: Memory) -> None:
    assert memory.run_all() == [], "no schedule ticks at the start"
    memory.clock.set(datetime(2026, 7, 1, 2, 29, 30, tzinfo=UTC))
    assert memory.run_all() == []
    memory.clock.tick(30)
    memory.run_all()
    assert seen == [datetime(2026, 7, 1, 2, 30, tzinfo=UTC)]
    memory.clock.tick(270)
    memory.run_all()
    assert seen[1:] == ["poll"]


def test_the_clock_goes_back_only_without_jobs(memory: Memory) -> None:
    when = datetime(2020, 1, 1, tzinfo=UTC)
    assert abs(memory.clock.set(when) - when) < timedelta(seconds=5)
    ref = send.enqueue("a")
    assert memory.jobs()[0].enqueued_at is not None
    assert memory.jobs()[0].enqueued_at.year == 2020  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"cannot go back while there are jobs, such as mails: send\(to='a'"):
        memory.clock.set(when - timedelta(days=1))
    memory.clock.set(when + timedelta(days=1))
    memory.run_all()
    assert ref.result() == "hi a x1"


def test_wrong_times_are_refused(memory: Memory) -> None:
    with pytest.raises(UsageError, match="seconds from 0"):
        memory.clock.tick(-1)
    with pytest.raises(UsageError, match="needs a time zone"):
        memory.clock.set(datetime(2026, 1, 1))
    with pytest.raises(UsageError, match="a number of seconds"):
        memory.clock.tick("1m")  # type: ignore[arg-type]
    for wrong in (float("nan"), float("inf"), 1e30):
        with pytest.raises(UsageError, match="a number of seconds"):
            memory.clock.tick(wrong)
    for far in (datetime.max.replace(tzinfo=UTC), -1):
        with pytest.raises(UsageError, match="the years 1970 to 2999"):
            memory.clock.set(far)
    assert abs(memory.clock.now() - datetime.now(UTC)) < timedelta(minutes=1), "it has not moved"


def test_user_code_and_other_users_of_fakeredis_keep_the_real_time(memory: Memory) -> None:
    other = fakeredis.FakeRedis()
    memory.clock.tick(86_400)
    send.enqueue("a")
    assert abs(other.time()[0] - time.time()) < 60
    assert memory.client.link().call("TIME")[0] > str(time.time() + 80_000).encode()


def test_jobs_can_be_told_apart_while_the_system_clock_is_frozen(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    first = send.using(id="same").enqueue("a")
    memory.run_all()
    second = send.using(id="same").enqueue("b")
    assert (first.state(), second.state()) == ("gone", "waiting")


def test_a_wait_that_would_never_end_says_so_at_once(memory: Memory) -> None:
    ref = send.enqueue("a")
    with pytest.raises(WaitTimeout, match=r"nothing runs jobs here: call run_all\(\) first"):
        ref.result()
    with pytest.raises(WaitTimeout, match=r"1 of the jobs, such as JobRef\('send'.*run_all\(\)"):
        list(forq.as_completed([ref]))
    with pytest.raises(UnknownJob):
        send.ref("unknown").result()

    async def wait() -> None:
        with pytest.raises(WaitTimeout, match=r"await arun_all\(\)"):
            await ref.aresult()
        with pytest.raises(WaitTimeout, match="1 of the jobs"):
            async for _ in forq.as_completed([ref]):
                pass
        await app.async_client.aclose()

    asyncio.run(wait())


def test_a_wait_for_a_job_that_is_not_due_says_when_it_is(memory: Memory) -> None:
    later, failed = send.using(run_in=3600).enqueue("a"), send.enqueue("nobody")
    memory.run_all(raises=False)
    with pytest.raises(WaitTimeout, match=r"is scheduled for 2.*\+00:00: move the clock, clock.tick\(SECONDS\), then"):
        later.result()
    with pytest.raises(WaitTimeout, match=r"is scheduled for 2.*\+00:00, after 1 failed attempt: move the clock"):
        failed.result()

    async def wait() -> None:
        with pytest.raises(WaitTimeout, match="move the clock"):
            await later.aresult()
        await app.async_client.aclose()

    asyncio.run(wait())
    memory.clock.tick(3600)
    with pytest.raises(WaitTimeout, match=r"call run_all\(\) first"):
        later.result()


def test_a_wait_for_a_held_job_says_that_others_have_not_ended(memory: Memory) -> None:
    later = send.using(run_in=3600).enqueue("a")
    held = send.using(after=later).enqueue("b")
    memory.run_all()
    with pytest.raises(WaitTimeout, match=r"is held: jobs that it waits for have not ended.*clock.tick\(SECONDS\)"):
        held.result()
    memory.clock.tick(3600)
    assert [attempt.id for attempt in memory.run_all() if attempt.task == "send"] == [later.id, held.id]


def test_one_end_lets_more_jobs_run_or_die_than_one_call_may_follow(memory: Memory) -> None:
    dead = send.using(id="dead", max_retries=0).prepare("nobody")
    behind = [send.using(after="dead").prepare("b") for _ in range(120)]
    always = [send.using(after="dead", when="ended").prepare("c") for _ in range(600)]
    refs = app.enqueue_many([dead, *behind, *always])
    assert len(memory.run_all(raises=False)) == 601
    assert [ref.state() for ref in refs] == ["dead"] * 121 + ["done"] * 600


@pytest.mark.parametrize("task", [examples.wait_for_other, examples.await_other])
def test_a_job_that_waits_for_another_fails_at_once(memory: Memory, task: forq.app.tasks.Task[[], object]) -> None:
    task.enqueue()
    with pytest.raises(WaitTimeout, match="a job cannot wait for another"):
        memory.run_all()


def test_a_wait_goes_on_while_another_thread_runs_jobs(memory: Memory) -> None:
    results: list[object] = []
    started, go_on = threading.Event(), threading.Event()

    def handle(data: object, job: forq.Job) -> str:
        started.set()
        assert go_on.wait(20)
        return "ended"

    with testing.memory(handlers={"slow": handle}) as slow:
        queue = slow.client.create_queue("slow", keep_done="1h")
        id = queue.enqueue(1)
        runner = threading.Thread(target=slow.run_all)
        runner.start()
        assert started.wait(20)
        waiter = threading.Thread(target=lambda: results.append(queue.wait(id, timeout=20)))
        waiter.start()
        wait_until(lambda: slow.client.link().call("EXISTS", "forq:queue:{slow}:waiters"), what="it waits")
        go_on.set()
        runner.join(20)
        waiter.join(20)
    assert results == ["ended"]


def test_a_wait_sees_a_job_that_another_thread_runs_right_after_a_check(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_first(module: ModuleType, name: str) -> None:
        wait = getattr(module, name)

        def run_then_wait(*args: object) -> None:
            runner = threading.Thread(target=memory.run_all)
            runner.start()
            runner.join(20)
            wait(*args)

        monkeypatch.setattr(module, name, run_then_wait)

    run_first(result_wait, "_wait_for_message")
    run_first(completion, "_wait_for_messages")
    assert fetch.enqueue(1).result(timeout=20) == 2
    assert [ref.result() for ref in forq.as_completed([fetch.enqueue(2)], timeout=20)] == [3]


def test_async_tasks_run_in_the_loop_of_arun_all(memory: Memory) -> None:
    async def test() -> None:
        refs = [await fetch.aenqueue(1), fetch.enqueue(2)]
        waiting = asyncio.create_task(refs[0].aresult(timeout=20))
        ran = await memory.arun_all()
        assert [each.outcome for each in ran] == ["done", "done"]
        assert [await waiting, await refs[1].aresult()] == [2, 3]
        assert seen == [asyncio.get_running_loop()] * 2
        await app.async_client.aclose()

    asyncio.run(test())


def test_arun_all_raises_and_runs_sync_tasks_without_a_running_loop(memory: Memory) -> None:
    async def test() -> None:
        ref = examples.without_loop.enqueue()
        await memory.arun_all()
        assert ref.result() == 1
        send.enqueue("nobody")
        with pytest.raises(ValueError, match="no such person"):
            await memory.arun_all()
        assert asyncio.get_running_loop()

    asyncio.run(test())


def test_a_cancelled_arun_all_ends(memory: Memory) -> None:
    async def test() -> None:
        examples.app.client.create_queue("endless")
        with testing.memory(handlers={"endless": _sleep_long}) as endless:
            endless.queue("endless").enqueue(1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(endless.arun_all(raises=False), 0.1)
            assert endless._runner.thread is None
            send.enqueue("a")
        await memory.arun_all()
        memory.assert_not_enqueued(send)

    asyncio.run(test())


async def _sleep_long(data: object, job: forq.Job) -> None:
    await asyncio.sleep(60)


def test_a_job_sees_the_context_of_the_test(memory: Memory) -> None:
    token = examples.word.set("from the test")
    ref = examples.read_word.enqueue()
    memory.run_all()
    examples.word.reset(token)
    assert ref.result() == "from the test"


def test_run_all_refuses_a_running_loop_and_arun_all_needs_one(memory: Memory) -> None:
    async def test() -> None:
        with pytest.raises(UsageError, match=r"await arun_all\(\) instead"):
            memory.run_all()

    asyncio.run(test())
    with pytest.raises(UsageError, match="needs the event loop of asyncio"):
        memory.arun_all().send(None)


def test_a_job_cannot_run_others(memory: Memory) -> None:
    with testing.memory(handlers={"q": lambda data, job: inner.run_all()}) as inner:
        inner.queue("q").enqueue(1)
        with pytest.raises(forq.ForqError, match="being run already"):
            inner.run_all()


def test_each_run_enters_and_leaves_the_lifespans(memory: Memory) -> None:
    with testing.memory(examples.live) as live:
        live.run_all()
        assert seen == [], "nothing to run"
        for _ in range(2):
            examples.use.enqueue()
            examples.use.enqueue()
            live.run_all()
    assert [each for each in seen if isinstance(each, str)] == ["enter", "use", "use", "leave"] * 2

    async def test() -> None:
        seen.clear()
        with testing.memory(examples.live) as live:
            examples.use.enqueue()
            await live.arun_all()
            assert seen == ["enter", "use", asyncio.get_running_loop(), "leave"]

    asyncio.run(test())


def test_a_lifespan_that_fails_is_raised_and_the_job_stays(memory: Memory) -> None:
    with testing.memory(examples.broken) as broken:
        ref = examples.query.enqueue()
        with pytest.raises(CannotImport, match=r"the lifespan no_database of app 'broken' failed: .*no database"):
            broken.run_all()
        assert (ref.state(), seen) == ("waiting", [])


def test_a_lifespan_that_fails_at_its_end_fails_the_test(memory: Memory) -> None:
    with testing.memory(examples.ending) as ending:
        for raised, raises, expected in [
            (
                OSError("still open"),
                True,
                "the lifespan cannot_end of app 'ending' failed at its end: OSError: still open",
            ),
            (OSError("still open"), False, None),
            (KeyboardInterrupt("ctrl-c"), False, "ctrl-c"),
        ]:
            ref = examples.end.enqueue()
            seen.append(raised)
            with (
                nullcontext() if expected is None else pytest.raises((CannotImport, KeyboardInterrupt), match=expected)
            ):
                ending.run_all(raises=raises)
            assert ref.state() == "gone"


def test_progress_is_stored_at_once(memory: Memory) -> None:
    examples.report.enqueue()
    memory.run_all()
    assert (seen[0]["fraction"], seen[0]["text"]) == (0.25, "a quarter")


def test_apps_and_clients_are_redirected_and_restored() -> None:
    before = app.client, app.client.url, app.client.prefix, os.environ.get("FORQ_REDIS")
    assert examples.second._client is None
    client = forq.Client("redis://elsewhere.invalid")
    with testing.memory(app, examples.second, client) as memory:
        send.enqueue("a")
        examples.captured_queue.enqueue({"to": "b"}, type="send")
        forq.Client().queue("mails").enqueue({"to": "c"}, type="send")
        client.queue("mails").enqueue({"to": "d"}, type="send")
        assert [job.data["to"] for job in memory.jobs("mails")] == ["a", "b", "c", "d"]
        greeting = examples.greet.enqueue("you")
        memory.run_all()
        assert (greeting.result(), captured_result()) == ("hello you", "hi b x1")
        inside = examples.second.client
    assert (app.client, app.client.url, app.client.prefix, os.environ.get("FORQ_REDIS")) == before
    assert client.url == "redis://elsewhere.invalid"
    assert examples.second._client is None
    assert (inside.url, inside.prefix) == (forq.Client().url, "second:")


def captured_result() -> object:
    done = {job["id"] for job in examples.captured_queue.jobs("done").jobs}
    return next(result for id in done if "b" in (result := examples.captured_queue.wait(id)))


def test_contexts_can_be_nested() -> None:
    with testing.memory(app) as outer:
        send.enqueue("outer")
        with testing.memory(examples.second) as other:
            examples.greet.enqueue("you")
            send.enqueue("outer too")
            assert (len(outer.jobs()), len(other.jobs())) == (2, 1)
        with testing.memory(app) as inner:
            send.enqueue("inner")
            assert [job.args["to"] for job in inner.jobs()] == ["inner"]
            inner.run_all()
        assert [job.args["to"] for job in outer.jobs()] == ["outer", "outer too"]
        assert len(outer.run_all()) == 2


def test_a_client_that_was_made_in_one_memory_reaches_the_next() -> None:
    """User code may make a client at its first call and keep it, and an app that was not passed does so."""
    other = forq.App("other")
    with testing.memory(app):
        kept = forq.Client()
        kept.create_queue("raw").enqueue(1)
        other.client.create_queue("other").enqueue(1)
    with pytest.raises(RedisUnavailable, match=r"made inside of forq.testing.memory\(\), which has ended; use it"):
        kept.queues()
    with testing.memory(app) as memory:
        kept.create_queue("raw").enqueue(2)
        other.client.create_queue("other").enqueue(2)
        assert [(job.queue, job.data) for job in memory.jobs()] == [("other", 2), ("raw", 2)]


def test_a_memory_that_has_ended_refuses_all_calls() -> None:
    with testing.memory(app) as ended:
        pass
    with testing.memory(app) as memory:
        send.enqueue("a")
        for call in (ended.jobs, ended.run_all, ended.clear, lambda: ended.queue("mails")):
            with pytest.raises(UsageError, match="has ended: use it inside of its with block"):
                call()
        assert len(memory.jobs()) == 1


def test_a_forked_process_is_refused(memory: Memory) -> None:
    """It would have a copy, and its jobs would be lost."""
    send.enqueue("a")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            send.enqueue("b")
        except RedisUnavailable as exc:
            os.write(writing, str(exc).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert f"jobs in memory exist only in process {os.getpid()}, and this is process {pid}" in said.read()
    os.waitpid(pid, 0)
    assert len(memory.run_all()) == 1


def test_nothing_of_forq_stays_patched() -> None:
    from forq import async_client, result_wait
    from forq.broker import link

    before = link.connect, result_wait._wait_for_message, async_client._wait_for_message
    with testing.memory(app):
        assert link.connect is not before[0]
    assert (link.connect, result_wait._wait_for_message, async_client._wait_for_message) == before


def test_clear_removes_everything(memory: Memory) -> None:
    send.using(token="t").enqueue("a")
    memory.clear()
    assert memory.jobs() == []
    send.using(token="t").enqueue("b")
    assert memory.run_all()


def test_an_app_can_be_named_and_wrong_targets_are_refused() -> None:
    with testing.memory("tests.testing.examples:app") as memory:
        send.enqueue("a")
        assert memory.run_all()
    with pytest.raises(UsageError, match=r"a forq\.App, forq\.Client or forq\.AsyncClient"), testing.memory(42):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(UsageError, match="queue 'mails' belongs to app 'shop'"),
        testing.memory(app, handlers={"mails": examples.handle}),
    ):
        pass
    with pytest.raises(UsageError, match="queue 'x' has no handler"), testing.memory(fail_handlers={"x": print}):
        pass


def test_queues_without_an_app(memory: Memory) -> None:
    by_path = "tests.testing.examples:handle"
    with testing.memory(handlers={"a": {"t": examples.handle}, "b": by_path}) as plain:
        client = forq.Client()
        client.create_queue("unserved").enqueue(1)
        types = {"a": "t", "b": None}
        ids = {name: client.create_queue(name, keep_done="1h").enqueue(1, type=types[name]) for name in types}
        assert len(plain.run_all()) == 2
        assert [client.queue(name).wait(ids[name]) for name in types] == [["t", 1], [None, 1]]
        assert len(plain.jobs("unserved")) == 1


def test_a_queue_that_is_deleted_and_created_again(memory: Memory) -> None:
    send.enqueue("a")
    memory.run_all()
    memory.client.delete_queue("mails", force=True)
    assert memory.run_all() == []
    memory.client.create_queue("mails")
    send.enqueue("b")
    assert len(memory.run_all()) == 1


def test_items_of_an_on_request_queue_are_dequeued(memory: Memory) -> None:
    queue = memory.client.create_queue("orders", mode="on_request")
    queue.enqueue({"dish": "soup"}, id="o1")
    release = queue.dequeue(lease=30)
    assert release is not None
    release.ack()
    assert queue.dequeue() is None


def test_without_fakeredis_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['fakeredis'] = None; from forq.testing import memory"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "pip install 'forq[testing]'" in done.stderr


def test_no_descriptors_stay_open() -> None:
    def use() -> int:
        with testing.memory(app) as memory:
            send.enqueue("a")
            threading.Thread(target=lambda: send.enqueue("b")).start()
            wait_until(lambda: len(memory.jobs()) == 2)

            async def enqueue() -> None:
                await send.aenqueue("c")
                with pytest.raises(WaitTimeout):
                    await send.using(run_in=60).enqueue("d").aresult()

            asyncio.run(enqueue())
            memory.run_all()
        return len(os.listdir("/proc/self/fd"))

    use()
    assert use() == use()
