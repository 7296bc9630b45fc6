"""Flows of tasks: the builder, and flows over two queues that the test kit runs."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import forq
from forq import testing
from forq.app.flow import Flow
from forq.errors import DoesNotFit, Exists, InvalidId, UnknownQueue, UsageError
from forq.testing import Memory

app = forq.App("home")


@dataclass(frozen=True)
class Page:
    url: str


@app.task
def fetch(url: str) -> Page:
    return Page(url)


@app.task(queue="parsers")
def parse(page: Page, factor: int = 1, *, bonus: int = 0) -> int:
    return len(page.url) * factor + bonus


@app.task
async def merge(numbers: list[int], title: str = "sum") -> str:
    return f"{title} {sum(numbers)}"


@app.task(queue="parsers")
def double(number: int) -> int:
    return 2 * number


@app.task(dead_on=(KeyError,))
def fail() -> int:
    raise KeyError("no")


@app.task
def note(text: str) -> str:
    return text


@app.task
def by_name(*, page: Page) -> str:
    return page.url


@app.task
def nothing() -> int:
    return 0


@pytest.fixture
def memory() -> Iterator[Memory]:
    with testing.memory(app) as memory:
        yield memory


def tasks_of(memory: Memory) -> list[str | None]:
    return [attempt.task for attempt in memory.run_all(raises=False)]


def test_results_go_from_job_to_job_over_two_queues(memory: Memory) -> None:
    with app.flow() as flow:
        page = flow.add(fetch.prepare("a.bc"))
        parts = [flow.then(parse, page, number, bonus=1) for number in range(3)]
        total = flow.join(merge, parts, title="all")
    assert memory.jobs(state="held")
    assert tasks_of(memory) == ["fetch", "parse", "parse", "parse", "merge"]
    assert page.ref.result() == Page("a.bc")
    assert [part.ref.result() for part in parts] == [1, 5, 9]
    assert total.ref.result() == "all 15"
    assert memory.jobs() == []


def test_a_flow_of_one_queue_is_one_call(memory: Memory) -> None:
    with app.flow() as flow:
        flow.join(merge, [flow.add(nothing.prepare()), flow.add(nothing.prepare())])
    assert memory.client.link().call("EXISTS", "forq:{home}:batches") == 0
    assert tasks_of(memory) == ["nothing", "nothing", "merge"]


def test_nothing_is_stored_before_the_end_of_the_block_or_after_an_exception(memory: Memory) -> None:
    with app.flow() as flow:
        node = flow.add(note.prepare("a"))
        assert memory.jobs() == []
        with pytest.raises(UsageError, match=f"the jobs of flow {flow.id} are not stored yet: leave the `with` block"):
            _ = node.ref
    assert len(memory.jobs()) == 1
    with pytest.raises(ZeroDivisionError), app.flow() as flow:
        flow.add(note.prepare(str(1 // 0)))
    assert len(memory.jobs()) == 1


def test_an_empty_flow_is_nothing(memory: Memory) -> None:
    with app.flow():
        pass
    assert memory.jobs() == []


def test_a_chain_passes_each_result_on(memory: Memory) -> None:
    with app.flow() as flow:
        last = flow.chain(fetch.prepare("abc"), parse.using(priority=1), double, double)
    assert tasks_of(memory) == ["fetch", "parse", "double", "double"]
    assert last.ref.result() == 12


def test_map_makes_a_job_per_value(memory: Memory) -> None:
    with app.flow() as flow:
        pages = flow.map(fetch, ["a", "bc"])
        flow.join(merge, [flow.then(parse, page) for page in pages])
    memory.run_all()
    assert [node.ref.result().url for node in pages] == ["a", "bc"]


@pytest.mark.parametrize("as_list", [True, False])
def test_a_job_that_was_added_waits_without_results(memory: Memory, as_list: bool) -> None:
    with app.flow() as flow:
        first = flow.add(note.prepare("first"))
        flow.add(note.prepare("second"), after=[first] if as_list else first)
    assert [job.state for job in memory.jobs(note)] == ["waiting", "held"]
    assert tasks_of(memory) == ["note", "note"]


def test_when_decides_what_runs_after_a_death(memory: Memory) -> None:
    with app.flow() as flow:
        broken = flow.add(fail.using(max_retries=0).prepare())
        behind = flow.then(double, broken)
        always = flow.add(note.prepare("always"), after=[broken, behind], when="ended")
        alarm = flow.add(note.prepare("alarm"), after=[broken], when="dead")
        calm = flow.add(note.prepare("calm"), after=[flow.add(nothing.prepare())], when="dead")
    assert sorted(map(str, tasks_of(memory))) == ["fail", "note", "note", "nothing"]
    assert [node.ref.state() for node in (broken, behind, always, alarm, calm)] == [
        *("dead", "dead", "done", "done"),
        "gone",
    ]


def test_the_same_dependency_counts_once(memory: Memory) -> None:
    with app.flow() as flow:
        number = flow.add(nothing.prepare())
        total = flow.join(merge, [number, number])
    memory.run_all()
    # The list has one result per job, not per mention.
    assert total.ref.result() == "sum 0"
    assert flow._jobs[1].needs == (0,)


def wrong_uses(typed: Flow) -> Iterator[tuple[type[Exception], str, Any]]:
    # Type checkers refuse these, too (test_types.py).
    flow: Any = typed
    page = flow.add(fetch.prepare("a"))
    foreign = app.flow().add(fetch.prepare("a"))
    yield UsageError, "is not a job of this flow: pass what add, then and join", lambda: flow.then(parse, foreign)
    yield UsageError, "is not a job of this flow", lambda: flow.add(note.prepare("a"), after=[foreign])
    yield UsageError, "'j1' is not a job of this flow", lambda: flow.add(note.prepare("a"), after=["j1"])
    yield (
        UsageError,
        r"jobs of a flow wait for jobs of the same flow: give them as flow.add\(…, after=…\)",
        lambda: flow.add(note.using(after="j1").prepare("a")),
    )
    yield UsageError, "task 'merge' needs the results of at least one job: none was given", lambda: flow.join(merge, [])
    yield UsageError, "for a single one: flow.then", lambda: flow.join(merge, page)
    yield UsageError, r"task by_name, .*has no positional parameter", lambda: flow.then(by_name, page)
    yield UsageError, r"task nothing, .*has no positional parameter", lambda: flow.then(nothing, page)
    yield DoesNotFit, "argument factor", lambda: flow.then(parse, page, "two")
    yield TypeError, "unexpected keyword argument 'nope'", lambda: flow.then(parse, page, nope=1)
    yield TypeError, "multiple values for argument 'page'", lambda: flow.then(parse, page, page=1)
    yield DoesNotFit, "argument text", lambda: flow.map(note, [1])
    yield UsageError, r"is not a prepared job; pass one: flow.add\(TASK", lambda: flow.add(note)
    yield UsageError, "is not a prepared job", lambda: flow.chain(note, note)
    yield UsageError, "is not a task: pass one that @app.task has made", lambda: flow.then(note.function, page)
    yield UsageError, "when 'failed' is not allowed", lambda: flow.add(note.prepare("a"), when="failed")
    sender_of: Any = note.using
    for option, value in (("token", "t"), ("if_exists", "skip"), ("durable", "replica")):
        sender = sender_of(**{option: value})
        message = rf"using\({option}=…\) is not allowed for jobs of a flow"
        yield UsageError, message, lambda sender=sender: flow.add(sender.prepare("a"))
        yield UsageError, message, lambda sender=sender: flow.then(sender, page)


def test_wrong_uses_are_refused_at_the_call(memory: Memory) -> None:
    flow = app.flow()
    for number, (error, message, use) in enumerate(wrong_uses(flow)):
        with pytest.raises(error, match=message):
            use()
        assert len(flow._nodes) == len(flow._jobs) == 1, number
    flow.store()
    assert tasks_of(memory) == ["fetch"]


def test_arguments_that_do_not_fit_are_type_errors() -> None:
    flow = app.flow()
    page = flow.add(fetch.prepare("a"))
    with pytest.raises(TypeError):
        flow.then(parse, page, "two")  # type: ignore[arg-type]


def test_a_stored_flow_cannot_change(memory: Memory) -> None:
    with app.flow() as flow:
        flow.add(note.prepare("a"))
    for use in (flow.store, lambda: flow.add(note.prepare("b"))):
        with pytest.raises(UsageError, match=rf"flow {flow.id} is stored and cannot change: .*app.flow\(\)"):
            use()
    assert len(memory.jobs()) == 1


def test_ids_of_flows_and_jobs_are_checked(memory: Memory) -> None:
    with pytest.raises(InvalidId, match="flow id 'not allowed' is not allowed"):
        app.flow("not allowed")
    note.using(id="taken").enqueue("x")
    with pytest.raises(Exists, match="already has a job with that id; nothing was stored"), app.flow("mine") as flow:
        flow.then(note, flow.add(note.using(id="taken").prepare("a")))
    assert [job.id for job in memory.jobs()] == ["taken"]


def test_the_queues_of_a_flow_are_created_before_it_is_stored(memory: Memory) -> None:
    late = forq.App("late", url=memory.url)
    first, second = late.task(nothing.function), late.task(queue="later")(double.function)
    with late.flow() as flow:
        flow.then(second, flow.add(first.prepare()))
    assert {"late", "later"} <= set(memory.client.queues())
    flow = late.flow()
    for sender in (first, first.using(queue="elsewhere")):
        flow.add(sender.prepare())
    with pytest.raises(UnknownQueue, match="nothing of the flow was stored"):
        flow.store()
    assert len(memory.jobs("late")) == 1


def test_asyncio_stores_flows_on_its_own_connections(memory: Memory) -> None:
    async def main() -> str:
        async with app.flow() as flow:
            total = flow.join(merge, [flow.then(parse, flow.add(fetch.prepare("abc")))])
        assert (await app.async_client.queue("home").job(total.id))["state"] == "held"
        with pytest.raises(ZeroDivisionError):
            async with app.flow() as other:
                other.add(note.prepare(str(1 // 0)))
        await memory.arun_all()
        result = await total.ref.aresult()
        await app.async_client.aclose()
        return result

    assert asyncio.run(main()) == "sum 3"
    assert memory.jobs() == []
