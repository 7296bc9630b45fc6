"""Parsing, validating and encoding messages."""

import json
import random

import pytest

from forq.bridge.messages import (
    AddJob,
    InvalidMessage,
    JobFailed,
    JobFinished,
    ListRequest,
    MessageEncoder,
    Tick,
    WorkerProgress,
    parse_message,
)

JOB = {"queue_name": "q", "worker_uuid": "w", "uuid": "j"}


def message(topic: str, **payload: object) -> bytes:
    return json.dumps({"topic": topic, "payload": payload}).encode()


def test_missing_optional_fields_have_defaults() -> None:
    added = parse_message(message("add_job", queue_name="q", command="c"))
    assert isinstance(added, AddJob)
    assert (added.priority, added.args, added.reference_uuid, added.options) == (5, None, None, "")
    assert len(added.uuid) == 32
    assert added.token != added.uuid
    failed = parse_message(message("job_failed", **JOB, error="no"))
    assert isinstance(failed, JobFailed)
    assert (failed.name, failed.message, failed.kind, failed.retry_at_ms) == ("Error", "no", "retriable", None)
    assert parse_message(message("list_jobs", queue_name="q")) == ListRequest("jobs", "q", 100)
    assert parse_message(message("tick")) == Tick()


def test_aliases_of_a_topic_mean_the_same() -> None:
    assert isinstance(parse_message(message("worker_busy", **JOB, progress=1)), WorkerProgress)
    assert isinstance(parse_message(message("worker_finished", **JOB, result={"x": 1})), JobFinished)


def test_a_job_with_a_too_deeply_nested_result_is_done_without_it() -> None:
    deep = b"[" * 300 + b"]" * 300
    finished = parse_message(message("job_finished", **JOB, result="?").replace(b'"?"', deep))
    assert isinstance(finished, JobFinished)
    assert finished.result.startswith(b"!it cannot be written as JSON")


def test_unknown_fields_are_ignored() -> None:
    line = json.dumps({"topic": "tick", "payload": {"x": 1}, "service_name": 7, "more": [1]}).encode()
    assert parse_message(line) == Tick()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b'{"topic":"tick","payload":{"x":NaN}}', "not JSON"),
        (b"17", "a message must be a JSON object"),
        (b"{}", "unknown topic None; allowed: add_job"),
        (b'{"topic":["tick"],"payload":{}}', "unknown topic"),
        (b'{"topic":"ad_job","payload":{}}', "unknown topic 'ad_job'; allowed: add_job, worker_idle"),
        (b'{"topic":"tick"}', "payload None is not an object"),
        (b'{"topic":"tick","payload":[]}', "is not an object"),
        (message("add_job", command="c"), "payload has no queue_name"),
        (message("add_job", queue_name="no blanks", command="c"), "queue name 'no blanks' is not allowed"),
        (message("add_job", queue_name="q"), "payload has no command"),
        (message("add_job", queue_name="q", command=""), "command '' is not allowed: a string of 1"),
        (message("add_job", queue_name="q", command="c", priority=10), "priority 10 is not allowed: a whole number"),
        (message("add_job", queue_name="q", command="c", priority=True), "priority True is not allowed"),
        (message("add_job", queue_name="q", command="c", uuid="a b"), "uuid 'a b' is not allowed"),
        (message("add_job", queue_name="q", command="c", reference_uuid=7), "reference_uuid 7 is not allowed"),
        (message("add_job", queue_name="q", command="c", timeout="soon"), "options of a job: timeout = 'soon' is not"),
        (message("add_job", queue_name="q", command="c", timeout={}), "options of a job: timeout = {} is not allowed"),
        (message("add_job", queue_name="q", command="c", max_retries="1x"), "max_retries = '1x' is not allowed"),
        (message("add_job", queue_name="q", command="c", backoff=[1, None]), "backoff = [1, None] is not allowed"),
        (message("add_job", queue_name="q", command="c", expires_in=0), "expires_in = 0 is not allowed: a duration"),
        (message("worker_idle", queue_name="q", worker_uuid="a:b"), "worker_uuid 'a:b' is not allowed"),
        (message("worker_idle", queue_name="q", worker_uuid=""), "worker_uuid '' is not allowed"),
        (
            message("worker_progress", **JOB, progress=1.5),
            "progress 1.5 is not allowed: a number from 0 to 1",
        ),
        (message("worker_progress", **JOB), "payload has no progress"),
        (message("worker_progress", **JOB, progress=0, text=7), "text 7 is not allowed"),
        (message("job_failed", **JOB), "error None is not allowed"),
        (message("job_failed", **JOB, error={"name": 7}), "name and message of an error must be strings"),
        (message("job_failed", **JOB, error="x", kind="odd"), "kind 'odd' is not allowed: permanent or retriable"),
        (message("job_failed", **JOB, error="x", retry_at=-1), "retry_at -1 is not allowed"),
        (message("job_accepted", **JOB, fence=0), "fence 0 is not allowed"),
        (message("list_jobs", queue_name="q", limit=0), "limit 0 is not allowed"),
    ],
)
def test_an_invalid_line_is_refused_with_the_reason(line: bytes, reason: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        parse_message(line)
    assert reason in str(refused.value)


def test_no_line_raises_anything_but_invalid_message() -> None:
    chance = random.Random(7)
    whole = message("job_failed", **JOB, error={"name": "E", "message": "m"}, kind="permanent", retry_at=17)
    for _ in range(20_000):
        line = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            line[chance.randrange(len(line))] = chance.randrange(256)
        try:
            parse_message(bytes(line))
        except InvalidMessage:
            continue


def test_outgoing_messages_have_sender_and_time() -> None:
    line = MessageEncoder("u", now=lambda: 17.12345).encode("error", {"line": 1})
    assert line.endswith(b"\n")
    sent = json.loads(line)
    assert sent.pop("service_host")
    assert sent == {
        "topic": "error",
        "service_name": "forq-bridge",
        "service_uuid": "u",
        "created_at": 17.123,
        "payload": {"line": 1},
    }
