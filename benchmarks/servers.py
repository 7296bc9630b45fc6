"""The servers that keep the peers' jobs, each with the same readings: Redis for most, PostgreSQL for some."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from benchmarks.installing import Unavailable, postgres_programs
from benchmarks.processes import Requests, cpu_seconds, tree_cpu_seconds, used_memory
from tests.support.drive.postgres import Postgres
from tests.support.drive.server import Server

# Like the Redis beside it, it keeps jobs in memory and syncs nothing to the disk (Postgres turns fsync off).
_POSTGRES_SETTINGS = {"shared_buffers": "256MB", "max_connections": "200", "max_wal_size": "4GB"}
_DATABASE = "bench"


class Counter(Protocol):
    """Counts requests from its creation."""

    def count(self) -> int: ...


class BenchServer(Protocol):
    """What the measures need of a server. `address`: what the peers' programs get as BENCH_SOCKET."""

    @property
    def address(self) -> str: ...

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def remove(self) -> None: ...

    @abstractmethod
    def flush(self) -> None: ...

    @abstractmethod
    def cpu_seconds(self) -> float:
        """Of all its processes, since its start."""

    @abstractmethod
    def used_memory(self) -> int:
        """Bytes that its data takes."""

    @abstractmethod
    def requests(self) -> Counter: ...


class RedisServer(Server):
    """A Redis server on a Unix socket, without persistence."""

    @property
    def address(self) -> str:
        return str(self.socket)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    def used_memory(self) -> int:
        return used_memory(self)

    def requests(self) -> Counter:
        return Requests(self)


class PostgresServer(Postgres):
    """A PostgreSQL server on a Unix socket. Its address is the socket's folder; the database is called bench."""

    def __init__(self, programs: Path, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(programs=programs, environ=environ, settings=_POSTGRES_SETTINGS)

    @property
    def address(self) -> str:
        return str(self.folder)

    def start(self) -> None:
        try:
            super().start()
        except (AssertionError, RuntimeError, OSError) as exc:
            raise Unavailable(f"PostgreSQL does not start here: {exc}") from exc

    def flush(self) -> None:
        """A new database: the peer's program creates its tables."""
        if not self.running:
            self.start()
        for sql in (f"DROP DATABASE IF EXISTS {_DATABASE} WITH (FORCE)", f"CREATE DATABASE {_DATABASE}"):
            try:
                self.query(sql)
            except AssertionError as exc:
                raise Unavailable(str(exc)) from exc

    def cpu_seconds(self) -> float:
        """Each connection is a process; those that have ended count for the one that started them."""
        assert self.process is not None, "the server was not started"
        return tree_cpu_seconds(self.process.pid)

    def used_memory(self) -> int:
        return int(self.query(f"SELECT pg_database_size('{_DATABASE}')"))

    def requests(self) -> Counter:
        return _Transactions(self)


def new_server(database: str) -> BenchServer:
    """Not started yet. `database`: that of a Peer."""
    return PostgresServer(*postgres_programs()) if database == "postgres" else RedisServer()


class _Transactions:
    """Transactions of the database. A connection reports its own once per second: less exact than for Redis."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._before = self._total()

    def count(self) -> int:
        return self._total() - self._before

    def _total(self) -> int:
        columns = "xact_commit + xact_rollback"
        return int(self._server.query(f"SELECT {columns} FROM pg_stat_database WHERE datname = '{_DATABASE}'"))
