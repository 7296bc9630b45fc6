"""Where a service gets the supervisor's requests and answers them: JSON-RPC lines over its leash."""

import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from forq import wire
from forq.errors import ForqError, UnknownVerb

READ_BYTES = 256 * 1024
# The supervisor and its services trust each other: the cap is there to notice a fault, not to fend one off.
MAX_LINE_BYTES = 64 * 1024 * 1024

log = logging.getLogger("forq")

Verb = Callable[[dict[str, Any]], object]


class Desk:
    def __init__(self, leash: socket.socket, verbs: Mapping[str, Verb]) -> None:
        self._leash = leash
        self._verbs = verbs
        self._lines = wire.Lines(MAX_LINE_BYTES)

    def fileno(self) -> int:
        return self._leash.fileno()

    def serve(self) -> bool:
        """Reads what is there and answers it; False when the supervisor is gone."""
        received = self._leash.recv(READ_BYTES)
        if not received:
            return False
        self._lines.push(received)
        while (line := self._lines.pop()) is not None:
            self._answer(wire.read_request(line))
        return True

    def tell(self, event: str, **fields: object) -> None:
        """Something the supervisor should know without having asked."""
        self._leash.sendall(wire.encode({"event": event, **fields}) + b"\n")

    def _answer(self, call: wire.Call) -> None:
        verb = self._verbs.get(call.method)
        try:
            if verb is None:
                raise UnknownVerb(f"no verb {call.method!r}")
            answer = wire.result(call.id, verb(call.params))
        except ForqError as exc:
            answer = wire.failure(call.id, exc)
        except Exception as exc:  # a fault of ours must not end the service: every other request would fail too
            log.exception("request failed verb=%s", call.method)
            answer = wire.failure(call.id, ForqError(f"internal error: {type(exc).__name__}: {exc}"))
        self._leash.sendall(answer)
