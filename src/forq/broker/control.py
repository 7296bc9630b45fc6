"""Requests to supervisors through Redis: sent by clients and clerks, read and answered by the pulse of the supervisor.

1. A requester stores a request in the list of one supervisor, with a deadline in server time (request).
2. Its pulse takes requests from the list before anything else, so none is carried out twice (take).
3. The answer goes to a key that both sides derive from the processor and the request's id (answer).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from forq.api_types import SupervisorInfo
from forq.broker.keys import answer_key, control_base, taken_key
from forq.broker.link import Link
from forq.broker.scripts import OK, error_for, script
from forq.errors import ForqError, InvalidData, OutcomeUnknown, RedisUnavailable, TimedOut
from forq.job import new_id
from forq.procs import jsonrpc
from forq.redis_url import database_of
from forq.remote_control import check_allowed

# A supervisor must read a request within this time. Pulse is woken at once; if the message is lost, it reads the list
# with its next heartbeat.
READ_SECONDS = 10.0
# How long a requester waits for the answer, besides the time that the request itself may take. Shorter than forqctl's
# timeout, so that it can print what is known about the request.
ANSWER_SECONDS = 20.0
# Longest blocking read, so that a dead connection is noticed.
MAX_BLOCK_SECONDS = 5.0
RETRY_PAUSE_SECONDS = 0.1
MAX_REQUEST_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Sent:
    """A stored request. `read_by`: the monotonic time after which it is no longer carried out."""

    processor: str
    host: str
    id: str
    method: str
    read_by: float


@dataclass(frozen=True, slots=True)
class TakenRequest:
    """A request that pulse has taken: not checked yet. `until`: the monotonic time of its deadline."""

    id: str
    until: float
    body: bytes


@dataclass(frozen=True, slots=True)
class Taken:
    requests: list[TakenRequest]
    left: int
    late: int
    repeated: int
    malformed: int


class Control:
    """The requests of a prefix."""

    def __init__(self, link: Link, prefix: str, now: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._base = control_base(prefix)
        self._db = database_of(link.url)
        self._now = now

    def send(
        self,
        target: SupervisorInfo,
        method: str,
        params: dict[str, Any],
        *,
        read_seconds: float = READ_SECONDS,
        request_id: str | None = None,
    ) -> Sent:
        """Stores a request. PermissionRefused if the supervisor does not accept it; it checks that again itself."""
        check_allowed(method, target)
        processor, request_id = target["processor"], request_id or new_id()
        body = orjson.dumps({"method": method, "params": params})
        if len(body) > MAX_REQUEST_BYTES:
            raise InvalidData(f"the request is too large: at most {MAX_REQUEST_BYTES} bytes are allowed")
        limit_ms = max(1, round(read_seconds * 1000))
        reply = self._link.run(script("request"), self._base, processor, request_id, limit_ms, self._db, body)
        if reply[0] != OK:
            raise error_for(processor, reply)
        # The server's time of the deadline is earlier: it began before this reply arrived.
        return Sent(processor, target["host"], request_id, method, self._now() + reply[1] / 1000)

    def read_answer(self, sent: Sent, block_seconds: float = 0.0) -> Any:
        """The result or ForqError of a request; None if there is no answer within `block_seconds`."""
        key = answer_key(self._base, sent.processor, sent.id)
        if block_seconds > 0:
            popped = self._link.call("BLPOP", key, f"{max(0.001, block_seconds):.3f}")
            line = None if popped is None else popped[1]
        else:
            line = self._link.call("LPOP", key)
        if line is None:
            return None
        value = jsonrpc.read_answer(line)[1]
        return {} if value is None else value

    def wait_for_answer(self, sent: Sent, seconds: float) -> Any:
        """The result of a request; raises its error. TimedOut says what is known about the request."""
        deadline = self._now() + seconds
        longest_seconds = min(MAX_BLOCK_SECONDS, self._link.timeout_seconds / 2)
        is_read = False
        while True:
            limit = deadline if is_read else min(deadline, sent.read_by)
            try:
                value = self.read_answer(sent, min(longest_seconds, max(0.001, limit - self._now())))
            except RedisUnavailable as exc:
                # The answer, if it was popped, is lost with the connection.
                raise OutcomeUnknown(f"{exc}; {sent.method} may or may not have been carried out") from None
            if isinstance(value, ForqError):
                raise value
            if value is not None:
                return value
            if self._now() >= limit:
                if is_read or not self.is_read(sent) or limit == deadline:
                    raise self.timed_out(sent)
                is_read = True

    def is_read(self, sent: Sent) -> bool:
        """Whether the supervisor has taken the request."""
        return bool(self._link.call("EXISTS", taken_key(self._base, sent.processor, sent.id)))

    def timed_out(self, sent: Sent) -> TimedOut:
        """The error for a request without an answer."""
        where = f"supervisor {sent.processor} on host {sent.host}"
        if self.is_read(sent):
            return TimedOut(
                f"{where} has read the request {sent.method}, but has not answered in time: it may or may not have "
                "been carried out"
            )
        if self._now() >= sent.read_by:
            return TimedOut(
                f"{where} has not read the request {sent.method} in time: it was not carried out, and will not be; "
                "see: forqctl status --all"
            )
        return TimedOut(
            f"{where} has not answered the request {sent.method} in time: it may still be carried out within "
            f"{sent.read_by - self._now():.1f} s"
        )

    def take(self, processor: str, count: int) -> Taken:
        """For pulse: removes requests from the list of this supervisor."""
        # Before the call, and a millisecond less for rounding: the deadline is never later than that in server time.
        began = self._now() - 0.001
        _, left, late, repeated, malformed, flat = self._link.run(script("take"), self._base, processor, count)
        requests = [
            TakenRequest(flat[at].decode(), began + flat[at + 1] / 1000, flat[at + 2]) for at in range(0, len(flat), 3)
        ]
        return Taken(requests, left, late, repeated, malformed)

    def answer(self, processor: str, request_id: str, line: str | bytes) -> bool:
        """For pulse: stores the answer; False if it was answered before, or never taken. May be repeated."""
        return bool(self._link.run(script("answer"), self._base, processor, request_id, self._db, line)[1])
