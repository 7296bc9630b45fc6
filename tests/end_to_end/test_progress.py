"""Progress with a real supervisor: where it is shown, that it ends with the attempt, and forqctl watch."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        forq.create("told", "tell", max_retries=0)
        yield forq


class Step:
    """A job that reports progress and then waits for a file, so that the test decides when it ends."""

    def __init__(self, forq: Forq, folder: Path, *steps: tuple[float, str], queue: str = "told") -> None:
        self.forq, self.queue, self.gate = forq, queue, folder / "gate"
        self.id = forq.ctl("push", queue, json.dumps([*steps, str(self.gate)]))

    def begun(self) -> "Step":
        wait_until(lambda: any(trace.job == self.id for trace in self.forq.traces("told")))
        return self

    def shown(self) -> dict[str, Any]:
        return json.loads(self.forq.ctl("job", self.queue, self.id, "--json"))  # type: ignore[no-any-return]

    def end(self, *, well: bool = True) -> None:
        part = self.gate.with_suffix(".part")
        part.write_text("" if well else "fail")
        part.rename(self.gate)

    def wait_until_gone(self) -> None:
        wait_until(lambda: self.forq.run_ctl("job", self.queue, self.id).returncode == 4)


def watching(process: "subprocess.Popen[str]") -> list[str]:
    out, err = process.communicate(timeout=20)
    assert not err
    return out.splitlines()


def test_plain_titles_show_other_users_neither_job_ids_nor_progress(tmp_path: Path) -> None:
    with running(settings='titles = "plain"\n') as forq:
        forq.create("told", "tell")
        job = Step(forq, tmp_path, (0.4, "page 12 of 30")).begun()
        wait_until(lambda: job.shown()["progress"])
        process = psutil.Process(forq.child("told")["pid"])

        def busy_seconds() -> float | None:
            found = re.fullmatch(r"forq: told main busy (\d+\.\d)s 0 done", " ".join(process.cmdline()).strip())
            return None if found is None else float(found[1])

        first = wait_until(busy_seconds)
        wait_until(lambda: (busy_seconds() or 0) > first, what="the title is written again after the report")
        for each in forq.processes():
            title = " ".join(each.cmdline())
            assert not [secret for secret in (job.id, "40%", "page 12") if secret in title], title
        assert forq.child("told")["job"] == job.id, "the control socket still shows it"
        job.end()
        job.wait_until_gone()


def test_progress_is_shown_by_job_status_why_and_ps(forq: Forq, tmp_path: Path) -> None:
    job = Step(forq, tmp_path, (0.1, "page 3 of 30"), (0.4, "page 12\nof 30")).begun()
    progress = wait_until(lambda: (found := job.shown()["progress"]) and found["fraction"] == 0.4 and found)
    assert (progress["text"], set(progress)) == ("page 12 of 30", {"fraction", "text", "at"})
    assert "progress        40% page 12 of 30" in forq.ctl("job", "told", job.id)
    child = forq.child("told")
    assert (child["job"], child["progress"]) == (job.id, {"fraction": 0.4, "text": "page 12 of 30"})
    assert child["jobs_progress"] == [child["progress"]]
    assert "40% page 12 of 30" in forq.ctl("status", "told")
    assert ": 40% page 12 of 30" in forq.ctl("why", "told", job.id)
    title = wait_until(lambda: "40%" in (found := " ".join(psutil.Process(child["pid"]).cmdline())) and found)
    assert f"busy {job.id} " in title
    assert "s 40% page 12 of 30, " in title
    job.end()
    job.wait_until_gone()
    assert forq.child("told")["progress"] is None
    assert forq.client().queue("told").status()["active"] == 0


def test_watch_follows_a_job_to_its_end(forq: Forq, tmp_path: Path) -> None:
    forq.ctl("pause", "told")
    job = Step(forq, tmp_path, (0.25, "a quarter"), (0.5, "half"))
    watch = forq.begin_ctl("watch", "told", job.id)
    try:
        assert watch.stdout is not None
        assert watch.stdout.readline() == "waiting\n"
        forq.ctl("resume", "told")
        job.begun()
        wait_until(lambda: watch.stdout is not None and "50% half" in watch.stdout.readline())
        job.end()
        assert watching(watch)[-1].startswith("gone")
        assert watch.returncode == 0
    finally:
        watch.kill()


def test_the_end_of_a_job_with_progress_is_shown_at_once(forq: Forq, tmp_path: Path) -> None:
    job = Step(forq, tmp_path, (0.5, "half")).begun()
    watch = forq.begin_ctl("watch", "told", job.id, "--json")
    assert watch.stdout is not None
    first = json.loads(watch.stdout.readline())
    assert (first["state"], first["progress"]["text"]) == ("active", "half")
    job.end(well=False)
    *_, last = map(json.loads, watching(watch))
    assert (last["state"], last["error"]["message"], watch.returncode) == ("dead", "told to", 1)
    assert forq.run_ctl("watch", "told", job.id).returncode == 1


def test_watch_exits_with_4_for_an_unknown_job_and_6_after_a_timeout(forq: Forq, tmp_path: Path) -> None:
    assert forq.run_ctl("watch", "told", "nothing").returncode == 4
    assert forq.run_ctl("watch", "nowhere", "nothing").returncode == 4
    job = Step(forq, tmp_path, (0.5, "half")).begun()
    assert forq.run_ctl("watch", "told", job.id, "--wait", "300ms").returncode == 6
    job.end()
    job.wait_until_gone()


def test_watch_outlives_the_clerk(forq: Forq, tmp_path: Path) -> None:
    job = Step(forq, tmp_path, (0.5, "half")).begun()
    watch = forq.begin_ctl("watch", "told", job.id)
    assert watch.stdout is not None
    assert watch.stdout.readline() == "active 50% half\n"
    services = forq.status()["supervisor"]["services"]
    clerk = next(service["pid"] for service in services if service["name"] == "clerk")
    psutil.Process(clerk).send_signal(signal.SIGKILL)
    job.end()
    assert watching(watch)[-1].startswith("gone")
    assert watch.returncode == 0


def test_the_progress_of_a_lost_attempt_is_gone_and_the_next_one_reports_its_own(forq: Forq, tmp_path: Path) -> None:
    forq.create("lost", "tell")
    job = Step(forq, tmp_path, (0.9, "nearly"), queue="lost").begun()
    wait_until(lambda: job.shown()["progress"])
    forq.ctl("pause", "lost")
    psutil.Process(forq.child("lost")["pid"]).send_signal(signal.SIGKILL)
    wait_until(lambda: job.shown()["state"] == "waiting")
    assert job.shown()["progress"] is None
    forq.ctl("resume", "lost")
    wait_until(lambda: job.shown()["progress"])
    assert job.shown()["stall_count"] == 1
    job.end()
    job.wait_until_gone()


def test_without_redis_progress_is_shown_from_the_scoreboard(server: Server, redis_url: str, tmp_path: Path) -> None:
    with running(redis=redis_url) as forq:
        forq.create("told", "tell")
        job = Step(forq, tmp_path, (0.1, "first"), *[(0.3, "more")] * 20, (0.7, "the last"))
        forq.wait_for_child("told", "busy")
        server.stop()
        job.begun()
        assert forq.child("told")["progress"] == {"fraction": 0.7, "text": "the last"}
        job.end()
