"""The web application."""

from fastapi import FastAPI

from forq.contrib.starlette import add_error_handlers, forq_lifespan
from shop.tasks import app, bill

web = FastAPI(lifespan=forq_lifespan(app))
add_error_handlers(web)


@web.post("/orders/{order}")
async def order(order: int, seconds: float = 0.0) -> str:
    ref = await bill.using(token=str(order)).aenqueue(order, seconds)
    return await ref.aresult(timeout=30)
