"""One look at everything that metrics and health are about: the supervisor, Redis, and what workers write."""

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
from forq.procs.lines import Lines
from forq.procs.scoreboard import LOOKS, REDIS_ERRORS, SUPERVISOR_ERRORS, Scoreboard, State, Tallied, Tallies

SUPERVISOR_SECONDS = 2.0
REDIS_SECONDS = 1.0
# Queues per round trip: between two of them the server serves others.
QUEUES_PER_CALL = 100
MAX_ANSWER_BYTES = 16 << 20
# Beyond its timeout a job is being ended; that takes a moment.
ENDING_SECONDS = 5.0


@dataclass
class Work:
    """What the workers of a queue do now. `started_ns`: when one of them began a job last (0: none has)."""

    busy: int = 0
    longest_seconds: float = 0.0
    started_ns: int = 0
    # How long each running job has been running, and how long it may (0: as long as it likes).
    running: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Look:
    """What was seen. `status` None: the supervisor did not answer; `round_trip_seconds` None: Redis did not.

    `counts` has None for a queue that is not in Redis, and nothing while Redis does not answer.
    """

    status: dict[str, Any] | None
    status_error: str
    counts: dict[str, Counts | None]
    redis_error: str
    round_trip_seconds: float | None
    tallied: dict[str, Tallied]
    work: dict[str, Work]
    now_ns: int
    took_seconds: float
    looks: int
    errors: dict[str, int]
    # Queues that no supervisor serves.
    unserved: list[str] = field(default_factory=list)


class Looker:
    def __init__(self, *, url: str, prefix: str, control_socket: str, board: Scoreboard, tallies: Tallies) -> None:
        self._link = Link(url, name="forq-metrics", timeout_seconds=REDIS_SECONDS)
        self._prefix = prefix
        self._control_socket = control_socket
        self._board = board
        self._tallies = tallies
        self._names: list[str] = []

    def look(self) -> Look:
        began = time.monotonic()
        header = self._tallies.header
        status: dict[str, Any] | None = None
        status_error = redis_error = ""
        try:
            status = ask_status(self._control_socket, SUPERVISOR_SECONDS)
            self._names = [queue["name"] for queue in status["queues"]]
        except ForqError as exc:
            status_error = str(exc)
            header[SUPERVISOR_ERRORS] += 1
        counts: dict[str, Counts | None] = {}
        unserved: list[str] = []
        round_trip: float | None = None
        try:
            round_trip = self._ping()
            unserved = Registry(self._link, self._prefix).without_supervisor(self._names)
            counts = self._counts([*self._names, *unserved])
        except ForqError as exc:
            redis_error, counts, unserved, round_trip = str(exc), {}, [], None
            header[REDIS_ERRORS] += 1
        header[LOOKS] += 1
        now_ns = time.monotonic_ns()
        return Look(
            status=status,
            status_error=status_error,
            counts=counts,
            redis_error=redis_error,
            round_trip_seconds=round_trip,
            tallied=self._tallies.read(),
            work=read_work(self._board, now_ns),
            now_ns=now_ns,
            took_seconds=time.monotonic() - began,
            looks=header[LOOKS],
            errors={"redis": header[REDIS_ERRORS], "supervisor": header[SUPERVISOR_ERRORS]},
            unserved=[name for name in unserved if counts[name] is not None],
        )

    def _ping(self) -> float:
        """Once for the connection, which may have to be made, and once for the time."""
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
                raise RedisUnavailable(f"the counts of {len(names)} queues took more than {SUPERVISOR_SECONDS:g} s")
            found |= counts_of(self._link, self._prefix, names[at : at + QUEUES_PER_CALL])
        return found


def read_work(board: Scoreboard, now_ns: int) -> dict[str, Work]:
    """What all workers do, by queue."""
    found: dict[str, Work] = {}
    for number in range(board.highest):
        slot = board.slot(number)
        if slot.state == State.EMPTY:
            continue
        work = found.setdefault(slot.queue, Work())
        work.started_ns = max(work.started_ns, slot.started_ns)
        running = slot.running_since_ns()
        if running is None or slot.state not in (State.BUSY, State.SETTLING):
            continue
        seconds = max(0.0, (now_ns - running[1]) / 1e9)
        limit = slot.timeout_ms / 1000
        work.busy += 1
        work.longest_seconds = max(work.longest_seconds, seconds)
        work.running.append((seconds, limit and limit + slot.lenience_ms / 1000 + ENDING_SECONDS))
    return found


def ask_status(path: str, seconds: float) -> dict[str, Any]:
    """`status` without counts. Raises SupervisorUnreachable if there is no answer in time."""
    deadline = time.monotonic() + seconds
    lines = Lines(MAX_ANSWER_BYTES)
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
        raise SupervisorUnreachable(f"the supervisor at {path} sent something that is no status")
    return answer


def queues_of(look: Look) -> Iterable[dict[str, Any]]:
    return () if look.status is None else look.status["queues"]
