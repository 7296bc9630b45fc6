"""The PostgreSQL of the benchmarks: an empty database per trial, and what it used."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.installing import Unavailable
from benchmarks.servers import PostgresServer
from tests.support.drive.postgres import need_postgres
from tests.support.drive.wait import wait_until


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer(need_postgres())
    try:
        server.flush()
        yield server
    finally:
        server.remove()


def test_a_flush_empties_the_database_and_counts_go_on(postgres: PostgresServer) -> None:
    program = ["psql", "-h", postgres.address, "-U", "postgres", "-d", "bench", "-XAtc"]
    empty, requests, used = postgres.used_memory(), postgres.requests(), postgres.cpu_seconds()
    postgres._run(*program, "CREATE TABLE jobs AS SELECT repeat('x', 100) FROM generate_series(1, 10000)")
    assert postgres.used_memory() > empty + 1_000_000
    assert postgres.cpu_seconds() > used
    wait_until(lambda: requests.count() >= 1)
    postgres.flush()
    assert postgres.used_memory() < empty + 1_000_000


def test_a_server_that_does_not_start_makes_the_peer_unavailable(tmp_path: Path) -> None:
    server = PostgresServer(tmp_path)
    try:
        with pytest.raises(Unavailable, match="PostgreSQL does not start here"):
            server.start()
    finally:
        server.remove()
