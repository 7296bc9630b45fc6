"""Failed attempts in `logging`: the contents of a record, and misbehaving logging handlers of the user."""

import asyncio
import logging
import logging.config
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forq import Job, Permanent, RetryAt
from forq.broker.record import pack_body
from forq.broker.scripts import Fate
from forq.output.streams import CaptureHandler
from forq.output.writer import OutputWriter
from forq.workers import job_log
from forq.workers.attempt import AttemptRunner, FailAttemptRunner
from forq.workers.exec_handlers import ProgramFailed
from forq.workers.handlers import Handlers
from forq.workers.job_log import MAX_QUEUED, WRITE_WAIT_SECONDS, FailedAttempt, JobLog
from tests.support.drive.wait import wait_until

RECORD = b"p5 1700000000123456\n" + pack_body(1, None, None)
AGAIN = Fate("retried", 4000, 2, 4)
OVER = Fate("dead", 0, 4, 4)


class Seen(logging.Handler):
    """A logging handler of the user, on the logger `forq`."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._then = then

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self._then()


Listen = Callable[..., Seen]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, another thread may take long to start."""
    monkeypatch.setattr(job_log, "WRITE_WAIT_SECONDS", 30.0)


@pytest.fixture
def listen() -> Iterator[Listen]:
    logger, added = logging.getLogger("forq"), []

    def add(then: Callable[[], object] = lambda: None) -> Seen:
        added.append(Seen(then))
        logger.addHandler(added[-1])
        return added[-1]

    yield add
    for handler in added:
        logger.removeHandler(handler)
    # dictConfig may have disabled all loggers, for later tests too.
    for each in logging.root.manager.loggerDict.values():
        if isinstance(each, logging.Logger):
            each.disabled = False


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Lines written to the log of the queue without `logging`: level, job, text."""
    lines: list[tuple[str, str, str]] = []
    monkeypatch.setattr(job_log, "write_past_logging", lambda *line: lines.append(line))
    return lines


def failed(
    handler: Callable[[Any, Any], Any], job: str = "j1", attempts: type[AttemptRunner] = AttemptRunner
) -> FailedAttempt:
    """A failed attempt, as the loop of a worker creates it."""
    ran = attempts("q", Handlers({None: handler}))
    failure = ran.run(job, RECORD, 9)
    assert failure is not None
    raised, ran.raised = ran.raised, None
    return FailedAttempt("q", job, failure, raised, ran.of_fail_handler)


def refuse(data: Any, job: Job) -> None:
    raise ValueError("no good")


def test_a_retried_failure_is_a_warning_with_the_exception_and_the_next_step(listen: Listen, past: list[Any]) -> None:
    seen = listen()
    JobLog().log_failure(failed(refuse), AGAIN)
    (record,) = seen.records
    assert record.getMessage() == ("job failed: attempt 2 of 4, retry in 4 s queue=q job=j1 error=ValueError: no good")
    assert (record.name, record.levelname) == ("forq", "WARNING")
    assert record.msg == "job failed: %s queue=%s job=%s error=%s", "log collectors group records by it"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    fields = {name: record.__dict__[name] for name in ("queue", "job_id", "attempt", "attempts", "retry_in_seconds")}
    assert fields == {"queue": "q", "job_id": "j1", "attempt": 2, "attempts": 4, "retry_in_seconds": 4.0}
    assert (record.funcName, record.pathname) == ("refuse", __file__), "where it was raised"
    assert past == []


def test_the_last_failure_is_an_error_with_the_next_command(listen: Listen) -> None:
    seen = listen()
    JobLog().log_failure(failed(refuse, job="50%s of it"), OVER)
    (record,) = seen.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == (
        "job failed: attempt 4 of 4, failed for good (see: forqctl why q '50%s of it')"
        " queue=q job=50%s of it error=ValueError: no good"
    )
    assert record.__dict__["retry_in_seconds"] is None


def test_a_requested_retry_is_not_logged_as_a_failure(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    def later(data: Any, job: Job) -> None:
        raise RetryAt(time.time() + 60, "the bank is closed")

    seen = listen()
    with caplog.at_level(logging.INFO, logger="forq"):
        JobLog().log_failure(failed(later), AGAIN)
        JobLog().log_failure(failed(later), OVER)
    requested, over = seen.records
    assert (requested.levelname, requested.exc_info) == ("INFO", None)
    assert requested.getMessage().startswith("job requested a retry: attempt 2 of 4, retry in 4 s ")
    assert (over.levelname, over.exc_info is not None) == ("ERROR", True), "its attempts are used up"


def test_the_record_names_a_fail_handler(listen: Listen) -> None:
    seen = listen()
    attempt = failed(refuse, attempts=FailAttemptRunner)
    JobLog().log_failure(attempt, AGAIN)
    assert seen.records[0].getMessage().startswith("fail handler failed: attempt 2 of 4")


def test_the_error_report_of_a_program_replaces_the_traceback(listen: Listen) -> None:
    def fail(data: Any, job: Job) -> None:
        raise ProgramFailed("DiskFull", "no space", trace="at main.rb:7")

    seen = listen()
    JobLog().log_failure(failed(fail), AGAIN)
    (record,) = seen.records
    assert record.getMessage().endswith("error=DiskFull: no space")
    assert logging.Formatter("%(levelname)s").format(record) == "WARNING\nat main.rb:7"


# The part of a traceback that is logged and stored.


async def refuse_later(data: Any, job: Job) -> None:
    await asyncio.sleep(0)
    refuse(data, job)


@pytest.mark.parametrize("handler", [refuse, refuse_later])
def test_a_traceback_starts_with_the_handler(handler: Any) -> None:
    attempt = failed(handler)
    assert attempt.raised is not None
    frames = traceback.extract_tb(attempt.raised.__traceback__)
    expected = ["refuse"] if handler is refuse else ["refuse_later", "refuse"]
    assert [frame.name for frame in frames] == expected
    text = attempt.failure.text()
    assert "attempt.py" not in text
    assert "asyncio" not in text
    assert "raise ValueError" in text


def test_exceptions_of_a_task_group_keep_the_frames_of_their_tasks() -> None:
    async def group(data: Any, job: Job) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(refuse_later(data, job))

    text = failed(group).failure.text()
    assert text.startswith("ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)")
    assert "in refuse_later" in text
    assert "attempt.py" not in text


def test_an_expected_error_has_no_frames_and_an_internal_error_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = AttemptRunner("q", Handlers({}))
    failure = attempts.run("j", RECORD, 9)
    assert failure is not None
    assert failure.text().splitlines()[1:] == [f"forq.errors.{failure.text().splitlines()[0]}"]
    assert isinstance(attempts.raised, Permanent)
    monkeypatch.setattr(attempts, "_read", lambda: None)
    failure = attempts.run("j", RECORD, 9)
    assert failure is not None
    assert "attempt.py" in failure.text()


# Misbehaving logging handlers.


def test_if_logging_handlers_raise_or_exit_the_line_is_in_the_log_of_the_queue(listen: Listen, past: list[Any]) -> None:
    def leave() -> None:
        raise SystemExit(3)

    seen, log = listen(leave), JobLog()
    for _ in range(2):
        log.log_failure(failed(refuse), AGAIN)
    assert len(seen.records) == 2, "it is called again"
    level, job, text = past[0]
    assert (level, job, len(past)) == ("WARNING", "j1", 2)
    assert text.startswith("job failed: attempt 2 of 4, retry in 4 s (logging raised SystemExit) error=ValueError")
    assert "in refuse" in text


def test_an_exception_whose_str_raises_is_logged(listen: Listen, past: list[Any], capsys: Any) -> None:
    class Silent(BaseException):
        def __str__(self) -> str:
            raise SystemExit(4)

    def fail(data: Any, job: Job) -> None:
        raise Silent

    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("forq").addHandler(handler)
    try:
        JobLog().log_failure(failed(fail), AGAIN)
    finally:
        logging.getLogger("forq").removeHandler(handler)
    text = capsys.readouterr().err + "".join(line for _, _, line in past)
    assert "error=Silent: (unprintable: SystemExit)" in text


def test_an_exception_that_cannot_be_formatted_is_in_the_log_of_the_queue(past: list[Any]) -> None:
    class Secretive(Exception):
        @property
        def __notes__(self) -> list[str]:  # type: ignore[override]
            raise RuntimeError("none of your business")

    def fail(data: Any, job: Job) -> None:
        raise Secretive("no good")

    ours = CaptureHandler(OutputWriter())
    logging.getLogger("forq").addHandler(ours)
    try:
        JobLog().log_failure(failed(fail), AGAIN)
    finally:
        logging.getLogger("forq").removeHandler(ours)
    assert len(past) == 1
    assert past[0][2].startswith(
        "job failed: attempt 2 of 4, retry in 4 s (logging raised RuntimeError) error=Secretive"
    )


def test_the_log_level_also_applies_to_the_fallback_log(past: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("forq"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("forq"), "level", logging.ERROR)
    JobLog().log_failure(failed(refuse), AGAIN)
    JobLog().log_failure(failed(refuse), OVER)
    assert [level for level, _, _ in past] == ["ERROR"]


def test_a_logging_handler_that_blocks_delays_no_worker_and_loses_no_line(
    listen: Listen, past: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_log, "WRITE_WAIT_SECONDS", WRITE_WAIT_SECONDS)
    free = threading.Event()
    seen, log = listen(free.wait), JobLog()
    try:
        began = time.monotonic()
        for _ in range(MAX_QUEUED + 4):
            log.log_failure(failed(refuse), AGAIN)
        took = time.monotonic() - began
    finally:
        free.set()
    assert WRITE_WAIT_SECONDS <= took < 5 * WRITE_WAIT_SECONDS + 3, "only one line waits for it"
    log.close()
    wait_until(lambda: len(seen.records) + len(past) == MAX_QUEUED + 4)
    assert "(logging is stuck)" in past[0][2]


def test_a_worker_waits_until_its_line_is_written(listen: Listen) -> None:
    seen, log = listen(lambda: time.sleep(0.02)), JobLog()
    for number in range(3):
        log.log_failure(failed(refuse), AGAIN)
        assert len(seen.records) == number + 1


def test_with_a_disabled_logger_the_line_is_in_the_log_of_the_queue(listen: Listen, past: list[Any]) -> None:
    seen = listen()
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
    JobLog().log_failure(failed(refuse), OVER)
    assert seen.records == []
    assert past[0][2].startswith("job failed: attempt 4 of 4, failed for good (see: forqctl why q j1) error=ValueError")


def test_a_level_set_by_the_user_is_respected(listen: Listen, past: list[Any]) -> None:
    seen = listen()
    logging.getLogger("forq").setLevel(logging.ERROR)
    try:
        JobLog().log_failure(failed(refuse), AGAIN)
        JobLog().log_failure(failed(refuse), OVER)
    finally:
        logging.getLogger("forq").setLevel(logging.NOTSET)
    assert [record.levelname for record in seen.records] == ["ERROR"]
    assert past == []


def test_fields_of_a_custom_record_factory_are_kept(listen: Listen, past: list[Any]) -> None:
    usual = logging.getLogRecordFactory()

    def mine(*given: Any, **named: Any) -> logging.LogRecord:
        record = usual(*given, **named)
        record.queue = "mine"
        return record

    seen = listen()
    logging.setLogRecordFactory(mine)
    try:
        JobLog().log_failure(failed(refuse), AGAIN)
    finally:
        logging.setLogRecordFactory(usual)
    assert (seen.records[0].__dict__["queue"], past) == ("mine", [])


def test_a_failure_logged_before_redis_answers_is_logged_again_without_its_exception(listen: Listen) -> None:
    seen, log, attempt = listen(), JobLog(), failed(refuse)
    log.log_failure(attempt, "outcome is decided when Redis is back")
    log.log_failure(attempt, OVER)
    first, second = seen.records
    assert first.getMessage().startswith("job failed: outcome is decided when Redis is back queue=q job=j1 ")
    assert (first.exc_info is not None, second.exc_info) == (True, None)
    assert second.getMessage().startswith("job failed: attempt 4 of 4, failed for good ")


def test_a_settled_failure_with_a_lost_reply_is_logged_once(listen: Listen) -> None:
    seen, log, attempt = listen(), JobLog(), failed(refuse)
    log.log_failure(attempt, "outcome is decided when Redis is back")
    log.log_failure(attempt, Fate("refused", 0, 0, 0))
    assert len(seen.records) == 1
