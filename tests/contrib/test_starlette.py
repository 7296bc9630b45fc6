"""forq.contrib.starlette: lifespan, dependency and error handlers, with the module of the guide and a real server."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from forq import App, AsyncClient, Client
from forq.errors import BackPressure, JobDead, OutcomeUnknown, QueueFull, RedisUnavailable, UsageError, WaitTimeout
from tests.docs.pages import ROOT
from tests.examples.guide_code import code_of
from tests.support.drive.server import Server

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from forq.contrib.starlette import add_error_handlers, forq_client, forq_lifespan

NOWHERE = "unix:///nonexistent/redis.sock"


def connections(server: Server) -> int:
    with server.connect() as client:
        return sum(each["name"].startswith("forq-") for each in client.client_list())


@pytest.fixture
def shop(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the guide that has no app."""
    monkeypatch.setenv("FORQ_REDIS", redis_url)
    Client(redis_url).create_queue("mails")
    module = ModuleType("shop_of_the_guide")
    # FastAPI resolves annotations in the module.
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code_of(ROOT / "docs/guide/fastapi.md")["shop.py"], module.__dict__)
    return module


@pytest.mark.one_server
def test_the_dependency_gives_the_client_and_the_end_closes_its_connections(
    shop: ModuleType, redis_url: str, server: Server
) -> None:
    async def state(request: Request) -> str:
        return str(request.state.shop)

    shop.web.get("/state")(state)
    with TestClient(shop.web) as web:
        answer = web.post("/mails/a@example.org")
        assert answer.status_code == 202
        assert Client(redis_url).queue("mails").job(answer.json())["data"] == {"to": "a@example.org"}
        assert web.get("/state").json() == "open"
        open_before = connections(server)
    assert connections(server) < open_before


def test_the_own_lifespan_lies_inside_and_failures_close_the_connections(redis_url: str) -> None:
    client = AsyncClient(redis_url)
    steps: list[str] = []

    @asynccontextmanager
    async def own(web: Starlette) -> AsyncIterator[None]:
        steps.append(f"queues {await client.queues()}")
        try:
            yield
        finally:
            steps.append(f"queues {await client.queues()}")

    async def live(fail: bool) -> None:
        async with forq_lifespan(client, lifespan=own)(None) as state:
            assert state == {"forq_client": client}
            assert asyncio.get_running_loop() in client._loops
            if fail:
                raise ValueError
        assert client._loops == {}

    asyncio.run(live(fail=False))
    with pytest.raises(ValueError, match=r"^$"):
        asyncio.run(live(fail=True))
    assert client._loops.keys() == set()
    assert steps == ["queues {}"] * 4


def test_the_application_starts_without_redis_unless_it_is_to_be_checked() -> None:
    app = App("nowhere", url=NOWHERE, connect_timeout=0.2)
    with TestClient(Starlette(lifespan=forq_lifespan(app))):
        pass
    checked = TestClient(Starlette(lifespan=forq_lifespan(app, check_redis=True)))
    with pytest.raises(RedisUnavailable, match=NOWHERE), checked:
        pass


def test_several_apps_are_closed_and_the_first_one_is_the_client(redis_url: str) -> None:
    first, second = App("first", url=redis_url), App("second", url=redis_url)

    async def name(request: Request) -> PlainTextResponse:
        await second.async_client.queues()
        return PlainTextResponse(str(await forq_client(request) is first.async_client))

    with TestClient(Starlette(routes=[Route("/", name)], lifespan=forq_lifespan(first, second))) as web:
        assert web.get("/").text == "True"
        assert len(second.async_client._loops) == 1
    assert not second.async_client._loops


def test_mistakes_are_explained() -> None:
    wrong: Any = asynccontextmanager
    with pytest.raises(UsageError, match="the argument `lifespan`"):
        forq_lifespan(wrong)

    async def plain(request: Request) -> PlainTextResponse:
        await forq_client(request)
        return PlainTextResponse("")

    with pytest.raises(UsageError, match="with TestClient"):
        TestClient(Starlette(routes=[Route("/", plain)])).get("/")


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RedisUnavailable, 503, "RedisUnavailable: the job was not stored"),
        (OutcomeUnknown, 503, "OutcomeUnknown: the job may have been stored"),
        (BackPressure, 503, "BackPressure: the job was not stored: Redis is full"),
        (QueueFull, 503, "QueueFull: the job was not stored: the queue is full"),
        (WaitTimeout, 504, "WaitTimeout: the job has not ended yet"),
    ],
)
def test_errors_become_answers_without_the_address_of_redis(
    error: type[Exception], status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    web = failing(error("at redis://secret-host"))
    with TestClient(web) as client:
        answer = client.get("/fail%1Bx")
    assert (answer.status_code, answer.json()) == (status, {"detail": reason})
    assert answer.headers.get("Retry-After") == ("7" if status == 503 else None)
    (line,) = caplog.messages
    assert line == rf"'/fail\x1bx': {error.__name__}: at redis://secret-host"


def test_other_errors_are_left_to_the_application() -> None:
    with TestClient(failing(JobDead("it is dead"))) as client, pytest.raises(JobDead):
        client.get("/fail")


@pytest.mark.parametrize("accepted", [False, True])
def test_a_websocket_is_closed(accepted: bool) -> None:
    web = failing(OutcomeUnknown("broke"), accept=accepted)
    with (
        TestClient(web) as client,
        pytest.raises(WebSocketDisconnect) as closed,
        client.websocket_connect("/socket") as socket,
    ):
        socket.receive_text()
    assert (closed.value.code, closed.value.reason) == (1013, "OutcomeUnknown: the job may have been stored")


def failing(error: Exception, *, accept: bool = False) -> FastAPI:
    web = FastAPI()
    add_error_handlers(web, retry_after_seconds=7)

    @web.get("/{path}")
    async def fail(path: str) -> None:
        raise error

    @web.websocket("/socket")
    async def fail_socket(socket: WebSocket) -> None:
        if accept:
            await socket.accept()
        raise error

    return web
