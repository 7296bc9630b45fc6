# tasks.py
from decimal import Decimal

from flask import current_app

import forq

app = forq.App("shop", timeout=1)


@app.task
def bill(number: str, prices: list[Decimal]) -> str:
    total = sum(prices, Decimal())
    return f"{current_app.config['SHOP']}: order {number}, {total} {current_app.config['CURRENCY']}"
