"""The metrics service: /metrics for Prometheus and /healthz for probes, from at most one snapshot per second."""

import json
import socket
import time
from typing import Any

from forq.broker.inspect import Counts
from forq.errors import ExitCode
from forq.health import CONSUMING_STATES, Fault, faults_of_queue, faults_of_supervisor
from forq.procs.context import Context
from forq.procs.liveness import expect_busy
from forq.procs.loop import service_loop
from forq.procs.scoreboard import AttemptStats
from forq.services.http_server import HttpServer, Request, Response
from forq.services.rpc import RpcServer
from forq.services.snapshot import Activity, Sampler, Snapshot, queues_of
from forq.settings import WORK

SNAPSHOT_SECONDS = 1.0
# A fault of a queue counts only if a second snapshot shows it too. By then a dead process is replaced, a new queue
# is served, and a job that just became due (its waiting time includes its delay) has started.
CONFIRM_SECONDS = 0.5
# Two snapshots, with a slow supervisor and a slow Redis.
LONGEST_SNAPSHOT_SECONDS = 15.0

INDEX = b"forq\n\n/metrics   for Prometheus\n/healthz   200 if jobs are consumed, else 503 with the reasons\n"


def run_metrics(context: Context, listener: socket.socket, leash: socket.socket) -> int:
    loop = service_loop()
    RpcServer(loop, leash, {})
    HttpServer(loop, listener, Endpoints(context).respond)
    loop.run()
    return ExitCode.STOPPED


class Endpoints:
    def __init__(self, context: Context) -> None:
        self._health_seconds = context.health_seconds
        self._sampler = Sampler(
            url=context.url,
            prefix=context.prefix,
            control_socket=context.control_socket,
            board=context.scoreboard,
            stats=context.stats or AttemptStats(),
        )
        self._snapshot: Snapshot | None = None
        self._taken_at = 0.0
        self._faults: list[Fault] = []
        self._rendered: dict[str, Response] = {}

    def respond(self, request: Request) -> Response:
        if request.path == "/metrics":
            return self._metrics(request.headers.get("accept", ""))
        if request.path == "/healthz":
            return self._healthz()
        if request.path == "/":
            return Response(INDEX)
        return Response(b"not found: use /metrics or /healthz\n", 404)

    def _healthz(self) -> Response:
        self._current_snapshot()
        body = {"ok": not self._faults, "faults": [fault.describe() for fault in self._faults]}
        text = json.dumps(body, separators=(",", ":")) + "\n"
        return Response(text.encode(), 503 if self._faults else 200, "application/json")

    def _metrics(self, accept: str) -> Response:
        # prometheus_client is an optional dependency, and no other process should pay for its import.
        from forq.services.metrics_page import render

        snapshot = self._current_snapshot()
        if accept not in self._rendered:
            body, content_type = render(snapshot, healthy=not self._faults, accept=accept)
            # Only the last format is cached.
            self._rendered = {accept: Response(body, content_type=content_type)}
        return self._rendered[accept]

    def _current_snapshot(self) -> Snapshot:
        if self._snapshot is not None and time.monotonic() - self._taken_at < SNAPSHOT_SECONDS:
            return self._snapshot
        expect_busy(LONGEST_SNAPSHOT_SECONDS)
        known = _queues_in(self._faults)
        snapshot = self._sampler.sample()
        faults = faults_in(snapshot, self._health_seconds)
        seen = _queues_in(faults)
        if seen - known:
            time.sleep(CONFIRM_SECONDS)
            snapshot = self._sampler.sample()
            faults = [fault for fault in faults_in(snapshot, self._health_seconds) if fault.queue in {None, *seen}]
        self._snapshot, self._faults, self._rendered = snapshot, faults, {}
        self._taken_at = time.monotonic()
        return snapshot


def _queues_in(faults: list[Fault]) -> set[str]:
    return {fault.queue for fault in faults if fault.queue is not None}


# Excludes failed logs, which stop no job, and queues that are served elsewhere.
CHECKS = ("service", "state", "process")


def faults_in(snapshot: Snapshot, health_seconds: float) -> list[Fault]:
    """Reasons why jobs are not consumed; empty if healthy."""
    faults = []
    if snapshot.status is None:
        faults.append(Fault("supervisor", snapshot.status_error))
    else:
        faults += [fault for fault in faults_of_supervisor(snapshot.status) if fault.check in CHECKS]
    if snapshot.round_trip_seconds is None:
        faults.append(Fault("redis", snapshot.redis_error))
    starved = _waiting_for_capacity(snapshot)
    for queue in queues_of(snapshot):
        found = [fault for fault in faults_of_queue(queue) if fault.check in CHECKS]
        faults += found
        if queue["state"] in CONSUMING_STATES and queue["name"] not in starved and not found:
            faults += _stuck(queue, snapshot, health_seconds)
    return faults


def _waiting_for_capacity(snapshot: Snapshot) -> set[str]:
    """Queues with a process that waits for capacity units. Other queues hold those, and are checked on their own."""
    waiting = [] if snapshot.status is None else snapshot.status["capacity"]["waiting"]
    return {request["worker"].rpartition(" ")[0] for request in waiting}


def _stuck(queue: dict[str, Any], snapshot: Snapshot, health_seconds: float) -> list[Fault]:
    name = queue["name"]
    counts = snapshot.counts.get(name)
    if counts is None or not _should_consume(queue, counts, health_seconds):
        return []
    activity = snapshot.activity.get(name, Activity())
    if any(seconds < (limit or health_seconds) for seconds, limit in activity.running):
        return []
    stats = snapshot.stats.get(name)
    last_ns = max(activity.started_ns, stats.last_ns if stats is not None else 0)
    quiet = (snapshot.now_ns - last_ns) / 1e9 if last_ns else None
    if quiet is not None and quiet < health_seconds:
        return []
    since = "yet" if quiet is None else f"for {quiet:.0f} s"
    number = counts.waiting + counts.retry + counts.overdue
    waits = f"{number} jobs wait, the oldest for {counts.oldest_waiting_seconds:.0f} s"
    return [Fault("stuck", f"{waits}, and no job has started or ended {since}", name)]


def _should_consume(queue: dict[str, Any], counts: Counts, health_seconds: float) -> bool:
    """Whether a job has waited too long for no good reason."""
    if queue["mode"] != WORK or counts.paused:
        return False
    if counts.oldest_waiting_seconds is None or counts.oldest_waiting_seconds < health_seconds:
        return False
    if counts.limits is not None and (counts.limits["limited_workers"] or counts.limits["may_begin"] == 0):
        return False
    return not any(
        child["role"] == "main" and child["state"] == "starting" and child["uptime_seconds"] < health_seconds
        for child in queue["children"]
    )
