"""Pulse's part in requests that come through Redis: announces this supervisor, takes requests to it, stores answers."""

import logging
from collections.abc import Callable
from typing import Any

from forq.broker.control import Control, TakenRequest
from forq.broker.keys import queue_base
from forq.broker.link import Link
from forq.broker.supervisors import Announced, Supervisors, read_owner
from forq.errors import ForqError, InvalidData, UnknownJob, UsageError
from forq.procs import jsonrpc
from forq.procs.context import Context
from forq.procs.scoreboard import State
from forq.values import check_job_id, check_queue_name

log = logging.getLogger("forq")

# Requests taken at a time; the heartbeats come in between.
TAKEN_PER_CALL = 8
MAX_METHOD = 64


class RemoteRequests:
    """
    1. Announces this supervisor with each heartbeat. Its description is sent only when it has changed.
    2. Takes requests when a message or a heartbeat reports them, and checks their form: every writer to the list can
       store anything.
    3. Replaces the fence of a kill by the position of the worker that runs this attempt, and `forward`s the request.
    4. Stores the supervisor's answers.
    """

    def __init__(
        self,
        link: Link,
        context: Context,
        *,
        later: Callable[[float, Callable[[], None]], object],
        forward: Callable[[dict[str, Any]], None],
    ) -> None:
        self._link = link
        self._context = context
        self._supervisors = Supervisors(link, context.prefix)
        self._control = Control(link, context.prefix)
        self._later = later
        self._forward = forward
        self._sent: dict[str, Any] | None = None
        self._withdrawn = False
        self._taking = False

    def announce(self, queues: list[str]) -> None:
        """`queues`: those that this supervisor serves."""
        if self._withdrawn:
            return
        about = self._describe(queues)
        announced = self._announce(None if about == self._sent else about)
        if announced.unknown:
            announced = self._announce(about)
        self._sent = about
        if announced.waiting:
            self.take_soon()

    def withdraw(self, processor: str) -> None:
        """This supervisor stops, or an earlier run of it is known to be dead."""
        if processor == self._context.processor:
            self._withdrawn = True
        self._supervisors.withdraw(processor)

    def take_soon(self) -> None:
        if not self._taking:
            self._taking = True
            self._later(0, self._take)

    def answer(self, processor: str, request_id: str, line: str) -> None:
        """Stores an answer of the supervisor. `processor`: the name that it had when the request came. May be
        repeated."""
        self._control.answer(processor, request_id, line)

    def _announce(self, about: dict[str, Any] | None) -> Announced:
        return self._supervisors.announce(self._context.processor, self._context.expiry_ms, about)

    def _describe(self, queues: list[str]) -> dict[str, Any]:
        board = self._context.scoreboard
        slots = map(board.slot, range(board.highest))
        processes = {slot.pid for slot in slots if slot.state != State.EMPTY} - {0}
        return {
            **self._context.about,
            "queues": sorted(queues),
            "processes": len(processes),
            "expiry_ms": self._context.expiry_ms,
        }

    def _take(self) -> None:
        self._taking = False
        taken = self._control.take(self._context.processor, TAKEN_PER_CALL)
        if taken.late or taken.repeated or taken.malformed:
            log.warning(
                "dropped remote requests late=%s repeated=%s malformed=%s", taken.late, taken.repeated, taken.malformed
            )
        if taken.left:
            self.take_soon()
        for request in taken.requests:
            try:
                self._handle(request)
            except ForqError as exc:
                self._refuse(request.id, exc)

    def _handle(self, request: TakenRequest) -> None:
        method, params = read_body(request.body)
        if method == "kill":
            params = self._with_position(params)
        self._forward(
            {
                "processor": self._context.processor,
                "id": request.id,
                "until": request.until,
                "method": method,
                "params": params,
            }
        )

    def _with_position(self, params: dict[str, Any]) -> dict[str, Any]:
        """The params of a kill, with the position of the attempt in place of its fence.

        The supervisor does not know fences. But while a worker stays at one position it takes no turn, so the fence
        that Redis has for its job in that time is the fence of the attempt at that position. Order matters: the
        position is read before the fence, and the supervisor compares it afterwards.
        """
        name, job_id, fence = check_queue_name(params.get("name")), check_job_id(params.get("id")), params.get("fence")
        if not isinstance(fence, int) or isinstance(fence, bool):
            raise UsageError("kill needs the fence of the attempt: a whole number")
        positions = self._positions(name, job_id)
        owner = self._link.call("HGET", f"{queue_base(self._context.prefix, name)}:active", job_id)
        attempt = None if owner is None else read_owner(owner)
        if attempt is None or attempt.fence != fence or attempt.worker not in positions:
            raise UnknownJob(
                f"attempt {job_id}@{fence} of queue {name!r} no longer runs on host {self._context.about.get('host')}; "
                f"nothing was killed; see: forqctl why {name} {job_id}"
            )
        params = {key: value for key, value in params.items() if key != "fence"}
        return {**params, "at": {"worker": attempt.worker, "position": positions[attempt.worker]}}

    def _positions(self, name: str, job_id: str) -> dict[str, int]:
        """The packed positions of the workers of this queue that run this job."""
        board, found = self._context.scoreboard, {}
        for slot in map(board.slot, range(board.highest)):
            if slot.queue == name and slot.job.decode("utf-8", "replace") == job_id:
                running = slot.running_since_ns()
                if running is not None:
                    found[slot.worker] = running[0]
        return found

    def _refuse(self, request_id: str, error: ForqError) -> None:
        log.warning("refused a remote request request=%s error=%s", request_id, error)
        self._control.answer(self._context.processor, request_id, jsonrpc.failure(request_id, error))


def read_body(body: bytes) -> tuple[str, dict[str, Any]]:
    """The method and params of a request. The verbs check the params, as those of any client."""
    message = jsonrpc.decode(body)
    if not isinstance(message, dict) or set(message) != {"method", "params"}:
        raise InvalidData("a remote request must be an object with method and params")
    method, params = message["method"], message["params"]
    if not isinstance(method, str) or len(method) > MAX_METHOD or not isinstance(params, dict):
        raise InvalidData("method of a remote request must be a short string, and params an object")
    return method, params
