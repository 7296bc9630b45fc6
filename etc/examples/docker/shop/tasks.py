"""What the worker runs."""

import time

import forq

app = forq.App("shop", timeout=1)


@app.task(timeout="1m")
def bill(order: int, seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return f"order {order} is billed"
