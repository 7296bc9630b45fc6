"""Pages of jobs with details and filters, and groups of dead jobs."""

import json
from typing import Any

import pytest

from forq.broker import search as search_module
from forq.broker.dead_groups import dead_groups
from forq.broker.enqueue import Update, new_job
from forq.broker.filters import JobFilter, pattern_of
from forq.broker.keys import DEFAULT_PREFIX
from forq.broker.link import READ_BYTES
from forq.broker.record import brief_fields, pack_body
from forq.broker.search import FoundPage, JobSearch
from forq.errors import InvalidData, UnknownQueue, UsageError
from tests.support.drive.one_queue import OneQueue, one_queue

BASICS = {"priority": 5, "retry_count": 0, "stall_count": 0, "timeout_count": 0, "suspect": False, "type": None}


def search(queue: OneQueue) -> JobSearch:
    return JobSearch(queue.link, DEFAULT_PREFIX, queue.name)


def found(queue: OneQueue, state: str, limit: int = 1000, **wanted: Any) -> list[str]:
    """The ids of all pages."""
    ids: list[str] = []
    after: str | None = None
    while True:
        page = search(queue).page(state, limit, after, JobFilter.from_mapping(wanted, state))
        ids += [job["id"] for job in page.jobs]
        after = page.next
        if after is None:
            return ids


def bury(queue: OneQueue, member: str, died_ms: int = 5000, error: Any = None, body: bytes | None = None) -> None:
    packed = b"p5 1000000\n" + (body or pack_body({"secret": 1}, None, "mail"))
    shown = {"name": "ValueError", "message": "no", "kind": "retriable", "traceback": None} | (error or {})
    queue.redis.zadd(queue.key("dead"), {member: died_ms})
    queue.redis.hset(queue.key("dead:jobs"), member, packed + b"\n" + json.dumps(shown).encode() + b"\n[{}]")


def test_details_of_live_jobs_leave_out_the_data(queue: OneQueue) -> None:
    queue.producer.enqueue(
        [
            new_job({"secret": 1}, id="w", identifier="Ann", type="mail", priority=3),
            new_job({"secret": 1}, id="s", run_at=4_000_000_000.5),
        ]
    )
    waiting, scheduled = search(queue).page().jobs
    enqueued_at = [job.pop("enqueued_at") for job in (waiting, scheduled)]
    assert enqueued_at == [queue.inspector.job(job_id)["enqueued_at"] for job_id in "ws"]
    named = {"id": "w", "identifier": "Ann", "state": "waiting", "type": "mail", "priority": 3, "run_at": None}
    assert waiting == BASICS | named
    assert scheduled == BASICS | {"id": "s", "identifier": "s", "state": "scheduled", "run_at": 4_000_000_000.5}


def test_details_of_jobs_that_were_claimed(queue: OneQueue) -> None:
    queue.set_options(keep_done_ms=60_000, max_retries=1)
    queue.enqueue("a", "d", "f", "r")
    worker, other = queue.worker(), queue.worker("w2")
    worker.turn(want=1)
    queue.producer.enqueue([new_job(2, id="a", identifier="again", run_at=4_000_000_000)], Update())
    other.turn(want=3)
    other.turn(done="d", failed="f", keep=1, kind="permanent", error='{"name":"E","message":"m"}')
    other.turn(failed="r", error='{"name":"Late","message":"Slow server"}')
    (active,) = search(queue).page("active").jobs
    assert (active["id"], active["worker"], active["fence"], active["removed"]) == ("a", "w1", int(worker.fence), False)
    (blocked,) = search(queue).page("blocked").jobs
    assert (blocked["id"], blocked["identifier"], blocked["run_at"]) == ("a", "again", 4_000_000_000)
    (done,) = search(queue).page("done").jobs
    assert (done["id"], done["fence"], done["run_seconds"]) == ("d", int(other.fence), 7e-6)
    (dead,) = search(queue).page("dead").jobs
    assert (dead["id"], dead["fence"], dead["error"], dead["message"], dead["attempts"]) == (
        "f",
        int(other.fence),
        "E",
        "m",
        1,
    )
    (retried,) = search(queue).page("scheduled").jobs
    assert (retried["id"], retried["retry_count"]) == ("r", 1)
    assert all("secret" not in job and "data" not in job for job in (active, blocked, done, dead, retried))
    assert found(queue, "scheduled", error="slow SERVER") == ["r"]
    assert found(queue, "scheduled", error="fast") == []
    assert found(queue, "done", since=done["ended_at"]) == found(queue, "done", until=done["ended_at"]) == ["d"]
    assert found(queue, "done", since=done["ended_at"] + 0.01) == []


def test_a_filter_selects_by_each_of_its_fields(queue: OneQueue) -> None:
    jobs = [
        new_job(1, id="one", identifier="Ann Lee", type="mail"),
        new_job(1, id="two", identifier='quo"ted \u00e4', type="mail.bulk"),
        new_job(1, id="ann"),
    ]
    queue.producer.enqueue(jobs)
    assert found(queue, "waiting") == ["one", "two", "ann"]
    assert found(queue, "waiting", type="mail") == ["one"]
    assert found(queue, "waiting", identifier="ann") == ["one", "ann"]
    assert found(queue, "waiting", identifier='O"TED \u00c4') == ["two"]
    assert found(queue, "waiting", text="MAIL") == ["one", "two"]
    assert found(queue, "waiting", text="tw") == ["two"]
    assert found(queue, "waiting", identifier="ann", type="mail", text="one") == ["one"]
    at = queue.inspector.job("one")["enqueued_at"]
    assert found(queue, "waiting", since=at, until=at) == ["one", "two", "ann"]
    assert found(queue, "waiting", since=at + 1) == found(queue, "waiting", until=at - 1) == []


def test_an_id_is_looked_up_in_its_state(queue: OneQueue) -> None:
    queue.enqueue("a", "b")
    bury(queue, "a@1", 1000)
    bury(queue, "a@2", 2000)
    queue.redis.config_resetstat()
    assert found(queue, "waiting", id="a") == ["a"]
    assert found(queue, "waiting", id="a", type="other") == found(queue, "scheduled", id="a") == []
    assert found(queue, "done", id="a") == found(queue, "blocked", id="a") == []
    dead = search(queue).page("dead", wanted=JobFilter(id="a")).jobs
    assert [job["fence"] for job in dead] == [2, 1]
    assert found(queue, "dead", id="a@1") == ["a"]
    longest = "x" * 128
    bury(queue, f"{longest}@{10**15}", 3000)
    assert found(queue, "dead", id=f"{longest}@{10**15}") == found(queue, "dead", id=longest) == [longest]
    assert "cmdstat_lrange" not in queue.redis.info("commandstats")


def test_dead_jobs_are_found_newest_first_by_their_error_and_time(queue: OneQueue) -> None:
    for number in range(4):
        bury(queue, f"j{number}@{number}", 1000 * number, {"name": "KeyError" if number % 2 else "IOError"})
    assert found(queue, "dead") == ["j3", "j2", "j1", "j0"]
    assert found(queue, "dead", error="keyerr") == ["j3", "j1"]
    assert found(queue, "dead", error="NO") == ["j3", "j2", "j1", "j0"]
    assert found(queue, "dead", since=1, until=2) == ["j2", "j1"]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_pages_continue_after_the_last_job_found(queue: OneQueue, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each state, also if a chunk ends between two jobs that died in the same millisecond."""
    monkeypatch.setattr(search_module, "CHUNK", 2)
    monkeypatch.setattr("forq.broker.dead.WALK_CHUNK", 2)
    queue.set_options(keep_done_ms=60_000)
    queue.enqueue(*"abcdefg")
    queue.worker().turn(want=2)
    queue.producer.enqueue([new_job(1, id=job_id) for job_id in "ab"], Update())
    second = queue.worker("w2")
    second.turn(want=1)
    second.turn(done="c")
    queue.producer.enqueue([new_job(1, id=f"s{n}", run_in=100 + n) for n in range(5)])
    queue.enqueue("p", "q", priority=7)
    for member in ("x@1", "x@2", "x@3", "y@4", "z@5"):
        bury(queue, member, 7000)
    bury(queue, "first@6", 1000)
    expected = {
        "waiting": ["d", "e", "f", "g", "p", "q"],
        "active": ["a", "b"],
        "blocked": ["a", "b"],
        "scheduled": ["s0", "s1", "s2", "s3", "s4"],
        "done": ["c"],
        "dead": ["z", "y", "x", "x", "x", "first"],
        "retry": [],
    }
    assert {state: found(queue, state, limit) for state in expected} == expected
    ids: list[str] = []
    page = FoundPage([], None, 0)
    while page.next is not None or not ids:
        page = search(queue).page(None, limit, page.next)
        ids += [job["id"] for job in page.jobs]
    assert ids == expected["active"] + expected["waiting"] + expected["scheduled"]


def test_the_retry_lane_and_suspects_are_found(queue: OneQueue) -> None:
    queue.set_options(retry_lane_retries=1, min_backoff_ms=0, max_backoff_ms=0, jitter=0)
    queue.enqueue(*"abc")
    worker = queue.worker()
    worker.turn(want=3)
    worker.turn(failed="a", keep=2, error='{"name":"Oops","message":"x"}')
    queue.recover(worker, 0, running=True, outcome="suspect")
    queue.recovery().promote(queue.name)
    assert found(queue, "retry") == found(queue, "retry", error="oops") == ["a"]
    assert sorted(found(queue, "waiting")) == ["b", "c"]
    assert [job["suspect"] for job in search(queue).page("waiting").jobs] == [False, True]


def test_a_request_scans_a_limited_number_of_jobs(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "SCANNED", 5)
    queue.enqueue(*(f"j{number}" for number in range(12)))
    wanted = JobFilter(text="j11")
    pages = [search(queue).page("waiting", wanted=wanted)]
    while pages[-1].next is not None:
        pages.append(search(queue).page("waiting", 10, pages[-1].next, wanted))
    assert [(len(page.jobs), page.scanned) for page in pages] == [(0, 5), (0, 5), (1, 2)]


def test_a_request_reads_a_limited_number_of_bytes(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "SCANNED_BYTES", READ_BYTES)
    queue.set_options(max_data=8 << 20)
    queue.producer.enqueue_many(new_job("x" * (READ_BYTES // 2), id=job_id) for job_id in "abcde")
    page = search(queue).page("waiting", wanted=JobFilter())
    assert ([job["id"] for job in page.jobs], page.scanned) == (["a", "b"], 2)
    assert [job["id"] for job in search(queue).page("waiting", 10, page.next).jobs] == ["c", "d"]


def test_stale_hints_and_wake_tokens_are_not_jobs(queue: OneQueue) -> None:
    queue.enqueue("a", "b", "c")
    queue.producer.cancel("a")
    queue.enqueue("a")
    queue.redis.lpush(queue.key("pending"), "")
    assert sorted(found(queue, "waiting")) == ["a", "b", "c"]


def test_a_broken_record_is_shown_with_the_reason(queue: OneQueue) -> None:
    queue.enqueue("a")
    queue.redis.hset(queue.key("jobs"), "a", "broken")
    (job,) = search(queue).page("waiting").jobs
    assert (job["id"], job["identifier"]) == ("a", "a")
    assert "broken" in job["record_error"]
    assert found(queue, "waiting", type="x") == []


@pytest.mark.parametrize(
    ("state", "given", "message"),
    [
        (None, {"id": "a"}, "needs a state"),
        ("waiting", {"name": "a"}, "id, type, identifier"),
        ("waiting", "a", "an object"),
        ("waiting", {"text": ""}, "1 to 1024"),
        ("waiting", {"text": 7}, "1 to 1024"),
        ("waiting", {"since": "today"}, "seconds"),
        ("waiting", {"since": float("nan")}, "seconds"),
        ("waiting", {"until": float("inf")}, "seconds"),
        ("waiting", {"until": 10**400}, "seconds"),
        ("waiting", {"error": "x"}, "dead, scheduled, retry"),
    ],
)
def test_an_invalid_filter_is_refused(state: str | None, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        JobFilter.from_mapping(given, state)


@pytest.mark.parametrize(
    ("state", "after"), [("dead", "waiting/5.1"), ("dead", "dead/1"), (None, "dead/1/a@1"), ("x", None)]
)
def test_a_state_or_cursor_of_another_kind_is_refused(queue: OneQueue, state: str | None, after: str | None) -> None:
    with pytest.raises(UsageError, match="not allowed"):
        search(queue).page(state, 10, after)


def test_an_unknown_queue_is_an_error(queue: OneQueue) -> None:
    with pytest.raises(UnknownQueue):
        JobSearch(queue.link, DEFAULT_PREFIX, "other").page("dead")
    with pytest.raises(UnknownQueue):
        dead_groups(queue.link, DEFAULT_PREFIX, "other")


def test_brief_fields_do_not_depend_on_the_data() -> None:
    brief = brief_fields(b'o3 1500000 1 2 3 -1 0 r=1\n["a\\"b",null,not json')
    assert brief == {
        "identifier": 'a"b',
        "type": None,
        "priority": 3,
        "enqueued_at": 1.5,
        "retry_count": 1,
        "stall_count": 2,
        "timeout_count": 3,
        "suspect": True,
    }
    assert brief_fields(b'p5 1000000\n[ "a", "t", {} ]')["type"] == "t"
    for broken in (
        b"",
        b"p5 1000000",
        b'px 1000000\n["a","t",1]',
        b'p5 x\n["a","t",1]',
        b"p5 1\n[1,2]",
        b"p5 1\n[1,2,3]",
    ):
        with pytest.raises(InvalidData):
            brief_fields(broken)


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        ("no row 17 of 3.5", "no row # of #.#"),
        ("user 6f1c9a52-3b1e-4c55-9d2e-0a1b2c3d4e5f is gone", "user # is gone"),
        ("job 01JD0Z8Y6QK3T5V7X9B1C2D3E4 failed at 0x7f3a2c10", "job # failed at #"),
        ("connection refused", "connection refused"),
        ("x" * 500, "x" * 120),
        ("", ""),
    ],
)
def test_numbers_and_ids_do_not_separate_groups(message: str, pattern: str) -> None:
    assert pattern_of(message) == pattern


def test_dead_jobs_are_grouped_by_error_type_and_message(queue: OneQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        bury(queue, f"a{number}@{number}", 1000 + number, {"message": f"row {number} is missing"})
    bury(queue, "b@4", 500, {"message": "row 9 is missing"}, pack_body(1, None, "other"))
    bury(queue, "c@5", 9000, {"name": "KeyError", "message": None})
    whole = dead_groups(queue.link, DEFAULT_PREFIX, queue.name)
    assert (whole.next, whole.scanned) == (None, 5)
    shown = [(g.error, g.type, g.pattern, g.count, g.newest_died_at, g.sample, g.message) for g in whole.groups]
    assert shown == [
        ("ValueError", "mail", "row # is missing", 3, 1.002, "a2@2", "row 2 is missing"),
        ("KeyError", "mail", "", 1, 9.0, "c@5", ""),
        ("ValueError", "other", "row # is missing", 1, 0.5, "b@4", "row 9 is missing"),
    ]
    monkeypatch.setattr(search_module, "SCANNED", 2)
    counts: dict[str, int] = {}
    after: str | None = None
    pages = 0
    while True:
        part = dead_groups(queue.link, DEFAULT_PREFIX, queue.name, after)
        for group in part.groups:
            counts[group.key] = counts.get(group.key, 0) + group.count
        after, pages = part.next, pages + 1
        if after is None:
            break
        bury(queue, f"new{pages}@9", 10_000)
    assert (counts, pages) == ({group.key: group.count for group in whole.groups}, 3)
    with pytest.raises(UsageError, match="cursor"):
        dead_groups(queue.link, DEFAULT_PREFIX, queue.name, "7")


def test_dead_jobs_with_broken_parts_are_grouped_too(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        queue.redis.zadd(queue.key("dead"), {"a@1": 1, "gone@2": 2})
        queue.redis.hset(queue.key("dead:jobs"), "a@1", "broken")
        (group,) = dead_groups(queue.link, DEFAULT_PREFIX, queue.name).groups
        assert (group.error, group.type, group.message, group.count) == (None, None, "broken", 1)
