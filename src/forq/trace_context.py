"""The trace context of OpenTelemetry that a job takes along: where it was enqueued, in the words of W3C trace context.

Nothing is imported here that the process has not imported itself: without OpenTelemetry this costs one look at a dict.
"""

import sys
from importlib.util import find_spec

TraceContext = dict[str, str]

# What the setting `tracing` may be.
OFF, OTLP, FILE = "off", "otlp", "file:"
_PACKAGES = {OTLP: "opentelemetry.exporter.otlp.proto.http", FILE: "opentelemetry.sdk"}


def current_trace() -> TraceContext | None:
    """The context of the span that is current in this thread or task; None if there is none."""
    tracing = sys.modules.get("opentelemetry.trace")
    # redis-py imports it wherever it is installed: most processes that have it have no span.
    if tracing is None or not tracing.get_current_span().get_span_context().is_valid:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: TraceContext = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier or None


def can_trace(setting: str) -> bool:
    """Whether the packages are there that this setting needs."""
    try:
        return find_spec(_PACKAGES[FILE if setting.startswith(FILE) else setting]) is not None
    except ModuleNotFoundError:
        return False
