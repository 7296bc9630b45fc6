# orders.py
from dataclasses import dataclass
from decimal import Decimal

import forq

app = forq.App("orders", timeout=1)


@dataclass
class Receipt:
    number: str
    total: Decimal


@app.task
def bill(number: str, prices: list[Decimal]) -> Receipt:
    return Receipt(number, sum(prices, Decimal()))
