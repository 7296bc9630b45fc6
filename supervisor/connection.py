"""One client of the control socket, and its requests.

1. Connection answers the lines of one client, and holds it to the limits below.
2. Request is what a verb gets: it answers once, now or later.

Nothing here blocks, and no client can make it: whoever is too fast, too slow or broken loses its own connection only.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from forq.errors import ForqError, InvalidData, TimedOut, UnknownVerb
from forq.procs import jsonrpc
from forq.procs.lines import LineConnection, Lines

if TYPE_CHECKING:
    from forq.procs.loop import Loop, Timer

log = logging.getLogger("forq.control")

MAX_UNANSWERED = 64
MAX_OUTPUT_BYTES = 8 << 20
HALF_LINE_SECONDS = 30.0
# A client that was told goodbye gets this long to read it.
LAST_WORDS_SECONDS = 5.0
# Small enough that one pass over a flood of tiny requests takes a few milliseconds.
READ_BYTES = 16 << 10


class Peer(NamedTuple):
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int
    gid: int


class Request:
    """One call of a verb. Answer it exactly once, with reply or fail; after the client has gone both do nothing."""

    def __init__(self, connection: Connection, call: jsonrpc.Call) -> None:
        self.method = call.method
        self.params = call.params
        self.peer = connection.peer
        self.answered = False
        self.gone = False
        self._call = call
        self._connection = connection
        self._gone_callbacks: list[Callable[[], None]] = []

    def reply(self, value: object) -> None:
        try:
            line = jsonrpc.result(self._call.id, value)
        except InvalidData:
            log.exception("the answer is not JSON", extra={"verb": self.method})
            self.fail(ForqError("internal error: the answer cannot be sent"), jsonrpc.INTERNAL_ERROR)
            return
        if len(line) > MAX_OUTPUT_BYTES:
            self.fail(InvalidData(f"the answer is larger than {MAX_OUTPUT_BYTES} bytes: ask for less"))
            return
        self._answer(line)

    def fail(self, error: ForqError, rpc_code: int | None = None) -> None:
        self._answer(jsonrpc.failure(self._call.id, error, rpc_code))

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back when the client leaves before the answer."""
        if self.gone:
            callback()
        else:
            self._gone_callbacks.append(callback)

    def client_left(self) -> None:
        self.gone = True
        for callback in self._gone_callbacks:
            try:
                callback()
            except Exception:
                log.exception("an on_gone callback failed", extra={"verb": self.method})

    def _answer(self, line: bytes) -> None:
        if self.answered:
            raise ForqError(f"{self.method} was answered twice")
        self.answered = True
        if not self.gone:
            self._connection.settle(self, line if self._call.expects_answer else b"")


class Connection:
    """One client. `peer` is who it is; `closed` is true from the moment its socket is gone."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        peer: Peer,
        verbs: Mapping[str, Callable[[Request], None]],
        on_close: Callable[[Connection], None],
    ) -> None:
        self.peer = peer
        self.closed = False
        self._verbs = verbs
        self._on_close = on_close
        self._loop = loop
        self._unanswered: set[Request] = set()
        self._serving = False
        self._farewell = False
        self._half_line_timer: Timer | None = None
        self._io = LineConnection(
            loop, sock, self._heard, lines=Lines(), on_output=self._all_sent, read_bytes=READ_BYTES
        )

    def _heard(self) -> None:
        if self._io.ended and (self._io.error or self._hung_up()):
            self.close()
        else:
            self._serve()

    def _serve(self) -> None:
        """Handle the lines that are here, as far as the limit on unanswered requests allows."""
        if self._serving or self.closed or self._farewell:
            return
        self._serving = True
        try:
            while len(self._unanswered) < MAX_UNANSWERED and not self.closed:
                line = self._io.lines.pop()
                if line is None:
                    break
                self._stop_half_line_timer()
                if line.strip():
                    self._dispatch(line)
        except InvalidData as exc:
            self._say_goodbye(exc)
        finally:
            self._serving = False
        self._settle_reading()

    def _dispatch(self, line: bytes) -> None:
        try:
            call = jsonrpc.read_request(line)
        except jsonrpc.Malformed as exc:
            self._send(jsonrpc.failure(exc.id, exc, exc.rpc_code))
            return
        request = Request(self, call)
        self._unanswered.add(request)
        try:
            verb = self._verbs.get(call.method)
            if verb is None:
                raise UnknownVerb(f"there is no verb {call.method[:64]!a}")
            verb(request)
        except Exception as exc:
            if request.answered or not isinstance(exc, ForqError):
                log.exception("a verb failed", extra={"verb": call.method})
            if request.answered:
                return
            if isinstance(exc, ForqError):
                request.fail(exc)
            else:
                hidden = ForqError(f"internal error in {call.method}: the supervisor's log has the details")
                request.fail(hidden, jsonrpc.INTERNAL_ERROR)

    def _settle_reading(self) -> None:
        """Read on, stop for a while, or end, as the state of this connection asks."""
        if self.closed or self._farewell:
            return
        if self._io.ended and not self._unanswered and not self._io.unsent_bytes:
            self.close()
        elif self._io.ended or len(self._unanswered) >= MAX_UNANSWERED:
            self._stop_half_line_timer()
            self._stop_reading()
        else:
            self._start_reading()
            # Further bytes do not extend it: one byte now and then must not hold the connection for ever.
            if len(self._io.lines) and self._half_line_timer is None:
                self._half_line_timer = self._loop.call_later(HALF_LINE_SECONDS, self._half_line_expired)

    def settle(self, request: Request, line: bytes) -> None:
        """Send the answer, and take up what had to wait for it."""
        self._unanswered.discard(request)
        self._send(line)
        if not self._io.reading:
            self._serve()

    def _send(self, line: bytes) -> None:
        self._io.send(line)
        if self._io.gone:
            self.close()
        elif self._io.unsent_bytes > MAX_OUTPUT_BYTES:
            log.warning(
                "a client does not read its answers: dropped",
                extra={"peer_uid": self.peer.uid, "peer_pid": self.peer.pid},
            )
            self.close()

    def _all_sent(self) -> None:
        if self._io.gone or self._farewell:
            self.close()
        else:
            self._settle_reading()

    def _say_goodbye(self, error: ForqError) -> None:
        """Send one last error line, and close when it has been read, or soon."""
        self._send(jsonrpc.failure(None, error, jsonrpc.INVALID_REQUEST))
        if not self._io.unsent_bytes:
            self.close()
        if self.closed:
            return
        self._farewell = True
        self._stop_half_line_timer()
        self._stop_reading()
        self._loop.call_later(LAST_WORDS_SECONDS, self.close)

    def _half_line_expired(self) -> None:
        self._half_line_timer = None
        self._say_goodbye(TimedOut(f"a line was begun and not ended within {HALF_LINE_SECONDS:g} s"))

    def _stop_half_line_timer(self) -> None:
        if self._half_line_timer is not None:
            self._half_line_timer.cancel()
            self._half_line_timer = None

    def _start_reading(self) -> None:
        self._io.read(True)
        self._loop.on_hangup(self._io.fileno(), None)

    def _stop_reading(self) -> None:
        self._io.read(False)
        self._loop.on_hangup(self._io.fileno(), self.close)

    def _hung_up(self) -> bool:
        """True when the client closed its end, false when it only said that it sends no more."""
        poll = select.poll()
        poll.register(self._io.fileno(), 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._stop_half_line_timer()
        self._loop.on_hangup(self._io.fileno(), None)
        self._io.close()
        self._on_close(self)
        for request in self._unanswered:
            request.client_left()
