"""URLs of Redis servers: the same as redis-py's, and what is wrong with one is said without its password."""

import pytest
from redis.connection import parse_url

from forq.broker.server_url import ServerAddress, read_server_url
from forq.errors import UsageError


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://",
        "redis://h:1/2",
        "redis://h/",
        "redis://:secret@h",
        "redis://us%40er:p%2Fw@[::1]:7/3",
        "redis://h/1?db=4",
        "redis://h?password=a%25b&username=u",
        "rediss://h:5?ssl_cert_reqs=none&ssl_ca_certs=/etc/ca.pem",
        "unix:///run/re%20dis.sock",
        "unix://user:secret@/run/redis.sock?db=1",
    ],
)
def test_a_url_means_what_it_means_to_redis_py(url: str) -> None:
    theirs = dict(parse_url(url))  # type: ignore[no-untyped-call]
    tls = {name: value for name, value in theirs.items() if name.startswith("ssl_")}

    assert read_server_url(url) == ServerAddress(
        path=theirs.get("path"),
        host=theirs.get("host", "localhost"),
        port=theirs.get("port", 6379),
        db=int(theirs.get("db", 0)),
        username=theirs.get("username"),
        password=theirs.get("password"),
        tls=tls if url.startswith("rediss:") else None,
    )


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("http://:secret@h", "'http'"),
        ("h:6379", "'h'"),
        ("", "no scheme"),
        ("unix:/run/redis.sock", "'unix'"),
        ("redis://:secret@h/first", "database is 'first'"),
        ("redis://:secret@h:port", "port"),
        ("redis://:secret@h?db=-1", "database is '-1'"),
    ],
)
def test_a_wrong_url_is_refused_with_the_reason_and_without_its_password(url: str, wrong: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_server_url(url)

    assert wrong in str(refused.value)
    assert "unix:///PATH" in str(refused.value)
    assert "secret" not in str(refused.value)
