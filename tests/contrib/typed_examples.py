"""Uses of forq.contrib, right and wrong, for tests/app/test_types.py: a line that ends with `# wrong` is refused."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.requests import Request

from forq import App, AsyncClient
from forq.contrib.starlette import add_error_handlers, forq_client, forq_lifespan

app = App("shop")
client = AsyncClient(timeout=1)


@asynccontextmanager
async def own(web: FastAPI) -> AsyncGenerator[None, None]:
    yield


@asynccontextmanager
async def own_with_state(web: FastAPI) -> AsyncGenerator[dict[str, int], None]:
    yield {"orders": 1}


web = FastAPI(lifespan=forq_lifespan(app))
FastAPI(lifespan=forq_lifespan(client, app, lifespan=own, check_redis=True))
FastAPI(lifespan=forq_lifespan(app, lifespan=own_with_state))
Starlette(lifespan=forq_lifespan(app))
add_error_handlers(web)
add_error_handlers(Starlette(), retry_after_seconds=5)


@web.post("/mails")
async def mail(client: Annotated[AsyncClient, Depends(forq_client)]) -> str:
    return await client.queue("mails").enqueue({})


async def plain(request: Request) -> AsyncClient:
    return await forq_client(request)


forq_lifespan()  # wrong
forq_lifespan(own)  # wrong
forq_lifespan(app, own)  # wrong
forq_lifespan(app, lifespan=own_with_state, check=True)  # wrong
FastAPI(lifespan=forq_lifespan)  # wrong
add_error_handlers(app)  # wrong
add_error_handlers(web, retry_after_seconds="5")  # wrong
