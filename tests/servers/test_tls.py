"""TLS: whom a client believes, what it shows of itself, and every kind of connection through it."""

import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import trustme

from forq import Client
from forq.broker.keys import DEFAULT_PREFIX, due_channels
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.errors import OutcomeUnknown, RedisUnavailable
from tests.support.drive.redis_cluster import free_ports, redis_cluster
from tests.support.drive.server import Server
from tests.support.drive.supervisor import running
from tests.support.drive.wait import wait_until
from tests.support.faults.proxy import Proxy


@dataclass(frozen=True)
class Authority:
    ca: trustme.CA
    file: Path

    def context(self, *names: str) -> ssl.SSLContext:
        """Of a server that shows a certificate with these names."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*names).configure_cert(context)
        return context

    def client_files(self, directory: Path) -> str:
        """A certificate of a client and its key, as options of a URL."""
        issued = self.ca.issue_cert("client.test")
        issued.cert_chain_pems[0].write_to_path(str(directory / "client.pem"))
        issued.private_key_pem.write_to_path(str(directory / "client.key"))
        return f"ssl_certfile={directory}/client.pem&ssl_keyfile={directory}/client.key"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    ca, file = trustme.CA(), tmp_path_factory.mktemp("tls") / "ca.pem"
    ca.cert_pem.write_to_path(str(file))
    return Authority(ca, file)


@pytest.fixture
def port(server: Server, authority: Authority) -> Iterator[int]:
    server.flush()
    with Proxy(server.socket, tls=authority.context("localhost", "127.0.0.1")) as proxy:
        yield proxy.port


def test_a_certificate_of_a_trusted_authority_is_believed(port: int, authority: Authority) -> None:
    assert Link(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.file}").call("PING") == b"PONG"
    assert Link(f"rediss://localhost:{port}?ssl_ca_certs={authority.file}").call("PING") == b"PONG"


def test_one_of_another_authority_is_refused(port: int, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    for url in (f"rediss://127.0.0.1:{port}", f"rediss://127.0.0.1:{port}?ssl_ca_certs={other}"):
        with pytest.raises(RedisUnavailable, match="certificate verify failed"):
            Link(url).call("PING")


def test_one_for_another_host_is_refused_unless_the_url_says_otherwise(server: Server, authority: Authority) -> None:
    with Proxy(server.socket, tls=authority.context("redis.example")) as proxy:
        url = f"{proxy.url}?ssl_ca_certs={authority.file}"
        with pytest.raises(RedisUnavailable, match="IP address mismatch"):
            Link(url).call("PING")
        assert Link(f"{url}&ssl_check_hostname=false").call("PING") == b"PONG"
        assert Link(f"{proxy.url}?ssl_cert_reqs=none").call("PING") == b"PONG"


def test_the_authority_of_the_url_is_the_only_one(
    server: Server, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = trustme.CA()
    other.cert_pem.write_to_path(str(tmp_path / "system.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "system.pem"))
    with Proxy(server.socket, tls=Authority(other, authority.file).context("127.0.0.1")) as proxy:
        assert Link(proxy.url).call("PING") == b"PONG"
        url = f"{proxy.url}?ssl_ca_certs={authority.file}"
        with pytest.raises(RedisUnavailable, match="certificate verify failed"):
            Link(url).call("PING")
        # redis-py itself believes the system's authorities, too.
        with redis.Redis.from_url(url) as client:
            assert client.ping()


def test_a_call_through_tls_has_a_time_limit(port: int, authority: Authority) -> None:
    link = Link(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.file}", timeout_seconds=0.3)
    with pytest.raises(OutcomeUnknown, match="timed out"):
        link.call("BLPOP", "nothing", 1)


def test_versions_and_ciphers_of_the_url_count(port: int, authority: Authority) -> None:
    url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.file}"
    assert Link(f"{url}&ssl_min_version={int(ssl.TLSVersion.TLSv1_3)}&ssl_ciphers=ECDHE").call("PING") == b"PONG"
    with pytest.raises(RedisUnavailable, match="cipher"):
        Link(f"{url}&ssl_ciphers=none-such").call("PING")


def test_a_server_may_ask_for_the_certificate_of_the_client(
    server: Server, authority: Authority, tmp_path: Path
) -> None:
    context = authority.context("127.0.0.1")
    context.verify_mode = ssl.CERT_REQUIRED
    authority.ca.configure_trust(context)
    with Proxy(server.socket, tls=context) as proxy:
        url = f"{proxy.url}?ssl_ca_certs={authority.file}"
        with pytest.raises(RedisUnavailable):
            Link(url).call("PING")
        stranger = Authority(trustme.CA(), authority.file)
        with pytest.raises(RedisUnavailable):
            Link(f"{url}&{stranger.client_files(tmp_path)}").call("PING")
        assert Link(f"{url}&{authority.client_files(tmp_path)}").call("PING") == b"PONG"


@pytest.mark.slow
def test_a_server_without_tls_is_not_spoken_to(server: Server) -> None:
    with Proxy(server.socket) as proxy, pytest.raises(RedisUnavailable):
        Link(f"rediss://127.0.0.1:{proxy.port}").call("PING")


def test_what_is_published_is_heard(port: int, authority: Authority) -> None:
    url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.file}"
    subscription = Subscription(url, due_channels(DEFAULT_PREFIX, 0), name="test")
    subscription.connect()
    assert subscription.receive() == []
    queue = Client(url).create_queue("q")
    queue.enqueue(1, run_in=60)
    assert wait_until(subscription.receive)[0][0] == "forq:queue:{q}@0:due"
    subscription.close()


def test_a_cluster_is_reached_through_tls_on_every_node(authority: Authority) -> None:
    ports, context = free_ports(2), authority.context("127.0.0.1")
    with redis_cluster(2, announced=ports) as cluster:
        first, second = cluster.masters
        with (
            Proxy(first.socket, listen=ports[0], tls=context),
            Proxy(second.socket, listen=ports[1], tls=context),
        ):
            client = Client(f"rediss+cluster://127.0.0.1:{ports[0]}?ssl_ca_certs={authority.file}")
            for name in ("a", "b", "c", "d"):
                client.create_queue(name).enqueue(1)
            assert {link.url.partition("?")[0] for link in client.link().masters()} == {
                f"rediss://127.0.0.1:{port}" for port in ports
            }


@pytest.mark.slow
def test_a_whole_supervisor_through_tls(port: int, authority: Authority) -> None:
    with running(redis=f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority.file}") as forq:
        forq.create("q", "record")
        queue = forq.client().queue("q")
        queue.enqueue_many(range(100))
        queue.enqueue(1, run_in=0.5)
        wait_until(lambda: forq.queue_status("q")["done"] == 101, what="all have run")
