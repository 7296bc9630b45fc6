"""Database connections of workers: a job never gets one that broke, that is older than CONN_MAX_AGE, or that another
process uses.

1. Around each job, connections of its thread that broke or are too old are closed, as Django does around each request.
2. In a worker, a connection that is kept is checked when a job first uses it.
3. A process that a job forks opens its own connections.
"""

import asyncio
import logging
import os
import threading
import weakref
from types import TracebackType
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import ConnectionHandler

from forq.job import Job

log = logging.getLogger("forq")


class ConnectionsAround:
    """Around each job. It is also right for a job that runs inside of a transaction, as in a TestCase.

    The queries of coroutines run in one thread of asgiref, so their connections are closed there. Nothing waits for
    that: the thread may be busy with a long query of another job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        # Aliases of databases that have a transaction of the caller.
        self._of_caller: set[str] = set()

    def __enter__(self) -> None:
        _known.take_thread()
        self._of_caller = close_unusable()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for alias in close_unusable() - self._of_caller:
            # Later jobs would run inside of it, and it would never be committed.
            log.error("rolled back a transaction that a job left open job=%s database=%s", self._job.id, alias)
            connections[alias].close()
            del connections[alias]

    async def __aenter__(self) -> None:
        if _known.any:
            _close_in_thread()
            # The call gets in line before the first query of the job.
            await asyncio.sleep(0)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _known.any:
            _close_in_thread()


def close_unusable() -> set[str]:
    """Closes connections of this thread that broke or are too old. Returns the aliases that are inside of a
    transaction: those connections are left alone."""
    inside: set[str] = set()
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            inside.add(connection.alias)
        else:
            connection.close_if_unusable_or_obsolete()
    _known.check_again()
    return inside


# A task that nothing refers to may be collected before it ends.
_closing: set["asyncio.Task[Any]"] = set()


def _close_in_thread() -> None:
    task = asyncio.ensure_future(sync_to_async(_close_of_coroutines)())
    _closing.add(task)
    task.add_done_callback(_closing.discard)


def _close_of_coroutines() -> None:
    _known.take_thread()
    close_unusable()


class _Known:
    """The database wrappers of this process, each of one thread.

    Those of threads that run neither jobs nor the queries of coroutines (asyncio.to_thread, an executor of the user)
    can only be closed there. They are marked, and checked at their next use.
    """

    def __init__(self) -> None:
        self.any = False
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        self._of_others: weakref.WeakSet[BaseDatabaseWrapper] = weakref.WeakSet()

    def add(self, connection: BaseDatabaseWrapper) -> None:
        self.any = True
        if threading.get_ident() not in self._threads:
            with self._lock:
                self._of_others.add(connection)

    def take_thread(self) -> None:
        """Connections of this thread are closed around jobs."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads.add(thread)
            with self._lock:
                self._of_others.difference_update(connections.all(initialized_only=True))

    def check_again(self) -> None:
        if not self._of_others:
            return
        with self._lock:
            found = list(self._of_others)
        for connection in found:
            # Inside of a transaction a check can fail for another reason. While a connection is opened, a check would
            # begin a transaction.
            if connection.connection is not None and not connection.in_atomic_block:
                connection.health_check_done = False  # type: ignore[attr-defined]  # not in django-stubs


_known = _Known()
# Connections that a forked process has inherited. Collecting one could end the session of its parent.
_inherited: list[object] = []


def prepare_worker() -> None:
    """Call it once, before the first job."""
    for alias in connections:
        # Django's own default uses a kept connection unchecked, so the first query after a restart of the database
        # fails. Pools of psycopg follow the same setting.
        connections.settings[alias]["CONN_HEALTH_CHECKS"] = True
    for connection in connections.all(initialized_only=True):
        # Opened while the apps were loaded, without the check.
        connection.close()
        _known.add(connection)
    # The signal connection_created does not come if the database goes away while the connection is prepared.
    connections.create_connection = _create_known  # type: ignore[method-assign]
    os.register_at_fork(after_in_child=_forget_inherited)


def _create_known(alias: str) -> BaseDatabaseWrapper:
    connection = ConnectionHandler.create_connection(connections, alias)
    _known.add(connection)
    return connection


def _forget_inherited() -> None:
    for connection in connections.all(initialized_only=True):
        _inherited.append(connection)
        del connections[connection.alias]
        pools = getattr(type(connection), "_connection_pools", None)
        if pools:
            _inherited.append(dict(pools))
            pools.clear()
