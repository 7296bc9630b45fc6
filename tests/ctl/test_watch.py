"""forqctl watch, and how forqctl shows progress: a real process against a table of fake verbs."""

import json
import os
import pty
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from forq import errors
from tests.ctl.fake_supervisor import FORQCTL, FakeSupervisor, environment, forqctl, queue_status, whole_status


def told(state: str, progress: tuple[float, str] | None = None, **more: Any) -> dict[str, Any]:
    shown = None if progress is None else {"fraction": progress[0], "text": progress[1], "at": 1700000000.5}
    return {"id": "a", "state": state, "identifier": "a", "progress": shown, "run_at": None, **more}


def script(*answers: Any) -> Callable[[dict[str, Any]], Any]:
    """Answers in this order, each under a name of its own. An error is raised."""
    given = iter(enumerate(answers, start=1))

    def answer(params: dict[str, Any]) -> Any:
        number, one = next(given)
        return one if isinstance(one, errors.ForqError) else {**one, "seen": f"{number} 0"}

    return answer


WAY = (
    told("waiting"),
    told("active"),
    told("active", (0.4, "page\x1b 12 of 30")),
    told("scheduled", run_at=1700000000.0),
    told("active", (1.0, "")),
)


def test_watch_prints_a_line_per_change_until_the_job_is_gone(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = script(*WAY, {"id": "a", "state": "gone"})
    assert forqctl(fake, "watch", "q", "a") == (
        0,
        "waiting\n"
        "active\n"
        "active 40% page\\x1b 12 of 30\n"
        "scheduled until 2023-11-14T22:13:20.000Z\n"
        "active 100%\n"
        "gone: done, released or cancelled\n",
        "",
    )
    assert [params["seen"] for _, params in fake.calls] == [None, "1 0", "2 0", "3 0", "4 0", "5 0"]


def test_watch_of_a_job_that_dies_is_1(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = script(told("active"), told("dead", error={"name": "E", "message": "no\n"}))
    assert forqctl(fake, "watch", "q", "a") == (1, "active\ndead: E: no\\n\n", "")


def test_watch_with_json_is_a_document_per_change(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = script(*WAY, {"id": "a", "state": "gone"})
    code, out, _ = forqctl(fake, "watch", "q", "a", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, lines) == (0, [*WAY, {"id": "a", "state": "gone"}])


@pytest.mark.parametrize(("error", "code"), [(errors.UnknownJob("none"), 4), (errors.UnknownQueue("none"), 4)])
def test_watch_of_what_is_not_there_is_4(fake: FakeSupervisor, error: errors.ForqError, code: int) -> None:
    fake.answers["watch"] = error
    assert forqctl(fake, "watch", "q", "a") == (code, "", "forqctl: none\n")


def test_watch_gives_up_in_time_with_6(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = lambda params: {**told("waiting"), "seen": "1 0"}
    code, out, err = forqctl(fake, "watch", "q", "a", "--wait", "200ms")
    assert (code, out, err) == (6, "waiting\n", "forqctl: job a of queue q has not ended yet\n")
    assert all(params["wait"] <= 0.2 for _, params in fake.calls)


def test_watch_goes_on_when_redis_was_away_but_does_not_begin_without_it(fake: FakeSupervisor) -> None:
    away = errors.RedisUnavailable("away")
    fake.answers["watch"] = script(told("active"), away, {"id": "a", "state": "gone"})
    assert forqctl(fake, "watch", "q", "a")[0] == 0
    fake.answers["watch"] = away
    assert forqctl(fake, "watch", "q", "a") == (1, "", "forqctl: away\n")


def test_watch_on_a_terminal_draws_a_bar_in_place(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = script(told("active"), told("active", (0.5, "x" * 200)), {"id": "a", "state": "gone"})
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*FORQCTL, "watch", "q", "a"], stdout=theirs, stderr=theirs, env=environment(fake))
    os.close(theirs)
    shown = b""
    try:
        while True:
            shown += os.read(ours, 65536)
    except OSError:  # the terminal's other end is closed
        assert process.wait(10) == 0
    finally:
        os.close(ours)
    bar = f"[{'#' * 15}{'.' * 15}] 50% {'x' * 200}"[:79]
    assert shown.decode().endswith(f"\r\x1b[K{bar}\r\x1b[Kgone: done, released or cancelled\r\n")


def test_job_shows_progress_in_words_and_in_json(fake: FakeSupervisor) -> None:
    fake.answers["job"] = told("active", (0.4, "page 12 of 30"))
    assert "progress        40% page 12 of 30 (2023-11-14T22:13:20.500Z)\n" in forqctl(fake, "job", "q", "a")[1]
    assert json.loads(forqctl(fake, "job", "q", "a", "--json")[1])["progress"]["fraction"] == 0.4
    fake.answers["job"] = told("waiting")
    assert "progress        -\n" in forqctl(fake, "job", "q", "a")[1]


def test_status_of_a_name_shows_the_progress_of_who_tells_it(fake: FakeSupervisor) -> None:
    queue = queue_status()
    queue["children"][0]["progress"] = {"fraction": 0.4, "text": "page 12 of 30"}
    fake.answers["status"] = whole_status(queue)
    assert forqctl(fake, "status", "emails")[1].splitlines()[4:7] == [
        "ROLE   PID  STATE   JOB  UPTIME  RESTARTS  PROGRESS",
        "main    11  busy    01J  1m39s          2  40% page 12 of 30",
        "retry   12  parked  -    1h06m          0  -",
    ]
