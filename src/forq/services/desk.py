"""Where a service gets the supervisor's requests and answers them: JSON-RPC lines over its leash."""

import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from forq.errors import ForqError, InvalidData, UnknownVerb
from forq.procs import wire
from forq.procs.liveness import may_take

READ_BYTES = 64 * 1024
# The supervisor and its services trust each other: the cap is there to notice a fault, not to fend one off.
MAX_LINE_BYTES = 64 * 1024 * 1024

log = logging.getLogger("forq")

Verb = Callable[[dict[str, Any]], object]


class Later:
    """What a verb returns whose answer is not known yet. `answer` is called once, with the result or a ForqError."""

    def __init__(self) -> None:
        self._send: Callable[[object], None] | None = None

    def promise(self, send: Callable[[object], None]) -> None:
        self._send = send

    def answer(self, value: object) -> None:
        assert self._send is not None, "the verb has not returned yet"
        self._send(value)


class Desk:
    def __init__(self, leash: socket.socket, verbs: Mapping[str, Verb]) -> None:
        self._leash = leash
        self._verbs = verbs
        self._lines = wire.Lines(MAX_LINE_BYTES)

    def fileno(self) -> int:
        return self._leash.fileno()

    def serve(self) -> bool:
        """Reads what is there and answers it; False when the supervisor is gone."""
        try:
            received = self._leash.recv(READ_BYTES)
        except ConnectionError:
            # A supervisor that is killed with something of ours unread resets the leash instead of ending it.
            received = b""
        if not received:
            return False
        self._lines.push(received)
        while (line := self._lines.pop()) is not None:
            call = wire.read_request(line)
            if call.expects_answer:
                may_take()
                self._answer(call)
            # Anything else is a ping: the loop comes round, and that is the answer.
        return True

    def tell(self, event: str, **fields: object) -> None:
        """Something the supervisor should know without having asked."""
        self._write(wire.encode({"event": event, **fields}) + b"\n")

    def _answer(self, call: wire.Call) -> None:
        verb = self._verbs.get(call.method)
        try:
            if verb is None:
                raise UnknownVerb(f"no verb {call.method!r}")
            result = verb(call.params)
            if isinstance(result, Later):
                result.promise(partial(self._send, call.id))
            else:
                self._send(call.id, result)
        except ForqError as exc:
            self._send(call.id, exc)
        except Exception as exc:  # a fault of ours must not end the service: every other request would fail too
            log.exception("request failed verb=%s", call.method)
            self._send(call.id, ForqError(f"internal error: {type(exc).__name__}: {exc}"))

    def _send(self, number: str | int | None, value: object) -> None:
        try:
            answer = wire.failure(number, value) if isinstance(value, ForqError) else wire.result(number, value)
        except InvalidData as exc:  # data that is nested too deeply, say
            answer = wire.failure(number, exc)
        self._write(answer)

    def _write(self, line: bytes) -> None:
        try:
            self._leash.sendall(line)
        except ConnectionError as exc:
            # The supervisor is gone: the next `serve` says so, and the service ends in its own way.
            log.info("supervisor is gone, nobody to answer error=%s", exc)
