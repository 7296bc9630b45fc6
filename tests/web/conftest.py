"""Fixtures: a folder of static files, a file of users whose hashes are computed once, and servers."""

import functools
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from forq.procs.unix_socket import listen
from forq.web.settings import WebSettings
from forq.web.users import hash_password
from tests.web.serving import PASSWORD, Served, serving

hashed = functools.cache(hash_password)


@pytest.fixture
def static(tmp_path: Path) -> Path:
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "page.css").write_text("body {}")
    (tmp_path / "secret").write_text("secret")
    return folder


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    """Alice may act, bob may read."""
    file = tmp_path / "web-users"
    file.write_text(f"# people\nalice:act:{hashed(PASSWORD)}\n\nbob:read:{hashed(PASSWORD)}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def serve(static: Path) -> Iterator[Callable[..., Served]]:
    """Starts a server on 127.0.0.1 with these settings."""
    with ExitStack() as stack:

        def start(listen: str = "127.0.0.1:9465", *, access: Any = None, listener: Any = None, **given: Any) -> Served:
            settings = None if access is not None and access.is_mounted else WebSettings(listen=listen, **given)
            return stack.enter_context(serving(settings, static, access=access, listener=listener))

        yield start


@pytest.fixture
def unix_listener() -> Iterator[tuple[str, socket.socket]]:
    """In a directory that others can enter, and writable for all, so that only the rules can refuse."""
    with tempfile.TemporaryDirectory(prefix="forq-") as directory:
        os.chmod(directory, 0o755)
        path = os.path.join(directory, "web.sock")
        listener = listen(path)
        os.chmod(path, 0o666)
        yield path, listener
