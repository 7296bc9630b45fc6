# reporting.py
from collections.abc import Iterator
from typing import Any

import sentry_sdk
from sentry_sdk.integrations.logging import ignore_logger

import forq

FLUSH_SECONDS = 5


def report_to_sentry(app: forq.App, *, every_attempt: bool = False) -> None:
    """Reports exceptions of the jobs of this app: of the attempt after which a job is dead, or of every attempt."""

    @app.lifespan
    def client() -> Iterator[None]:
        sentry_sdk.init()  # reads SENTRY_DSN, SENTRY_ENVIRONMENT and SENTRY_RELEASE
        ignore_logger("forq")  # its messages are about forq, not about your code
        yield
        sentry_sdk.flush(FLUSH_SECONDS)

    @app.around
    def report(job: forq.Job) -> Iterator[None]:
        with sentry_sdk.isolation_scope() as scope:
            scope.set_transaction_name(job.type or job.queue)
            scope.set_tags({"queue": job.queue, "task": job.type, "job": job.id, "attempt": str(job.attempt)})
            try:
                yield
            except forq.Reschedule:  # Snooze and RetryAt: the job asks to run again
                raise
            except Exception as exc:
                if every_attempt or is_final(job, exc):
                    sentry_sdk.capture_exception(exc)
                raise

    def is_final(job: forq.Job, exc: Exception) -> bool:
        task = app.tasks.get(job.type or "")
        return job.is_last or isinstance(exc, (forq.Permanent, *(task.dead_on if task else ())))


def report_dead(data: Any, job: forq.Job) -> None:
    """For `on_dead` of a queue: reports jobs whose processes were killed. The hook has reported all others."""
    _, dead, error = data
    if error["kind"] == "stall":
        with sentry_sdk.isolation_scope() as scope:
            scope.set_tags({"queue": job.queue, "task": dead["type"], "job": dead["id"]})
            sentry_sdk.capture_message(f"{dead['type']}: {error['message']}", "error")
