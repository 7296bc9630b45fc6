"""The metrics service: /metrics for Prometheus and /healthz for probes, from at most one snapshot per second."""

import json
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from forq.broker.inspect import Counts, counts_of
from forq.broker.keys import registry_key
from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.errors import ExitCode, ForqError, RedisUnavailable, SupervisorUnreachable
from forq.health import CONSUMING_STATES, Fault, faults_of_queue, faults_of_supervisor
from forq.procs import jsonrpc
from forq.procs.context import Context
from forq.procs.lines import LineBuffer
from forq.procs.liveness import expect_busy
from forq.procs.loop import service_loop
from forq.procs.scoreboard import (
    REDIS_ERRORS,
    SNAPSHOTS,
    SUPERVISOR_ERRORS,
    AttemptStats,
    QueueStats,
    Scoreboard,
    State,
)
from forq.services.http_server import HttpServer, Request, Response
from forq.services.rpc import RpcServer
from forq.settings import WORK

SNAPSHOT_SECONDS = 1.0
# A fault of a queue counts only if a second snapshot shows it too. By then a dead process is replaced, a new queue
# is served, and a job that just became due (its waiting time includes its delay) has started.
CONFIRM_SECONDS = 0.5
# Two snapshots, with a slow supervisor and a slow Redis.
LONGEST_SNAPSHOT_SECONDS = 15.0

INDEX = b"forq\n\n/metrics   for Prometheus\n/healthz   200 if jobs are consumed, else 503 with the reasons\n"
SUPERVISOR_SECONDS = 2.0
REDIS_SECONDS = 1.0
# Queues per round trip, so that the server can serve other clients in between.
QUEUES_PER_CALL = 100
MAX_ANSWER_BYTES = 16 << 20
# Longest time to end a job after its timeout.
ENDING_SECONDS = 5.0


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

    def _current_snapshot(self) -> "Snapshot":
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


@dataclass
class Activity:
    """The running jobs of a queue. `started_ns`: start of the latest job (0: none yet)."""

    busy: int = 0
    longest_seconds: float = 0.0
    started_ns: int = 0
    # Run time and time limit of each running job, in seconds (limit 0: none).
    running: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """`status` is None if the supervisor did not answer, `round_trip_seconds` if Redis did not.

    `counts` has None for a queue that is not in Redis, and is empty if Redis did not answer.
    """

    status: dict[str, Any] | None
    status_error: str
    counts: dict[str, Counts | None]
    redis_error: str
    round_trip_seconds: float | None
    stats: dict[str, QueueStats]
    activity: dict[str, Activity]
    now_ns: int
    took_seconds: float
    snapshots: int
    errors: dict[str, int]
    # Served by no supervisor.
    unserved: list[str] = field(default_factory=list)


class Sampler:
    """Takes snapshots of the supervisor, Redis and the workers."""

    def __init__(self, *, url: str, prefix: str, control_socket: str, board: Scoreboard, stats: AttemptStats) -> None:
        self._link = Link(url, name="forq-metrics", timeout_seconds=REDIS_SECONDS)
        self._prefix = prefix
        self._control_socket = control_socket
        self._board = board
        self._stats = stats
        self._names: list[str] = []

    def sample(self) -> Snapshot:
        began = time.monotonic()
        header = self._stats.header
        status: dict[str, Any] | None = None
        status_error = redis_error = ""
        try:
            status = request_status(self._control_socket, SUPERVISOR_SECONDS)
            self._names = [queue["name"] for queue in status["queues"]]
        except ForqError as exc:
            status_error = str(exc)
            header[SUPERVISOR_ERRORS] += 1
        counts: dict[str, Counts | None] = {}
        unserved: list[str] = []
        round_trip: float | None = None
        try:
            round_trip = self._ping()
            unserved = Registry(self._link, self._prefix).queues_without_supervisor(self._names)
            counts = self._counts([*self._names, *unserved])
        except ForqError as exc:
            redis_error, counts, unserved, round_trip = str(exc), {}, [], None
            header[REDIS_ERRORS] += 1
        header[SNAPSHOTS] += 1
        now_ns = time.monotonic_ns()
        return Snapshot(
            status=status,
            status_error=status_error,
            counts=counts,
            redis_error=redis_error,
            round_trip_seconds=round_trip,
            stats=self._stats.read(),
            activity=read_activity(self._board, now_ns),
            now_ns=now_ns,
            took_seconds=time.monotonic() - began,
            snapshots=header[SNAPSHOTS],
            errors={"redis": header[REDIS_ERRORS], "supervisor": header[SUPERVISOR_ERRORS]},
            unserved=[name for name in unserved if counts[name] is not None],
        )

    def _ping(self) -> float:
        """The first PING may have to connect; the second is measured."""
        at = registry_key(self._prefix)
        self._link.call("PING", at=at)
        began = time.perf_counter()
        self._link.call("PING", at=at)
        return time.perf_counter() - began

    def _counts(self, names: list[str]) -> dict[str, Counts | None]:
        deadline = time.monotonic() + SUPERVISOR_SECONDS
        found: dict[str, Counts | None] = {}
        for at in range(0, len(names), QUEUES_PER_CALL):
            if time.monotonic() > deadline:
                raise RedisUnavailable(
                    f"reading the counts of {len(names)} queues took more than {SUPERVISOR_SECONDS:g} s"
                )
            found |= counts_of(self._link, self._prefix, names[at : at + QUEUES_PER_CALL])
        return found


def read_activity(board: Scoreboard, now_ns: int) -> dict[str, Activity]:
    """By queue."""
    found: dict[str, Activity] = {}
    for number in range(board.highest):
        slot = board.slot(number)
        if slot.state == State.EMPTY:
            continue
        activity = found.setdefault(slot.queue, Activity())
        activity.started_ns = max(activity.started_ns, slot.started_ns)
        running = slot.running_since_ns()
        if running is None or slot.state not in (State.BUSY, State.SETTLING):
            continue
        seconds = max(0.0, (now_ns - running[1]) / 1e9)
        limit = slot.timeout_ms / 1000
        activity.busy += 1
        activity.longest_seconds = max(activity.longest_seconds, seconds)
        activity.running.append((seconds, limit and limit + slot.lenience_ms / 1000 + ENDING_SECONDS))
    return found


def request_status(path: str, seconds: float) -> dict[str, Any]:
    """The supervisor's `status`, without counts. Raises SupervisorUnreachable if there is no reply in time."""
    deadline = time.monotonic() + seconds
    lines = LineBuffer(MAX_ANSWER_BYTES)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
            control.settimeout(seconds)
            control.connect(path)
            control.sendall(jsonrpc.request(1, "status", {"counts": False}))
            while (line := lines.pop()) is None:
                control.settimeout(max(deadline - time.monotonic(), 0.001))
                received = control.recv(1 << 18)
                if not received:
                    raise SupervisorUnreachable(f"the supervisor at {path} closed the connection")
                lines.push(received)
                if time.monotonic() > deadline:
                    raise TimeoutError
    except TimeoutError as exc:
        raise SupervisorUnreachable(f"no answer from the supervisor at {path} within {seconds:g} s") from exc
    except OSError as exc:
        raise SupervisorUnreachable(f"cannot reach the supervisor at {path}: {exc.strerror or exc}") from exc
    _, answer = jsonrpc.read_answer(line)
    if isinstance(answer, ForqError):
        raise answer
    if not isinstance(answer, dict):
        raise SupervisorUnreachable(f"the supervisor at {path} sent an invalid status")
    return answer


def queues_of(snapshot: Snapshot) -> Iterable[dict[str, Any]]:
    return () if snapshot.status is None else snapshot.status["queues"]


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
