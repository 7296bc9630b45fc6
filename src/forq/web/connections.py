"""The connections of uvicorn: each request carries its peer, and no client can occupy the server for long.

uvicorn itself limits only the time between two requests. Without the limits here, a client that sends half a request,
nothing at all, or does not read its response would keep its connection for ever.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from forq.web.guard import HEADERS, MAX_HEAD_BYTES
from forq.web.peers import SCOPE_KEY, find_peer

# From the first byte of a request, or from the connect, to the end of its body.
RECEIVE_SECONDS = 20.0
# How long a client may read nothing of its response.
SEND_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 15
# More than there may be live pages, each of which keeps one.
MAX_CONNECTIONS = 640

log = logging.getLogger("forq.web")


class PeerProtocol(H11Protocol):
    """One connection. `http=PeerProtocol` for uvicorn.Config, with the other OPTIONS below."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.accepted_at = self.loop.time()
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        peer = find_peer(transport.get_extra_info("socket"))
        inner = self.app

        async def with_peer(scope: Any, receive: Any, send: Any) -> None:
            scope[SCOPE_KEY] = peer
            await inner(scope, receive, send)

        self.app = with_peer
        self._time_request()
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_receive_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self.flow.write_paused:
            # The client has read the response before it, or the next one fills the buffer.
            self._stop_send_timer()
        super().data_received(data)
        if self.receives:
            self._time_request()
        else:
            self._stop_receive_timer()

    @property
    def receives(self) -> bool:
        """Whether a request, or the rest of one, is still to come."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.receives:
            self._stop_receive_timer()
        if self.transport.get_write_buffer_size() > 0:
            # Even a transport that was closed waits until its client has read everything.
            self._time_response()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_response()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """A request that is no HTTP never reaches the application, which adds these headers to all others."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            # In the middle of a response.
            self.transport.abort()
            return
        fields = [*HEADERS.items(), ("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        answer = h11.Response(status_code=400, headers=fields, reason=b"Bad Request")
        for event in (answer, h11.Data(data=msg.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._time_response()

    def _make_room(self) -> None:
        """Closes the oldest connection that waits for a request; if there is none, this one."""
        # One that was aborted stays in the set until the next turn of the event loop.
        others = [each for each in self.connections if isinstance(each, PeerProtocol) and each is not self]
        others = [each for each in others if not each.transport.is_closing()]
        if len(others) < MAX_CONNECTIONS:
            return
        idle = [each for each in others if each.cycle is None or each.cycle.response_complete]
        victim = min(idle, key=lambda each: each.accepted_at, default=self)
        victim.transport.abort()

    def _time_request(self) -> None:
        # Further bytes do not extend it.
        if self._receive_timer is None:
            self._receive_timer = self.loop.call_later(RECEIVE_SECONDS, self.transport.abort)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _time_response(self) -> None:
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


# For uvicorn.Config. proxy_headers: uvicorn would replace the address of the client by what a header says.
OPTIONS: Mapping[str, Any] = {
    "http": PeerProtocol,
    "ws": "none",
    "proxy_headers": False,
    "server_header": False,
    "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
    "timeout_keep_alive": KEEP_ALIVE_SECONDS,
    "timeout_graceful_shutdown": 5,
    "access_log": False,
    "log_config": None,
    # A client can cause warnings.
    "log_level": "error",
}
