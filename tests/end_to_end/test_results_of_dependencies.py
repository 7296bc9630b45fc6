"""Jobs that wait for others and use their results, with a real supervisor and real workers."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forq.app.tasks import JobRef, Prepared
from forq.job import new_id
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until
from tests.support.handlers import flow

pytestmark = pytest.mark.timeout(120)

PARTS = 20
SQUARES = [number**2 for number in range(PARTS)]


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        for name, concurrency in (("flow", 1), ("wide", 8)):
            options = ("--set=max_data=8mb", f"--set=concurrency={concurrency}")
            forq.ctl("create", name, "--handler", "flow:app", "--path", str(HANDLERS), *options)
        flow.app._client = forq.client()
        yield forq
        flow.app._client.close()
        flow.app._client = None


def flow_of(queue: str, merge: Any, stop_at: Path | None = None) -> JobRef[Any]:
    """fetch -> parse -> 20 x process -> merge, in one call. The process in the middle may wait for its end."""
    fetch, parse, *parts = (new_id() for _ in range(PARTS + 2))
    middle = "" if stop_at is None else str(stop_at)
    process = {each: flow.process.using(queue=queue, id=each, after=parse, with_results=True) for each in parts}
    *_, merged = flow.app.enqueue_many(
        [
            flow.fetch.using(queue=queue, id=fetch).prepare(PARTS),
            flow.parse.using(queue=queue, id=parse, after=fetch, with_results=True).prepare(),
            *(
                sender.prepare(number, middle if number == PARTS // 2 else "")
                for number, sender in enumerate(process.values())
            ),
            merge.using(queue=queue, after=parts, with_results=True, keep_done="1h").prepare(),
        ]
    )
    return merged


@pytest.mark.parametrize("queue", ["flow", "wide"])
@pytest.mark.parametrize("merge", [flow.merge, flow.merge_later])
def test_results_pass_through_a_flow_in_order(forq: Forq, queue: str, merge: Any) -> None:
    assert flow_of(queue, merge).result(60) == SQUARES
    status = flow.app.client.queue(queue).status()
    assert (status["held"], status["failed"], status["dead"]) == (0, 0, 0)


def test_jobs_may_be_enqueued_while_those_that_they_wait_for_run(forq: Forq) -> None:
    fetched = flow.fetch.using(queue="wide").enqueue(PARTS)
    parsed = flow.parse.using(queue="wide", after=fetched, with_results=True).enqueue()
    process = flow.process.using(queue="wide", after=parsed, with_results=True)
    parts = [process.enqueue(number) for number in range(PARTS)]
    assert flow.merge.using(queue="wide", after=parts, with_results=True).enqueue().result(60) == SQUARES


@pytest.mark.parametrize("queue", ["flow", "wide"])
def test_a_worker_that_is_killed_loses_no_result(forq: Forq, queue: str, tmp_path: Path) -> None:
    stop_at = tmp_path / "pid"
    merged = flow_of(queue, flow.merge, stop_at)
    wait_until(stop_at.exists, what="the job in the middle runs")
    os.kill(int(stop_at.read_text()), signal.SIGKILL)
    assert merged.result(60) == SQUARES
    assert forq.queue_status(queue)["dead"] == 0


def test_results_of_more_than_one_call_are_used(forq: Forq) -> None:
    letters = "abcdefghijklmnopqrst"
    assert len(letters) * flow.LONG > 4 << 20
    ids = {letter: new_id() for letter in letters}
    outline = flow.outline.using(queue="wide", after=list(ids.values()), with_results=True, keep_done="1h")
    parts = [flow.repeat.using(queue="wide", id=ids[letter]).prepare(letter) for letter in letters]
    *_, outlined = flow.app.enqueue_many([*parts, outline.prepare()])
    assert outlined.result(60) == [[letter, flow.LONG] for letter in letters]


def test_a_chain_passes_on_results_that_grow(forq: Forq) -> None:
    last = [new_id()]
    jobs: list[Prepared[Any]] = [flow.repeat.using(queue="flow", id=last[0]).prepare("a")]
    for _ in range(5):
        before, last = last, [new_id(), new_id()]
        jobs += [flow.longer.using(queue="flow", id=each, after=before, with_results=True).prepare() for each in last]
    outline = flow.outline.using(queue="flow", after=last, with_results=True, keep_done="1h")
    *_, outlined = flow.app.enqueue_many([*jobs, outline.prepare()])
    assert outlined.result(60) == [["a", 16 * flow.LONG]] * 2
