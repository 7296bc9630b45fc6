"""The log line of a failed or lost attempt: it names the next step, whatever a user does to logging."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forq.errors import NoResult, UnknownJob
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(180)

# A module with its own logging handler, which records each failure that it receives.
LISTENER = """
import json, logging, os, time

class Listener(logging.Handler):
    def emit(self, record):
        if record.exc_info:
            fields = {name: record.__dict__.get(name) for name in ("queue", "job_id", "attempt", "attempts")}
            entry = {"pid": os.getpid(), "error": repr(record.exc_info[1]), "level": record.levelname, **fields}
            with open(SEEN, "a") as file:
                file.write(json.dumps(entry) + "\\n")

def handle(data, job):
    raise ValueError(f"no good: {data}")
"""


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running(settings="capacity = 1000\n") as forq:
        yield forq


def create(forq: Forq, name: str, code: str, tmp_path: Path, **options: object) -> None:
    """Creates a queue whose handler is this code."""
    (tmp_path / f"{name}_module.py").write_text(code)
    settings = [f"--set={key}={value}" for key, value in options.items()]
    forq.ctl("create", name, "--handler", f"{name}_module:handle", "--path", str(tmp_path), *settings)


def logs(forq: Forq, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in forq.ctl("logs", name, "--json", "-n", "1000").splitlines()]


def wait_for_lines(forq: Forq, name: str, count: int) -> list[dict[str, Any]]:
    return wait_until(lambda: found if len(found := logs(forq, name)) >= count else [])  # type: ignore[no-any-return]


def heads(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(record["level"], record["message"].partition("\n")[0]) for record in records]


def test_the_lines_of_a_job_name_the_next_step_until_it_has_failed_permanently(forq: Forq) -> None:
    retries = ("--set=max_retries=2", "--set=retry_lane_retries=0", "--set=jitter=0", "--set=min_backoff=250ms")
    forq.ctl("create", "thrice", "--handler", "printing:fail", "--path", str(HANDLERS), *retries)
    forq.client().queue("thrice").enqueue("x", id="t")
    records = wait_for_lines(forq, "thrice", 3)
    assert heads(records) == [
        ("WARNING", "job failed: attempt 1 of 3, retry in 250 ms error=ValueError: no good: x"),
        ("WARNING", "job failed: attempt 2 of 3, retry in 500 ms error=ValueError: no good: x"),
        (
            "ERROR",
            "job failed: attempt 3 of 3, failed for good (see: forqctl why thrice t) error=ValueError: no good: x",
        ),
    ]
    for record in records:
        _, title, first_frame, *_ = record["message"].splitlines()
        assert (title, "printing.py" in first_frame) == ("Traceback (most recent call last):", True)
        assert (record["job"], record["logger"], record["stream"]) == ("t", "forq", "log")
    wait_until(lambda: "attempt 3 of 3" in forq.log)
    assert [forq.log.count(f"attempt {number} of 3") for number in (1, 2, 3)] == [1, 1, 1], "never twice"
    assert "ValueError" in forq.ctl("why", "thrice", "t"), "the command works"


def test_logging_handlers_of_the_process_get_the_exception(forq: Forq, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"SEEN = {str(seen)!r}\n{LISTENER}\nlogging.getLogger().addHandler(Listener())\n"
    create(forq, "heard", code, tmp_path, max_retries=0)
    forq.client().queue("heard").enqueue(1, id="h")
    (record,) = wait_for_lines(forq, "heard", 1)
    assert json.loads(wait_until(lambda: seen.exists() and seen.read_text())) == {
        "pid": forq.child("heard")["pid"],
        "error": "ValueError('no good: 1')",
        "level": "ERROR",
        "queue": "heard",
        "job_id": "h",
        "attempt": 1,
        "attempts": 1,
    }
    assert record["message"].count("no good: 1") == 2, "the line, and the end of the traceback"


@pytest.mark.parametrize("how", ["basicConfig", "dictConfig", "propagate"])
def test_logging_set_up_by_a_user_gets_only_the_line(forq: Forq, tmp_path: Path, how: str) -> None:
    """The user's handler writes to stderr, which is captured too."""
    setups = {
        "basicConfig": "logging.basicConfig(force=True, format='MINE %(levelname)s %(message)s')",
        "dictConfig": "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': False, 'formatters': "
        "{'f': {'format': 'MINE %(levelname)s %(message)s'}}, 'handlers': {'h': {'class': 'logging.StreamHandler', "
        "'formatter': 'f'}}, 'root': {'handlers': ['h']}})",
        "propagate": "h = logging.StreamHandler()\n"
        "h.setFormatter(logging.Formatter('MINE %(levelname)s %(message)s'))\n"
        "logging.getLogger('forq').addHandler(h)\nlogging.getLogger('forq').propagate = False",
    }
    name = f"own-{how}"
    module = f"import logging.config\n{setups[how]}\ndef handle(data, job):\n    raise ValueError('no good')\n"
    (tmp_path / "own_setup.py").write_text(module)
    forq.ctl("create", name, "--handler", "own_setup:handle", "--path", str(tmp_path), "--set=max_retries=0")
    forq.client().queue(name).enqueue(1, id="o")
    wait_until(lambda: any(record["message"] == "ValueError: no good" for record in logs(forq, name)))
    records = logs(forq, name)
    headline = f"job failed: attempt 1 of 1, failed for good (see: forqctl why {name} o) queue={name} job=o"
    assert records[0]["message"] == f"MINE ERROR {headline} error=ValueError: no good"
    assert (records[0]["stream"], records[0]["job"]) == ("stderr", "o")
    assert sum("attempt 1 of 1" in record["message"] for record in records) == 1


def test_accidentally_disabled_loggers_leave_the_line_in_the_queue_s_log(forq: Forq, tmp_path: Path) -> None:
    code = "import logging.config\nlogging.config.dictConfig({'version': 1})\n"
    create(forq, "off", f"{code}def handle(data, job):\n    raise ValueError('no good')\n", tmp_path, max_retries=0)
    forq.client().queue("off").enqueue(1, id="o")
    (record,) = wait_for_lines(forq, "off", 1)
    assert heads([record]) == [
        ("ERROR", "job failed: attempt 1 of 1, failed for good (see: forqctl why off o) error=ValueError: no good")
    ]


@pytest.mark.fault("handler's logging raises, exits or blocks")
def test_logging_that_blocks_or_raises_affects_neither_worker_nor_jobs(forq: Forq, tmp_path: Path) -> None:
    code = """
import logging, threading
class Hostile(logging.Handler):
    def emit(self, record):
        if "first" in record.getMessage():
            raise SystemExit(3)
        if "second" in record.getMessage():
            threading.Event().wait()
def handle(data, job):
    if data:
        raise ValueError(data)
logging.getLogger().handlers.insert(0, Hostile())
"""
    create(forq, "hostile", code, tmp_path, max_retries=0, timeout="60s")
    queue = forq.client().queue("hostile")
    ids = queue.enqueue_many(["first", "second", "third", None])
    wait_until(lambda: forq.queue_status("hostile")["done"] == 1, what="the last job runs")
    wait_until(lambda: forq.queue_status("hostile")["dead"] == 3)
    assert forq.child("hostile")["restarts"] == 0
    outcomes = {dead["id"]: dead["message"] for dead in queue.dead().jobs}
    assert outcomes == dict(zip(ids, ("first", "second", "third"), strict=False))
    assert "(logging raised SystemExit)" in wait_for_lines(forq, "hostile", 1)[0]["message"]


def test_a_job_that_requests_a_later_retry_is_not_a_warning(forq: Forq, tmp_path: Path) -> None:
    code = """
import time
from forq import RetryAt
def handle(data, job):
    if not job.retry_count:
        raise RetryAt(time.time() + 0.2, "the bank is closed")
"""
    create(forq, "later", code, tmp_path, max_retries=3)
    forq.client().queue("later").enqueue(1, id="l")
    wait_until(lambda: forq.queue_status("later")["done"] == 1)
    (record,) = logs(forq, "later")
    assert record["level"] == "INFO"
    assert record["message"].startswith("job requested a retry: attempt 1 of 4, retry in ")
    assert record["message"].endswith("error=RetryAt: the bank is closed")


def test_an_attempt_that_dies_with_its_process_has_a_line_in_the_same_format(forq: Forq, tmp_path: Path) -> None:
    code = "import os\ndef handle(data, job):\n    os.kill(os.getpid(), 9)\n"
    create(forq, "killed", code, tmp_path, max_stalls=1)
    forq.client().queue("killed").enqueue(1, id="k")
    cause = "job lost with its process (signal 9 (SIGKILL))"
    records = wait_for_lines(forq, "killed", 2)
    assert heads(records) == [
        ("WARNING", f"{cause}: attempt 1 of 2, retry at once"),
        ("ERROR", f"{cause}: attempt 2 of 2, failed for good (see: forqctl why killed k)"),
    ]
    assert {record["job"] for record in records} == {"k"}
    wait_until(lambda: forq.queue_status("killed")["dead"] == 1, what="the job runs again as the line message")
    wait_until(lambda: "killed k: job lost with its process (signal 9 (SIGKILL)): attempt 2 of 2" in forq.log)


@pytest.mark.parametrize("kind", ["blocking", "coroutine"])
def test_a_timeout_has_a_line_in_the_same_format(forq: Forq, tmp_path: Path, kind: str) -> None:
    coroutine = "import asyncio\nasync def handle(data, job):\n    await asyncio.sleep(60)\n"
    code = coroutine if kind == "coroutine" else "import time\ndef handle(data, job):\n    time.sleep(60)\n"
    create(forq, kind, code, tmp_path, max_timeouts=1, timeout="300ms")
    forq.client().queue(kind).enqueue(1, id="s")
    first, last = heads(wait_for_lines(forq, kind, 2))
    assert (first[0], last[0]) == ("WARNING", "ERROR")
    assert "attempt 1 of 2, retry at once" in first[1]
    assert f"attempt 2 of 2, failed for good (see: forqctl why {kind} s)" in last[1]
    assert first[1].startswith("job timed out")
    wait_until(lambda: forq.queue_status(kind)["dead"] == 1)


def test_a_failing_fail_handler_is_logged_under_the_id_of_its_job(forq: Forq, tmp_path: Path) -> None:
    code = "def handle(data, job):\n    raise ValueError(1)\ndef mourn(data, job):\n    raise KeyError(2)\n"
    (tmp_path / "mourner.py").write_text(code)
    options = ("--set=max_retries=0", "--set=fail_max_retries=0", "--fail-handler", "mourner:mourn")
    forq.ctl("create", "mourned", "--handler", "mourner:handle", "--path", str(tmp_path), *options)
    forq.client().queue("mourned").enqueue(1, id="m")
    records = wait_for_lines(forq, "mourned", 2)
    assert [record["job"] for record in records] == ["m", "m"]
    expected = "fail handler failed: attempt 1 of 1, failed for good (see: forqctl why mourned m) error=KeyError: 2"
    # Two processes wrote these, in any order.
    assert ("ERROR", expected) in heads(records)


def test_a_result_that_is_not_json_is_logged_when_its_job_ends(forq: Forq, tmp_path: Path) -> None:
    code = "from decimal import Decimal\ndef handle(data, job):\n    return {'order': {'total': Decimal(1)}}\n"
    create(forq, "decimal", code, tmp_path, keep_done="1h")
    queue = forq.client().queue("decimal")
    queue.enqueue(1, id="d")
    (record,) = wait_for_lines(forq, "decimal", 1)
    reason = "the handler's result is not JSON: result['order']['total'] is of type Decimal"
    assert record["message"].startswith(f"job is done, but its result is not kept reason={reason}; allowed are str, ")
    assert (record["level"], record["job"], record["logger"]) == ("WARNING", "d", "forq")
    with pytest.raises(NoResult, match="of type Decimal"):
        queue.wait("d", timeout=10)


def test_a_batch_with_more_results_than_done_max_is_logged(forq: Forq, tmp_path: Path) -> None:
    create(forq, "batch", "def handle(data, job):\n    return data\n", tmp_path, keep_done="1h", done_max=10)
    queue = forq.client().queue("batch")
    ids = queue.enqueue_many(range(30))
    wait_until(lambda: forq.queue_status("batch")["done"] == 30)
    # Of jobs that end in the same millisecond, any may be among the last.
    assert queue.wait(queue.enqueue("last"), timeout=10) == "last"
    message = r"last done_max = 10 jobs, currently those since .*`forqctl set batch done_max=10000`"
    with pytest.raises(UnknownJob, match=message):
        list(map(queue.wait, ids))


def test_a_job_lost_with_its_supervisor_has_a_line_after_the_next_start(tmp_path: Path) -> None:
    with running() as forq:
        create(forq, "long", "import time\ndef handle(data, job):\n    time.sleep(60)\n", tmp_path)
        forq.client().queue("long").enqueue(1, id="l")
        wait_until(lambda: forq.client().queue("long").job("l")["state"] == "active")
        assert forq.process is not None
        os.kill(forq.pid, signal.SIGKILL)
        forq.process.wait()
        forq.start()
        line = "job lost with its process (supervisor lost): attempt 1 of 4, retry at once queue=long job=l"
        wait_until(lambda: line in forq.log)
