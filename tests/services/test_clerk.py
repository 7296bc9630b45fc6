"""The clerk's verbs, called without a supervisor."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import redis

from forq.broker.explain import unknown_job
from forq.errors import ForqError, InvalidData, UnknownDependency, UnknownJob, UnknownQueue, UsageError
from forq.procs import jsonrpc
from forq.procs.loop import service_loop
from forq.services.clerk import Clerk
from forq.services.rpc import RpcServer
from tests.support.drive.contexts import context


@pytest.fixture
def clerk(redis_url: str, tmp_path: Path) -> Clerk:
    clerk = Clerk(context(url=redis_url, logs_dir=tmp_path / "logs"), service_loop())
    clerk.create(
        {
            "name": "q",
            "mode": "work",
            "options": {"max_items": 5},
            "fail_handler": False,
            "reopening": False,
            "joining": False,
        }
    )
    return clerk


def test_push_returns_the_id_and_job_shows_it(clerk: Clerk) -> None:
    answer: Any = clerk.redis_verbs.push({"name": "q", "data": {"n": 1}, "identifier": "one", "priority": None})
    job: Any = clerk.redis_verbs.job({"name": "q", "id": answer["id"]})
    assert (job["state"], job["data"], job["identifier"], job["priority"]) == ("waiting", {"n": 1}, "one", 5)


def test_push_takes_the_options_of_a_job(clerk: Clerk) -> None:
    options = {"timeout": "5m", "max_retries": 1, "backoff": [1, "5s"], "keep_done": 3600}
    clerk.redis_verbs.push({"name": "q", "data": 1, "id": "a", "expires_in": "1h", **options})
    clerk.redis_verbs.push_many({"name": "q", "jobs": [{"data": 1, "id": "b", "timeout": 1}, {"data": 1, "id": "c"}]})
    jobs: list[Any] = [clerk.redis_verbs.job({"name": "q", "id": id}) for id in "abc"]
    assert jobs[0]["options"] == {"timeout": "5m", "max_retries": 1, "backoff": ["1s", "5s"], "keep_done": "1h"}
    assert jobs[0]["expires_at"] > jobs[0]["enqueued_at"] + 3599
    assert jobs[1]["options"] == {"timeout": "1s"}
    assert "options" not in jobs[2]
    with pytest.raises(UsageError, match="timeout = 'soon' is not allowed: a duration from"):
        clerk.redis_verbs.push({"name": "q", "data": 1, "timeout": "soon"})


def test_push_takes_what_a_job_waits_for(clerk: Clerk) -> None:
    verbs = clerk.redis_verbs
    verbs.push({"name": "q", "data": 1, "id": "a"})
    verbs.push({"name": "q", "data": 1, "id": "b", "after": "a", "with_results": True})
    verbs.push_many({"name": "q", "jobs": [{"data": 1, "id": "c", "after": ["a", "b"], "when": "ended"}]})
    jobs: list[Any] = [verbs.job({"name": "q", "id": id}) for id in "bc"]
    assert [(job["when"], job["with_results"], job["waits_for_count"]) for job in jobs] == [
        ("done", True, 1),
        ("ended", False, 2),
    ]
    counts: Any = verbs.counts({"names": ["q"]})
    assert (counts["q"]["waiting"], counts["q"]["held"]) == (1, 2)
    explained: Any = verbs.why({"name": "q", "id": "c"})
    assert explained["state"] == "held"
    held: Any = verbs.jobs({"name": "q", "state": "held", "details": True})
    assert {job["id"]: job["waits_for_count"] for job in held["jobs"]} == {"b": 1, "c": 2}
    done: Any = verbs.cancel({"name": "q", "state": "held", "filter": {"id": "c"}})
    assert done["cancelled"] == 1


def test_job_and_why_explain_what_happened_to_a_job_that_is_gone(clerk: Clerk) -> None:
    clerk.redis_verbs.push({"name": "q", "data": 1, "id": "a"})
    clerk.redis_verbs.cancel({"name": "q", "id": "a"})
    for verb in (clerk.redis_verbs.job, clerk.redis_verbs.why):
        with pytest.raises(UnknownJob, match="any more: it was cancelled at 20"):
            verb({"name": "q", "id": "a"})
        with pytest.raises(UnknownJob, match="never had a job 'b'"):
            verb({"name": "q", "id": "b"})


def test_a_job_enqueued_while_the_journal_is_read_is_shown(clerk: Clerk, monkeypatch: pytest.MonkeyPatch) -> None:
    def enqueue_meanwhile(*args: Any) -> UnknownJob:
        clerk.redis_verbs.push({"name": "q", "data": 1, "id": "a"})
        return unknown_job(*args)

    monkeypatch.setattr("forq.services.redis_verbs.unknown_job", enqueue_meanwhile)
    job: Any = clerk.redis_verbs.job({"name": "q", "id": "a"})
    assert job["state"] == "waiting"


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"name": "q"}, UsageError),
        ({"name": "q", "data": 1, "colour": "red"}, UsageError),
        ({"name": "q", "data": 1, "priority": "high"}, UsageError),
        ({"name": "q", "data": 2**70}, InvalidData),
        ({"name": "q", "data": 1, "after": {"a": 1}}, UsageError),
        ({"name": "q", "data": 1, "after": [1]}, UsageError),
        ({"name": "q", "data": 1, "after": "nobody"}, UnknownDependency),
        ({"name": "q", "data": 1, "after": "a", "with_results": 1}, UsageError),
        ({"name": "q", "data": 1, "after": "a", "when": "soon"}, UsageError),
        ({"name": "other", "data": 1}, UnknownQueue),
        ({"data": 1}, UsageError),
    ],
)
def test_an_invalid_push_is_refused_and_stores_nothing(
    clerk: Clerk, params: dict[str, Any], error: type[ForqError]
) -> None:
    with pytest.raises(error):
        clerk.redis_verbs.push(params)
    counts: Any = clerk.redis_verbs.counts({"names": ["q"]})
    assert counts["q"]["waiting"] == 0


def test_one_invalid_job_in_a_list_stores_none_of_them(clerk: Clerk) -> None:
    with pytest.raises(UsageError):
        clerk.redis_verbs.push_many({"name": "q", "jobs": [{"data": 1}, {"date": 2}]})
    counts: Any = clerk.redis_verbs.counts({"names": ["q", "gone"]})
    assert (counts["q"]["waiting"], counts["gone"]) == (0, None)


def test_delete_writes_dropped_jobs_to_the_failed_log(clerk: Clerk, tmp_path: Path) -> None:
    clerk.redis_verbs.push({"name": "q", "data": "kept", "id": "a"})
    assert clerk.delete({"name": "q", "force": True}) == {"dropped": 1}
    assert clerk.purge({"name": "q"}) == {"more": False}
    lines = (tmp_path / "logs" / "q" / "failed.jsonl").read_text().splitlines()
    assert [(line["id"], line["data"], line["cause"]) for line in map(json.loads, lines)] == [("a", "kept", "deleted")]


def test_memory_skips_processes_that_have_exited(clerk: Clerk) -> None:
    memory: Any = clerk.memory({"pids": [os.getpid(), 2**22 - 1]})
    assert list(memory) == [str(os.getpid())]
    assert memory[str(os.getpid())] > 1_000_000


def test_dead_jobs_are_listed_shown_retried_and_discarded(clerk: Clerk, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as store:
        for number in (7, 8):
            store.zadd("forq:queue:{q}:dead", {f"a@{number}": number})
            store.hset("forq:queue:{q}:dead:jobs", f"a@{number}", 'p5 1000000\n[null,null,1]\n{"name":"E"}')
    verbs = clerk.verbs()
    assert [job["fence"] for job in verbs["dead.list"]({"name": "q"})["jobs"]] == [8, 7]
    assert verbs["dead.show"]({"name": "q", "id": "a@7"})["error"] == {"name": "E"}
    assert verbs["dead.retry"]({"name": "q", "id": "a"}) == {"id": "a@8"}
    left = verbs["dead.retry"]({"name": "q", "all": True})
    assert left == {"done": 0, "refused": 1, "left": 0, "next": None}
    assert verbs["dead.discard"]({"name": "q", "id": "a@7"}) == {"id": "a@7"}
    for params in ({"name": "q"}, {"name": "q", "id": "a", "all": True}):
        with pytest.raises(UsageError, match="exactly one of id, all"):
            verbs["dead.discard"](params)


def test_jobs_are_listed_with_details_and_filters(clerk: Clerk) -> None:
    clerk.redis_verbs.push({"name": "q", "data": 1, "id": "a", "type": "mail"})
    clerk.redis_verbs.push({"name": "q", "data": 1, "id": "b"})
    jobs = clerk.verbs()["jobs"]
    assert set(jobs({"name": "q"})) == {"jobs", "next"}
    detailed = jobs({"name": "q", "details": True})
    assert [(job["id"], job["type"]) for job in detailed["jobs"]] == [("a", "mail"), ("b", None)]
    assert (detailed["next"], detailed["scanned"]) == (None, 2)
    found = jobs({"name": "q", "state": "waiting", "filter": {"type": "mail"}})
    assert found == {"jobs": [{"id": "a", "identifier": "a", "state": "waiting"}], "next": None, "scanned": 2}
    with pytest.raises(UsageError, match="needs a state"):
        jobs({"name": "q", "filter": {"type": "mail"}})


def test_jobs_are_changed_by_ids_and_by_filter(clerk: Clerk, redis_url: str) -> None:
    verbs = clerk.verbs()
    for job_id in "abc":
        verbs["push"]({"name": "q", "data": 1, "id": job_id, "type": "mail"})
    assert verbs["cancel"]({"name": "q", "ids": ["a", "x"]}) == {"cancelled": 1, "left": ["x"]}
    by_filter = {"name": "q", "state": "waiting", "filter": {"type": "mail"}}
    assert verbs["cancel"](by_filter) == {"cancelled": 2, "left": [], "scanned": 2, "next": None}
    assert verbs["cancel"]({"name": "q", "id": "a"}) == {"cancelled": False}
    with redis.Redis.from_url(redis_url) as store:
        for number in range(4):
            store.zadd("forq:queue:{q}:dead", {f"d{number}@1": number})
            store.hset("forq:queue:{q}:dead:jobs", f"d{number}@1", 'p5 1000000\n[null,null,1]\n{"name":"E"}')
    assert [group["count"] for group in verbs["dead.groups"]({"name": "q"})["groups"]] == [4]
    answer = verbs["dead.retry"]({"name": "q", "ids": ["d0", "x@1"]})
    assert (answer["done"], list(answer["refused"])) == (1, ["x@1"])
    assert verbs["dead.discard"]({"name": "q", "ids": ["d1@1"]}) == {"done": 1, "refused": {}}
    matching = {"name": "q", "filter": {"error": "e"}}
    assert verbs["dead.retry"](matching) == {"done": 2, "refused": {}, "scanned": 2, "next": None}
    for params in ({"name": "q", "ids": ["a"], "filter": {}}, {"name": "q"}, {"name": "q", "id": "a", "ids": []}):
        for verb in ("cancel", "dead.retry"):
            with pytest.raises(UsageError, match="exactly one of"):
                verbs[verb](params)


def test_recover_reports_jobs_already_stored_and_jobs_left_out(clerk: Clerk) -> None:
    jobs = [{"data": n, "id": job_id, "token": str(n)} for n, job_id in enumerate("aba")]
    assert clerk.redis_verbs.recover({"name": "q", "jobs": jobs}) == {"recovered": 2, "known": 0, "left": [2]}
    clerk.redis_verbs.cancel({"name": "q", "id": "b"})
    assert clerk.redis_verbs.recover({"name": "q", "jobs": jobs}) == {"recovered": 0, "known": 2, "left": [2]}
    clerk.redis_verbs.cancel({"name": "q", "id": "a"})
    assert clerk.redis_verbs.recover({"name": "q", "jobs": jobs}) == {"recovered": 1, "known": 2, "left": []}
    with pytest.raises(UsageError, match="jobs must be a list of objects"):
        clerk.redis_verbs.recover({"name": "q", "jobs": {}})


def test_a_verb_that_raises_gets_an_error_reply_and_the_server_continues() -> None:
    ours, theirs = socket.socketpair()

    def broken(params: dict[str, Any]) -> object:
        raise RuntimeError("oh")

    loop = service_loop()
    RpcServer(loop, theirs, {"broken": broken, "fine": lambda params: params})
    for number, verb in enumerate(["broken", "missing", "fine"]):
        ours.sendall(jsonrpc.request(number, verb, {"x": number}))
    loop.tick(5)
    answers = [jsonrpc.read_answer(line)[1] for line in ours.recv(65536).splitlines()]
    assert "RuntimeError" in str(answers[0])
    assert "missing" in str(answers[1])
    assert answers[2] == {"x": 2}
    ours.close()
    loop.run()
    theirs.close()
