"""FastAPI and Starlette: a lifespan that closes the connections, a dependency, and answers for errors of forq."""

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import Lifespan
from starlette.websockets import WebSocket

from forq.app.app import App
from forq.async_client import AsyncClient
from forq.errors import BackPressure, ForqError, OutcomeUnknown, QueueFull, RedisUnavailable, UsageError, WaitTimeout

__all__ = ["add_error_handlers", "forq_client", "forq_lifespan"]

# The attribute of request.state.
CLIENT = "forq_client"
# WebSocket: "try again later".
TRY_AGAIN_LATER = 1013

# Texts for the users of the web application: the messages of the errors contain the address of Redis.
_REASONS: dict[type[ForqError], str] = {
    OutcomeUnknown: "the job may have been stored",
    RedisUnavailable: "the job was not stored",
    BackPressure: "the job was not stored: Redis is full",
    QueueFull: "the job was not stored: the queue is full",
    WaitTimeout: "the job has not ended yet",
}

log = logging.getLogger("forq.web")


def forq_lifespan(
    app: App | AsyncClient, *more: App | AsyncClient, lifespan: Lifespan[Any] | None = None, check_redis: bool = False
) -> Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]:
    """A lifespan for FastAPI and Starlette that closes the connections of these apps or clients at its end:
    `FastAPI(lifespan=forq_lifespan(app))`.

    `lifespan`: your own, entered after this one and left before it. `check_redis`: do not start if Redis does not
    answer; by default the web application starts, and its requests fail until Redis is back.
    """
    clients = [_client_of(each) for each in (app, *more)]

    @asynccontextmanager
    async def entered(web: Any) -> AsyncIterator[Mapping[str, Any]]:
        async with AsyncExitStack() as stack:
            for client in clients:
                stack.push_async_callback(client.aclose)
            if check_redis:
                for client in clients:
                    await client.queues()
            state = None if lifespan is None else await stack.enter_async_context(lifespan(web))
            yield {**(state or {}), CLIENT: clients[0]}

    return entered


def _client_of(source: App | AsyncClient) -> AsyncClient:
    if isinstance(source, AsyncClient):
        return source
    if isinstance(source, App):
        return source.async_client
    raise UsageError(
        f"forq_lifespan({source!r:.100}) is not allowed: pass a forq.App or a forq.AsyncClient; your own lifespan is "
        "the argument `lifespan`: forq_lifespan(app, lifespan=…)"
    )


async def forq_client(connection: HTTPConnection) -> AsyncClient:
    """The first client of `forq_lifespan`, as a dependency of FastAPI:
    `client: Annotated[AsyncClient, Depends(forq_client)]`. In Starlette: `await forq_client(request)`."""
    client = getattr(connection.state, CLIENT, None)
    if not isinstance(client, AsyncClient):
        raise UsageError(
            "this web application has no client of forq: make it with FastAPI(lifespan=forq_lifespan(app)); a test "
            "client has to run the lifespan, too: with TestClient(web) as client: …"
        )
    return client


def add_error_handlers(web: Starlette, *, retry_after_seconds: int = 1) -> None:
    """Answers errors of forq that a request does not handle: 503 with Retry-After if a job could not be stored, or may
    not have been; 504 if a result did not come in time. A WebSocket is closed with 1013. Each is logged."""
    retry_after = {"Retry-After": str(retry_after_seconds)}
    for error in (RedisUnavailable, BackPressure, QueueFull):
        web.add_exception_handler(error, _answering(503, retry_after))
    web.add_exception_handler(WaitTimeout, _answering(504, {}))


def _answering(
    status: int, headers: Mapping[str, str]
) -> Callable[[HTTPConnection, Exception], Coroutine[Any, Any, Any]]:
    async def answer(connection: HTTPConnection, exc: Exception) -> JSONResponse | None:
        reason = next(text for error, text in _REASONS.items() if isinstance(exc, error))
        detail = f"{type(exc).__name__}: {reason}"
        # %r: a path may contain control characters.
        log.warning("%r: %s: %s", connection.url.path, type(exc).__name__, exc)
        if isinstance(connection, WebSocket):
            await connection.close(TRY_AGAIN_LATER, detail)
            return None
        return JSONResponse({"detail": detail}, status, headers)

    return answer
