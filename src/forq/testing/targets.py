"""The apps and clients of a test: loads them, makes them use another Redis for a while, and restores them.

The client objects stay the same: user code that holds `app.client` or a queue of it is redirected, too.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from forq.app.app import App
from forq.app.loading import load_app
from forq.async_client import AsyncClient
from forq.client import Client
from forq.errors import UsageError
from forq.paths import key_prefix, redis_url
from forq.values import shown

Redirected = App | Client | AsyncClient
Target = Redirected | str


def read_apps(targets: Iterable[Target]) -> tuple[list[App], list[App | Client | AsyncClient]]:
    """The apps, and everything that is to be redirected. An app may be given as "package.module:app"."""
    loaded = [load_app(target) if isinstance(target, str) else target for target in targets]
    return [target for target in loaded if isinstance(target, App)], loaded


def path_of(app: App) -> str:
    """The app as "package.module:attribute". UsageError if it has none, or its module is not importable elsewhere."""
    module = sys.modules.get(app._module)
    names = [name for name, value in vars(module).items() if value is app] if module else []
    if not names or app._module == "__main__":
        raise UsageError(
            f"a supervisor cannot import app {app.name!r}: it must be an attribute of a module, such as app = "
            f"forq.App({app.name!r}) in shop/tasks.py; it was made in {app._module}"
        )
    return f"{app._module}:{names[0]}"


@contextmanager
def redirected(targets: Iterable[Redirected], url: str, prefix: str) -> Iterator[None]:
    """Inside, these apps and clients use this Redis, and so do new ones that name none (FORQ_REDIS, FORQ_PREFIX)."""
    with ExitStack() as undo:
        for target in targets:
            if isinstance(target, App):
                undo.enter_context(_app(target, url, prefix))
            elif isinstance(target, Client):
                undo.enter_context(_client(target, url, prefix))
            elif isinstance(target, AsyncClient):
                undo.enter_context(_async_client(target, url, prefix))
            else:
                raise UsageError(f"{shown(target)} is not allowed: a forq.App, forq.Client or forq.AsyncClient")
        # Last, so that it is undone first.
        undo.enter_context(environment(FORQ_REDIS=url, FORQ_PREFIX=prefix))
        yield


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _app(app: App, url: str, prefix: str) -> Iterator[None]:
    before = app._url, app._prefix
    clients = app._client, app._async_client
    with ExitStack() as undo:
        if app._client is not None:
            undo.enter_context(_client(app._client, url, prefix))
        if app._async_client is not None:
            undo.enter_context(_async_client(app._async_client, url, prefix))
        app._url, app._prefix = url, prefix
        try:
            yield
        finally:
            app._url, app._prefix = before
            made = app._client, app._async_client
            app._client, app._async_client = clients
            app._queues.clear()
    # Outside, where the environment is as before. User code may hold clients that were made inside.
    for client in made:
        if client is not None and client not in clients:
            if isinstance(client, AsyncClient):
                _close_connections(client)
            client.url = app._url or redis_url()
            client.prefix = key_prefix() if app._prefix is None else app._prefix
            _forget_connections(client)


@contextmanager
def _client(client: Client, url: str, prefix: str) -> Iterator[None]:
    before = client.url, client.prefix, client._local
    client.url, client.prefix = url, prefix
    _forget_connections(client)
    try:
        yield
    finally:
        client.url, client.prefix, client._local = before


@contextmanager
def _async_client(client: AsyncClient, url: str, prefix: str) -> Iterator[None]:
    before = client.url, client.prefix, client._loops
    client.url, client.prefix = url, prefix
    _forget_connections(client)
    try:
        yield
    finally:
        _close_connections(client)
        client.url, client.prefix, client._loops = before
        client._last = None


def _forget_connections(client: Client | AsyncClient) -> None:
    if isinstance(client, Client):
        client._local = threading.local()
    else:
        client._loops, client._last = {}, None


def _close_connections(client: AsyncClient) -> None:
    """Those that a test has opened and not closed. Their event loop may have ended."""
    for connections in client._loops.values():
        with suppress(RuntimeError):
            connections.close()
