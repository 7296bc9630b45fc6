"""Apps with a real supervisor: tasks run with their types, and clients get typed results."""

import asyncio
from collections.abc import Iterator
from decimal import Decimal

import pytest

from forq import App, AsyncClient
from forq.errors import JobDead
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until, whole_lines
from tests.support.handlers import shop

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        options = ("--set=keep_done=1h", "--set=max_retries=2", "--set=min_backoff=10ms", "--set=concurrency=2")
        forq.ctl("create", "shop", "--handler", "shop:app", "--path", str(HANDLERS), *options)
        shop.app._client = forq.client()
        yield forq


def test_results_have_the_declared_types(forq: Forq) -> None:
    refs = [shop.bill.enqueue("a", [Decimal("1.10"), Decimal("2")]), shop.bill.enqueue("again", [Decimal("0.5")])]
    assert [ref.result(timeout=30) for ref in refs] == [
        shop.Receipt("a", Decimal("3.10"), 1),
        shop.Receipt("again", Decimal("0.5"), 2),
    ]
    assert shop.greet.enqueue("you").result(timeout=30) == "hello you, this is greet"


def test_coroutines_enqueue_and_get_typed_results(forq: Forq) -> None:
    async def bill(to: str) -> shop.Receipt:
        ref = await shop.bill.aenqueue(to, [Decimal(1), Decimal("0.5")])
        return await ref.aresult(timeout=30)

    async def main() -> list[shop.Receipt]:
        async with AsyncClient(forq.url) as client:
            shop.app._async_client = client
            return await asyncio.gather(*(bill(str(n)) for n in range(50)))

    assert asyncio.run(main()) == [shop.Receipt(str(n), Decimal("1.5"), 1) for n in range(50)]


def test_many_jobs_of_several_tasks(forq: Forq) -> None:
    refs = shop.app.enqueue_many([*(shop.greet.prepare(str(n)) for n in range(50)), *[shop.find.prepare("a")] * 2])
    assert {ref.result(timeout=30) for ref in refs} == {f"hello {n}, this is greet" for n in range(50)} | {"b"}


def test_an_exception_of_dead_on_is_not_retried(forq: Forq) -> None:
    ref = shop.find.enqueue("missing")
    with pytest.raises(JobDead, match="KeyError"):
        ref.result(timeout=30)
    assert ref.state() == "dead"
    assert forq.client().queue("shop").job(ref.id)["retry_count"] == 0


def test_an_unknown_task_waits_for_a_worker_that_knows_it(forq: Forq) -> None:
    queue = forq.client().queue("shop")
    job_id = queue.enqueue({}, type="nothing")
    wait_until(lambda: queue.job(job_id)["state"] == "scheduled", what="it is snoozed")
    logged = wait_until(lambda: [line for line in forq.ctl("logs", "shop").splitlines() if job_id in line], what="log")
    assert "job snoozed" in logged[0]
    assert "no task 'nothing'; it has: bill, find, greet" in logged[0]


def test_a_job_without_a_type_is_dead_at_once(forq: Forq) -> None:
    job_id = forq.ctl("push", "shop", '{"name": "you"}').strip()
    queue = forq.client().queue("shop")
    dead = wait_until(lambda: (job := queue.job(job_id))["state"] == "dead" and job, what="it is dead")
    assert "run: forqctl push shop --type TASK JSON" in dead["error"]["message"]


def test_jobs_enqueued_before_the_first_supervisor_run_once_it_starts(redis_url: str) -> None:
    """The producer makes the queue. The supervisor joins it, with its own options and a fail handler."""
    producing = App("shop", url=redis_url)
    producing.queue("shop", max_items=2, keep_done="1h")
    refs = [producing.task_ref("greet").enqueue(name="you"), producing.task_ref("find").enqueue(key="missing")]
    settings = f"""
        [queues.shop]
        handler = "shop:app"
        fail_handler = "traced:on_fail"
        path = ["{HANDLERS}"]
        keep_done = "1h"
        max_items = 100
    """
    with running(redis=redis_url, settings=settings) as forq:
        assert refs[0].result(timeout=30) == "hello you, this is greet"
        wait_until(lambda: [line for line in whole_lines(forq.trace_file) if f" failed={refs[1].id}/" in line])
        producing.enqueue_many([producing.task_ref("greet").using(run_in=3600).prepare(name="x") for _ in range(3)])
    producing.client.close()
