"""Reading the results that a claimed job uses."""

import pytest

from forq.broker.enqueue import new_job
from forq.broker.link import READ_BYTES, Link
from tests.support.drive.one_queue import HandWorker, OneQueue


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


def ready(queue: OneQueue, worker: HandWorker, results: dict[str, str]) -> None:
    """`z` waits for jobs with these ids and results, and is claimed after them."""
    jobs = [new_job(1, id=each) for each in results]
    queue.producer.enqueue([*jobs, new_job(1, id="z", after=list(results), with_results=True, when="ended")])
    ids = "".join(results)
    assert worker.turn(len(ids)) == list(ids)
    for left, each in reversed(list(enumerate(reversed(ids)))):
        assert worker.turn(0 if left else 1, done=each, keep=left, results={each: results[each]}) == ["z"][left:]


def test_the_results_are_in_the_order_of_the_dependencies(queue: OneQueue, worker: HandWorker) -> None:
    ready(queue, worker, {"a": "1", "b": '"x"', "c": "!too long"})
    assert worker.consumer.read_inputs("z", 3) == [b"done 1", b'done "x"', b"done !too long"]


def test_a_dependency_that_has_not_ended_has_none(queue: OneQueue, worker: HandWorker) -> None:
    queue.producer.enqueue([new_job(1, id="a"), new_job(1, id="b")])
    queue.producer.enqueue([new_job(1, id="z", after=["a", "b"], when="dead", with_results=True)])
    worker.turn(2)
    assert worker.turn(1, failed="b", keep=1) == ["z"]
    assert worker.consumer.read_inputs("z", 2) == [b"", b"dead "]


def test_they_stay_for_a_retry_and_are_gone_when_the_job_has_ended(queue: OneQueue, worker: HandWorker) -> None:
    queue.set_options(max_retries=5, min_backoff_ms=0)
    ready(queue, worker, {"a": "1"})
    assert worker.turn(1, failed="z") == ["z"]
    assert worker.consumer.read_inputs("z", 1) == [b"done 1"]
    worker.turn(0, done="z")
    assert worker.consumer.read_inputs("z", 1) is None


def test_long_results_are_read_in_parts(queue: OneQueue, worker: HandWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    long = '"' + READ_BYTES // 3 * "x" + '"'
    queue.set_options(max_data=2 * READ_BYTES)
    ready(queue, worker, dict.fromkeys("abcde", long))
    sizes: list[int] = []
    call = Link.call

    def measure(self: Link, *args: str, at: str | None = None) -> object:
        reply = call(self, *args, at=at)
        if args[0] == "HMGET":
            sizes.append(sum(map(len, reply)))
        return reply

    monkeypatch.setattr(Link, "call", measure)
    found = worker.consumer.read_inputs("z", 5)
    assert found == [b"done " + long.encode()] * 5
    assert len(sizes) == 3
    assert max(sizes) <= READ_BYTES
