"""Requests between supervisors: carries out those that came through Redis, and sends others where the job runs."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from forq.errors import ForqError, InvalidData, RedisUnavailable, TimedOut, UnknownJob, UnknownQueue, UsageError
from forq.procs import jsonrpc
from forq.procs.loop import Loop
from forq.procs.unix_socket import Peer
from forq.remote_control import check_allowed
from forq.supervisor.control import Request
from forq.supervisor.services import Services
from forq.values import shown

log = logging.getLogger("forq")

Verb = Callable[[Request], None]

# Limits of requests that came through Redis. Their answers are stored there for a while.
MAX_PENDING = 32
MAX_ANSWER_BYTES = 512 << 10
MAX_STACKS = 500
MAX_STACK_CHARACTERS = 200_000
MAX_WAIT_SECONDS = 3600.0
# Besides the other limits: a requester elsewhere does not follow output.
LOG_PARAMS = ("name", "cursor", "lines", "job")

# Verbs that are sent elsewhere if no process of this supervisor has the queue or job.
FOUND_ELSEWHERE = ("kill", "stack", "queue.restart")
# Verbs that are sent elsewhere only with `on`. The output of a queue is on every host that has served it.
SENT_WITH_ON = (*FOUND_ELSEWHERE, "status", "logs", "app.restart")


class RemoteCalls:
    """Carries out requests that pulse has taken from Redis, and returns the answers to pulse.

    `tables`: the verbs for remote_control = "read" and "full".
    """

    def __init__(self, services: Services, loop: Loop, tables: Mapping[str, Mapping[str, Verb]]) -> None:
        self._services = services
        self._loop = loop
        self._tables = tables
        self._pending: set[str] = set()

    def receive(self, given: dict[str, Any]) -> None:
        caller = _Requester(given["processor"], given["id"], self._answer)
        request = _RemoteRequest(caller, jsonrpc.Call(given["id"], given["method"], given["params"], True))
        self._pending.add(given["id"])
        try:
            self._run(request, given["until"])
        except ForqError as exc:
            if not request.answered:
                request.fail(exc)
        except Exception:
            log.exception("verb failed verb=%s", request.method)
            if not request.answered:
                request.fail(ForqError(f"internal error in {request.method}: the supervisor's log has the details"))

    def _run(self, request: Request, until: float) -> None:
        about = {**self._services.context.about, "processor": self._services.processor}
        check_allowed(request.method, about)
        if self._loop.now() >= until:
            raise TimedOut(f"{request.method} reached the supervisor too late; it was not carried out")
        if len(self._pending) > MAX_PENDING:
            raise ForqError(f"{MAX_PENDING} requests from elsewhere are being carried out; try again")
        if request.method == "logs":
            given = {name: value for name, value in request.params.items() if name in LOG_PARAMS}
            request.params = {**given, "small": True}
        log.info("remote request verb=%s params=%s", request.method, shown(request.params))
        self._tables[about["remote_control"]][request.method](request)

    def _answer(self, processor: str, request_id: str, line: bytes) -> None:
        self._pending.discard(request_id)
        if len(line) > MAX_ANSWER_BYTES:
            too_large = InvalidData(f"the answer is larger than {MAX_ANSWER_BYTES} bytes: request less")
            line = jsonrpc.failure(request_id, too_large)
        params = {"processor": processor, "id": request_id, "line": line.decode()}
        self._services.pulse.request("remote_answer", params, _log_unstored, repeat=True)


class _Requester:
    """The caller of a request that came through Redis."""

    peer = Peer(-1, -1, -1)

    def __init__(self, processor: str, request_id: str, send: Callable[[str, str, bytes], None]) -> None:
        self._processor = processor
        self._id = request_id
        self._send = send

    def answer(self, request: Request, line: bytes) -> None:
        self._send(self._processor, self._id, line)


class _RemoteRequest(Request):
    def reply(self, value: object) -> None:
        super().reply(with_short_stacks(value) if self.method == "stack" and isinstance(value, dict) else value)


def with_short_stacks(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer of `stack`, within the limits. `cut` is the number of stacks that are shortened or missing."""
    stacks = answer["stacks"][:MAX_STACKS]
    limit = MAX_STACK_CHARACTERS // max(1, len(stacks))
    cut = len(answer["stacks"]) - len(stacks)
    shortened = []
    for entry in stacks:
        text = entry["stack"]
        if text is not None and len(text) > limit:
            entry = {**entry, "stack": f"{text[:limit]}\n  … (cut)"}
            cut += 1
        shortened.append(entry)
    return {**answer, "stacks": shortened, **({"cut": cut} if cut else {})}


def _log_unstored(answer: Any) -> None:
    if isinstance(answer, ForqError):
        log.warning("failed to store the answer to a remote request error=%s", answer)


class OtherSupervisors:
    """Sends requests of the control socket to another supervisor, through the clerk."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def forwarding(self, table: Mapping[str, Verb]) -> dict[str, Verb]:
        """The verbs of `table` that may be carried out elsewhere: with the param `on`, or if there is no such queue or
        job here."""
        return {name: self._forwarding(table[name], name in FOUND_ELSEWHERE) for name in SENT_WITH_ON}

    def list_all(self, request: Request) -> None:
        """The verb `supervisors`."""

        def answered(answer: Any) -> None:
            if isinstance(answer, ForqError):
                request.fail(answer)
            else:
                request.reply(answer)

        self._services.clerk.request("supervisors", {}, answered)

    def _forwarding(self, here: Verb, found_elsewhere: bool) -> Verb:
        def run(request: Request) -> None:
            on, seconds = request.params.pop("on", None), request.params.pop("timeout", None)
            if seconds is not None and (
                isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_WAIT_SECONDS
            ):
                raise UsageError(f"timeout {shown(seconds)} is not allowed: seconds up to {MAX_WAIT_SECONDS:g}")
            if on is not None and (not isinstance(on, str) or not on):
                raise UsageError(f"on {shown(on)} is not allowed: the name of a processor, or of a host")
            if on == self._services.processor:
                here(request)
            elif on is not None:
                self._send(request, here, on, seconds, None)
            elif not found_elsewhere:
                here(request)
            else:
                try:
                    here(request)
                except (UnknownQueue, UnknownJob) as exc:
                    self._send(request, here, None, seconds, exc)

        return run

    def _send(
        self, request: Request, here: Verb, on: str | None, seconds: float | None, missing: ForqError | None
    ) -> None:
        """`seconds`: limit for the answer. `missing`: why this supervisor cannot carry it out."""

        def answered(answer: Any) -> None:
            if isinstance(answer, UnknownQueue | UnknownJob) and missing is not None:
                request.fail(type(missing)(f"{missing}; {answer}"))
            elif isinstance(answer, RedisUnavailable) and missing is not None:
                request.fail(type(missing)(f"{missing}; other supervisors cannot be asked: {answer}"))
            elif isinstance(answer, ForqError):
                request.fail(answer)
            elif answer["here"]:
                self._run_here(request, here)
            else:
                request.reply(answer["result"])

        target = {"on": on, "besides": self._services.processor, "seconds": seconds}
        asked = {"method": request.method, "params": request.params, **target}
        self._services.clerk.request("elsewhere", asked, answered)

    def _run_here(self, request: Request, here: Verb) -> None:
        """`on` named this host."""
        try:
            here(request)
        except ForqError as exc:
            request.fail(exc)
