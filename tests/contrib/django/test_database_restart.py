"""PostgreSQL restarts while jobs use it: those that run at that moment are retried, and no later one fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import NamedTuple

import pytest

from tests.support.drive.postgres import Postgres
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until, whole_lines

pytestmark = pytest.mark.timeout(90)

ROOT = Path(__file__).resolve().parents[3]
# Of each queue.
JOBS = 90
MORE_JOBS = 15
KINDS = ("hook", "coroutine", "plain")
SETTINGS = """
[apps.shop]
app = "forq.contrib.django.worker:app"

[queues.plain]
app = "shop"
handler = "tests.support.django_project.queries.tasks:plain"
max_retries = 20
min_backoff = "0.3s"
max_backoff = "0.3s"
"""


class Note(NamedTuple):
    kind: str
    outcome: str
    began: float


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with Postgres() as server:
        yield server


@contextmanager
def workers(redis_url: str, postgres: Postgres, notes: Path, **more: str) -> Iterator[Forq]:
    environment = {
        "PYTHONPATH": str(ROOT),
        "DJANGO_SETTINGS_MODULE": "tests.support.django_project.restart_settings",
        "DJANGO_TEST_POSTGRES": postgres.host,
        "DJANGO_TEST_NOTES": str(notes),
        **more,
    }
    forq = Forq(redis=redis_url, settings=SETTINGS, environment=environment)
    try:
        forq.start()
        # Not the registry, which has a queue's name before the queue itself.
        wait_until(lambda: {"threads", "coroutines", "plain"} <= served(forq), what="the queues are served")
        yield forq
    finally:
        forq.remove()


def served(forq: Forq) -> set[str]:
    return {queue["name"] for queue in forq.status()["queues"] if queue["state"] == "running"}


def notes_in(path: Path) -> list[Note]:
    lines = [line.split(" ") for line in whole_lines(path)]
    return [Note(kind, outcome, float(began)) for kind, outcome, began in lines]


def enqueue(forq: Forq, count: int) -> None:
    client = forq.client()
    for name, job_type in (("threads", "in_thread"), ("coroutines", "in_coroutine"), ("plain", None)):
        for _ in range(count):
            client.queue(name).enqueue({}, type=job_type and f"queries.{job_type}")


def kill_a_job(forq: Forq, notes: Path) -> None:
    """Makes a job dead, and waits for its fail handler."""
    before = len([note for note in notes_in(notes) if note.kind == "on_dead"])
    forq.client().queue("threads").enqueue({}, type="queries.dies")
    wait_until(lambda: len([note for note in notes_in(notes) if note.kind == "on_dead"]) > before, what="on_dead ran")


def processed(forq: Forq) -> list[int]:
    return [forq.queue_status(name)["done"] for name in ("threads", "coroutines", "plain")]


@pytest.mark.parametrize("pool", ["", "1"], ids=["kept connections", "pool"])
def test_no_job_fails_after_a_restart_of_the_database(
    redis_url: str, postgres: Postgres, tmp_path: Path, pool: str
) -> None:
    if pool:
        django = pytest.importorskip("django")
        if django.VERSION < (5, 1):
            pytest.skip("Django has pools since 5.1")
        pytest.importorskip("psycopg_pool", reason="pip install 'psycopg[pool]'")
    notes = tmp_path / "notes"
    with workers(redis_url, postgres, notes, DJANGO_TEST_POOL=pool) as forq:
        kill_a_job(forq, notes)
        enqueue(forq, JOBS)
        wait_until(lambda: set(KINDS) <= {note.kind for note in notes_in(notes)}, what="jobs of each kind run")
        stopped = time()
        postgres.restart()
        ready = time()
        wait_until(lambda: processed(forq) == [JOBS] * 3, 30, "all jobs are done")
        under_load = notes_in(notes)
        failed = [note for note in under_load if note.outcome == "failed"]
        late = [note for note in failed if note.began > ready]
        print(f"{len(failed)} of {len(under_load)} attempts failed, {len(late)} later ({ready - stopped:.2f} s)")
        assert late == []
        assert [note for note in failed if note.began < stopped - 1] == []
        assert pool or {note.kind for note in failed} >= set(KINDS)
        # Every process has an open connection that breaks while nothing runs.
        postgres.restart()
        enqueue(forq, MORE_JOBS)
        kill_a_job(forq, notes)
        wait_until(lambda: processed(forq) == [JOBS + MORE_JOBS] * 3, 30, "all jobs are done")
        assert {note.outcome for note in notes_in(notes)[len(under_load) :]} == {"done"}
        assert forq.queue_status("threads")["dead"] == 2
