# tasks.py
import os
import time

from reporting import report_dead, report_to_sentry

import forq

app = forq.App("shop")
report_to_sentry(app, every_attempt="EVERY_ATTEMPT" in os.environ)
app.queue("shop", max_timeouts=0, on_dead=report_dead)


@app.task(max_retries=1, backoff=0)
def bill(order: int) -> None:
    raise RuntimeError(f"order {order} has no price")


@app.task(dead_on=(LookupError,))
async def ship(order: int) -> None:
    raise LookupError(f"order {order} has no address")


@app.task
def wait(order: int) -> None:
    raise forq.Snooze(60, f"order {order} is not paid yet")


@app.task(timeout="500ms")
def print_label(order: int) -> None:
    time.sleep(60)
