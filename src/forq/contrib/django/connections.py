"""Database connections of workers: a job never gets one that broke, or that is older than CONN_MAX_AGE."""

from types import TracebackType

from asgiref.sync import sync_to_async
from django.db import close_old_connections, connections

from forq.job import Job


def check_connections_before_use() -> None:
    """For workers: a connection that was kept (CONN_MAX_AGE) is checked when a job first uses it.

    Django's own default uses it unchecked, so that the first query after a restart of the database fails.
    """
    for alias in connections:
        connections.settings[alias]["CONN_HEALTH_CHECKS"] = True


class ConnectionsAround:
    """Around each job: closes connections that broke or are too old, as Django does around each request.

    Queries of coroutines run in the thread of asgiref, so their connections are closed there.
    """

    def __init__(self, job: Job) -> None:
        pass

    def __enter__(self) -> None:
        close_old_connections()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_old_connections()

    async def __aenter__(self) -> None:
        await sync_to_async(close_old_connections)()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await sync_to_async(close_old_connections)()
