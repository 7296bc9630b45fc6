"""Starts a real PostgreSQL server on a private unix socket."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pytest

# Where Debian installs the programs of each major version.
_FOLDERS = "/usr/lib/postgresql"
_START_SECONDS = 30
_STOP_SECONDS = 30
# The server refuses to run as root; as root, the tests run it as the first of these users.
_USERS = ("postgres", "nobody")


def find_postgres() -> Path | None:
    """The folder of initdb and postgres: of the newest version on this machine."""
    versions = [path.parent for path in Path(_FOLDERS).glob("*/bin/postgres") if path.with_name("initdb").exists()]
    if versions:
        return max(versions, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path is not None else None


def need_postgres() -> Path:
    """The folder of the programs. Skips the test if there is none."""
    found = find_postgres()
    if found is None:
        pytest.skip(f"no PostgreSQL server in {_FOLDERS} or on the PATH: install the Debian package postgresql")
    return found


class Postgres:
    """One server process; its data survives stop, kill and restart. `with` starts and removes it.

    `folder`: of its socket, which is the HOST of a Django database; NAME and USER are "postgres". Nothing is synced to
    the disk: data survives the death of processes, not that of the machine. `programs` and `environ`: another
    PostgreSQL than the machine's. `settings`: further ones, by the server's names.
    """

    def __init__(
        self,
        *,
        programs: Path | None = None,
        environ: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._programs = programs or need_postgres()
        self._environ = {**os.environ, **(environ or {})}
        self._settings = dict(settings or {})
        self.folder = Path(tempfile.mkdtemp(prefix="forq-pg-"))
        self.process: subprocess.Popen[bytes] | None = None
        self._user: str | None = None
        if os.geteuid() == 0:
            self._user = next(name for name in _USERS if _user_exists(name))
            shutil.chown(self.folder, self._user)

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
    def host(self) -> str:
        return str(self.folder)

    @property
    def url(self) -> str:
        """For libpq, and so for psycopg.connect."""
        return f"host={self.folder} user=postgres dbname=postgres"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        assert not self.running, "the server runs already"
        data = self.folder / "data"
        if not data.exists():
            self._run("initdb", "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
            "shared_buffers": "16MB",
            "max_connections": "60",
            # Otherwise a server that was killed is repaired by its parent, which is another process than this one.
            "restart_after_crash": "off",
            **self._settings,
        }
        parts = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(self._programs / "postgres"), "-D", str(data), *parts],
                user=self._user,
                env=self._environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait_until_ready()

    def stop(self) -> None:
        """Ends it at once but in order: open transactions are rolled back, clients lose their connection."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """As after a crash: the next start recovers from the log. SIGQUIT makes the server's children exit, too."""
        self._end(signal.SIGQUIT)

    def restart(self) -> None:
        self.stop()
        self.start()

    def remove(self) -> None:
        """Kills the server and deletes its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def query(self, sql: str) -> str:
        """The rows of a query: one per line, columns separated by `|`."""
        return self._run("psql", "-h", str(self.folder), "-U", "postgres", "-XAtc", sql).strip()

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            user=self._user,
            env=self._environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"
        return done.stdout

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            ready = subprocess.run(
                [str(self._programs / "pg_isready"), "-q", "-h", str(self.folder)],
                env=self._environ,
                stdin=subprocess.DEVNULL,
            )
            if ready.returncode == 0:
                return
            if not self.running or time.monotonic() > deadline:
                log = (self.folder / "server.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"PostgreSQL did not start: {log}")
            time.sleep(0.02)

    def _end(self, signum: int) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signum)
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def _user_exists(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
