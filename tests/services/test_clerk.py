"""The clerk's verbs, called without a supervisor."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import redis

from forq.broker.explain import unknown_job
from forq.errors import ForqError, InvalidData, UnknownJob, UnknownQueue, UsageError
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
    answer: Any = clerk.push({"name": "q", "data": {"n": 1}, "identifier": "one", "priority": None})
    job: Any = clerk.job({"name": "q", "id": answer["id"]})
    assert (job["state"], job["data"], job["identifier"], job["priority"]) == ("waiting", {"n": 1}, "one", 5)


def test_push_takes_the_options_of_a_job(clerk: Clerk) -> None:
    options = {"timeout": "5m", "max_retries": 1, "backoff": [1, "5s"], "keep_done": 3600}
    clerk.push({"name": "q", "data": 1, "id": "a", "expires_in": "1h", **options})
    clerk.push_many({"name": "q", "jobs": [{"data": 1, "id": "b", "timeout": 1}, {"data": 1, "id": "c"}]})
    jobs: list[Any] = [clerk.job({"name": "q", "id": id}) for id in "abc"]
    assert jobs[0]["options"] == {"timeout": "5m", "max_retries": 1, "backoff": ["1s", "5s"], "keep_done": "1h"}
    assert jobs[0]["expires_at"] > jobs[0]["enqueued_at"] + 3599
    assert jobs[1]["options"] == {"timeout": "1s"}
    assert "options" not in jobs[2]
    with pytest.raises(UsageError, match="timeout = 'soon' is not allowed: a duration from"):
        clerk.push({"name": "q", "data": 1, "timeout": "soon"})


def test_job_and_why_explain_what_happened_to_a_job_that_is_gone(clerk: Clerk) -> None:
    clerk.push({"name": "q", "data": 1, "id": "a"})
    clerk.cancel({"name": "q", "id": "a"})
    for verb in (clerk.job, clerk.why):
        with pytest.raises(UnknownJob, match="any more: it was cancelled at 20"):
            verb({"name": "q", "id": "a"})
        with pytest.raises(UnknownJob, match="never had a job 'b'"):
            verb({"name": "q", "id": "b"})


def test_a_job_enqueued_while_the_journal_is_read_is_shown(clerk: Clerk, monkeypatch: pytest.MonkeyPatch) -> None:
    def enqueue_meanwhile(*args: Any) -> UnknownJob:
        clerk.push({"name": "q", "data": 1, "id": "a"})
        return unknown_job(*args)

    monkeypatch.setattr("forq.services.clerk.unknown_job", enqueue_meanwhile)
    job: Any = clerk.job({"name": "q", "id": "a"})
    assert job["state"] == "waiting"


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"name": "q"}, UsageError),
        ({"name": "q", "data": 1, "colour": "red"}, UsageError),
        ({"name": "q", "data": 1, "priority": "high"}, UsageError),
        ({"name": "q", "data": 2**70}, InvalidData),
        ({"name": "other", "data": 1}, UnknownQueue),
        ({"data": 1}, UsageError),
    ],
)
def test_an_invalid_push_is_refused_and_stores_nothing(
    clerk: Clerk, params: dict[str, Any], error: type[ForqError]
) -> None:
    with pytest.raises(error):
        clerk.push(params)
    counts: Any = clerk.counts({"names": ["q"]})
    assert counts["q"]["waiting"] == 0


def test_one_invalid_job_in_a_list_stores_none_of_them(clerk: Clerk) -> None:
    with pytest.raises(UsageError):
        clerk.push_many({"name": "q", "jobs": [{"data": 1}, {"date": 2}]})
    counts: Any = clerk.counts({"names": ["q", "gone"]})
    assert (counts["q"]["waiting"], counts["gone"]) == (0, None)


def test_delete_writes_dropped_jobs_to_the_failed_log(clerk: Clerk, tmp_path: Path) -> None:
    clerk.push({"name": "q", "data": "kept", "id": "a"})
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
        with pytest.raises(UsageError, match="either id or all"):
            verbs["dead.discard"](params)


def test_recover_reports_jobs_already_stored_and_jobs_left_out(clerk: Clerk) -> None:
    jobs = [{"data": n, "id": job_id, "token": str(n)} for n, job_id in enumerate("aba")]
    assert clerk.recover({"name": "q", "jobs": jobs}) == {"recovered": 2, "known": 0, "left": [2]}
    clerk.cancel({"name": "q", "id": "b"})
    assert clerk.recover({"name": "q", "jobs": jobs}) == {"recovered": 0, "known": 2, "left": [2]}
    clerk.cancel({"name": "q", "id": "a"})
    assert clerk.recover({"name": "q", "jobs": jobs}) == {"recovered": 1, "known": 2, "left": []}
    with pytest.raises(UsageError, match="jobs must be a list of objects"):
        clerk.recover({"name": "q", "jobs": {}})


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
