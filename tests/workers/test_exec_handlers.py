"""Exec handlers: the messages they send to a program, and the outcome of every answer."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from forq.queue_spec import read_program
from forq.workers.attempt import describe_failure
from forq.workers.exec_handlers import ExecOnceHandler, ProgramFailed, running_programs
from tests.support.drive.processes import alive
from tests.support.drive.programs import python_program, script
from tests.support.drive.wait import wait_until
from tests.workers.exec_attempts import Made, failure_of, job, pid_of

pytestmark = pytest.mark.timeout(60)


def test_a_program_receives_all_fields_of_its_job(tmp_path: Path, made: Made) -> None:
    seen = tmp_path / "seen"
    before = f"out = open({str(seen)!r}, 'w')\n"
    handler = made(
        script(tmp_path, f"{before}import sys\nfor line in sys.stdin:\n    out.write(line); out.close(); break\n")
    )
    data = {"command": "send", "args": [1, "ü\u2028\0", None], "reference_uuid": "r", "deep": [[{}]]}
    failure_of(handler, data, job(counts=(1, 2, 3)))
    message = orjson.loads(seen.read_bytes())
    payload = message.pop("payload")
    assert (message["topic"], message["service_name"]) == ("job_assignment", "forq")
    assert set(message) == {"topic", "service_name", "service_uuid", "service_host", "created_at"}
    assert abs(message["created_at"] - time.time()) < 60
    assert payload.pop("worker_uuid") == message["service_uuid"]
    assert payload == {
        "uuid": "j1",
        "queue_name": "q",
        "data": data,
        "command": "send",
        "args": data["args"],
        "reference_uuid": "r",
        "identifier": "mine",
        "type": "mail",
        "priority": 3,
        "attempt": 7,
        "retry_count": 1,
        "stall_count": 2,
        "timeout_count": 3,
        "enqueued_at": 1700000000.5,
        "fence": 9,
    }


def test_one_instance_runs_many_jobs_with_data_of_any_size(tmp_path: Path, made: Made) -> None:
    act = 'if data is not None and len(data["big"]) != data["length"]: say("job_failed", uuid=payload["uuid"])\n'
    handler = made(python_program(tmp_path, act))
    handler(None, job())
    pid = pid_of(handler)
    for length in (1, 70_000, 5_000_000):
        handler({"big": "x" * length, "length": length}, job())
    assert pid_of(handler) == pid


@dataclass
class ProgressLog:
    """Records the progress of a job."""

    reports: list[tuple[str, float, str]]

    def report(self, position: int, job_id: str, fence: int, fraction: float, text: str) -> None:
        self.reports.append((job_id, fraction, text))


def test_messages_may_be_split_joined_or_separated_by_blank_lines(tmp_path: Path, made: Made) -> None:
    reports: list[tuple[str, float, str]] = []
    act = """\
lines = [{"topic": "worker_idle", "payload": {}}, {"topic": "job_accepted", "payload": {"uuid": payload["uuid"]}},
    {"topic": "worker_progress", "payload": {"uuid": payload["uuid"], "progress": 0.25, "text": "a"}},
    {"topic": "worker_busy", "payload": {"uuid": payload["uuid"], "progress": 1, "queue_name": "q"}, "more": 1},
    {"topic": "worker_finished", "payload": {"uuid": payload["uuid"], "result": [1]}}]
text = "\\n \\n".join(map(json.dumps, lines)) + "\\n"
for piece in (text[:7], text[7:60], text[60:]):
    os.write(1, piece.encode()); time.sleep(0.01)
return False
"""
    handler = made(python_program(tmp_path, act))
    for each in (job(), job("j2")):
        each._reporter = ProgressLog(reports)
        handler(1, each)
    assert reports == [("j1", 0.25, "a"), ("j1", 1.0, ""), ("j2", 0.25, "a"), ("j2", 1.0, "")]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ({"error": "no good", "kind": "permanent"}, ("JobFailed", "no good", "permanent", "")),
        ({"error": {"name": "E", "message": "m", "traceback": "at x"}}, ("E", "m", "retriable", "at x")),
        ({"error": {}, "kind": None}, ("JobFailed", "", "retriable", "")),
        ({}, ("JobFailed", "", "retriable", "")),
    ],
)
def test_a_program_that_reports_a_failure_keeps_running(
    tmp_path: Path, made: Made, failure: dict[str, Any], expected: tuple[str, ...]
) -> None:
    handler = made(python_program(tmp_path, 'say("job_failed", uuid=payload["uuid"], **data)\nreturn False'))
    error = failure_of(handler, failure)
    assert (error["name"], error["message"], error["kind"], error["traceback"]) == expected
    pid = pid_of(handler)
    failure_of(handler, failure)
    assert pid_of(handler) == pid


def test_the_time_of_the_next_attempt_is_taken_from_the_failure(tmp_path: Path, made: Made) -> None:
    handler = made(python_program(tmp_path, 'say("job_failed", uuid=payload["uuid"], retry_at=data)\nreturn False'))
    for given, expected in ((1700000000.5, 1700000000500), ("soon", None), (-1, None), (None, None)):
        with pytest.raises(ProgramFailed) as caught:
            handler(given, job())
        assert describe_failure(caught.value).retry_at_ms == expected


@pytest.mark.parametrize(
    ("act", "name", "message"),
    [
        ("sys.exit(3)", "ExitStatus", "status 3"),
        ("sys.exit(0)", "ExitStatus", "status 0 before it reported the outcome of the job"),
        ("os.kill(os.getpid(), 9)", "ExitSignal", "signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), 40)", "ExitSignal", "signal 40 (?)"),
        ("os.close(1); time.sleep(60)", "BadMessage", "closed its stdout"),
        ("print('hello')", "BadMessage", "not JSON: 'hello'"),
        ("print('\\ud800'.encode('utf-8', 'surrogatepass'))", "BadMessage", "not JSON"),
        ("os.write(1, b'\\xff\\n')", "BadMessage", "not JSON"),
        ("print(3)", "BadMessage", "not an object: 3"),
        ("print('{}')", "BadMessage", "topic"),
        ("say('dance', uuid='j1')", "BadMessage", "unknown topic 'dance'"),
        ("say('job_finished', uuid='other')", "BadMessage", "about another job, uuid 'other'"),
        ("say('job_finished')", "BadMessage", "about another job"),
        ("say('job_finished', uuid='j1', queue_name='p')", "BadMessage", "about another job"),
        ("say('worker_progress', uuid='j1', progress=2)", "BadMessage", "progress = 2"),
        ("say('worker_progress', uuid='j1', progress=True)", "BadMessage", "progress = True"),
        ("say('worker_progress', uuid='j1', progress=0, text=1)", "BadMessage", "text = 1"),
        ("say('job_failed', uuid='j1', error=[1])", "BadMessage", "error = [1]"),
        ("say('job_failed', uuid='j1', error={'name': 1})", "BadMessage", "name = 1"),
        ("say('job_failed', uuid='j1', kind='odd')", "BadMessage", "kind = 'odd'"),
        ("print('x' * 3_000_000)", "BadMessage", "line too long: at most 1048576 bytes"),
        ("while True: os.write(1, b'x' * 65536)", "BadMessage", "line too long"),
    ],
)
def test_a_protocol_violation_fails_the_attempt_and_replaces_the_instance(
    tmp_path: Path, made: Made, act: str, name: str, message: str
) -> None:
    handler = made(python_program(tmp_path, f"if data == 'fine': return True\nnote('before')\n{act}\nreturn False"))
    handler("fine", job("j0"))
    pid = pid_of(handler)
    error = failure_of(handler, "wrong")
    assert (error["name"], error["kind"]) == (name, "retriable")
    assert message in error["message"]
    assert error["message"].endswith("; last output: before")
    assert error["traceback"] == "before"
    assert not alive({pid})
    handler("fine", job("j2"))
    assert pid_of(handler) != pid


def test_a_program_that_cannot_be_started_fails_the_attempt_and_is_started_again(tmp_path: Path, made: Made) -> None:
    handler = made(f"exec:{tmp_path}/program")
    assert failure_of(handler)["name"] == "CannotStart"
    (tmp_path / "program").write_text("no interpreter is named here")
    assert "Permission denied" in failure_of(handler)["message"]
    (tmp_path / "program").chmod(0o755)
    assert "Exec format error" in failure_of(handler)["message"]
    assert failure_of(ExecOnceHandler(read_program(f"exec-once:{tmp_path}/none")))["name"] == "CannotStart"


def test_an_instance_that_ends_between_jobs_costs_no_attempt_and_leaves_no_zombie(tmp_path: Path, made: Made) -> None:
    handler = made(python_program(tmp_path, 'say("job_finished", uuid=payload["uuid"])\nsys.exit(1)'))
    pids = set()
    for number in range(30):
        handler(number, job(f"j{number}"))
        pids.add(pid_of(handler))
        if number % 2:
            wait_until(lambda: not running_programs(), what="it is reaped while idle")
            assert not os.path.exists(f"/proc/{pid_of(handler)}")
    assert len(pids) == 30


def test_an_instance_that_sends_messages_between_jobs_is_replaced_without_failing_a_job(
    tmp_path: Path, made: Made, logged: pytest.LogCaptureFixture
) -> None:
    act = 'say("job_finished", uuid=payload["uuid"])\nsay(data, uuid=payload["uuid"]); note("said")\nreturn False'
    handler = made(python_program(tmp_path, act))
    handler("worker_idle", job())
    wait_until(lambda: "said" in logged.text, what="its message has arrived")
    pid = pid_of(handler)
    handler("job_finished", job("j2"))
    assert pid_of(handler) == pid, "worker_idle is allowed"
    wait_until(lambda: logged.text.count("text=said") == 2, what="both messages have arrived")
    handler("worker_idle", job("j3"))
    assert pid_of(handler) != pid
    assert "it sent a message without a job" in logged.text


def test_an_answer_before_all_data_was_read_counts_and_the_instance_is_replaced(tmp_path: Path, made: Made) -> None:
    source = (
        'import os, time\nos.write(1, b\'{"topic": "job_finished", "payload": {"uuid": "j1"}}\\n\'); time.sleep(60)'
    )
    handler = made(script(tmp_path, source))
    handler("x" * 1_000_000, job())
    assert handler.programs() == []
