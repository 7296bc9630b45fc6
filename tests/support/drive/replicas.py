"""Starts a master with a replica, and sentinels that watch them, on ports of 127.0.0.1."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from forq.supervisor.embedded import find_server
from tests.support.drive.redis_cluster import free_ports, is_in_sync, run_command
from tests.support.drive.server import Server
from tests.support.drive.wait import wait_until
from tests.support.faults.proxy import Proxy

MASTER = "forq-test"
_REPLICA = {"repl-diskless-sync-delay": "0", "repl-timeout": "60"}


class Pair:
    """A master and its replica, which follows through `proxy` if `proxied`."""

    def __init__(self, stack: ExitStack, *, proxied: bool = False) -> None:
        first, second = free_ports(2)
        self.master = Server(port=first, settings=_REPLICA, appendonly=True)
        self.replica = Server(port=second, settings=_REPLICA, appendonly=True)
        for server in (self.master, self.replica):
            stack.callback(server.remove)
            server.start()
        self.proxy = stack.enter_context(Proxy(first))
        run_command(self.replica, "REPLICAOF", "127.0.0.1", self.proxy.port if proxied else first)
        wait_until(lambda: is_in_sync(self.replica), what="the replica is in sync")
        wait_until(
            lambda: b"state=online" in run_command(self.master, "INFO", "replication"),
            what="the master knows its replica",
        )

    def promote(self) -> None:
        run_command(self.replica, "REPLICAOF", "NO", "ONE")


class Sentinels:
    """Three sentinels over a pair."""

    def __init__(self, stack: ExitStack, pair: Pair) -> None:
        self.ports = free_ports(3)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forq-")))
        for port in self.ports:
            config = directory / f"{port}.conf"
            config.write_text(_config(port, directory, pair.master.port))
            process = subprocess.Popen([find_server(None), str(config), "--sentinel"], stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        wait_until(lambda: all(map(self._is_ready, self.ports)), what="the sentinels know each other and the replica")

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in self.ports) + f"/{MASTER}"

    def master_port(self) -> int:
        with redis.Redis(port=self.ports[0]) as client:
            return int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)[1])

    def fail_over(self) -> None:
        """Fails over at an operator's request, with all servers alive."""
        with redis.Redis(port=self.ports[0]) as client:
            client.execute_command("SENTINEL", "FAILOVER", MASTER)

    def _is_ready(self, port: int) -> bool:
        try:
            with redis.Redis(port=port) as client:
                state = client.sentinel_masters()[MASTER]
        except redis.ConnectionError:
            return False
        return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1 and not state["is_disconnected"])


def _config(port: int, directory: Path, master_port: int) -> str:
    return f"""port {port}
bind 127.0.0.1
dir {directory}
logfile {directory}/{port}.log
daemonize no
sentinel monitor {MASTER} 127.0.0.1 {master_port} 2
sentinel down-after-milliseconds {MASTER} 500
sentinel failover-timeout {MASTER} 3000
"""


@contextmanager
def replicated(*, proxied: bool = False) -> Iterator[Pair]:
    """`proxied`: the replica follows through `Pair.proxy`."""
    with ExitStack() as stack:
        yield Pair(stack, proxied=proxied)


@contextmanager
def watched() -> Iterator[tuple[Pair, Sentinels]]:
    with ExitStack() as stack:
        pair = Pair(stack)
        yield pair, Sentinels(stack, pair)
