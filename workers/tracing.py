"""One OpenTelemetry span per attempt, below the span in which the job was enqueued. Needs forq[tracing].

`tracing = "otlp"` sends them where the usual OTEL_EXPORTER_OTLP_* variables say, "file:PATH" writes a line each.
They are sent in batches by a thread of the SDK's: no job waits for that, and a process that is killed takes some along.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from forq.job import FILE, OTLP, Job
from forq.version import VERSION

# What a collector that does not answer may take of the end of a process.
FLUSH_SECONDS = 2.0


class Tracing:
    """Makes the spans of one process; to be made after the fork."""

    def __init__(self, setting: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._file: IO[str] | None = None
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first.
        resource = Resource({"service.name": "forq", "service.version": VERSION}).merge(Resource.create())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter(setting)))
        self._tracer = self._provider.get_tracer("forq", VERSION)
        # What handlers make with the global tracer is below the span of their attempt, and goes the same way.
        from opentelemetry import trace

        trace.set_tracer_provider(self._provider)

    def _exporter(self, setting: str) -> Any:
        if setting == OTLP:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        self._file = open(  # noqa: SIM115
            setting.removeprefix(FILE), "a", encoding="utf-8", buffering=1, opener=_private
        )
        return ConsoleSpanExporter(out=self._file, formatter=lambda span: span.to_json(indent=None) + "\n")

    @contextmanager
    def attempt(self, job: Job) -> Iterator[None]:
        """The span of the attempt that runs inside; what it raises is in the span."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(job.trace or {})
        attributes: dict[str, str | int] = {
            "messaging.system": "forq",
            "messaging.operation.type": "process",
            "messaging.destination.name": job.queue,
            "messaging.message.id": job.id,
            "forq.identifier": job.identifier,
            "forq.attempt": 1 + job.retry_count + job.stall_count + job.timeout_count,
            "forq.fence": job.fence,
        }
        if job.type is not None:
            attributes["forq.type"] = job.type
        name = f"process {job.queue}"
        with self._tracer.start_as_current_span(name, parent, SpanKind.CONSUMER, attributes):
            yield

    def close(self) -> None:
        """Sends what is left, for a moment at most. The SDK's own timeouts do not hold while its exporter tries again:
        what goes on after that ends with the process."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)
        if self._file is not None and not closing.is_alive():
            self._file.close()


def _private(path: str, flags: int) -> int:
    """An exception's text, which spans have, may tell what is in a job."""
    return os.open(path, flags, 0o600)
