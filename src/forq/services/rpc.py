"""The JSON-RPC server of a service: requests of the supervisor over the leash, replies and notifications back."""

import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from forq.errors import ForqError, InvalidData, UnknownVerb
from forq.procs import jsonrpc
from forq.procs.lines import LineBuffer, LineConnection
from forq.procs.liveness import expect_busy
from forq.procs.loop import Loop

log = logging.getLogger("forq")

# The supervisor and its services trust each other: the limit only detects bugs.
MAX_LINE_BYTES = 64 * 1024 * 1024

Verb = Callable[[dict[str, Any]], object]


class PendingReply:
    """Returned by a verb whose reply comes later. `resolve` is called once, with the result or a ForqError."""

    def __init__(self) -> None:
        self._send: Callable[[object], None] | None = None

    def bind(self, send: Callable[[object], None]) -> None:
        self._send = send

    def resolve(self, value: object) -> None:
        assert self._send is not None, "the verb has not returned yet"
        self._send(value)


class RpcServer:
    """Stops the loop when the supervisor is gone. `on_end` is called before any timer that is due."""

    def __init__(
        self,
        loop: Loop,
        leash: socket.socket,
        verbs: Mapping[str, Verb],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._verbs = verbs
        self._on_end = on_end
        self._leash = LineConnection(loop, leash, self._serve, lines=LineBuffer(MAX_LINE_BYTES))

    def _serve(self) -> None:
        if self._leash.ended:
            self._loop.stop()
            self._on_end()
        while (line := self._leash.lines.pop()) is not None:
            call = jsonrpc.read_request(line)
            if call.expects_answer:
                expect_busy()
                self._answer(call)
            # A ping needs no reply: the pass of the loop is the sign of life.

    def notify(self, event: str, **fields: object) -> None:
        self._leash.send(jsonrpc.encode({"event": event, **fields}) + b"\n")

    def _answer(self, call: jsonrpc.Call) -> None:
        verb = self._verbs.get(call.method)
        try:
            if verb is None:
                raise UnknownVerb(f"no verb {call.method!r}")
            result = verb(call.params)
            if isinstance(result, PendingReply):
                result.bind(partial(self._send, call.id))
            else:
                self._send(call.id, result)
        except ForqError as exc:
            self._send(call.id, exc)
        except Exception as exc:  # a bug must not end the service: every other request would fail too
            log.exception("request failed verb=%s", call.method)
            self._send(call.id, internal_error(exc))

    def _send(self, number: str | int | None, value: object) -> None:
        try:
            answer = jsonrpc.failure(number, value) if isinstance(value, ForqError) else jsonrpc.result(number, value)
        except InvalidData as exc:  # for example data nested too deeply
            answer = jsonrpc.failure(number, exc)
        self._leash.send(answer)


def internal_error(exc: Exception) -> ForqError:
    return ForqError(f"internal error: {type(exc).__name__}: {exc}")
