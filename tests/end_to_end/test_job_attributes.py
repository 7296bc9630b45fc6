"""Attributes of the job argument, over retries, snoozes and the stop of its process."""

from pathlib import Path

import pytest

from tests.support.drive.supervisor import running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)

HANDLERS = """
import time
from forq import Snooze

def again(data, job):
    print("SEEN", job.attempt, job.is_last, job.snoozes, job.run_id, flush=True)
    if job.snoozes < 2:
        raise Snooze(0.01)
    raise ValueError("again")

def long(data, job):
    print("BEGAN", flush=True)
    while not job.should_stop:
        time.sleep(0.005)
    print("STOPPED", job.snoozes, flush=True)
    raise Snooze(3600)
"""


def test_attempts_snoozes_and_the_last_attempt(tmp_path: Path) -> None:
    (tmp_path / "attributes.py").write_text(HANDLERS)
    with running() as forq:

        def printed(queue: str, word: str) -> list[list[str]]:
            lines = forq.ctl("logs", queue).splitlines()
            return [line.split(word, 1)[1].split() for line in lines if word in line]

        options = ("--path", str(tmp_path), "--set=max_retries=1", "--set=retry_lane_retries=1")
        forq.ctl("create", "again", "--handler", "attributes:again", *options, "--set=min_backoff=10ms")
        queue = forq.client().queue("again")
        queue.enqueue({}, id="j")
        wait_until(lambda: queue.job("j")["state"] == "dead", what="it is dead")
        seen = wait_until(lambda: len(lines := printed("again", "SEEN")) >= 5 and lines, what="its lines")
        assert [each[:3] for each in seen] == [
            ["1", "False", "0"],
            ["1", "False", "1"],
            ["1", "False", "2"],
            ["2", "False", "2"],
            ["3", "True", "2"],
        ]
        assert len({each[3] for each in seen}) == 1, "one run"

        forq.ctl("create", "long", "--handler", "attributes:long", "--path", str(tmp_path))
        forq.client().queue("long").enqueue({}, id="j")
        wait_until(lambda: printed("long", "BEGAN"), what="it runs")
        forq.ctl("restart", "long")
        assert wait_until(lambda: printed("long", "STOPPED"), what="it stopped") == [["0"]]
        job = forq.client().queue("long").job("j")
        assert (job["state"], job["retry_count"]) == ("scheduled", 0)
