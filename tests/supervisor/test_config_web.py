"""The section [web] of the config file."""

from pathlib import Path

import pytest

from forq.errors import ConfigError
from forq.supervisor.config import load
from forq.supervisor.listeners import WebConfig
from forq.web import settings


def web(tmp_path: Path, text: str) -> WebConfig:
    file = tmp_path / "forq.toml"
    file.write_text(f"[web]\n{text}\n")
    config = load({"config": str(file)}, {}).web
    assert config is not None
    return config


def test_without_the_section_there_is_no_dashboard() -> None:
    assert load({}, {}).web is None


def test_an_empty_section_listens_on_the_loopback_address(tmp_path: Path) -> None:
    config = web(tmp_path, "")
    assert (config.host, config.port, config.read_only) == ("127.0.0.1", 9465, False)


@pytest.mark.parametrize(
    "text",
    [
        'listen = "127.0.0.1:80"',
        'listen = "127.9.9.9:80"',
        'listen = "localhost:80"',
        'listen = "[::1]:80"',
        'listen = "./web.sock"',
        'listen = "0.0.0.0:80"\nusers = "web-users"',
        'listen = "[::]:80"\nproxies = ["10.0.0.0/8"]',
        'listen = "forq.example.com:80"\nproxies = ["unix", "10.0.0.5"]',
    ],
)
def test_addresses_that_strangers_cannot_use_are_allowed(tmp_path: Path, text: str) -> None:
    assert web(tmp_path, text).listen


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "forq.example.com:80", "[::ffff:10.0.0.1]:80"]
)
def test_other_addresses_need_authentication(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError, match="not allowed without authentication: set `users`"):
        web(tmp_path, f'listen = "{listen}"')


@pytest.mark.parametrize(
    "text",
    [
        "listen = 80",
        'listen = "nowhere"',
        "read_only = 1",
        'proxies = "10.0.0.5"',
        "proxies = [5]",
        'proxies = ["10.0.0.5/8"]',
        'proxies = ["proxy.example.com"]',
        'proxy_header = "X Forwarded"',
        'proxy_header = "X-User\\n"',
        "hosts = [1]",
        "port = 80",
    ],
)
def test_an_invalid_value_names_the_section(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="web"):
        web(tmp_path, text)


def test_without_the_packages_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == "jinja2" else object())
    with pytest.raises(ConfigError, match=r"needs jinja2: pip install 'forq\[web\]'"):
        web(tmp_path, "")
