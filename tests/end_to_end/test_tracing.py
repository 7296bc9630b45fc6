"""One span per attempt, below the span of its enqueue: in a file, and at a collector."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from forq import Client
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until, whole_lines

tracer = TracerProvider().get_tracer("producer")


def create(forq: Forq, name: str, function: str, *options: str) -> None:
    forq.ctl("create", name, "--handler", f"spans:{function}", "--path", str(HANDLERS), *options)


def spans_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(file)]


@pytest.mark.parametrize("function", ["inside", "inside_async"])
def test_an_attempt_is_a_span_between_its_enqueue_and_the_spans_of_its_handler(
    redis_url: str, tmp_path: Path, function: str
) -> None:
    file = tmp_path / "traces.jsonl"
    with running(redis=redis_url, settings=f'tracing = "file:{file}"') as forq:
        create(forq, "q", function)
        with tracer.start_as_current_span("order") as order:
            job_id = Client(redis_url).queue("q").enqueue(1, identifier="order 7")
        wait_until(lambda: forq.queue_status("q")["done"] == 1)
        forq.stop()
        attempt, inside = sorted(spans_in(file), key=lambda span: span["name"], reverse=True)
    context = order.get_span_context()
    assert attempt["name"] == "process q"
    assert attempt["kind"] == "SpanKind.CONSUMER"
    assert attempt["context"]["trace_id"] == f"0x{context.trace_id:032x}"
    assert attempt["parent_id"] == f"0x{context.span_id:016x}"
    assert attempt["attributes"]["messaging.message.id"] == job_id
    assert attempt["attributes"]["messaging.destination.name"] == "q"
    assert attempt["attributes"]["forq.identifier"] == "order 7"
    assert (inside["name"], inside["parent_id"]) == ("inside", attempt["context"]["span_id"])


def test_each_attempt_is_a_span_and_a_failed_one_has_the_error(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    with running(redis=redis_url, settings=f'tracing = "file:{file}"') as forq:
        create(forq, "q", "inside", "--set=min_backoff=10ms")
        with tracer.start_as_current_span("order") as order:
            Client(redis_url).queue("q").enqueue("fail once")
        Client(redis_url).queue("q").enqueue("without a trace")
        wait_until(lambda: forq.queue_status("q")["done"] == 2)
        forq.stop()
        attempts = [span for span in spans_in(file) if span["name"] == "process q"]
    by_number = {span["attributes"]["forq.attempt"]: span for span in attempts if span["parent_id"]}
    assert set(by_number) == {1, 2}
    assert by_number[1]["status"]["status_code"] == "ERROR"
    assert by_number[1]["events"][0]["attributes"]["exception.message"] == "no"
    assert by_number[2]["status"]["status_code"] == "UNSET"
    assert {span["context"]["trace_id"] for span in by_number.values()} == {
        f"0x{order.get_span_context().trace_id:032x}"
    }
    assert len(attempts) == 3


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OTLP collector on loopback, and the requests that it received."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


def test_spans_reach_a_collector_when_the_process_ends_normally(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
        with running(redis=redis_url, settings='tracing = "otlp"') as forq:
            create(forq, "q", "inside")
            Client(redis_url).queue("q").enqueue_many([1] * 20)
            wait_until(lambda: forq.queue_status("q")["done"] == 20)
            forq.stop()
    resources = [resource for request in received for resource in request.resource_spans]
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert [span.name for span in spans].count("process q") == 20
    named = {a.value.string_value for r in resources for a in r.resource.attributes if a.key == "service.name"}
    assert named == {"shop"}


def test_a_missing_collector_does_not_affect_jobs(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with running(redis=redis_url, settings='tracing = "otlp"') as forq:
        create(forq, "q", "inside")
        Client(redis_url).queue("q").enqueue_many([1] * 20)
        wait_until(lambda: forq.queue_status("q")["done"] == 20)
        assert forq.stop() == 0


def test_an_unwritable_file_loses_spans_but_no_job(redis_url: str, tmp_path: Path) -> None:
    with running(redis=redis_url, settings=f'tracing = "file:{tmp_path}/missing/spans"') as forq:
        create(forq, "q", "inside")
        Client(redis_url).queue("q").enqueue(1)
        wait_until(lambda: forq.queue_status("q")["done"] == 1)
        assert "jobs run without spans" in forq.ctl("logs", "q")
