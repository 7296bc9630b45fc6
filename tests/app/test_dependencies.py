"""Tasks that wait for others: `using(after=…, when=…, with_results=…)`, and results as arguments."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import forq
from forq.app.tasks import JobRef
from forq.broker.dependencies import AS_ARGUMENT, AS_LIST, READ
from forq.errors import DoesNotFit, NoResult, Permanent, Snooze, UnknownDependency, UsageError
from forq.job import Inputs, Job
from tests.support.drive.one_queue import OneQueue, one_queue
from tests.support.drive.worker_here import run_waiting

seen: list[Any] = []
tasks = forq.App("q")


@dataclass(frozen=True)
class Page:
    url: str
    words: int = 0


@tasks.task
def fetch(url: str) -> Page:
    return Page(url, len(url))


@tasks.task
def count(page: Page, minimum: int = 0, *, factor: int = 1) -> int:
    return max(page.words, minimum) * factor


@tasks.task
def merge(pages: list[Page]) -> int:
    return sum(page.words for page in pages)


@tasks.task
async def merge_later(pages: list[Page | None]) -> list[str | None]:
    await asyncio.sleep(0)
    return [None if page is None else page.url for page in pages]


@tasks.task
def read() -> None:
    seen.append(forq.current_job().results())


@tasks.task
def by_name(*, page: Page) -> int:
    return page.words


@tasks.task
def only_rest(*pages: Page) -> int:
    return len(pages)


@tasks.task(dead_on=(KeyError,))
def fail() -> None:
    raise KeyError("no")


@pytest.fixture
def queue(redis_url: str) -> Any:
    with one_queue(redis_url) as queue:
        tasks._client = forq.Client(redis_url)
        seen.clear()
        yield queue
        tasks._client.close()


def run(queue: OneQueue) -> int:
    return run_waiting(queue.link.url, tasks, "q")


def with_results(use: int, *packed: bytes, of: str = "merge") -> Job:
    return Job("q", "j1", "j1", of, 5, 0.0, 1, inputs=Inputs(len(packed), use, packed))


def call(task: str, data: Any, use: int, *packed: bytes) -> Any:
    """As a worker runs a job that uses results."""
    ended = tasks(data, with_results(use, *packed, of=task))
    if asyncio.iscoroutine(ended):
        ended = asyncio.run(ended)
    return ended.pack(ended.value)


PAGE = b'done {"url":"a.b","words":3}'


def test_a_task_runs_after_another_and_reads_its_result(queue: OneQueue) -> None:
    first = fetch.enqueue("a.b")
    ref = read.using(after=first, with_results=True).enqueue()
    assert isinstance(ref, JobRef)
    assert (first.state(), ref.state()) == ("waiting", "held")
    assert queue.inspector.counts().held == 1
    assert run(queue) == 2
    assert seen == [[{"url": "a.b", "words": 3}]]


@pytest.mark.parametrize("given", [lambda a, b: [a, b.id], lambda a, b: (a.id, b), lambda a, b: iter([a, b])])
def test_dependencies_are_refs_or_ids_in_any_sequence(queue: OneQueue, given: Callable[..., Any]) -> None:
    a, b = fetch.enqueue("a"), fetch.enqueue("bc")
    read.using(after=given(a, b), with_results=True).enqueue()
    assert run(queue) == 3
    assert [page["url"] for page in seen[0]] == ["a", "bc"]


def test_a_sender_may_enqueue_several_jobs(queue: OneQueue) -> None:
    sender = read.using(after=[fetch.enqueue("a")], with_results=True)
    sender.enqueue()
    sender.enqueue()
    assert run(queue) == 3
    assert len(seen) == 2


def test_the_other_options_of_the_job_apply_too(queue: OneQueue) -> None:
    job = read.using(after="a", when="ended", id="b", priority=3, timeout=7, with_results=True).prepare().job
    assert (job.id, job.priority, job.options, job.after) == ("b", 3, "t=7000", "ended 1 ja")


def test_aenqueue_stores_dependencies(queue: OneQueue) -> None:
    app = forq.App("q", url=queue.link.url)
    fetch_later, read_later = app.task(fetch.function), app.task(read.function)

    async def main() -> None:
        first = await fetch_later.aenqueue("a.b")
        await read_later.using(after=first, with_results=True).aenqueue()
        await app.async_client.aclose()

    asyncio.run(main())
    assert run(queue) == 2
    assert seen == [[{"url": "a.b", "words": 3}]]


def test_enqueue_many_takes_jobs_with_and_without_dependencies(queue: OneQueue) -> None:
    refs = tasks.enqueue_many(
        [
            *(fetch.using(id=each).prepare(each) for each in "abc"),
            read.using(after=[*"abc"], with_results=True).prepare(),
            fetch.prepare("later"),
        ]
    )
    assert [ref.id for ref in refs[:3]] == [*"abc"]
    assert queue.inspector.counts().held == 1
    assert run(queue) == 5
    assert [page["url"] for page in seen[0]] == [*"abc"]


def test_a_dead_dependency_takes_its_dependants_along_unless_they_wait_for_any_end(queue: OneQueue) -> None:
    dead = fail.using(max_retries=0).enqueue()
    behind = read.using(after=dead).enqueue()
    read.using(after=behind, when="ended", with_results=True).enqueue()
    assert run(queue) == 2
    assert seen == [[None]]
    assert behind.state() == "dead"


def test_the_result_of_a_running_job_can_be_used_if_its_task_keeps_it(queue: OneQueue) -> None:
    kept, other = fetch.enqueue("a"), fetch.using(keep_done=0).enqueue("b")
    queue.worker().turn(2)
    assert read.using(after=kept, with_results=True).enqueue().state() == "held"
    with pytest.raises(UsageError, match=f"the result of job '{other.id}' of queue 'q' is not kept: enqueue the job"):
        read.using(after=[kept, other], with_results=True).enqueue()
    with pytest.raises(UsageError, match=f"the result of job '{other.id}' of queue 'q' is not kept"):
        read.using(after=[kept.id, other.id], with_results=True).enqueue()


def test_an_unknown_dependency_is_refused(queue: OneQueue) -> None:
    with pytest.raises(UnknownDependency, match="has no job 'nobody' to wait for"):
        read.using(after="nobody").enqueue()


def test_a_held_job_can_be_cancelled(queue: OneQueue) -> None:
    ref = read.using(after=fetch.enqueue("a")).enqueue()
    assert ref.cancel()
    assert (run(queue), seen, ref.state()) == (1, [], "gone")


def test_a_queue_remembers_ended_jobs_from_the_first_use_of_after_on(queue: OneQueue) -> None:
    before, later = fail.using(max_retries=0, id="before"), fail.using(max_retries=0, id="later")
    before.enqueue()
    run(queue)
    with pytest.raises(UnknownDependency, match="did not remember ended jobs before, but does so from now on"):
        read.using(after="before").enqueue()
    later.enqueue()
    run(queue)
    read.using(after="later", when="ended", with_results=True).enqueue()
    assert (run(queue), seen) == (1, [[None]])


def test_wrong_dependencies_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="job 'a' is in queue 'other', but a job of queue 'q' can wait for"):
        read.using(after=fetch.ref("a", queue="other"))
    with pytest.raises(UsageError, match="job 'a' is in queue 'q', but a job of queue 'slow' can wait for"):
        read.using(after=fetch.ref("a"), queue="slow")
    with pytest.raises(UsageError, match="when 'failed' is not allowed: 'done', 'ended', 'dead'"):
        read.using(after="a", when="failed")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="with_results needs `after`"):
        read.using(with_results=True)
    with pytest.raises(UsageError, match="after: 5 is not allowed: ids of jobs of the same queue, or their refs"):
        read.using(after=5)  # type: ignore[arg-type]


def test_a_result_becomes_the_first_argument_with_its_type() -> None:
    assert call("count", {}, AS_ARGUMENT, PAGE) == 3
    assert call("count", {"minimum": 5, "factor": 2}, AS_ARGUMENT, PAGE) == 10


def test_the_list_of_results_becomes_the_first_argument_with_its_type() -> None:
    assert call("merge", {}, AS_LIST, PAGE, PAGE) == 6
    assert call("merge_later", {}, AS_LIST, PAGE, b"dead ") == ["a.b", None]


def test_results_that_are_only_read_are_no_arguments() -> None:
    assert call("count", {"page": {"url": "x", "words": 1}}, READ, PAGE) == 1


def test_hooks_see_the_same_arguments() -> None:
    app = forq.App("q")

    @app.around
    def around(job: Job) -> Iterator[None]:
        seen.append(job.results())
        yield

    app.task(name="merge")(merge.function)
    seen.clear()
    ended = app({}, with_results(AS_LIST, PAGE))
    assert (ended.value, seen) == (3, [[{"url": "a.b", "words": 3}]])


def test_a_missing_result_fails_the_attempt_before_the_function_starts() -> None:
    with pytest.raises(NoResult, match=r"dependency 1 of job 'j1'.*too long"):
        call("count", {}, AS_ARGUMENT, b"done !too long")


def test_a_result_of_another_type_waits_for_the_deploy_and_is_then_dead() -> None:
    old = Job("q", "j1", "j1", "count", 5, 0.0, 10**12, snoozes=40, inputs=Inputs(1, AS_ARGUMENT, (b"done 5",)))
    with pytest.raises(Permanent, match=r"do not fit task count.*argument page"):
        tasks({}, old)
    with pytest.raises(Snooze, match=r"do not fit task count.*argument page"):
        call("count", {}, AS_ARGUMENT, b"done 5")


@pytest.mark.parametrize("task", [by_name, only_rest])
def test_a_task_without_a_positional_parameter_cannot_get_a_result(task: Any) -> None:
    message = rf"task {task.name}, {task.name}\(.*has no positional parameter.*current_job\(\).results\(\)"
    with pytest.raises(UsageError, match=message):
        task.signature.pack_rest((), {})
    with pytest.raises(Snooze, match=message):
        call(task.name, {}, AS_ARGUMENT, PAGE)


def test_a_call_without_its_first_argument_is_packed() -> None:
    assert count.signature.pack_rest((), {}) == {}
    assert count.signature.pack_rest((5,), {"factor": 2}) == {"minimum": 5, "factor": 2}
    with pytest.raises(TypeError, match="multiple values for argument 'page'"):
        count.signature.pack_rest((), {"page": Page("a")})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        count.signature.pack_rest((), {"nothing": 1})
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        count.signature.pack_rest((1, 2), {})
    with pytest.raises(DoesNotFit, match="argument minimum"):
        count.signature.pack_rest(("five",), {})


def test_a_task_whose_code_is_elsewhere_gets_no_result_as_an_argument() -> None:
    with pytest.raises(UsageError, match="the parameters of task 'far' are unknown here"):
        tasks.task_ref("far").signature.pack_rest((), {})
