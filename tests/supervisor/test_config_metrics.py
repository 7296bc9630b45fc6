"""[metrics] of the config file: allowed values, and addresses that cannot be opened."""

import importlib.util
import os
import socket
from pathlib import Path

import pytest

from forq.errors import ConfigError
from forq.supervisor import listeners
from forq.supervisor.config import load
from forq.supervisor.listeners import MetricsConfig


def read(tmp_path: Path, text: str) -> MetricsConfig | None:
    file = tmp_path / "forq.toml"
    file.write_text(text)
    return load({"config": str(file), "state_dir": str(tmp_path)}, {}).metrics


def test_without_the_table_metrics_are_off(tmp_path: Path) -> None:
    assert read(tmp_path, "") is None


def test_an_empty_table_listens_on_loopback(tmp_path: Path) -> None:
    place = read(tmp_path, "[metrics]")
    assert place is not None
    assert (place.host, place.port, place.path, place.health_seconds) == ("127.0.0.1", 9464, None, 60.0)


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("0.0.0.0:1", "0.0.0.0", 1), ("[::1]:9464", "::1", 9464), ("localhost:65535", "localhost", 65535)],
)
def test_an_address_is_a_host_and_a_port(tmp_path: Path, listen: str, host: str, port: int) -> None:
    place = read(tmp_path, f'[metrics]\nlisten = "{listen}"')
    assert place is not None
    assert (place.host, place.port) == (host, port)


def test_an_address_with_a_slash_is_a_path_relative_to_the_file(tmp_path: Path) -> None:
    place = read(tmp_path, '[metrics]\nlisten = "./m.sock"\nhealth_seconds = "2m"')
    assert place is not None
    assert (place.path, place.health_seconds) == (tmp_path / "m.sock", 120.0)


@pytest.mark.parametrize(
    "text",
    [
        'listen = "9464"',
        'listen = ":9464"',
        'listen = "localhost:0"',
        'listen = "localhost:65536"',
        'listen = "localhost:http"',
        'listen = "::1:9464"',
        'listen = "http://localhost:1"',
        f'listen = "/{"x" * 200}"',
        "listen = 9464",
        'listen = ""',
        "health_seconds = -1",
        'health_seconds = "soon"',
        "helth_seconds = 5",
    ],
)
def test_an_invalid_address_is_a_config_error_that_names_the_setting(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics|socket path"):
        read(tmp_path, f"[metrics]\n{text}")


def test_metrics_must_be_a_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a table with listen"):
        read(tmp_path, 'metrics = "127.0.0.1:9464"')


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("prometheus_client") is not None
    monkeypatch.setattr(listeners, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'forq\[metrics\]'"):
        read(tmp_path, "[metrics]")


def test_an_address_in_use_is_a_config_error_with_the_address_and_the_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        place = read(tmp_path, f'[metrics]\nlisten = "{address}"')
        assert place is not None
        with pytest.raises(ConfigError, match=f"cannot listen at {address}: Address already in use"):
            place.open(None)


def test_an_address_of_another_machine_is_a_config_error(tmp_path: Path) -> None:
    place = read(tmp_path, '[metrics]\nlisten = "192.0.2.1:9464"')
    assert place is not None
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:9464: Cannot assign"):
        place.open(None)


def test_a_unix_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    place = read(tmp_path, '[metrics]\nlisten = "./m.sock"')
    assert place is not None
    listener = place.open(None)
    assert os.stat(tmp_path / "m.sock").st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="another process listens there"):
        place.open(None)
    place.close(listener)
    assert not (tmp_path / "m.sock").exists()
