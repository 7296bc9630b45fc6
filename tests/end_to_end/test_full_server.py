"""A server at its memory limit: its jobs are still run, also by a supervisor that starts only then."""

import os
import signal
from pathlib import Path

import pytest

from forq import Client
from forq.errors import BackPressure
from tests.support.drive.server import Server
from tests.support.drive.supervisor import HANDLERS, running
from tests.support.drive.wait import wait_until

QUEUE = f"""
[queues.full]
handler = "traced:record"
fail_handler = "traced:on_fail"
path = ["{HANDLERS}"]

[queues.full.schedules.yearly]
cron = "0 0 1 1 *"
"""


@pytest.mark.timeout(120)
def test_a_supervisor_that_starts_on_a_full_server_drains_it(server: Server, redis_url: str, tmp_path: Path) -> None:
    """Otherwise the server would stay full forever."""
    with running(redis=redis_url, settings=QUEUE, trace=tmp_path / "trace") as forq, server.connect() as redis:
        forq.ctl("pause", "full")
        queue = Client(redis_url).queue("full")
        ids = queue.enqueue_many(range(20))
        os.kill(forq.pid, signal.SIGKILL)
        assert forq.process is not None
        forq.process.wait()
        redis.config_set("maxmemory", 1)
        try:
            with pytest.raises(BackPressure):
                queue.enqueue("one more")
            forq.start()
            forq.ctl("resume", "full")
            wait_until(lambda: {t.job for t in forq.traces("end")} == set(ids), 60.0, "every job has run")
            assert "cannot serve queue" not in forq.log
        finally:
            redis.config_set("maxmemory", 0)
