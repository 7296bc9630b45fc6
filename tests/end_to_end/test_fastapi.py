"""The FastAPI application of the guide: a real web server and supervisor, also while Redis does not answer."""

import asyncio
import json
import os
import re
import signal
import socket as sockets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from forq import Client
from forq.broker.journal import read_entry
from forq.broker.keys import DEFAULT_PREFIX, queue_base
from tests.docs.pages import ROOT, blocks
from tests.support.drive.server import Server
from tests.support.drive.supervisor import Forq, running
from tests.support.drive.wait import wait_until

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.timeout(180), pytest.mark.one_server]

REQUESTS = 50
# Of the app in the guide.
TIMEOUT_SECONDS = 1.0
# A call of a loaded machine may end this much later.
SLACK_SECONDS = 3.0
PING_SECONDS = 0.01
# A request that was answered with 503.
_LOGGED = re.compile(r"'/orders/\S+': (OutcomeUnknown|RedisUnavailable): ")


class Reply(NamedTuple):
    status: int
    body: Any
    seconds: float


class Web:
    """The web server, and requests to it."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket

    async def request(self, method: str, path: str, body: object = None) -> Reply:
        began = time.monotonic()
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        try:
            data = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.1\r\nHost: web\r\nConnection: close\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            received = await reader.read()
        finally:
            writer.close()
        header, _, content = received.partition(b"\r\n\r\n")
        return Reply(int(header.split(b" ")[1]), json.loads(content), time.monotonic() - began)

    async def order(self, number: str) -> Reply:
        return await self.request("POST", f"/orders/{number}", ["1.10", "2"])

    async def orders(self, numbers: list[str]) -> list[Reply]:
        return await asyncio.gather(*map(self.order, numbers))

    async def pings(self, until: "asyncio.Task[Any]") -> list[float]:
        """How long each of a series of pings took, in seconds."""
        took = []
        while not until.done():
            reply = await self.request("GET", "/ping")
            assert (reply.status, reply.body) == (200, "pong")
            took.append(reply.seconds)
            await asyncio.sleep(PING_SECONDS)
        return took


@pytest.fixture(scope="module")
def redis() -> Iterator[Server]:
    """A server that tests may freeze."""
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules of the guide."""
    directory = tmp_path_factory.mktemp("fastapi")
    for block in blocks(ROOT / "docs/guide/fastapi.md"):
        if block.language == "python":
            name = block.text.split("\n", 1)[0].removeprefix("# ")
            (directory / name).write_text(block.text)
    return directory


@pytest.fixture(scope="module")
def forq(redis: Server, code: Path) -> Iterator[Forq]:
    settings = f'[apps.orders]\napp = "orders:app"\npath = ["{code}"]\n'
    with running(redis=redis.url, settings=settings) as forq:
        wait_until(lambda: [each["state"] for each in forq.status()["queues"]] == ["running"], 60, "the queue runs")
        yield forq


@pytest.fixture(scope="module")
def web(forq: Forq, code: Path) -> Iterator[Web]:
    socket = code / "web.sock"
    command = [sys.executable, "-m", "uvicorn", "web:web", "--uds", str(socket), "--log-level", "warning"]
    environment = {**forq.environ(), "FORQ_REDIS": forq.url, "PYTHONPATH": str(code)}
    with open(code / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=code, env=environment, stdout=log, stderr=log)

    def is_up() -> bool:
        assert process.poll() is None, (code / "log").read_text()
        with sockets.socket(sockets.AF_UNIX) as probe:
            # The file exists before the server listens.
            return probe.connect_ex(str(socket)) == 0

    try:
        wait_until(is_up, 60, "the web server is up")
        yield Web(socket)
    finally:
        process.terminate()
        process.wait(30)
    # No other warnings, and no exceptions in the event loop.
    others = [line for line in (code / "log").read_text().splitlines() if not _LOGGED.match(line)]
    assert others == []


def billed(redis: Server) -> Counter[str]:
    """How often each order was billed, by the journal."""
    found: Counter[str] = Counter()
    with redis.connect() as client:
        entries: Any = client.xrange(f"{queue_base(DEFAULT_PREFIX, 'orders')}:events")
    jobs = [event.job for _, fields in entries for event in read_entry(fields, "orders") if event.verb == "done"]
    queue = Client(redis.url).queue("orders")
    for job in jobs:
        assert job is not None
        found[queue.job(job)["data"]["number"]] += 1
    return found


def check_receipts(numbers: list[str], replies: list[Reply]) -> None:
    assert [reply.body for reply in replies] == [{"number": number, "total": "3.10"} for number in numbers]
    assert {reply.status for reply in replies} == {200}


def show(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    quantiles = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] * 1000 for q in (50, 99)}
    shown = ", ".join(f"{key} {value:.1f} ms" for key, value in quantiles.items())
    print(f"{name}: {len(ordered)} requests, {shown}, longest {ordered[-1] * 1000:.1f} ms")


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * 99 // 100)]


def test_concurrent_requests_get_typed_results(web: Web, redis: Server) -> None:
    numbers = [f"first-{n}" for n in range(REQUESTS)]
    replies = asyncio.run(web.orders(numbers))
    check_receipts(numbers, replies)
    assert Decimal(replies[0].body["total"]) == Decimal("3.10")
    show(f"{REQUESTS} concurrent orders", [reply.seconds for reply in replies])
    assert all(billed(redis)[number] == 1 for number in numbers)


def test_a_repeated_request_is_not_billed_again(web: Web, redis: Server) -> None:
    check_receipts(["same"] * 5, asyncio.run(web.orders(["same"] * 5)))
    assert billed(redis)["same"] == 1


@pytest.mark.parametrize(
    ("frozen_seconds", "longest_ping_seconds"),
    [
        # An event loop that waits for Redis would stand still for TIMEOUT_SECONDS.
        pytest.param(3.0, TIMEOUT_SECONDS / 2, id="3s"),
        pytest.param(10.0, 0.05, id="10s", marks=pytest.mark.slow),
    ],
)
def test_while_redis_is_frozen_other_requests_go_on(
    web: Web, redis: Server, frozen_seconds: float, longest_ping_seconds: float
) -> None:
    """No order is lost or billed twice, although the outcome of the requests is unknown."""
    kind = f"{frozen_seconds:g}s"
    warm, waiting, new = ([f"{name}-{kind}-{n}" for n in range(REQUESTS)] for name in ("warm", "waiting", "new"))
    queue = Client(redis.url).queue("orders")

    async def requests() -> tuple[list[Reply], list[float]]:
        check_receipts(warm, await web.orders(warm))
        await asyncio.to_thread(queue.pause)
        before = asyncio.create_task(web.orders(waiting))
        await asyncio.to_thread(wait_until, lambda: waiters(redis) == len(waiting), what="all wait for results")
        # Its event loop reads Redis' answers to these waits before it answers this.
        await web.request("GET", "/ping")
        os.kill(redis.pid, signal.SIGSTOP)
        try:
            frozen = asyncio.create_task(asyncio.sleep(frozen_seconds))
            pings = asyncio.create_task(web.pings(frozen))
            refused = await web.orders(new)
            took = await pings
        finally:
            os.kill(redis.pid, signal.SIGCONT)
        await asyncio.to_thread(queue.resume)
        check_receipts(waiting, await before)
        check_receipts(new, await web.orders(new))
        return refused, took

    refused, took = asyncio.run(requests())
    show(f"pings while Redis is frozen for {kind}", took)
    show("orders while Redis is frozen", [reply.seconds for reply in refused])
    assert {reply.status for reply in refused} == {503}
    # The token of each makes it safe to repeat.
    assert {reply.body["detail"].split(":")[0] for reply in refused} <= {"OutcomeUnknown", "RedisUnavailable"}
    assert any(reply.body["detail"].startswith("OutcomeUnknown") for reply in refused)
    assert all(TIMEOUT_SECONDS * 0.9 <= reply.seconds <= TIMEOUT_SECONDS + SLACK_SECONDS for reply in refused)
    assert p99(took) < longest_ping_seconds
    counts = billed(redis)
    assert {counts[number] for number in (*warm, *waiting, *new)} == {1}


def waiters(redis: Server) -> int:
    with redis.connect() as client:
        return int(client.hlen(f"{queue_base(DEFAULT_PREFIX, 'orders')}:waiters"))
