"""forqctl watch, and the progress of jobs in other commands."""

import json
import os
import pty
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from forq import errors
from tests.ctl.fake_supervisor import FORQCTL, FakeSupervisor, environment, forqctl, queue_status, whole_status


def job_state(state: str, progress: tuple[float, str] | None = None, **more: Any) -> dict[str, Any]:
    shown = None if progress is None else {"fraction": progress[0], "text": progress[1], "at": 1700000000.5}
    return {"id": "a", "state": state, "identifier": "a", "progress": shown, "run_at": None, **more}


def script(*answers: Any) -> Callable[[dict[str, Any]], Any]:
    """Gives these answers in order, each with its own `seen`. An error is raised."""
    given = iter(enumerate(answers, start=1))

    def answer(params: dict[str, Any]) -> Any:
        number, one = next(given)
        return one if isinstance(one, errors.ForqError) else {**one, "seen": f"{number} 0"}

    return answer


CHANGES = (
    job_state("waiting"),
    job_state("active"),
    job_state("active", (0.4, "page\x1b 12 of 30")),
    job_state("scheduled", run_at=1700000000.0),
    job_state("active", (1.0, "")),
)


def test_watch_prints_a_line_per_change_until_the_job_is_gone(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = script(*CHANGES, {"id": "a", "state": "gone"})
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


def test_watch_of_a_job_that_dies_exits_with_1(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = script(job_state("active"), job_state("dead", error={"name": "E", "message": "no\n"}))
    assert forqctl(fake, "watch", "q", "a") == (1, "active\ndead: E: no\\n\n", "")


def test_watch_with_json_prints_one_document_per_change(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = script(*CHANGES, {"id": "a", "state": "gone"})
    code, out, _ = forqctl(fake, "watch", "q", "a", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, lines) == (0, [*CHANGES, {"id": "a", "state": "gone"}])


@pytest.mark.parametrize(("error", "code"), [(errors.UnknownJob("none"), 4), (errors.UnknownQueue("none"), 4)])
def test_watch_of_an_unknown_job_or_queue_exits_with_4(
    fake: FakeSupervisor, error: errors.ForqError, code: int
) -> None:
    fake.answers["watch"] = error
    assert forqctl(fake, "watch", "q", "a") == (code, "", "forqctl: none\n")


def test_watch_exits_with_6_when_the_wait_is_over(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = lambda params: {**job_state("waiting"), "seen": "1 0"}
    code, out, err = forqctl(fake, "watch", "q", "a", "--wait", "200ms")
    assert (code, out, err) == (6, "waiting\n", "forqctl: job a of queue q has not ended yet\n")
    assert all(params["wait"] <= 0.2 for _, params in fake.calls)


def test_watch_survives_a_redis_outage_but_does_not_start_during_one(fake: FakeSupervisor) -> None:
    away = errors.RedisUnavailable("away")
    fake.answers["watch"] = script(job_state("active"), away, {"id": "a", "state": "gone"})
    assert forqctl(fake, "watch", "q", "a")[0] == 0
    fake.answers["watch"] = away
    assert forqctl(fake, "watch", "q", "a") == (1, "", "forqctl: away\n")


def test_watch_on_a_terminal_draws_a_bar_in_place(fake: FakeSupervisor) -> None:
    fake.answers["watch"] = script(
        job_state("active"), job_state("active", (0.5, "x" * 200)), {"id": "a", "state": "gone"}
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*FORQCTL, "watch", "q", "a"], stdout=theirs, stderr=theirs, env=environment(fake))
    os.close(theirs)
    shown = b""
    try:
        while True:
            shown += os.read(ours, 65536)
    except OSError:  # forqctl has closed the terminal
        assert process.wait(10) == 0
    finally:
        os.close(ours)
    bar = f"[{'#' * 15}{'.' * 15}] 50% {'x' * 200}"[:79]
    assert shown.decode().endswith(f"\r\x1b[K{bar}\r\x1b[Kgone: done, released or cancelled\r\n")


def test_job_shows_progress_as_text_and_as_json(fake: FakeSupervisor) -> None:
    fake.answers["job"] = job_state("active", (0.4, "page 12 of 30"))
    assert "progress        40% page 12 of 30 (2023-11-14T22:13:20.500Z)\n" in forqctl(fake, "job", "q", "a")[1]
    assert json.loads(forqctl(fake, "job", "q", "a", "--json")[1])["progress"]["fraction"] == 0.4
    fake.answers["job"] = job_state("waiting")
    assert "progress        -\n" in forqctl(fake, "job", "q", "a")[1]


def test_status_of_one_queue_shows_reported_progress(fake: FakeSupervisor) -> None:
    queue = queue_status()
    queue["children"][0]["progress"] = {"fraction": 0.4, "text": "page 12 of 30"}
    fake.answers["status"] = whole_status(queue)
    assert forqctl(fake, "status", "emails")[1].splitlines()[4:7] == [
        "ROLE   PID  STATE   JOB  UPTIME  RESTARTS  PROGRESS",
        "main    11  busy    01J  1m39s          2  40% page 12 of 30",
        "retry   12  parked  -    1h06m          0  -",
    ]
