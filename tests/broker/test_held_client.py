"""Held jobs as clients see them: enqueueing them, one job, pages, searches, bulk requests and explanations."""

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from forq.api_types import When
from forq.async_client import AsyncClient
from forq.broker.bulk import BulkChanges
from forq.broker.chunks import NewJob
from forq.broker.enqueue import new_job
from forq.broker.explain import why
from forq.broker.filters import JobFilter
from forq.broker.inspect import find_job
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.search import JobSearch
from forq.client import Client, Queue
from forq.errors import UnknownDependency, UsageError, WaitTimeout
from tests.support.drive.one_queue import HandWorker, OneQueue


class Ref(NamedTuple):
    queue: str
    id: str


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    client = Client(redis_url)
    yield client
    client.close()


@pytest.fixture
def q(client: Client) -> Queue:
    return client.queue("q")


@pytest.fixture
def worker(queue: OneQueue) -> HandWorker:
    return queue.worker()


@pytest.mark.parametrize("after", ["a", ["a"], ("a", "a"), Ref("q", "a"), [Ref("q", "a")]])
def test_a_client_enqueues_a_job_that_waits_for_ids_and_refs(
    queue: OneQueue, q: Queue, worker: HandWorker, after: Any
) -> None:
    q.enqueue(1, id="a")
    assert q.enqueue(2, id="b", after=after) == "b"
    assert (q.status()["held"], q.status()["waiting"]) == (1, 1)
    assert worker.turn(5) == ["a"]
    assert worker.turn(5, done="a") == ["b"]


@pytest.mark.parametrize("when", ["ended", "dead"])
def test_a_client_says_when_the_job_may_run(queue: OneQueue, q: Queue, worker: HandWorker, when: When) -> None:
    q.enqueue(1, id="a")
    q.enqueue(2, id="b", after="a", when=when)
    worker.turn(1)
    assert worker.turn(5, failed="a") == ["b"]


def test_a_client_asks_for_results(queue: OneQueue, q: Queue, worker: HandWorker) -> None:
    q.enqueue(1, id="a")
    q.enqueue(2, id="b", after="a", with_results=True)
    worker.turn(1)
    worker.turn(0, done="a", results={"a": "5"})
    assert queue.hash("inputs")["b 1"] == "done 5"
    with pytest.raises(UsageError, match="with_results needs `after`"):
        q.enqueue(3, with_results=True)


def test_a_ref_of_another_queue_is_refused(queue: OneQueue, q: Queue) -> None:
    q.enqueue(1, id="a")
    with pytest.raises(
        UsageError, match="job 'a' is in queue 'other', but a job of queue 'q' can wait for jobs of its"
    ):
        q.enqueue(2, after=Ref("other", "a"))
    with pytest.raises(UnknownDependency):
        q.enqueue(2, after=["a", "nobody"])
    with pytest.raises(UsageError, match="when 'soon' is not allowed: 'done', 'ended', 'dead'"):
        q.enqueue(2, after="a", when="soon")  # type: ignore[arg-type]
    assert q.status()["held"] == 0


def test_the_results_of_a_batch_are_refused(queue: OneQueue, client: Client, q: Queue) -> None:
    """It has one per member."""
    with client.batch("q") as batch:
        pass
    with pytest.raises(UsageError, match="a batch has no result of its own"):
        q.enqueue(1, after=batch, with_results=True)
    assert q.enqueue(1, after=batch)


def test_an_async_client_enqueues_jobs_that_wait(queue: OneQueue, redis_url: str, worker: HandWorker) -> None:
    async def test() -> None:
        async with AsyncClient(redis_url) as client:
            q = client.queue("q")
            first = await q.enqueue(1, id="a")
            await q.enqueue(2, id="b", after=[first], when="ended", with_results=True)
            with pytest.raises(UsageError, match="is in queue 'other'"):
                await q.enqueue(2, after=Ref("other", "a"))

    asyncio.run(test())
    assert queue.hash("held")["b"].split(" ")[1:3] == ["ended", "1"]


def enqueue(queue: OneQueue, *jobs: NewJob) -> None:
    queue.producer.enqueue(list(jobs))


def after(job_id: str, *names: str, **more: Any) -> NewJob:
    return new_job({"n": job_id}, id=job_id, after=names, **more)


def test_a_held_job_shows_what_it_waits_for(queue: OneQueue, worker: HandWorker) -> None:
    enqueue(queue, new_job(1, id="a"), new_job(1, id="d"), new_job(1, id="c", run_at=4_000_000_000))
    enqueue(queue, after("b", "a", type="mail", priority=3, expires_in="1h"))
    enqueue(queue, after("z", "a", "b", "c", "d", when="ended", with_results=True, run_at=4_000_000_001))
    worker.turn(1)
    job = queue.inspector.job("b")
    assert (job["state"], job["data"], job["type"], job["priority"]) == ("held", {"n": "b"}, "mail", 3)
    assert (job["when"], job["with_results"], job["run_at"]) == ("done", False, None)
    assert job["waits_for"] == [{"kind": "job", "id": "a", "state": "active"}]
    assert job["options"] == {"expires_in": "1h"}
    assert "expires_at" not in job
    assert (job["attempts"], job["progress"]) == ([], None)
    assert queue.inspector.job("z")["waits_for"] == [
        {"kind": "job", "id": "a", "state": "active"},
        {"kind": "job", "id": "b", "state": "held"},
        {"kind": "job", "id": "c", "state": "scheduled", "run_at": 4_000_000_000.0},
        {"kind": "job", "id": "d", "state": "waiting"},
    ]
    worker.turn(0, done="a")
    job = queue.inspector.job("z")
    assert (job["when"], job["with_results"], job["run_at"]) == ("ended", True, 4_000_000_001.0)
    assert ([each["id"] for each in job["waits_for"]], job["waits_for_count"], job["waited_for"]) == (
        ["b", *"cd"],
        3,
        1,
    )


def test_a_job_that_waits_for_a_blocked_one_shows_that(queue: OneQueue, worker: HandWorker) -> None:
    enqueue(queue, new_job(1, id="a"), after("first", "a"))
    worker.turn(1)
    enqueue(queue, new_job(2, id="a"))
    enqueue(queue, after("second", "a"))
    states = {name: queue.inspector.job(name)["waits_for"][0]["state"] for name in ("first", "second")}
    assert states == {"first": "active", "second": "blocked"}


def test_only_the_first_dependencies_are_shown(queue: OneQueue) -> None:
    names = [f"j{number}" for number in range(120)]
    enqueue(queue, *(new_job(1, id=name) for name in names), after("b", *names))
    job = queue.inspector.job("b")
    assert [each["id"] for each in job["waits_for"]] == names[:100]
    assert (job["waits_for_count"], job["waited_for"]) == (120, 0)


def test_a_dependency_whose_end_is_not_followed_yet_has_ended(queue: OneQueue, worker: HandWorker) -> None:
    enqueue(queue, new_job(1, id="a"))
    for part in range(2):
        enqueue(queue, *(after(f"j{part}.{number}", "a") for number in range(400)))
    worker.turn(1)
    worker.turn(0, done="a")
    held = sorted(queue.hash("held"))
    assert len(held) == 300
    assert queue.inspector.job(held[0])["waits_for"] == [{"kind": "job", "id": "a", "state": "done"}]


def test_a_job_shows_which_jobs_wait_for_it(queue: OneQueue, worker: HandWorker) -> None:
    enqueue(queue, new_job(1, id="a"), after("b", "a"), after("gone", "a"), after("c", "b"))
    assert "dependants" not in queue.inspector.job("c")
    queue.producer.cancel("gone")
    for _ in range(2):
        job = queue.inspector.job("a")
        assert (job["dependants"], job["dependant_count"]) == (["b"], 2)
        worker.turn(1)
    assert queue.inspector.job("b")["dependants"] == ["c"]
    enqueue(queue, *(after(f"j{number:02}", "a") for number in range(30)))
    job = queue.inspector.job("a")
    assert (job["dependants"][:2], len(job["dependants"]), job["dependant_count"]) == (["b", "j00"], 19, 32)


def pages(queue: OneQueue, state: str | None, limit: int) -> list[list[str]]:
    found, following = [], None
    while True:
        page = queue.inspector.jobs(state, limit, following)
        assert len(page.jobs) <= limit
        found.append([job["id"] for job in page.jobs])
        following = page.next
        if following is None:
            return found


@pytest.mark.parametrize("number", [5, 1300])
@pytest.mark.parametrize("limit", [3, 100, 1000])
def test_held_jobs_are_listed_in_pages(queue: OneQueue, number: int, limit: int) -> None:
    names = {f"j{each}" for each in range(number)}
    enqueue(queue, new_job(1, id="a"))
    for part in range(0, number, 400):
        enqueue(queue, *(after(f"j{each}", "a") for each in range(part, min(part + 400, number))))
    listed = [id for page in pages(queue, "held", limit) for id in page]
    assert (set(listed), len(listed)) == (names, number)


def test_a_list_of_all_jobs_ends_with_the_held_ones(queue: OneQueue, worker: HandWorker) -> None:
    enqueue(queue, new_job(1, id="a", priority=0), new_job(1, id="w"), new_job(1, id="s", run_in=3600))
    enqueue(queue, after("h", "a"), after("i", "a"))
    worker.turn(1)
    page = queue.inspector.jobs()
    assert [(job["id"], job["state"]) for job in page.jobs[:3]] == [
        ("a", "active"),
        ("w", "waiting"),
        ("s", "scheduled"),
    ]
    assert {job["id"] for job in page.jobs[3:]} == {"h", "i"}
    for limit in (1, 2, 3, 4):
        listed = [id for each in pages(queue, None, limit) for id in each]
        assert (listed[:3], set(listed[3:]), len(listed)) == ([*"aws"], {"h", "i"}, 5)
    with pytest.raises(UsageError, match="cursor 'held/x' is not allowed"):
        queue.inspector.jobs("held", after="held/x")


def test_a_held_job_is_found_in_its_queue(queue: OneQueue) -> None:
    enqueue(queue, new_job(1, id="a"), after("b", "a"))
    names = ["none", "q", "other"]
    assert find_job(queue.link, DEFAULT_PREFIX, names, "b") == [("q", "held")]
    assert find_job(queue.link, DEFAULT_PREFIX, names, "a") == [("q", "waiting")]
    assert find_job(queue.link, DEFAULT_PREFIX, names, "c") == []


def found(queue: OneQueue, state: str | None, limit: int = 1000, **wanted: Any) -> list[str]:
    ids: list[str] = []
    following: str | None = None
    search = JobSearch(queue.link, DEFAULT_PREFIX, queue.name)
    while True:
        asked = JobFilter.from_mapping(wanted, state) if wanted else None
        page = search.page(state, limit, following, asked)
        ids += [job["id"] for job in page.jobs]
        following = page.next
        if following is None:
            return ids


def test_held_jobs_are_found_by_a_filter(queue: OneQueue) -> None:
    enqueue(queue, new_job(1, id="a"), after("b", "a", type="mail", identifier="Ann"), after("c", "a", "b"))
    assert found(queue, "held", type="mail") == ["b"]
    assert found(queue, "held", identifier="ann") == ["b"]
    assert found(queue, "held", id="c") == ["c"]
    assert found(queue, "held", id="a") == []
    assert found(queue, "held", id="c", type="mail") == []
    assert found(queue, None)[0] == "a"
    assert set(found(queue, None)) == set("abc")
    (job,) = JobSearch(queue.link, DEFAULT_PREFIX, "q").page("held", wanted=JobFilter(id="c")).jobs
    assert (job["waits_for_count"], job["run_at"], job["retry_count"]) == (2, None, 0)
    with pytest.raises(UsageError, match="a filter by error needs one of the states dead"):
        found(queue, "held", error="x")


@pytest.mark.parametrize("limit", [3, 7, 1000])
def test_a_search_finds_each_held_job_once(queue: OneQueue, limit: int) -> None:
    enqueue(queue, new_job(1, id="a"))
    for part in range(4):
        enqueue(queue, *(after(f"j{part}.{number}", "a") for number in range(300)))
    # Each look-up continues the move of the grown hash to a larger table; during it a page may omit an id (scan_held).
    fields = [f"j{part}.{number}" for part in range(4) for number in range(300)]
    assert all(queue.redis.hmget(queue.key(name), fields * 2) for name in ("held", "held:jobs"))
    listed = found(queue, "held", limit)
    assert (len(set(listed)), len(listed)) == (1200, 1200)
    assert len(found(queue, "held", limit, text="J1.2")) == 111


def test_held_jobs_are_cancelled_by_ids_and_by_a_filter(queue: OneQueue) -> None:
    enqueue(queue, new_job(1, id="a"), *(after(f"j{number}", "a", type="mail") for number in range(700)))
    enqueue(queue, after("other", "a"))
    bulk = BulkChanges(queue.link, DEFAULT_PREFIX, queue.name)
    assert bulk.cancel_ids(["j0", "none"]).cancelled == 1
    done = bulk.cancel_matching("held", JobFilter(id="j1"))
    assert (done.cancelled, done.scanned) == (1, 1)
    cancelled, following = 0, None
    while True:
        part = bulk.cancel_matching("held", JobFilter(type="mail"), following)
        cancelled, following = cancelled + part.cancelled, part.next
        if following is None:
            break
    assert cancelled == 698
    assert set(queue.hash("held")) == {"other"}


def test_only_the_held_job_that_was_found_is_cancelled(queue: OneQueue) -> None:
    enqueue(queue, new_job(1, id="a"), after("b", "a"))
    (job,) = JobSearch(queue.link, DEFAULT_PREFIX, "q").by_id("held", JobFilter(id="b"))
    queue.producer.cancel("b")
    enqueue(queue, after("b", "a"))
    BulkChanges(queue.link, DEFAULT_PREFIX, "q")._cancel([("b", f"0 {job.enqueued_us}")])
    assert set(queue.hash("held")) == {"b"}


def reason(queue: OneQueue, job_id: str, **options: Any) -> str:
    return why(queue.link, DEFAULT_PREFIX, queue.name, job_id, **options)[1]


def test_why_says_what_a_held_job_waits_for(queue: OneQueue, worker: HandWorker) -> None:
    enqueue(queue, new_job(1, id="a"), new_job(1, id="s", run_at=4_000_000_000), new_job(1, id="w"))
    enqueue(queue, after("b", "a"), after("c", "a", "s", "w", when="ended"), after("d", "b", "w", when="dead"))
    worker.turn(1)
    assert reason(queue, "b") == "it waits for job a to be done: a is running"
    assert reason(queue, "c") == (
        "it waits for jobs a, s and w to end: a is running, s is scheduled for 2096-10-02T07:06:40Z, w is waiting; "
        "see: forqctl why q s"
    )
    assert reason(queue, "d") == (
        "it waits for jobs b and w to die (it is cancelled if none does): b is held, w is waiting; see: forqctl why q b"
    )
    worker.turn(0, done="a")
    assert reason(queue, "c").startswith("it waits for jobs s and w to end: s is scheduled for 2096-10-02T07:06:40Z, ")
    assert "w is waiting; 1 other has ended; see: forqctl why q s" in reason(queue, "c")
    queue.registry.pause("q", paused=True)
    assert reason(queue, "d").endswith("; its queue is paused; `forqctl resume q` resumes it; see: forqctl why q b")


def test_why_names_at_most_ten_jobs(queue: OneQueue) -> None:
    names = [f"j{number}" for number in range(22)]
    enqueue(queue, *(new_job(1, id=name) for name in names), after("b", *names, expires_in="90s", run_at=4e9))
    text = reason(queue, "b")
    assert text.startswith("it waits for jobs j0, j1, j2, j3, j4, j5, j6, j7, j8, j9 and 12 more to be done: j0 is ")
    assert "j10" not in text
    assert "; it is scheduled for 2096-10-02T07:06:40Z; " in text
    assert text.endswith("; it has its own expires_in = 90s; see: forqctl why q j0")


def test_why_says_that_a_dependency_failed(queue: OneQueue, worker: HandWorker) -> None:
    enqueue(queue, new_job(1, id="a"), after("b", "a", expires_in="1h"))
    worker.turn(1)
    worker.turn(0, failed="a")
    expected = (
        "it could not run: job a, for which it waited, ended as dead; `forqctl dead retry q b` runs it without waiting"
    )
    assert reason(queue, "b") == reason(queue, "b", messages=False) == expected
    assert "expires_at" not in queue.inspector.job("b")


def test_drain_waits_for_held_jobs_that_become_ready_and_for_no_others(
    queue: OneQueue, q: Queue, worker: HandWorker
) -> None:
    q.enqueue(1, id="a")
    q.enqueue(2, id="b", after="a")
    q.enqueue(3, id="later", run_in=3600)
    q.enqueue(4, id="c", after="later")
    assert worker.turn(1) == ["a"]
    assert worker.turn(1, done="a") == ["b"]
    with pytest.raises(WaitTimeout, match="0 waiting, 1 active"):
        q.drain(timeout=0)
    worker.turn(0, done="b")
    q.drain(timeout=0)
    assert q.status()["held"] == 1


def test_a_held_job_cannot_be_run_before_its_dependencies(queue: OneQueue, q: Queue) -> None:
    q.enqueue(1, id="a")
    q.enqueue(2, id="b", after="a")
    with pytest.raises(UsageError, match="that job of queue 'q' is held, not scheduled"):
        q.run_now("b")
