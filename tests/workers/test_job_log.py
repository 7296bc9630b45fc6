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

RECORD = b"p5 1700000000123\n" + pack_body(1, None, None)
AGAIN = Fate("retried", 4000, 2, 4)
OVER = Fate("dead", 0, 4, 4)


class Seen(logging.Handler):
    """A handler of the user's, on the logger `forq`."""

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
    """On a busy machine another thread may take long to begin."""
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
    logger.disabled = False


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Lines that went to the queue's log past logging: level, job, text."""
    lines: list[tuple[str, str, str]] = []
    monkeypatch.setattr(job_log, "write_past_logging", lambda *line: lines.append(line))
    return lines


def failed(
    handler: Callable[[Any, Any], Any], job: str = "j1", attempts: type[AttemptRunner] = AttemptRunner
) -> FailedAttempt:
    """As a worker's loop makes it."""
    ran = attempts("q", Handlers({None: handler}))
    failure = ran.run(job, RECORD, 9)
    assert failure is not None
    raised, ran.raised = ran.raised, None
    return FailedAttempt("q", job, failure, raised, ran.of_fail_handler)


def refuse(data: Any, job: Job) -> None:
    raise ValueError("no good")


def test_a_retry_is_a_warning_with_the_exception_and_what_follows(listen: Listen, past: list[Any]) -> None:
    seen = listen()
    JobLog().log_failure(failed(refuse), AGAIN)
    (record,) = seen.records
    assert record.getMessage() == ("job failed: attempt 2 of 4, retry in 4 s queue=q job=j1 error=ValueError: no good")
    assert (record.name, record.levelname) == ("forq", "WARNING")
    assert record.msg == "job failed: %s queue=%s job=%s error=%s", "by which others group records"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
    fields = {name: record.__dict__[name] for name in ("queue", "job_id", "attempt", "attempts", "retry_in_seconds")}
    assert fields == {"queue": "q", "job_id": "j1", "attempt": 2, "attempts": 4, "retry_in_seconds": 4.0}
    assert (record.funcName, record.pathname) == ("refuse", __file__), "where it was raised"
    assert past == []


def test_the_last_one_is_an_error_that_names_the_next_command(listen: Listen) -> None:
    seen = listen()
    JobLog().log_failure(failed(refuse, job="50%s of it"), OVER)
    (record,) = seen.records
    assert record.levelname == "ERROR"
    assert record.getMessage() == (
        "job failed: attempt 4 of 4, failed for good (see: forqctl why q '50%s of it')"
        " queue=q job=50%s of it error=ValueError: no good"
    )
    assert record.__dict__["retry_in_seconds"] is None


def test_a_job_that_asks_to_be_tried_later_is_no_failure(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    def later(data: Any, job: Job) -> None:
        raise RetryAt(time.time() + 60, "the bank is closed")

    seen = listen()
    with caplog.at_level(logging.INFO, logger="forq"):
        JobLog().log_failure(failed(later), AGAIN)
        JobLog().log_failure(failed(later), OVER)
    asked, over = seen.records
    assert (asked.levelname, asked.exc_info) == ("INFO", None)
    assert asked.getMessage().startswith("job requested a retry: attempt 2 of 4, retry in 4 s ")
    assert (over.levelname, over.exc_info is not None) == ("ERROR", True), "its attempts are used up"


def test_a_fail_handler_is_named_as_such(listen: Listen) -> None:
    seen = listen()
    attempt = failed(refuse, attempts=FailAttemptRunner)
    JobLog().log_failure(attempt, AGAIN)
    assert seen.records[0].getMessage().startswith("fail handler failed: attempt 2 of 4")


def test_what_a_program_says_of_itself_stands_for_the_traceback(listen: Listen) -> None:
    def fail(data: Any, job: Job) -> None:
        raise ProgramFailed("DiskFull", "no space", trace="at main.rb:7")

    seen = listen()
    JobLog().log_failure(failed(fail), AGAIN)
    (record,) = seen.records
    assert record.getMessage().endswith("error=DiskFull: no space")
    assert logging.Formatter("%(levelname)s").format(record) == "WARNING\nat main.rb:7"


# Which part of a traceback is shown and stored.


async def refuse_later(data: Any, job: Job) -> None:
    await asyncio.sleep(0)
    refuse(data, job)


@pytest.mark.parametrize("handler", [refuse, refuse_later])
def test_the_first_frame_is_the_handler_s(handler: Any) -> None:
    attempt = failed(handler)
    assert attempt.raised is not None
    frames = traceback.extract_tb(attempt.raised.__traceback__)
    expected = ["refuse"] if handler is refuse else ["refuse_later", "refuse"]
    assert [frame.name for frame in frames] == expected
    told = attempt.failure.text()
    assert "attempt.py" not in told
    assert "asyncio" not in told
    assert "raise ValueError" in told


def test_exceptions_of_a_task_group_keep_the_frames_of_their_tasks() -> None:
    async def group(data: Any, job: Job) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(refuse_later(data, job))

    told = failed(group).failure.text()
    assert told.startswith("ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)")
    assert "in refuse_later" in told
    assert "attempt.py" not in told


def test_an_error_of_forq_s_own_has_no_frames_and_a_fault_of_forq_s_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = AttemptRunner("q", Handlers({}))
    failure = attempts.run("j", RECORD, 9)
    assert failure is not None
    assert failure.text().splitlines()[1:] == [f"forq.errors.{failure.text().splitlines()[0]}"]
    assert isinstance(attempts.raised, Permanent)
    monkeypatch.setattr(attempts, "_read", lambda: None)
    failure = attempts.run("j", RECORD, 9)
    assert failure is not None
    assert "attempt.py" in failure.text()


# What a user's logging may do.


def test_handlers_that_raise_or_exit_leave_the_line_in_the_queue_s_log(listen: Listen, past: list[Any]) -> None:
    def leave() -> None:
        raise SystemExit(3)

    seen, log = listen(leave), JobLog()
    for _ in range(2):
        log.log_failure(failed(refuse), AGAIN)
    assert len(seen.records) == 2, "it is asked again"
    level, job, text = past[0]
    assert (level, job, len(past)) == ("WARNING", "j1", 2)
    assert text.startswith("job failed: attempt 2 of 4, retry in 4 s (logging raised SystemExit) error=ValueError")
    assert "in refuse" in text


def test_an_exception_whose_text_raises_is_told(listen: Listen, past: list[Any], capsys: Any) -> None:
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
    told = capsys.readouterr().err + "".join(text for _, _, text in past)
    assert "error=Silent: (unprintable: SystemExit)" in told


def test_an_exception_that_cannot_be_shown_is_in_the_queue_s_log(past: list[Any]) -> None:
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


def test_a_level_holds_for_what_logging_did_not_take(past: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("forq"), "disabled", True)
    monkeypatch.setattr(logging.getLogger("forq"), "level", logging.ERROR)
    JobLog().log_failure(failed(refuse), AGAIN)
    JobLog().log_failure(failed(refuse), OVER)
    assert [level for level, _, _ in past] == ["ERROR"]


def test_a_handler_that_blocks_holds_nobody_up_and_no_line_is_lost(
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
    assert WRITE_WAIT_SECONDS <= took < 5 * WRITE_WAIT_SECONDS + 3, "it is waited for once"
    log.close()
    wait_until(lambda: len(seen.records) + len(past) == MAX_QUEUED + 4)
    assert "(logging is stuck)" in past[0][2]


def test_a_worker_waits_until_its_line_is_written(listen: Listen) -> None:
    seen, log = listen(lambda: time.sleep(0.02)), JobLog()
    for number in range(3):
        log.log_failure(failed(refuse), AGAIN)
        assert len(seen.records) == number + 1


def test_a_logger_that_is_turned_off_leaves_the_queue_s_log(listen: Listen, past: list[Any]) -> None:
    seen = listen()
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
    JobLog().log_failure(failed(refuse), OVER)
    assert seen.records == []
    assert past[0][2].startswith("job failed: attempt 4 of 4, failed for good (see: forqctl why q j1) error=ValueError")


def test_a_level_that_a_user_has_set_is_respected(listen: Listen, past: list[Any]) -> None:
    seen = listen()
    logging.getLogger("forq").setLevel(logging.ERROR)
    try:
        JobLog().log_failure(failed(refuse), AGAIN)
        JobLog().log_failure(failed(refuse), OVER)
    finally:
        logging.getLogger("forq").setLevel(logging.NOTSET)
    assert [record.levelname for record in seen.records] == ["ERROR"]
    assert past == []


def test_fields_of_a_user_s_record_factory_stay(listen: Listen, past: list[Any]) -> None:
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


def test_what_is_told_before_redis_answers_is_told_again_without_its_exception(listen: Listen) -> None:
    seen, log, attempt = listen(), JobLog(), failed(refuse)
    log.log_failure(attempt, "outcome is decided when Redis is back")
    log.log_failure(attempt, OVER)
    first, second = seen.records
    assert first.getMessage().startswith("job failed: outcome is decided when Redis is back queue=q job=j1 ")
    assert (first.exc_info is not None, second.exc_info) == (True, None)
    assert second.getMessage().startswith("job failed: attempt 4 of 4, failed for good ")


def test_a_settle_whose_answer_was_lost_is_told_once(listen: Listen) -> None:
    seen, log, attempt = listen(), JobLog(), failed(refuse)
    log.log_failure(attempt, "outcome is decided when Redis is back")
    log.log_failure(attempt, Fate("refused", 0, 0, 0))
    assert len(seen.records) == 1
