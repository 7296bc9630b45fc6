"""Ingest as a job: the queue that `[pipeline]` in forq.toml makes runs this, and it runs itself again later."""

import argparse
from typing import Any

from forq.client import Client
from forq.job import Job
from forq.pipeline.cli import add_common
from forq.pipeline.ingest import add_arguments
from forq.pipeline.ingest import run as run_ingest

# A session that is used again so soon is kept: to start one takes ten seconds.
KEPT_FOR_SECONDS = 120.0


def ingest(data: dict[str, Any], job: Job) -> None:
    """Reads what is new into the history; then enqueues itself (blocked behind this run until it has ended)."""
    every = float(data["every_seconds"])
    queue = Client(prefix=data["prefix"]).queue(job.queue)
    parser = argparse.ArgumentParser()
    add_common(parser)
    add_arguments(parser)
    try:
        run_ingest(parser.parse_args(["--history", data["history"], "--prefix", data["prefix"]]))
    finally:
        if every > KEPT_FOR_SECONDS:
            _end_session()
    queue.enqueue(data, id=job.id, run_in=every)


def _end_session() -> None:
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is not None:
        session.stop()
