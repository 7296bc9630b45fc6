"""Runs a bridge: `forq bridge` on stdin and stdout or a Unix socket, and the supervisor's bridge service."""

import argparse
import os
import signal
import socket
import sys
from dataclasses import dataclass

from setproctitle import setproctitle

from forq.bridge.loop import Bridge, Peer, StandardStreams
from forq.bridge.messages import MessageEncoder
from forq.bridge.requests import Requests
from forq.broker.keys import handed_channels
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.errors import ExitCode, ForqError
from forq.job import new_id
from forq.logging_setup import configure
from forq.paths import key_prefix, redis_url
from forq.procs.loop import service_loop
from forq.procs.unix_socket import listen
from forq.redis_url import database_of
from forq.settings import BRIDGE, SERVICE
from forq.values import show_duration

CALL_TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class BridgeSettings:
    """`path` None: stdin and stdout. `leash`: only below a supervisor."""

    url: str
    prefix: str
    tick_seconds: float
    max_queues: int
    path: str | None = None
    leash: socket.socket | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis", metavar="URL", help="redis://, unix://, redis+cluster:// or redis+sentinel:// (FORQ_REDIS)"
    )
    parser.add_argument("--prefix", metavar="P", help="prefix of all Redis keys (FORQ_PREFIX; forq:)")
    tick, most = show_duration(BRIDGE["tick"].default), SERVICE["max_queues"].default
    parser.add_argument("--tick", metavar="TIME", default=tick, help=f"how often a worker must send a message ({tick})")
    parser.add_argument(
        "--max-queues",
        dest="max_queues",
        type=int,
        default=most,
        metavar="N",
        help=f"maximum number of queues in Redis ({most})",
    )
    parser.add_argument("--listen", metavar="PATH", help="serve connections to this Unix socket")


def run(arguments: argparse.Namespace) -> int:
    configure()
    try:
        settings = BridgeSettings(
            url=arguments.redis or redis_url(),
            prefix=key_prefix() if arguments.prefix is None else arguments.prefix,
            tick_seconds=BRIDGE["tick"].parse(arguments.tick, "--tick"),
            max_queues=arguments.max_queues,
            path=arguments.listen and os.path.abspath(arguments.listen),
        )
        setproctitle(f"forq: bridge {settings.path or '-'}")
        return run_bridge(settings)
    except ForqError as exc:
        print(f"forq: {exc}", file=sys.stderr)
        return exc.exit_code


def run_bridge(settings: BridgeSettings) -> int:
    """Serves until all peers have disconnected or a signal arrives. Executes all received messages before it exits."""
    name = new_id()
    listener = None if settings.path is None else listen(settings.path)
    loop = service_loop()
    stdio: tuple[Peer, ...] = () if settings.path is not None else (StandardStreams(loop),)
    link = Link(settings.url, name="forq-bridge", timeout_seconds=CALL_TIMEOUT_SECONDS)
    subscription = Subscription(
        settings.url, handed_channels(settings.prefix, database_of(settings.url), name), name="forq-bridge-subscription"
    )
    requests = Requests(link, settings.prefix, name, max_queues=settings.max_queues, tick_seconds=settings.tick_seconds)
    bridge = Bridge(
        loop,
        requests,
        subscription,
        MessageEncoder(name),
        tick_seconds=settings.tick_seconds,
        peers=stdio,
        listener=listener,
        leash=settings.leash,
    )
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.on_signal(signum, bridge.stop)
    try:
        bridge.run()
    finally:
        loop.close()
        subscription.close()
        link.close()
        if listener is not None and settings.path is not None:
            listener.close()
            os.unlink(settings.path)
    return ExitCode.FAILED if any(peer.disconnected for peer in stdio) else ExitCode.STOPPED
