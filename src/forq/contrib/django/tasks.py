"""The task that delivers the outboxes. Projects with FORQ["OUTBOX"] have it."""

import asyncio
import logging
import threading

from django.db import Error as DatabaseProblem
from django.db import connections

from forq.app.app import App
from forq.contrib.django.outbox_settings import OutboxSettings
from forq.errors import RedisUnavailable

log = logging.getLogger("forq.outbox")

TASK_NAME = "forq.deliver_outbox"
# A delivery that takes longer continues at the next tick.
ROUND_SECONDS = 30.0
TIMEOUT = "5m"


def add_deliverer(app: App, settings: OutboxSettings) -> None:
    """Declares the task, its schedule and its queue."""
    if settings.queue not in app.queue_names():
        app.queue(settings.queue, concurrency=1)
    # A failed delivery is repeated at the next tick. The default "skip" of a schedule prevents two at a time.
    app.task(name=TASK_NAME, queue=settings.queue, every=settings.every, max_retries=0, timeout=TIMEOUT)(deliver_outbox)


async def deliver_outbox() -> None:
    """Sends the jobs that are left in the outboxes of all databases.

    A coroutine, because an app with an async hook allows async tasks only. The hooks of the app do not run around it:
    one that opens a transaction would keep a delivery from committing its steps.
    """
    stop = threading.Event()
    try:
        await asyncio.to_thread(deliver_all, stop)
    finally:
        stop.set()


def deliver_all(stop: threading.Event) -> None:
    """One call for each database. An outage of one does not delay the others. Closes the connections of the thread."""
    from forq.contrib.django.outbox import deliver
    from forq.contrib.django.project import project_app

    settings = project_app().outbox_settings
    try:
        for alias in () if settings is None else settings.databases:
            try:
                done = deliver(alias, seconds=ROUND_SECONDS, stop=stop)
            except (RedisUnavailable, DatabaseProblem) as exc:
                log.warning("could not deliver the outbox of database %s; the next run tries again: %s", alias, exc)
            else:
                if done.sent:
                    log.info("delivered from the outbox of database %s: %d", alias, done.sent)
    finally:
        connections.close_all()
