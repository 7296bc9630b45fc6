"""Runs the dashboard: the supervisor's process `forq: web`, and the command `forq web` on its own."""

import argparse
import asyncio
import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from setproctitle import setproctitle
from starlette.types import ASGIApp

from forq.broker.link import Link, check_server
from forq.errors import ExitCode, ForqError
from forq.logging_setup import configure
from forq.paths import key_prefix, redis_url
from forq.procs.context import Context
from forq.procs.listen_address import ListenAddress, read_listen
from forq.procs.liveness import mark_pass
from forq.procs.minutes import seconds_to_boundary
from forq.procs.scoreboard import AttemptStats
from forq.services.snapshot import Sampler
from forq.settings import SERVICE, WEB
from forq.web.access import Access
from forq.web.action_log import ActionLog
from forq.web.app import dashboard
from forq.web.connections import OPTIONS
from forq.web.feed import Feed
from forq.web.settings import WebSettings
from forq.web.source import Source

DEFAULT_HEALTH_SECONDS = 60.0
# Without an answer from Redis, all pages fail at once: not because of a pause of a busy machine.
SNAPSHOT_REDIS_SECONDS = 3.0
BACKLOG = 128

log = logging.getLogger("forq.web")


def run_service(context: Context, settings: WebSettings, listener: socket.socket, leash: socket.socket) -> int:
    """The process of a supervisor. Ends when the supervisor is gone."""
    source = Source(context.url, context.prefix, context.control_socket)
    sampler = Sampler(
        url=context.url,
        prefix=context.prefix,
        control_socket=context.control_socket,
        board=context.scoreboard,
        stats=context.stats or AttemptStats(),
        name="forq-web",
        redis_seconds=SNAPSHOT_REDIS_SECONDS,
    )
    feed = Feed(
        source,
        sampler,
        context.rings,
        health_seconds=context.health_seconds or DEFAULT_HEALTH_SECONDS,
    )
    ending = Ending()
    app = dashboard(
        source,
        feed,
        Access(settings),
        ActionLog(context.logs_dir.parent / "actions.jsonl"),
        redact=context.redact,
        settings=settings,
        is_ending=ending,
    )

    def keep_minutes() -> None:
        """Adds the minute that has ended. Without a viewer, this process does nothing else."""
        asyncio.get_running_loop().call_later(seconds_to_boundary(time.time()), keep_minutes)
        if context.rings is not None and context.stats is not None:
            context.rings.write(context.stats.read(), time.time())

    def started(server: Server) -> None:
        watch_leash(leash, server.stop)
        keep_minutes()

    return serve(app, listener, ending, on_start=started)


class Ending:
    """Whether the server is about to stop. It waits for open responses, and a live page lasts minutes."""

    def __init__(self) -> None:
        self.begun = False

    def __call__(self) -> bool:
        return self.begun


def serve(
    app: ASGIApp,
    listener: socket.socket,
    ending: Ending,
    *,
    on_start: Callable[["Server"], None] = lambda server: None,
) -> int:
    """Serves at this socket until a signal arrives or the server is stopped."""
    config = uvicorn.Config(app, lifespan="on", date_header=False, backlog=BACKLOG, **OPTIONS)
    server = Server(config, ending, on_start)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_MarkingSelector())) as runner:
        runner.run(server.serve(sockets=[listener]))
    return ExitCode.STOPPED


class Server(uvicorn.Server):
    """A server that sleeps while nothing happens: uvicorn's own wakes ten times a second to look for signals."""

    def __init__(self, config: uvicorn.Config, ending: Ending, on_start: Callable[["Server"], None]) -> None:
        super().__init__(config)
        self._ending = ending
        self._on_start = on_start
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = self._ending.begun = True
        self._stopped.set()

    async def main_loop(self) -> None:
        self._on_start(self)
        await self._stopped.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        yield


class _MarkingSelector(selectors.DefaultSelector):
    """Marks this process as alive before it waits, for the supervisor (procs/liveness.py)."""

    def select(self, timeout: float | None = None) -> Any:
        mark_pass()
        return super().select(timeout)


def watch_leash(leash: socket.socket, on_end: Callable[[], None]) -> None:
    """Calls back when the supervisor is gone. Its pings need no answer: waking up is the sign of life."""
    leash.setblocking(False)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        try:
            ended = not leash.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            ended = True
        if ended:
            loop.remove_reader(leash.fileno())
            on_end()

    loop.add_reader(leash.fileno(), readable)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis", metavar="URL", help="redis://, unix://, redis+cluster:// or redis+sentinel:// (FORQ_REDIS)"
    )
    parser.add_argument("--prefix", metavar="P", help="prefix of all Redis keys (FORQ_PREFIX; forq:)")
    listen = WEB["listen"].default
    parser.add_argument("--listen", metavar="ADDRESS", default=listen, help=f"HOST:PORT, or a path ({listen})")
    parser.add_argument("--read-only", dest="read_only", action="store_true", help="show everything, change nothing")
    parser.add_argument("--users", metavar="FILE", help="users and password hashes, written by `forq web-user`")
    parser.add_argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that browsers use (repeatable)",
    )
    parser.add_argument(
        "--proxy",
        dest="proxies",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a proxy that authenticates users: address, network or unix (repeatable)",
    )
    header = WEB["proxy_header"].default
    header_help = f"the header in which the proxy names the user ({header})"
    parser.add_argument("--proxy-header", dest="proxy_header", metavar="NAME", default=header, help=header_help)
    parser.add_argument(
        "--proxy-actor",
        dest="proxy_actors",
        action="append",
        default=[],
        metavar="USER",
        help="a user of the proxy that may act, if not all may (repeatable)",
    )
    redact_help = "replace what matches this pattern in shown data, messages and stacks (repeatable)"
    parser.add_argument("--redact", action="append", default=[], metavar="PATTERN", help=redact_help)
    parser.add_argument("--action-log", dest="action_log", metavar="FILE", help="append each action to this file")


def run(arguments: argparse.Namespace) -> int:
    configure()
    try:
        return _run(arguments)
    except ForqError as exc:
        print(f"forq: {exc}", file=sys.stderr)
        return exc.exit_code


def _run(arguments: argparse.Namespace) -> int:
    listen = str(WEB["listen"].parse(arguments.listen, "--listen"))
    settings = WebSettings(
        listen=listen,
        read_only=arguments.read_only,
        users=None if arguments.users is None else os.path.abspath(arguments.users),
        proxies=tuple(arguments.proxies),
        proxy_header=str(WEB["proxy_header"].parse(arguments.proxy_header, "--proxy-header")),
        proxy_actors=tuple(arguments.proxy_actors),
        hosts=tuple(arguments.hosts),
    )
    settings.check("forq web")
    url = arguments.redis or redis_url()
    prefix = key_prefix() if arguments.prefix is None else arguments.prefix
    check_server(Link(url, name="forq-web"))
    address = ListenAddress("forq web", *read_listen(listen))
    listener = address.open(None)
    setproctitle(f"forq: web {listen}")
    source = Source(url, prefix)
    ending = Ending()
    app = dashboard(
        source,
        Feed(source),
        Access(settings),
        ActionLog(None if arguments.action_log is None else Path(arguments.action_log)),
        redact=SERVICE["log_redact"].parse(arguments.redact, "--redact"),
        settings=settings,
        is_ending=ending,
    )
    print(f"forq: the dashboard is at {listen if address.path else f'http://{listen}/'}", file=sys.stderr)
    try:
        return serve(app, listener, ending)
    finally:
        address.close(listener)
