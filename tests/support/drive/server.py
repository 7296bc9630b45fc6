"""Starts a real server on a private unix socket."""

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Self

import pytest
import redis

from forq.supervisor import embedded
from forq.supervisor.embedded import find_server

# The server that the tests use; by default the one from the Python packages.
CHOSEN = "FORQ_TEST_SERVER"

_START_SECONDS = 20
_STOP_SECONDS = 20


def put_on_path(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Makes forq find the chosen server, whatever else is installed on this machine."""
    wanted = environ.get(CHOSEN) or embedded._bundled() or "valkey-server"
    program = shutil.which(wanted)
    if program is None:
        raise pytest.UsageError(f"no server at {wanted}: `make tools` installs one, {CHOSEN}=PATH names another")
    (folder / "valkey-server").symlink_to(Path(program).absolute())
    environ["PATH"] = f"{folder}:{environ['PATH']}"


class Server:
    """One server process; its data survives stop, kill and restart only with appendonly. `with` starts and removes it.

    `include`: a file with more settings. `user`: NAME:PASSWORD@ of a user with all rights. `port`: also listens on
    127.0.0.1. `settings`: further ones, by the server's names.
    """

    def __init__(
        self,
        *,
        appendonly: bool = False,
        include: Path | None = None,
        user: str = "",
        port: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="forq-"))
        self.socket = self.directory / "redis.sock"
        self.url = f"unix://{user}{self.socket}"
        self.appendonly = appendonly
        self._include = include
        self.port = port
        self.settings = dict(settings or {})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was not started"
        return self.process.pid

    def start(self) -> None:
        assert not self.running, "the server runs already"
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL)
        self._wait_until_ready()

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def remove(self) -> None:
        """Kills the server and deletes its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def flush(self) -> None:
        """Empties the server and resets its settings, whatever the previous test did."""
        if not self.running:
            self.start()
        with self.connect() as client:
            client.config_set("maxmemory", 0)
            client.flushall()

    def connect(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=10)

    def _command(self) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "logfile": str(self.directory / "server.log"),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes" if self.appendonly else "no",
            # Written before it is acknowledged, however slow the disk is: with "everysec" a write may wait for a sync.
            "appendfsync": "no",
            **self.settings,
        }
        if self._include is not None:
            settings["include"] = str(self._include)
        return [find_server(None), *(part for name, value in settings.items() for part in (f"--{name}", value))]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with self.connect() as client:
                    client.ping()
                return
            except redis.ConnectionError as exc:  # also BusyLoadingError
                if not self.running or time.monotonic() > deadline:
                    log = self.directory / "server.log"
                    text = log.read_text(errors="replace")[-2000:] if log.exists() else "(no log)"
                    raise RuntimeError(f"the test server did not start: {text}") from exc
            time.sleep(0.01)

    def _end(self, signum: int) -> None:
        if self.process is None:
            return
        self.process.send_signal(signum)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
