"""Which URLs there are, what they stand for, and how wrong ones are refused."""

import pytest

from forq import Client
from forq.errors import UsageError
from forq.redis_url import CLUSTER, SENTINEL, SERVER, read_address, shown_url
from forq.supervisor.config import load


def test_one_server_is_what_its_url_says() -> None:
    address = read_address("rediss://me:hush@h:1/2?ssl_ca_certs=/ca")
    assert (address.kind, address.hosts) == (SERVER, (("h", 1),))
    assert read_address("unix:///run/r.sock?db=1").hosts == ()


def test_nodes_of_a_cluster_get_its_user_and_options() -> None:
    address = read_address("rediss+cluster://me:hush@a,b:7001,[::1]:7002?ssl_ca_certs=/ca")
    assert (address.kind, address.hosts) == (CLUSTER, (("a", 6379), ("b", 7001), ("::1", 7002)))
    assert address.server_url("c", 7003) == "rediss://me:hush@c:7003?ssl_ca_certs=%2Fca"
    assert address.server_url("::1", 7002) == "rediss://me:hush@[::1]:7002?ssl_ca_certs=%2Fca"


def test_sentinels_have_passwords_of_their_own() -> None:
    url = "rediss+sentinel://me:hush@a,b:7001/main/3?sentinel_username=s&sentinel_password=quiet&ssl_ca_certs=/ca"
    address = read_address(url)
    assert (address.kind, address.master, address.hosts) == (SENTINEL, "main", (("a", 26379), ("b", 7001)))
    assert address.server_url("c", 7003) == "rediss://me:hush@c:7003/3?ssl_ca_certs=%2Fca"
    assert address.sentinel_url("a", 26379) == "rediss://a:26379?ssl_ca_certs=%2Fca&username=s&password=quiet"


@pytest.mark.parametrize("url", ["redis+cluster://a,b:7001", "rediss+cluster://u:p@a/0", "redis+sentinel://a,b/main/1"])
def test_the_service_takes_them(url: str) -> None:
    assert load({"redis": url}, {}).redis == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h", "unknown scheme"),
        ("redis+clusters://h", "unknown scheme"),
        ("redis://a,b", "a single server has only one host"),
        ("redis://h/first", "database 'first' is not a number"),
        ("redis+cluster://", "a host or port is invalid"),
        ("redis+cluster://a,,b", "a host or port is invalid"),
        ("redis+cluster://a:0", "a host or port is invalid"),
        ("redis+cluster://a/1", "a cluster has no databases"),
        ("redis+sentinel://a", "the name of the master is missing"),
        ("redis+sentinel://a/main/x", "database 'x' is not a number"),
        ("unix://x/y", "a unix socket needs an absolute path"),
    ],
)
def test_a_wrong_url_is_refused_with_the_reason_and_what_is_allowed(url: str, why: str) -> None:
    with pytest.raises(UsageError, match="is not allowed") as caught:
        Client(url).queues()
    assert why in str(caught.value)
    assert "redis+sentinel://" in str(caught.value)


def test_no_secret_of_a_wrong_url_is_shown() -> None:
    for url in ("redis://me:hush/hush@h:port?password=hush", "redis+sentinel://me:hush@h?sentinel_password=hush"):
        with pytest.raises(UsageError) as caught:
            read_address(url)
        assert "hush" not in str(caught.value)
    assert shown_url("redis+cluster://me:hush@a,b") == "redis+cluster://***@a,b"


def test_an_option_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="database 'first' is not a number"):
        Client("redis://127.0.0.1?db=first").queues()
