"""Timeouts of tasks, in a queue with another timeout: each job of a batch has its own deadline."""

import time

import pytest

from forq.errors import JobDead
from tests.support.drive.supervisor import HANDLERS, running
from tests.support.drive.wait import wait_until
from tests.support.handlers import timed

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_jobs_of_one_claim_have_the_timeouts_of_their_tasks(concurrency: int) -> None:
    with running() as forq:
        options = ("--set=timeout=1h", "--set=max_timeouts=0", f"--set=concurrency={concurrency}")
        forq.ctl("create", "timed", "--handler", "timed:app", "--path", str(HANDLERS), *options, "--set=keep_done=1h")
        timed.app._client = forq.client()
        timed.app._queues.clear()
        # A task with the long timeout of the queue sets the supervisor's timer first.
        assert timed.rest.enqueue(0.01).result(timeout=30) == 0.01
        forq.ctl("pause", "timed")
        quick = [timed.rest.enqueue(0.0) for _ in range(20)]
        late = [timed.hang.enqueue(), timed.hang_async.enqueue()]
        longer = [timed.rest.enqueue(1.0), timed.unlimited.enqueue(1.0)]
        began = time.monotonic()
        forq.ctl("resume", "timed")
        for ref in late:
            with pytest.raises(JobDead, match="TimeoutError"):
                ref.result(timeout=30)
        assert [ref.result(timeout=30) for ref in longer] == [1.0, 1.0]
        # The results of jobs that ran in the same batch before one that was killed may be lost.
        wait_until(lambda: {ref.state() for ref in quick} == {"done"}, what="the quick ones are done")
        assert time.monotonic() - began < 25, "nothing waits for the timeout of the queue"
