"""How a line of the log looks."""

import json
import logging
import os
import pty
from pathlib import Path

import pytest

from forq.log_format import LogFormat, choose_format, is_journal, iso_time
from forq.logging_setup import LineFormatter

RECORD = {
    "time": "2026-11-16T17:04:30.123Z",
    "level": "WARNING",
    "queue": "emails",
    "job": "01JD0Z",
    "stream": "log",
    "logger": "my.lib",
    "message": "careful\x1b[2J\nsecond",
}


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def test_text_is_one_line_per_line_and_obeys_nothing() -> None:
    assert LogFormat(json=False).render(RECORD) == (
        "2026-11-16 17:04:30.123 WARNING emails 01JD0Z: my.lib: careful\\x1b[2J\n    second"
    )
    plain = {**RECORD, "level": "INFO", "logger": "forq", "message": "text", "job": None}
    assert LogFormat(json=False, date=False).render(plain) == "17:04:30.123 INFO    emails: text"


def test_on_a_terminal_levels_have_colours_unless_somebody_minds() -> None:
    ours, theirs = pty.openpty()
    assert choose_format("auto", theirs, {}) == LogFormat(json=False, colour=True, date=False)
    assert not choose_format("auto", theirs, {"NO_COLOR": "1"}).colour
    assert "\x1b[33mWARNING\x1b[0m" in LogFormat(json=False, colour=True).render(RECORD)
    os.close(ours)
    os.close(theirs)


def test_under_the_journal_it_is_json_with_the_priority_in_front(tmp_path: Path) -> None:
    with open(tmp_path / "stderr", "w") as file:
        status = os.fstat(file.fileno())
        environ = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        assert choose_format("auto", file.fileno(), environ) == LogFormat(json=True, priority=True)
        assert choose_format("text", file.fileno(), environ) == LogFormat(json=False, priority=True)
        # Somebody has redirected stderr since systemd set the variable.
        other = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + 1}"}
        assert choose_format("auto", file.fileno(), other) == LogFormat(json=False)
        assert choose_format("json", file.fileno(), {}) == LogFormat(json=True)
    line = LogFormat(json=True, priority=True).render(RECORD)
    assert line.startswith("<4>{")
    assert json.loads(line[3:]) == RECORD
    assert "\n" not in line


@pytest.mark.parametrize("text", ["", "x", "1:", ":", "1:2:3"])
def test_a_strange_journal_variable_is_none(text: str) -> None:
    assert not is_journal(2, {"JOURNAL_STREAM": text})
    assert not is_journal(999_999, {"JOURNAL_STREAM": text})


def test_forqs_own_messages_have_queue_and_job_as_fields_in_json_and_stay_as_they_are() -> None:
    made = logging.LogRecord("forq", logging.ERROR, "", 1, "ending a job queue=%s job=%s cause=x", ("q", "j"), None)
    told = json.loads(LineFormatter(LogFormat(json=True)).format(made))
    assert {key: told[key] for key in ("queue", "job", "level", "message", "logger", "pid")} == {
        "queue": "q",
        "job": "j",
        "level": "ERROR",
        "message": "ending a job queue=q job=j cause=x",
        "logger": "forq",
        "pid": os.getpid(),
    }
    text = LineFormatter(LogFormat(json=False)).format(made)
    assert text.endswith(" ERROR   ending a job queue=q job=j cause=x")


def test_a_message_with_lone_surrogates_is_shown() -> None:
    made = {**RECORD, "message": "\ud800"}
    assert json.loads(LogFormat(json=True).render(made))["message"] == "\\ud800"
    assert LogFormat(json=False).render(made).endswith("\\ud800")


def test_times_have_milliseconds_and_are_never_rounded_up() -> None:
    assert iso_time(1_700_000_000.9999) == "2023-11-14T22:13:20.999Z"
    assert iso_time(0.0) == "1970-01-01T00:00:00.000Z"


def test_what_an_error_says_cannot_pass_for_the_queue_of_a_message() -> None:
    made = logging.LogRecord("forq", logging.ERROR, "", 1, "failed queue=%s error=%s", ("q", "x queue=other"), None)
    assert json.loads(LineFormatter(LogFormat(json=True)).format(made))["queue"] == "q"
