"""Snapshots of the supervisor, Redis and the workers, for the metrics service and the dashboard."""

import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from forq.broker.inspect import Counts, counts_of
from forq.broker.keys import registry_key
from forq.broker.link import Link
from forq.broker.registry import Registry
from forq.errors import ForqError, RedisUnavailable, SupervisorUnreachable
from forq.procs import jsonrpc
from forq.procs.lines import LineBuffer
from forq.procs.scoreboard import (
    REDIS_ERRORS,
    SNAPSHOTS,
    SUPERVISOR_ERRORS,
    AttemptStats,
    QueueStats,
    Scoreboard,
    State,
)

SUPERVISOR_SECONDS = 2.0
REDIS_SECONDS = 1.0
# Queues per round trip, so that the server can serve other clients in between.
QUEUES_PER_CALL = 100
MAX_ANSWER_BYTES = 16 << 20
# Longest time to end a job after its timeout.
ENDING_SECONDS = 5.0


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

    def __init__(
        self,
        *,
        url: str,
        prefix: str,
        control_socket: str,
        board: Scoreboard,
        stats: AttemptStats,
        name: str = "forq-metrics",
        redis_seconds: float = REDIS_SECONDS,
    ) -> None:
        self._link = Link(url, name=name, timeout_seconds=redis_seconds)
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
