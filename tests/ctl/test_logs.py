"""forqctl logs."""

import json
import signal
import subprocess
from typing import Any

import pytest

from forq import errors
from tests.ctl.fake_supervisor import FORQCTL, FakeSupervisor, environment, forqctl
from tests.support.drive.wait import wait_until


def record(number: int) -> dict[str, Any]:
    about = {"time": "2026-11-16T17:04:30.123Z", "level": "INFO", "queue": "q", "job": "j", "stream": "stdout"}
    return {**about, "message": f"line {number}"}


def answer(*numbers: int, more: bool = False, skipped: bool = False) -> dict[str, Any]:
    cursor = f"0123456789abcdef:{numbers[-1] if numbers else 0}"
    return {"records": [record(number) for number in numbers], "cursor": cursor, "more": more, "skipped": skipped}


def test_logs_shows_the_last_lines_of_all_answers(fake: FakeSupervisor) -> None:
    answers = [answer(1, 2, more=True), answer(more=True), answer(3, 4)]
    fake.answers["logs"] = lambda params: answers.pop(0)
    code, out, err = forqctl(fake, "logs", "q", "-n", "3", TZ="UTC")
    lines = [f"2026-11-16 17:04:30.123 INFO    q j: line {number}\n" for number in (2, 3, 4)]
    assert (code, out, err) == (0, "".join(lines), "")
    requests = [params for _, params in fake.calls]
    assert requests[0] == {"name": "q", "job": None, "lines": 3, "cursor": None}
    assert [params["cursor"] for params in requests[1:]] == ["0123456789abcdef:2", "0123456789abcdef:0"]


def test_logs_with_json_prints_one_record_per_line(fake: FakeSupervisor) -> None:
    fake.answers["logs"] = answer(1, 2)
    code, out, _ = forqctl(fake, "logs", "q", "--job", "j", "--json")
    assert (code, [json.loads(line) for line in out.splitlines()]) == (0, [record(1), record(2)])
    assert fake.calls[0][1]["job"] == "j"


def test_logs_follow_runs_until_interrupted_and_reports_missing_lines(fake: FakeSupervisor) -> None:
    answers = [answer(1), answer(2), answer(9, skipped=True)]
    fake.answers["logs"] = lambda params: answers.pop(0) if answers else None
    process = subprocess.Popen(
        [*FORQCTL, "logs", "-f", "q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(fake), text=True
    )
    wait_until(lambda: len(fake.calls) == 4, what="a fourth request")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert [line[-6:] for line in out.splitlines()] == ["line 1", "line 2", "line 9"]
    assert err == "forqctl: output was written faster than it could be read; some lines are missing\n"
    assert [params.get("wait") for _, params in fake.calls] == [None, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("lines", ["-1", "x"])
def test_logs_rejects_an_invalid_number_of_lines(fake: FakeSupervisor, lines: str) -> None:
    assert forqctl(fake, "logs", "q", "-n", lines)[0] == 2
    assert not fake.calls


def test_logs_of_an_unknown_queue_exits_with_4(fake: FakeSupervisor) -> None:
    fake.answers["logs"] = errors.UnknownQueue("none")
    assert forqctl(fake, "logs", "q") == (4, "", "forqctl: none\n")
