# web.py
from decimal import Decimal

from fastapi import FastAPI
from orders import Receipt, app, bill

from forq.contrib.starlette import add_error_handlers, forq_lifespan

web = FastAPI(lifespan=forq_lifespan(app))
add_error_handlers(web)


@web.get("/ping")
async def ping() -> str:
    return "pong"


@web.post("/orders/{number}")
async def order(number: str, prices: list[Decimal]) -> Receipt:
    ref = await bill.using(token=number).aenqueue(number, prices)
    return await ref.aresult(timeout=30)
