"""Two supervisors on one server that would take over from each other, and the check that neither did."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.drive.supervisor import Forq, running

# The expiry is shorter than the faults of these tests, and longer than any delay of a busy machine.
STEADY = 'heartbeat = "300ms"\nexpiry = "2s"\n'


@contextmanager
def supervisor_pair(redis_url: str, trace: Path) -> Iterator[tuple[Forq, Forq]]:
    with (
        running(redis=redis_url, settings=STEADY, trace=trace) as one,
        running(redis=redis_url, settings=STEADY, trace=trace) as two,
    ):
        yield one, two


def assert_nobody_was_evicted(*supervisors: Forq) -> None:
    for forq in supervisors:
        assert "evicted processors" not in forq.log
        assert "restarting all queues" not in forq.log
        assert {trace.stalls for trace in forq.traces()} <= {0}
