"""Data that others wrote into Redis or pass to forq: corrupt, huge, nested, and hostile names."""

import json
import socket
from collections.abc import Iterator

import pytest
import redis

from forq import Client
from forq.errors import InvalidData, InvalidName
from tests.support.drive.one_queue import one_queue
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

BROKEN = {
    "empty": b"",
    "letter": b"x",
    "binary": b"\xff\xfe\x00" * 100,
    "headless": b"\n[null,null,1]",
    "no-number": b"p5 soon\n[null,null,1]",
    "truncated": b'p5 1\n[null,null,{"a": [1, 2',
    "short-list": b"p5 1\n[null]",
    "no-list": b'p5 1\n{"data": 1}',
    "few-counts": b"c5 1 2\n[null,null,1]",
    "nested": b"p5 1\n[null,null," + b"[" * 100_000 + b"]" * 100_000 + b"]",
    "no-utf-8": b'p5 1\n[null,null,"\xff\xff"]',
    "list-as-type": b"p5 1\n[null,[1],1]",
}
HOSTILE_NAMES = ("q\r\nDEL x", "a\0b", "{tag}", "}{", "../up", "..", ".", "", "a/b", "a b", "é", "x" * 65, "#fail", "*")


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings='heartbeat = "300ms"\nexpiry = "2s"\n') as forq:
        yield forq


@pytest.fixture
def store(forq: Forq) -> Iterator[redis.Redis]:
    """Its server, for writes that bypass forq."""
    with redis.Redis.from_url(forq.url) as client:
        yield client


@pytest.mark.fault("payload corrupt, truncated or nested")
def test_broken_records_are_dead_with_the_reason_and_their_process_runs_the_others(
    forq: Forq, store: redis.Redis
) -> None:
    forq.create("fragile", "record", max_retries=0)
    pid = forq.wait_for_child("fragile")["pid"]
    forq.ctl("pause", "fragile")
    queue = forq.client().queue("fragile")
    for name in BROKEN:
        queue.enqueue(1, id=name)
        queue.enqueue(1, id=f"after-{name}")
    for name, record in BROKEN.items():
        store.hset("forq:queue:{fragile}:jobs", name, record)
    forq.ctl("resume", "fragile")
    wait_until(lambda: forq.client().queue("fragile").status()["done"] == len(BROKEN), what="the healthy ones ran")
    wait_until(lambda: forq.client().queue("fragile").status()["dead"] == len(BROKEN), what="the broken ones are dead")
    assert {trace.job for trace in forq.traces("end")} == {f"after-{name}" for name in BROKEN}
    assert forq.child("fragile")["pid"] == pid
    for name in BROKEN:
        error = json.loads(forq.ctl("dead", "show", "fragile", name, "--json"))["error"]
        assert error["name"] in ("InvalidData", "TypeError"), f"{name}: {error}"
        assert error["message"], name
    log = forq.state_dir / "logs" / "fragile" / "failed.jsonl"
    wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") == len(BROKEN), what="all are logged")


@pytest.mark.fault("payload corrupt, truncated or nested")
def test_ids_that_are_not_text_run_and_are_shown_as_far_as_possible(forq: Forq, store: redis.Redis) -> None:
    forq.create("nameless", "fail", max_retries=0)
    pid = forq.wait_for_child("nameless")["pid"]
    base = "forq:queue:{nameless}"
    for job_id in (b"\xff\xfe", b"\x80@\xc3\x28"):
        store.hset(f"{base}:jobs", job_id, b"p5 1\n[null,null,1]")
        store.rpush(f"{base}:pending", job_id)
    forq.client().queue("nameless").enqueue(1, id="plain")
    wait_until(lambda: forq.client().queue("nameless").status()["dead"] == 3, what="all have failed")
    assert forq.child("nameless")["pid"] == pid
    for listing in (["jobs", "nameless", "--state", "dead"], ["dead", "list", "nameless"]):
        assert "plain" in forq.ctl(*listing)
    forq.ctl("dead", "discard", "nameless", "--all")
    assert forq.queue_status("nameless")["dead"] == 0


@pytest.mark.fault("payload corrupt, truncated or nested")
def test_a_job_with_an_id_that_is_not_text_is_killed_at_its_deadline(forq: Forq, store: redis.Redis) -> None:
    forq.create("overdue", "sleep", timeout="300ms", max_timeouts=0)
    forq.wait_for_child("overdue")
    store.hset("forq:queue:{overdue}:jobs", b"\xff\xfe", b"p5 1\n[null,null,60]")
    store.rpush("forq:queue:{overdue}:pending", b"\xff\xfe")
    wait_until(lambda: forq.client().queue("overdue").status()["dead"] == 1, what="it is ended")
    assert forq.run_ctl("ping").returncode == 0


@pytest.mark.fault("payload huge")
def test_data_above_the_limit_is_refused_and_the_connection_stays_open(redis_url: str) -> None:
    with one_queue(redis_url) as queue:
        producer = Client(redis_url).queue("q")
        with pytest.raises(InvalidData, match="larger than max_data = 1048576"):
            producer.enqueue("x" * (64 << 20))
        with pytest.raises(InvalidData, match="is not JSON"):
            producer.enqueue(json.loads("[" * 900 + "]" * 900))
        producer.enqueue("small", id="a")
        assert queue.state().jobs == {"a"}


@pytest.mark.fault("payload huge")
def test_a_huge_record_written_directly_does_not_affect_other_queues(forq: Forq, store: redis.Redis) -> None:
    forq.create("heavy", "record")
    forq.ctl("pause", "heavy")
    queue = forq.client().queue("heavy")
    queue.enqueue_many([1] * 3)
    queue.enqueue(1, id="huge")
    store.hset("forq:queue:{heavy}:jobs", "huge", b'p5 1\n[null,null,"' + b"x" * (48 << 20) + b'"]')
    forq.ctl("resume", "heavy")
    wait_until(lambda: forq.client().queue("heavy").status()["done"] == 4, what="it runs like others")


@pytest.mark.fault("queue name hostile")
@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_name_is_refused_before_anything_is_sent(server: Server, redis_url: str, name: str) -> None:
    from forq import Client

    client = Client(redis_url)
    with pytest.raises(InvalidName, match="is not allowed: 1 to 64 of"):
        client.queue(name)
    with pytest.raises(InvalidName):
        client.create_queue(name, mode="on_request")
    with server.connect() as nothing:
        assert nothing.dbsize() == 0


@pytest.mark.fault("queue name hostile")
def test_hostile_names_are_refused_at_the_socket_and_make_no_file(server: Server, redis_url: str) -> None:
    with running(redis=redis_url) as forq:
        before = sorted(str(path) for path in forq.directory.rglob("*"))
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(forq.state_dir / "control.sock"))
            lines = control.makefile("rw", encoding="utf-8", newline="\n")
            for name in (*HOSTILE_NAMES, None, 7, ["q"], {"a": 1}):
                for verb in ("queue.create", "queue.delete", "push", "status", "logs"):
                    params = {"name": name, "names": [name], "handler": "traced:noop", "path": str(HANDLERS), "data": 1}
                    lines.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": verb, "params": params}) + "\n")
                    lines.flush()
                    answer = json.loads(lines.readline())
                    assert "error" in answer, (name, verb, answer)
        assert sorted(str(path) for path in forq.directory.rglob("*")) == before
        assert forq.status()["queues"] == []


@pytest.mark.fault("queue name hostile")
def test_hostile_names_written_directly_into_the_registry_are_skipped(forq: Forq, store: redis.Redis) -> None:
    def restarts() -> dict[str, int]:
        return {service["name"]: service["restarts"] for service in forq.status()["supervisor"]["services"]}

    before = restarts()
    for name in (*(name.encode() for name in HOSTILE_NAMES), b"\xff\xfe"):
        store.hset("forq:queues", name, "auto_release")
        store.hset(b"forq:queue:{" + name + b"}:options", "mode", "auto_release")
    store.hset("forq:queues", "odd-mode", b"\xff")
    made = forq.client().create_queue("late", mode="on_request")
    made.enqueue(1)
    wait_until(lambda: "late" in {queue["name"] for queue in forq.status()["queues"]}, what="others are found")
    assert restarts() == before
    found = {queue["name"] for queue in forq.status()["queues"]}
    assert not found & {*HOSTILE_NAMES, "odd-mode"}
    store.hdel("forq:queues", *(name.encode() for name in HOSTILE_NAMES), b"\xff\xfe", b"odd-mode")
