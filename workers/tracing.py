"""One OpenTelemetry span per attempt, a child of the span that enqueued the job. Needs forq[tracing].

`tracing = "otlp"` sends spans to the collector of the OTEL_EXPORTER_OTLP_* variables; "file:PATH" writes one line per
span. A thread of the SDK sends them in batches: jobs do not wait, but a killed process loses its last spans.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from forq.job import FILE, OTLP, Job
from forq.version import VERSION

# A collector that does not answer delays the end of a process by at most this.
FLUSH_SECONDS = 2.0


class Tracing:
    """The spans of one process. Create it after the fork."""

    def __init__(self, setting: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._file: IO[str] | None = None
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        resource = Resource({"service.name": "forq", "service.version": VERSION}).merge(Resource.create())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter(setting)))
        self._tracer = self._provider.get_tracer("forq", VERSION)
        # Spans that handlers make with the global tracer become children of their attempt's span.
        from opentelemetry import trace

        trace.set_tracer_provider(self._provider)

    def _exporter(self, setting: str) -> Any:
        if setting == OTLP:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        self._file = open(  # noqa: SIM115
            setting.removeprefix(FILE), "a", encoding="utf-8", buffering=1, opener=_open_private
        )
        return ConsoleSpanExporter(out=self._file, formatter=lambda span: span.to_json(indent=None) + "\n")

    @contextmanager
    def attempt(self, job: Job) -> Iterator[None]:
        """The span of one attempt; records its exception."""
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
        """Sends the remaining spans for at most FLUSH_SECONDS. The SDK's own timeouts do not limit the exporter's
        retries; those end with the process."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)
        if self._file is not None and not closing.is_alive():
            self._file.close()


def _open_private(path: str, flags: int) -> int:
    """Spans contain exception texts, which may contain job data."""
    return os.open(path, flags, 0o600)
