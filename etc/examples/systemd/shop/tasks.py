"""The background jobs of the shop."""

import forq

app = forq.App("shop")


@app.task
def bill(order: int) -> str:
    return f"order {order} is billed"
