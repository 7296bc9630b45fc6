"""A process that ingests and kills itself before its n-th change of the history (0: never).

Arguments: Redis URL, directory, n, seconds between reads (0: read once)
"""

import os
import signal
import sys

import pytest

from forq.pipeline.ingest import Ingest, stop_on_signal
from forq.pipeline.session import spark_session
from tests.pipeline.failing_folder import count_changes


def main() -> None:
    redis, directory, die_at, every = sys.argv[1:]

    def at_change(number: int) -> None:
        if number == int(die_at):
            os.kill(os.getpid(), signal.SIGKILL)

    ingest = Ingest(spark_session("child"), directory, redis, entries_per_batch=40)
    count_changes(pytest.MonkeyPatch(), at_change)
    with stop_on_signal(ingest):
        print(ingest.run(float(every) or None).rows, flush=True)


if __name__ == "__main__":
    main()
