"""Which servers are accepted, and the errors for the others."""

from typing import Any

import pytest

from forq.broker.link import Link, check_server
from forq.errors import IncompatibleServer


class InfoLink(Link):
    """Answers INFO from a text."""

    def __init__(self, info: str) -> None:
        super().__init__("redis://127.0.0.1:1")
        self._info = info

    def call(self, *args: Any, at: str | None = None) -> Any:
        return self._info.encode()


@pytest.mark.parametrize(
    ("info", "answer"),
    [
        ("redis_version:7.0.0\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n", "Redis 7.0.0"),
        ("redis_version:7.2.4\r\nvalkey_version:9.1.2\r\nmaxmemory_policy:noeviction\r\n", "Valkey 9.1.2"),
        ("redis_version:7.4.1\r\nmaxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n", "Redis 7.4.1"),
        ("redis_version:10.0.1\r\nmaxmemory:100\r\nmaxmemory_policy:noeviction\r\n", "Redis 10.0.1"),
    ],
)
def test_a_recent_server_that_evicts_no_keys_is_accepted(info: str, answer: str) -> None:
    assert check_server(InfoLink(info)) == answer


@pytest.mark.parametrize(
    ("info", "error"),
    [
        ("redis_version:6.2.14\r\nmaxmemory_policy:noeviction\r\n", "Redis 6.2.14 .* too old: forq needs Redis 7.0"),
        ("redis_version:7.2.4\r\nvalkey_version:7.1.0\r\n", "too old: forq needs Valkey 7.2"),
        ("redis_version:7.4.1\r\nmaxmemory:100\r\nmaxmemory_policy:volatile-ttl\r\n", "volatile-ttl.*noeviction"),
    ],
)
def test_an_old_or_evicting_server_is_refused_with_the_reason(info: str, error: str) -> None:
    with pytest.raises(IncompatibleServer, match=error):
        check_server(InfoLink(info))


def test_the_test_server_is_accepted(redis_url: str) -> None:
    assert check_server(Link(redis_url)).startswith(("Redis", "Valkey"))
