"""Database connections around jobs, without a supervisor: transactions, coroutines, forks."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.apps import apps
from django.db import connection, connections, transaction

from forq import Job
from forq.contrib.django import connections as tested
from forq.contrib.django.project import DjangoApp


def receipts() -> Any:
    """Not imported above: Django is set up by a fixture."""
    return apps.get_model("orders", "Receipt").objects


def job() -> Job:
    return Job("shop", "j1", "j1", None, 5, 0.0, 1)


@pytest.fixture
def known(project: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a worker that has used the database."""
    monkeypatch.setattr(tested._known, "any", True)
    yield
    connections.close_all()


def test_a_connection_older_than_its_age_is_closed_after_the_job(project: None) -> None:
    with tested.ConnectionsAround(job()):
        receipts().count()
        assert connection.connection is not None
    assert connection.connection is None


def test_a_job_inside_of_a_transaction_of_its_caller_leaves_it_alone(project: None) -> None:
    with transaction.atomic():
        receipts().create(number="1")
        with tested.ConnectionsAround(job()):
            receipts().create(number="2")
        transaction.set_rollback(True)
    assert not receipts().exists()


def test_a_transaction_that_a_job_leaves_open_is_rolled_back(project: None, caplog: pytest.LogCaptureFixture) -> None:
    with tested.ConnectionsAround(job()):
        transaction.atomic().__enter__()
        receipts().create(number="lost")
    assert "transaction that a job left open job=j1 database=default" in caplog.text
    with tested.ConnectionsAround(job()):
        assert not receipts().exists()
        receipts().create(number="kept")
    assert [receipt.number for receipt in receipts().all()] == ["kept"]


def test_connections_of_coroutines_are_closed_before_and_after_a_job(known: None) -> None:
    def is_open() -> bool:
        return connection.connection is not None

    async def run() -> list[bool]:
        await sync_to_async(receipts().count)()
        found = [await sync_to_async(is_open)()]
        async with tested.ConnectionsAround(job()):
            found.append(await sync_to_async(is_open)())
            await receipts().acount()
        await asyncio.sleep(0)
        found.append(await sync_to_async(is_open)())
        return found

    assert asyncio.run(run()) == [True, False, False]


def test_a_job_does_not_wait_for_a_query_of_another_one(known: None) -> None:
    busy, over = threading.Event(), threading.Event()

    def query() -> None:
        busy.set()
        over.wait(20)

    async def run() -> float:
        other = asyncio.ensure_future(sync_to_async(query)())
        while not busy.is_set():
            await asyncio.sleep(0.001)
        began = time.monotonic()
        async with tested.ConnectionsAround(job()):
            pass
        seconds = time.monotonic() - began
        over.set()
        await other
        return seconds

    assert asyncio.run(run()) < 5


def test_a_fail_handler_has_its_connections_closed(project: None) -> None:
    seen: list[Any] = []

    def on_dead(data: Any, job: Job) -> None:
        seen.append((data, receipts().count()))

    app = DjangoApp("other")
    app._around_fail_handler(on_dead, "m:on_dead")(["data"], job())
    assert seen == [(["data"], 0)]
    assert connection.connection is None


FORK = """
import os
import forq.contrib.django.worker
from django.db import connections

first = connections["default"]
first.ensure_connection()
assert first.health_check_enabled
pid = os.fork()
if pid == 0:
    mine = connections["default"]
    same = mine is first or mine.connection is not None
    mine.ensure_connection()
    os._exit(1 if same else 0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert connections["default"] is first and first.is_usable()
"""


def test_a_forked_process_opens_its_own_connections(project_environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", FORK], env=project_environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
