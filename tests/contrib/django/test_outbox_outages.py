"""Orders are committed while Redis is stopped and restarted, replies are lost, and deliverers are killed at every step:
each order gets its job exactly once. `make outbox` runs it with 1,000 orders."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq
from tests.support.drive.wait import wait_until, whole_lines

ROOT = Path(__file__).parents[3]
ORDERS = int(os.environ.get("FORQ_TEST_ORDERS", "40"))
SECONDS = float(os.environ.get("FORQ_TEST_SECONDS", "1"))
# Of the longest outage, and between two of them.
OUTAGE_SECONDS, UP_SECONDS = SECONDS / 20 + 0.2, min(SECONDS / 2, 1.5)
PROCESSES, THREADS = 4, 2
SETTINGS = "tests.support.django_project.settings"
PROGRAMS = "tests.support.drive.outbox_programs"


class Place:
    """A database and a Redis server of their own, and the processes that use them."""

    def __init__(self, folder: Path, server: Server, postgres: str | None) -> None:
        self.folder = folder
        self.server = server
        self.deaths = folder / "deaths"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FORQ_")},
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            "DJANGO_TEST_FOLDER": str(folder),
            "PYTHONPATH": str(ROOT),
            "FORQ_REDIS": server.url,
            "FORQ_TEST_SEED": os.environ["FORQ_TEST_SEED"],
        }
        self.environment.pop("DJANGO_TEST_POSTGRES", None)
        if postgres is not None:
            self.environment["DJANGO_TEST_POSTGRES"] = postgres

    def start(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *command], env=self.environment, stdin=subprocess.DEVNULL, stderr=log, stdout=log
            )

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        if host := self.environment.get("DJANGO_TEST_POSTGRES"):
            import psycopg

            with psycopg.connect(host=host, user="postgres", dbname="postgres") as connection:
                return connection.execute(sql).fetchall()
        import sqlite3

        with sqlite3.connect(self.folder / "database.sqlite3", timeout=20) as file:
            return file.execute(sql).fetchall()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]


@contextmanager
def place(folder: Path, engine: str) -> Iterator[Place]:
    with ExitStack() as stack:
        host = None
        if engine == "postgres":
            from tests.support.drive.postgres import Postgres

            host = stack.enter_context(Postgres()).host
        server = stack.enter_context(Server(appendonly=True))
        found = Place(folder, server, host)
        assert found.start("django", "migrate", "--verbosity", "0").wait(60) == 0, found.log
        yield found


@contextmanager
def supervisor(place: Place) -> Iterator[Forq]:
    forq = Forq(redis=place.server.url, environment=place.environment)
    forq.arguments = ["--app", "forq.contrib.django.worker:app"]
    try:
        forq.start()
        yield forq
    finally:
        forq.remove()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_each_order_gets_its_job_exactly_once(tmp_path: Path, engine: str) -> None:
    chance = random.Random(f"{os.environ['FORQ_TEST_SEED']} {engine}")
    began = time.monotonic()
    with ExitStack() as stack:
        here = stack.enter_context(place(tmp_path, engine))
        stack.enter_context(supervisor(here))
        producers = here.start(PROGRAMS, "produce", str(PROCESSES), str(THREADS), str(ORDERS), str(SECONDS))
        deliverers = here.start(PROGRAMS, "deliver", str(PROCESSES // 2), str(here.deaths))
        for process in (producers, deliverers):
            stack.callback(process.wait)
            stack.callback(process.kill)
        outages, most = disturb(here, producers, chance)
        assert here.query("SELECT count(*) FROM orders_order") == [(ORDERS,)], here.log

        def all_ran() -> bool:
            waiting, receipts = here.query(
                "SELECT (SELECT count(*) FROM forq_outbox), (SELECT count(DISTINCT number) FROM orders_receipt)"
            )[0]
            return bool(waiting == 0 and receipts == ORDERS)

        wait_until(all_ran, seconds=120, what="every order has its job")
        orders = {number for (number,) in here.query("SELECT number FROM orders_order")}
        runs = Counter(number for (number,) in here.query("SELECT number FROM orders_receipt"))
        assert runs == Counter(orders)
        died = Counter(whole_lines(here.deaths))
        print(
            f"\n{engine}: {len(runs)} of {len(orders)} orders got their job exactly once; {outages} outages of Redis, "
            f"up to {most} rows waiting; {died.total()} deaths of deliverers, {died['after send']} of them between the "
            f"answer of Redis and the DELETE; {time.monotonic() - began:.1f} s"
        )
        for where, count in sorted(died.items()):
            print(f"  {where}: {count}")


def test_a_supervisor_delivers_what_processes_left_behind(tmp_path: Path) -> None:
    with place(tmp_path, "sqlite") as here:
        here.environment["DJANGO_TEST_EVERY"] = "1s"
        here.server.stop()
        assert here.start(PROGRAMS, "produce", "1", "1", "3", "0").wait(60) == 0, here.log
        assert here.query("SELECT count(*) FROM forq_outbox") == [(3,)]
        here.server.start()
        with supervisor(here) as forq:
            wait_until(lambda: len(here.query("SELECT number FROM orders_receipt")) == 3, what=f"jobs ran: {forq.log}")
        assert here.query("SELECT count(*) FROM forq_outbox") == [(0,)]


def disturb(here: Place, producers: "subprocess.Popen[bytes]", chance: random.Random) -> tuple[int, int]:
    """Outages of Redis until the producers have ended. Returns their number, and how many rows waited at most."""
    outages = most = 0
    wait_until(lambda: here.query("SELECT count(*) FROM orders_order") != [(0,)], what="the first order")
    while producers.poll() is None or not outages:
        time.sleep(chance.uniform(0.2, UP_SECONDS))
        chance.choice((here.server.stop, here.server.kill))()
        outages += 1
        time.sleep(chance.uniform(0.1, OUTAGE_SECONDS))
        most = max(most, here.query("SELECT count(*) FROM forq_outbox")[0][0])
        here.server.start()
    assert producers.wait(60) == 0, here.log
    return outages, most
