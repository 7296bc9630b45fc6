"""The same behaviour in memory, in the thread of the test on a real server, and with a real supervisor."""

import asyncio
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import forq
from forq.app.tasks import Prepared
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from forq.client import Queue
from forq.errors import Exists, JobDead, NoResult, UnknownJob, UsageError, WaitTimeout
from forq.testing.processes import ServerProcess, SupervisorProcess
from tests.support.handlers import modes
from tests.support.handlers.modes import BACKOFF_SECONDS, MODULE_APPS, NOTES, Order, entered, notes
from tests.testing.drivers import SETTINGS, Driver, WithSupervisor, in_memory, on_server, with_supervisor

# Slightly more than a back-off.
LATER = BACKOFF_SECONDS + 0.02


@pytest.fixture(scope="module")
def notes_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The supervisor's processes inherit its path."""
    path = tmp_path_factory.mktemp("modes") / "notes"
    os.environ[NOTES] = str(path)
    yield path
    del os.environ[NOTES]


@pytest.fixture(scope="module")
def server_process() -> Iterator[ServerProcess]:
    process = ServerProcess()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def supervisor_process(server_process: ServerProcess, notes_file: Path) -> Iterator[SupervisorProcess]:
    process = SupervisorProcess(MODULE_APPS, server_process, SETTINGS)
    yield process
    process.stop()


@pytest.fixture(params=["memory", "server", "supervisor"])
def driver(request: pytest.FixtureRequest, notes_file: Path) -> Iterator[Driver]:
    notes_file.write_text("")
    if request.param == "memory":
        with in_memory() as memory:
            yield memory
    elif request.param == "server":
        with on_server(request.getfixturevalue("server_process")) as server:
            yield server
    else:
        with with_supervisor(request.getfixturevalue("supervisor_process")) as supervisor:
            yield supervisor


@pytest.fixture
def queue(driver: Driver) -> Queue:
    return driver.store.queue("modes")


def test_a_job_returns_its_result(driver: Driver) -> None:
    ref = modes.add.enqueue(2, right=3)
    driver.run()
    assert (ref.result(timeout=5), ref.state()) == (5, "done")


def test_a_coroutine_returns_its_result(driver: Driver) -> None:
    ref = modes.add_later.enqueue(2, 3)
    driver.run()
    assert ref.result(timeout=5) == 5


def test_arguments_and_results_keep_their_types(driver: Driver) -> None:
    due = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
    ref = modes.deliver.enqueue(Order(7, due, ["a"]))
    driver.run()
    assert ref.result(timeout=5) == Order(8, due, ["a", "Order"])


def test_a_task_without_a_result_keeps_none(driver: Driver) -> None:
    ref = modes.silent.enqueue("x")
    driver.run()
    with pytest.raises(UsageError, match="keeps no results"):
        ref.result(timeout=5)
    assert (ref.state(), notes()) == ("gone", ["x"])


def test_a_job_keeps_its_end_with_keep_done_of_its_own(driver: Driver) -> None:
    ref = modes.silent.using(keep_done="1h").enqueue("x")
    driver.run()
    assert (ref.result(timeout=5), ref.state()) == (None, "done")


def test_a_result_is_gone_after_keep_done(driver: Driver) -> None:
    ref, next_one = modes.add.using(keep_done=0.2).enqueue(1), modes.add.enqueue(1)
    driver.run(until=lambda: next_one.state() == "done")
    driver.run(after=0.25)
    last = modes.add.enqueue(1)
    driver.run(until=lambda: ref.state() == "gone")
    assert (next_one.state(), last.state()) == ("done", "done")


def test_a_result_that_cannot_be_stored_does_not_fail_the_job(driver: Driver) -> None:
    ref = modes.unstorable.enqueue()
    driver.run()
    with pytest.raises(NoResult, match="result"):
        ref.result(timeout=5)


def test_a_failed_job_is_retried_after_its_backoff(driver: Driver) -> None:
    ref = modes.flaky.enqueue("a", good_from=3)
    driver.run()
    driver.run(after=LATER, until=lambda: len(notes()) == 2)
    driver.run(after=LATER, until=lambda: ref.state() == "done")
    assert notes() == ["a 1 False", "a 2 False", "a 3 True"]
    assert ref.result(timeout=5) == "a in attempt 3"
    first, second = driver.store.jobs(modes.flaky, "done")[0].attempts
    assert second["started_at"] - first["ended_at"] >= BACKOFF_SECONDS - 0.002
    assert [attempt["error"]["message"] for attempt in (first, second)] == ["attempt 1", "attempt 2"]


def test_a_job_is_dead_after_its_last_retry(driver: Driver) -> None:
    ref = modes.flaky.using(max_retries=1).enqueue("a", good_from=9)
    driver.run()
    driver.run(after=LATER, until=lambda: ref.state() == "dead")
    with pytest.raises(JobDead, match="ConnectionError: attempt 2"):
        ref.result(timeout=5)
    assert notes()[:2] == ["a 1 False", "a 2 True"]


def test_the_backoff_of_a_job_replaces_that_of_its_task(driver: Driver) -> None:
    ref = modes.flaky.using(backoff=60).enqueue("a", good_from=2)
    driver.run()
    driver.run(after=LATER)
    assert (ref.state(), notes()) == ("scheduled", ["a 1 False"])


def test_permanent_is_never_retried(driver: Driver) -> None:
    ref = modes.refuse.enqueue("never")
    driver.run()
    with pytest.raises(JobDead, match="never"):
        ref.result(timeout=5)
    assert notes()[0] == "refuse"


def test_an_exception_of_dead_on_is_never_retried(driver: Driver) -> None:
    ref = modes.look_up.enqueue("k")
    driver.run()
    with pytest.raises(JobDead, match="KeyError"):
        ref.result(timeout=5)
    assert notes()[0] == "look up"


def test_a_snooze_is_not_counted(driver: Driver) -> None:
    ref = modes.snooze_once.enqueue(BACKOFF_SECONDS)
    driver.run()
    driver.run(after=LATER, until=lambda: ref.state() == "done")
    assert ref.result(timeout=5) == "attempt 1"
    assert notes() == ["attempt 1 snoozes 0", "attempt 1 snoozes 1"]


def test_a_snoozed_job_waits(driver: Driver) -> None:
    ref, began = modes.snooze_once.enqueue(60), driver.now()
    driver.run(until=notes)
    driver.run(until=lambda: ref.state() == "scheduled")
    (job,) = driver.store.jobs(modes.snooze_once)
    assert job.run_at is not None
    assert 59 <= job.run_at.timestamp() - began <= 90


def test_a_job_that_always_snoozes_ends(driver: Driver, queue: Queue) -> None:
    queue.pause()
    ref = modes.snooze_once.using(id="s").enqueue(0)
    # As if it had been snoozed as often as allowed; the task then snoozes once more.
    jobs, link = f"{queue_base(DEFAULT_PREFIX, 'modes')}:jobs", driver.store.client.link()
    head, _, body = link.call("HGET", jobs, "s").partition(b"\n")
    link.call("HSET", jobs, "s", b"o" + head[1:] + b" 0 0 0 0 1000 -\n" + body.replace(b'"seconds":0', b'"seconds":-1'))
    queue.resume()
    driver.run(until=lambda: ref.state() == "dead")
    with pytest.raises(JobDead, match="TooManySnoozes"):
        ref.result(timeout=5)


def test_retry_at_names_the_time_of_the_retry(driver: Driver) -> None:
    soon, later = modes.retry_at.enqueue(driver.now() + BACKOFF_SECONDS), modes.retry_at.enqueue(driver.now() + 60)
    driver.run()
    driver.run(after=LATER, until=lambda: soon.state() == "done")
    assert (soon.result(timeout=5), later.state()) == (2, "scheduled")


def test_the_retry_lane_follows_the_retries(driver: Driver) -> None:
    ref = modes.last_try.enqueue(good_from=2)
    driver.run()
    driver.run(after=0.1, until=lambda: ref.state() == "done")
    assert (ref.result(timeout=5), notes()) == ("attempt 2", ["lane 1", "lane 2"])


def test_a_coroutine_is_cancelled_at_its_timeout(driver: Driver) -> None:
    ref = modes.hang.enqueue()
    driver.run(until=lambda: ref.state() == "dead")
    with pytest.raises(JobDead, match="TimeoutError"):
        ref.result(timeout=5)
    assert notes()[0] == "hang"


def test_jobs_run_by_priority_and_then_in_order(driver: Driver, queue: Queue) -> None:
    queue.pause()
    for word, priority in [("c", 5), ("e", 9), ("a", 0), ("d", 5), ("b", 1)]:
        modes.silent.using(priority=priority).enqueue(word)
    queue.resume()
    driver.run(until=lambda: len(notes()) == 5)
    assert notes() == ["a", "b", "c", "d", "e"]


def test_a_paused_queue_runs_nothing(driver: Driver, queue: Queue) -> None:
    queue.pause()
    ref = modes.add.enqueue(1)
    if not hasattr(driver.store, "drain"):
        driver.run()
    assert ref.state() == "waiting"
    queue.resume()
    driver.run()
    assert ref.state() == "done"


def test_a_job_waits_for_run_in(driver: Driver) -> None:
    soon, later = modes.add.using(run_in=0.2).enqueue(1), modes.add.using(run_in=60).enqueue(1)
    driver.run(after=0.25, until=lambda: soon.state() == "done")
    assert later.state() == "scheduled"


def test_a_job_whose_time_has_passed_runs_at_once(driver: Driver) -> None:
    ref = modes.add.using(run_at=driver.now() - 60).enqueue(1)
    driver.run(until=lambda: ref.state() == "done")


def test_a_token_returns_the_earlier_job(driver: Driver) -> None:
    first = modes.silent.using(token="t1").enqueue("once")
    assert modes.silent.using(token="t1").enqueue("twice").id == first.id
    driver.run()
    assert modes.silent.using(token="t1").enqueue("again").id == first.id
    driver.run()
    assert notes() == ["once"]


def test_enqueueing_a_waiting_id_updates_the_job(driver: Driver, queue: Queue) -> None:
    queue.pause()
    first = modes.silent.using(id="42", keep_done="1h").enqueue("old")
    second = modes.silent.using(id="42", keep_done="1h").enqueue("new")
    queue.resume()
    driver.run(until=lambda: second.state() == "done")
    assert (notes(), first.id) == (["new"], second.id)


def test_an_existing_id_is_skipped_or_refused(driver: Driver, queue: Queue) -> None:
    queue.pause()
    modes.silent.using(id="42").enqueue("old")
    modes.silent.using(id="42", if_exists="skip").enqueue("new")
    with pytest.raises(Exists):
        modes.silent.using(id="42", if_exists="refuse").enqueue("new")
    queue.resume()
    driver.run(until=notes)
    assert notes() == ["old"]


def test_an_id_that_runs_waits_for_its_end(driver: Driver) -> None:
    ref = modes.enqueue_same_id.using(id="same").enqueue(2)
    driver.run(until=lambda: modes.enqueue_same_id.ref("same").state() == "done" and len(notes()) == 4)
    assert notes() == ["runs 2", "enqueued active", "runs 1", "enqueued active"]
    assert modes.enqueue_same_id.ref("same").result(timeout=5) == "left 0"
    assert ref.id == "same"


def test_a_cancelled_job_does_not_run(driver: Driver, queue: Queue) -> None:
    queue.pause()
    ref, kept = modes.silent.enqueue("cancelled"), modes.silent.enqueue("kept")
    assert (ref.cancel(), ref.cancel(), ref.state()) == (True, False, "gone")
    queue.resume()
    driver.run(until=notes)
    assert (notes(), kept.cancel()) == (["kept"], False)


def test_an_expired_job_is_dead_without_running(driver: Driver, queue: Queue) -> None:
    queue.pause()
    ref = modes.add.using(expires_in=0.2).enqueue(1)
    if hasattr(driver.store, "drain"):
        expired_at = driver.now() + 0.25
        while driver.now() < expired_at:
            ref.state()
    else:
        driver.run(after=0.25)
    queue.resume()
    driver.run(until=lambda: ref.state() == "dead")
    with pytest.raises(JobDead, match="expired"):
        ref.result(timeout=5)


def test_a_dead_job_can_be_retried(driver: Driver, queue: Queue) -> None:
    ref = modes.flaky.using(id="7", max_retries=0).enqueue("a", good_from=2)
    driver.run(until=lambda: ref.state() == "dead")
    queue.retry_dead("7")
    driver.run(until=lambda: len([line for line in notes() if line.startswith("a")]) == 2)
    assert [line for line in notes() if line.startswith("a")] == ["a 1 True", "a 1 True"], "its counts are reset"


def test_on_dead_is_called_for_a_dead_job(driver: Driver) -> None:
    modes.fail.using(id="7").enqueue("no")
    driver.run(until=notes)
    assert notes() == ["dead {'message': 'no'} 7 fail ValueError"]


def test_hooks_and_lifespans_surround_the_jobs(driver: Driver) -> None:
    ref = modes.greet.enqueue("you")
    driver.run()
    assert ref.result(timeout=5) == "hello you"
    assert notes() == ["outer greet", "inner", "greet you", "inner end", "outer end"]
    # A process of the supervisor may have entered them in an earlier test, or its retry process enters them, too.
    assert entered() == ["enter", "enter async"] * (len(entered()) // 2)
    assert entered() or isinstance(driver, WithSupervisor)


def test_a_hook_sees_the_exception_but_cannot_swallow_it(driver: Driver) -> None:
    ref = modes.greet.enqueue("")
    driver.run()
    with pytest.raises(JobDead, match="nobody"):
        ref.result(timeout=5)
    assert notes() == ["outer greet", "inner", "inner end", "saw nobody", "outer end"]


def test_hooks_surround_coroutines(driver: Driver) -> None:
    ref = modes.agreet.enqueue("you")
    driver.run()
    assert ref.result(timeout=5) == "hello you"
    assert notes()[2] == "agreet you"


def test_jobs_that_jobs_enqueue_run_too(driver: Driver) -> None:
    modes.count_down.enqueue(3)
    driver.run(until=lambda: len(notes()) == 4)
    assert notes() == ["count 3", "count 2", "count 1", "count 0"]


def test_bulk_jobs_of_several_tasks(driver: Driver) -> None:
    refs: list[forq.JobRef[Any]] = modes.app.enqueue_many(
        [modes.add.prepare(1, 2), modes.add_later.prepare(3, 4), modes.add.using(queue="other").prepare(5, 6)]
    )
    driver.run()
    assert [ref.result(timeout=5) for ref in refs] == [3, 7, 11]


def test_as_completed_yields_ended_jobs(driver: Driver) -> None:
    refs = [modes.add.enqueue(number) for number in range(5)] + [modes.fail.enqueue("no")]
    driver.run()
    ended = list(forq.as_completed(refs, timeout=10))
    assert set(ended) == set(refs)
    assert sorted(ref.result() for ref in ended if ref != refs[-1]) == [1, 2, 3, 4, 5]


def test_using_chooses_the_queue(driver: Driver) -> None:
    ref = modes.about.using(queue="other", id="x", priority=3).enqueue()
    driver.run()
    assert ref.result(timeout=5) == {"id": "x", "queue": "other", "attempt": 1, "priority": 3, "type": "about"}


def test_states_of_a_job(driver: Driver, queue: Queue) -> None:
    queue.pause()
    ref = modes.add.enqueue(1)
    assert ref.state() == "waiting"
    queue.resume()
    driver.run()
    assert ref.state() == "done"
    assert modes.add.ref("unknown").state() == "gone"


def test_an_unknown_task_waits_for_a_deploy(driver: Driver, queue: Queue) -> None:
    id = queue.enqueue({}, type="vanished")
    driver.run(until=lambda: queue.job(id).get("snooze_count") == 1)
    assert queue.job(id)["state"] == "scheduled"


def test_arguments_that_do_not_fit_wait_for_a_deploy(driver: Driver, queue: Queue) -> None:
    id = queue.enqueue({"wrong": 1}, type="add")
    driver.run(until=lambda: queue.job(id).get("snooze_count") == 1)
    assert queue.job(id)["state"] == "scheduled"


def test_wrong_arguments_are_refused_by_enqueue(driver: Driver) -> None:
    with pytest.raises(TypeError, match="missing 1 required"):
        modes.add.enqueue()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="left"):
        modes.add.enqueue("one")  # type: ignore[arg-type]
    assert driver.store.jobs() == []


def test_an_interval_ticks(driver: Driver, queue: Queue) -> None:
    queue.schedule("often", every=1, type="ticked", data={})
    driver.run(until=notes)
    driver.run(after=1.0, until=lambda: len(notes()) == 2)
    queue.unschedule("often")
    assert set(notes()) == {f"tick {datetime.now(UTC).year}"}


def test_a_schedule_can_be_triggered(driver: Driver, queue: Queue) -> None:
    queue.pause()
    queue.schedule("yearly", cron="0 0 1 1 *", type="silent", data={"word": "new year"})
    queue.trigger("yearly")
    with pytest.raises(Exists):
        queue.trigger("yearly")
    queue.resume()
    driver.run(until=notes)
    assert notes() == ["new year"]
    assert [each["key"] for each in queue.schedules()] == ["yearly"]


def test_plain_handlers_get_data_and_job(driver: Driver) -> None:
    plain = driver.store.queue("plain")
    id, typed, bad = plain.enqueue([1, 2]), plain.enqueue("x", type="typed"), plain.enqueue("bad", id="b")
    driver.run(until=lambda: len(notes()) == 3)
    assert (plain.wait(id, timeout=5), plain.wait(typed, timeout=5)) == ({"got": [1, 2]}, "typed: x")
    with pytest.raises(JobDead, match="bad data"):
        plain.wait(bad, timeout=5)
    assert notes() == [f"plain {id} None", "plain b None", "plain dead bad b"]


def test_asyncio_clients_enqueue_and_wait(driver: Driver) -> None:
    async def enqueue() -> list[forq.JobRef[int]]:
        try:
            return [await modes.add.aenqueue(1), await modes.add_later.aenqueue(1, 2)]
        finally:
            await modes.app.async_client.aclose()

    async def results(refs: list[forq.JobRef[int]]) -> list[int]:
        try:
            ended = {ref: await ref.aresult(timeout=5) async for ref in forq.as_completed(refs, timeout=5)}
            return [ended[ref] for ref in refs]
        finally:
            await modes.app.async_client.aclose()

    refs = asyncio.run(enqueue())
    driver.run()
    assert asyncio.run(results(refs)) == [2, 3]


def test_a_wait_for_an_unknown_or_waiting_job(driver: Driver, queue: Queue) -> None:
    queue.pause()
    with pytest.raises(UnknownJob):
        modes.add.ref("unknown").result(timeout=0.1)
    with pytest.raises(WaitTimeout):
        modes.add.enqueue(1).result(timeout=0.1)
    queue.resume()


def test_a_job_runs_after_others_with_their_results(driver: Driver) -> None:
    first, second = modes.add.enqueue(1), modes.add_later.enqueue(3, 4)
    both = modes.total.using(after=[first, second], with_results=True).enqueue()
    last = modes.total_later.using(after=[both, first], with_results=True).enqueue()
    driver.run()
    assert (both.result(timeout=5), last.result(timeout=5)) == (9, [9, 2])


def test_a_job_that_waits_is_held(driver: Driver) -> None:
    later = modes.add.using(run_in=0.5).enqueue(1)
    ref = modes.total.using(after=later, with_results=True).enqueue()
    driver.run()
    assert (later.state(), ref.state()) == ("scheduled", "held")
    assert [(job.id, job.task) for job in driver.store.jobs(state="held")] == [(ref.id, "total")]
    driver.run(after=0.55, until=lambda: ref.state() == "done")
    assert ref.result(timeout=5) == 2


def test_a_death_decides_what_runs_next(driver: Driver) -> None:
    always = modes.total_later.using(after=["dead", "good", "sequel"], when="ended", with_results=True)
    jobs: list[Prepared[Any]] = [
        modes.fail.using(id="dead").prepare("no"),
        modes.add.using(id="good").prepare(1),
        modes.silent.using(id="sequel", after="dead", keep_done="1h").prepare("sequel"),
        modes.silent.using(after="dead", when="dead").prepare("repair"),
        modes.silent.using(after="good", when="dead").prepare("unneeded"),
        always.prepare(),
    ]
    _, _, sequel, _, unneeded, last = modes.app.enqueue_many(jobs)
    driver.run()
    assert last.result(timeout=5) == [None, 2, None]
    assert (sequel.state(), unneeded.state()) == ("dead", "gone")
    with pytest.raises(JobDead, match="DependencyFailed: job dead, for which it waited, ended as dead"):
        sequel.result(timeout=5)
    assert sorted(notes()) == ["dead {'message': 'no'} dead fail ValueError", "repair"]


def test_a_job_without_a_usable_result_is_named(driver: Driver) -> None:
    broken = modes.unstorable.enqueue()
    ref = modes.total.using(after=broken, with_results=True, max_retries=0).enqueue()
    driver.run()
    with pytest.raises(JobDead, match=rf"NoResult: dependency 1 of job '{ref.id}' succeeded, but has no result"):
        ref.result(timeout=5)


def test_many_jobs_wait_for_one(driver: Driver) -> None:
    first = modes.add.using(id="first").prepare(1)
    others = [modes.total.using(after="first", with_results=True).prepare() for _ in range(600)]
    refs = modes.app.enqueue_many([first, *others])
    driver.run()
    assert {ref.state() for ref in refs} == {"done"}
    assert refs[-1].result(timeout=5) == 2
