"""forqctl logs: a real process against a table of fake verbs."""

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


def test_logs_shows_the_last_lines_of_all_pieces(fake: FakeSupervisor) -> None:
    pieces = [answer(1, 2, more=True), answer(more=True), answer(3, 4)]
    fake.answers["logs"] = lambda params: pieces.pop(0)
    code, out, err = forqctl(fake, "logs", "q", "-n", "3", TZ="UTC")
    lines = [f"2026-11-16 17:04:30.123 INFO    q j: line {number}\n" for number in (2, 3, 4)]
    assert (code, out, err) == (0, "".join(lines), "")
    asked = [params for _, params in fake.calls]
    assert asked[0] == {"name": "q", "job": None, "lines": 3, "cursor": None}
    assert [params["cursor"] for params in asked[1:]] == ["0123456789abcdef:2", "0123456789abcdef:0"]


def test_logs_with_json_is_a_record_per_line_of_one_job(fake: FakeSupervisor) -> None:
    fake.answers["logs"] = answer(1, 2)
    code, out, _ = forqctl(fake, "logs", "q", "--job", "j", "--json")
    assert (code, [json.loads(line) for line in out.splitlines()]) == (0, [record(1), record(2)])
    assert fake.calls[0][1]["job"] == "j"


def test_following_goes_on_until_it_is_interrupted_and_says_when_lines_are_missing(fake: FakeSupervisor) -> None:
    pieces = [answer(1), answer(2), answer(9, skipped=True)]
    fake.answers["logs"] = lambda params: pieces.pop(0) if pieces else None
    process = subprocess.Popen(
        [*FORQCTL, "logs", "-f", "q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(fake), text=True
    )
    wait_until(lambda: len(fake.calls) == 4, what="it waits for more")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert [line[-6:] for line in out.splitlines()] == ["line 1", "line 2", "line 9"]
    assert err == "forqctl: output was written faster than it could be read; some lines are missing\n"
    assert [params.get("wait") for _, params in fake.calls] == [None, 5.0, 5.0, 5.0]


@pytest.mark.parametrize("lines", ["-1", "x"])
def test_a_wrong_number_of_lines_is_2(fake: FakeSupervisor, lines: str) -> None:
    assert forqctl(fake, "logs", "q", "-n", lines)[0] == 2
    assert not fake.calls


def test_logs_of_no_queue_is_4(fake: FakeSupervisor) -> None:
    fake.answers["logs"] = errors.UnknownQueue("none")
    assert forqctl(fake, "logs", "q") == (4, "", "forqctl: none\n")
