"""The bridge's loop: serves its peers (standard streams or sockets) and sends assignments to idle workers."""

import logging
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from forq.bridge.messages import InvalidMessage, JobReport, MessageEncoder, Request, WorkerIdle, parse_message
from forq.bridge.requests import Requests, Response
from forq.broker.keys import queue_of_channel
from forq.broker.pubsub import Subscription
from forq.errors import ForqError, InvalidData, RedisUnavailable
from forq.procs.lines import READ_BYTES, LineBuffer, LineConnection
from forq.procs.loop import Loop
from forq.values import shown

RETRY_SECONDS = 0.25
LINES_PER_TURN = 50
# Each connection takes a file descriptor and up to 1 MiB for an incomplete line.
MAX_CONNECTIONS = 1000
ACCEPT_PAUSE_SECONDS = 0.5
# The supervisor sends only pings, one short line at a time.
PING_BYTES = 4096
# A peer that closed its input has this long to read the remaining responses.
DRAIN_SECONDS = 30.0
# Workers that send no message for this long lose their binding.
FORGET_SECONDS = 86400.0 * 2
# While stopping with requests left, how long to wait for Redis.
STOP_SECONDS = 10.0
# A peer with more unsent output is not read; with more than MAX_UNSENT_BYTES it is disconnected.
PAUSE_UNSENT_BYTES = 1 << 20
MAX_UNSENT_BYTES = 8 << 20
STDIN, STDOUT = 0, 1

log = logging.getLogger("forq")


class Peer(Protocol):
    """`pending`: line number and request not executed yet. `ended`: no more input. `disconnected`: output is lost."""

    name: str
    lines: LineBuffer
    pending: tuple[int, Request] | None
    ended: bool

    @property
    def disconnected(self) -> bool: ...

    @property
    def unsent(self) -> bool: ...

    def update_reading(self) -> None:
        """Reads only while all received lines are executed, so that a fast sender blocks instead of filling memory."""

    def send(self, line: bytes) -> None: ...

    def stop_reading(self) -> None: ...

    def close(self) -> None: ...


@dataclass(eq=False)
class WorkerBinding:
    """The peer that last sent a message of this worker. Its assignments go there."""

    peer: Peer
    last_seen: float


class Bridge:
    """1. Executes the requests of all peers, a few lines of each in turn. While Redis is down it retries the same
       request, and reads nothing more from that peer.
    2. Assigns jobs to idle workers when Redis publishes that there may be work for them.
    3. On each tick expires inactive workers and leases, and promotes due jobs.
    4. When a peer disconnects, executes the messages read from it, then unregisters its idle workers.

    End of file on `leash` stops the bridge.
    """

    def __init__(
        self,
        loop: Loop,
        requests: Requests,
        subscription: Subscription,
        encoder: MessageEncoder,
        *,
        tick_seconds: float,
        peers: tuple[Peer, ...] = (),
        listener: socket.socket | None = None,
        leash: socket.socket | None = None,
    ) -> None:
        self._loop = loop
        self._requests = requests
        self._subscription = subscription
        self._encoder = encoder
        self._tick_seconds = tick_seconds
        # The value is the time at which the last request of a finished peer was executed.
        self._peers: dict[Peer, float | None] = dict.fromkeys(peers)
        self._listener = listener
        self._leash = leash
        self._now = loop.now
        self._bindings: dict[tuple[str, str], WorkerBinding] = {}
        self._notified: dict[tuple[str, str], None] = {}
        self._due_at: dict[str, float] = {}
        self._next_tick = loop.now()
        self._redis_down_until = 0.0
        self._accepted = 0
        self._stopping = False
        self._give_up_at = float("inf")

    def run(self) -> None:
        """Serves until `stop`, or until the last peer has disconnected and no socket listens."""
        if self._leash is not None:
            self._loop.add_reader(self._leash.fileno(), self._read_leash)
        self._start_accepting()
        self._loop.run(self._after_pass)

    def _after_pass(self) -> float:
        if self._now() >= self._redis_down_until:
            self._try_redis(self._maintain)
        for peer in list(self._peers):
            self._process_lines(peer)
            self._close_if_finished(peer)
            peer.update_reading()
        if not self._peers and (self._listener is None or self._stopping):
            self._loop.stop()
        elif self._now() > self._give_up_at:
            lost = sum(peer.lines.count() + (peer.pending is not None) for peer in self._peers)
            raise RedisUnavailable(f"stopped while Redis is unavailable: {lost} messages were read but not executed")
        return self._timeout_seconds()

    def stop(self) -> None:
        """Stops reading; executes the messages read so far."""
        self._stopping = True
        self._give_up_at = self._now() + STOP_SECONDS
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
        if self._leash is not None:
            self._loop.remove_reader(self._leash.fileno())
        for peer in self._peers:
            peer.stop_reading()

    def _timeout_seconds(self) -> float:
        now = self._now()
        if now < self._redis_down_until:
            return self._redis_down_until - now + 0.001
        if self._notified or any(peer.pending is not None or peer.lines.has_line() for peer in self._peers):
            return 0.0
        return max(0.0, min([self._next_tick, *self._due_at.values()]) - now) + 0.001

    def _read_leash(self) -> None:
        assert self._leash is not None
        if not self._leash.recv(PING_BYTES):
            self.stop()

    def _start_accepting(self) -> None:
        if self._listener is not None and not self._stopping:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            log.warning("cannot accept connections; retrying in %s s error=%s", ACCEPT_PAUSE_SECONDS, exc)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._start_accepting)
            return
        if len(self._peers) >= MAX_CONNECTIONS:
            self._reject(connected)
            return
        self._accepted += 1
        self._peers[SocketPeer(self._loop, connected, f"client-{self._accepted}")] = None

    def _reject(self, connected: socket.socket) -> None:
        reason = f"too many connections: at most {MAX_CONNECTIONS} at a time"
        with connected, suppress(OSError):  # the client may have disconnected already
            connected.setblocking(False)
            connected.send(self._encoder.encode("error", {"line": 0, "reason": reason}))

    def _maintain(self) -> None:
        """Subscribes, ticks, and assigns jobs to notified workers."""
        if not self._subscription.connected:
            self._subscription.connect()
            self._loop.add_reader(self._subscription.fileno(), self._read_notifications)
            # Notifications published while disconnected are lost.
            self._notified |= dict.fromkeys(self._bindings)
        now = self._now()
        if now >= self._next_tick:
            self._tick(now)
        for queue in [queue for queue, at in self._due_at.items() if at <= now]:
            self._promote(queue)
        for key in list(self._notified)[:LINES_PER_TURN]:
            binding = self._bindings.get(key)
            if binding is not None and not binding.peer.disconnected:
                self._assign(binding.peer, *key)
            del self._notified[key]

    def _promote(self, queue: str) -> None:
        try:
            due_ms = self._requests.promote(queue)
        except RedisUnavailable:
            raise
        except ForqError:
            # The next tick plans it again.
            del self._due_at[queue]
            raise
        self._plan_promotion(queue, due_ms)

    def _assign(self, peer: Peer, queue: str, worker: str) -> None:
        """Not retried if it is refused, for example because the queue was deleted: that would repeat forever."""
        try:
            self._send(peer, self._requests.assign(queue, worker))
        except RedisUnavailable:
            raise
        except ForqError as exc:
            log.warning("cannot assign jobs to a worker queue=%s worker=%s error=%s", queue, worker, exc)

    def _tick(self, now: float) -> None:
        self._next_tick = now + self._tick_seconds
        for queue, due_ms in self._requests.tick().items():
            self._plan_promotion(queue, due_ms)
        for key, binding in list(self._bindings.items()):
            if now - binding.last_seen > FORGET_SECONDS:
                del self._bindings[key]

    def _plan_promotion(self, queue: str, due_ms: int | None) -> None:
        """Promotes the queue's next due job on time if it is due before the next tick."""
        self._due_at.pop(queue, None)
        if due_ms is not None and due_ms / 1000 < self._tick_seconds:
            self._due_at[queue] = self._now() + due_ms / 1000

    def _read_notifications(self) -> None:
        fd = self._subscription.fileno()
        try:
            notifications = self._subscription.receive()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            self._redis_lost(exc)
            return
        for channel, worker in notifications:
            self._notified[queue_of_channel(channel), worker] = None

    def _try_redis(self, call: Callable[[], None]) -> None:
        try:
            call()
            self._redis_restored()
        except RedisUnavailable as exc:
            self._redis_lost(exc)
        except ForqError as exc:
            log.error("maintenance failed; retrying at the next tick error=%s", exc)

    def _redis_lost(self, exc: RedisUnavailable) -> None:
        if self._redis_down_until == 0.0:
            log.warning("redis is gone; keeping received messages until it is back error=%s", exc)
        self._redis_down_until = self._now() + RETRY_SECONDS

    def _redis_restored(self) -> None:
        if self._redis_down_until:
            log.info("redis is back")
            self._redis_down_until = 0.0

    def _process_lines(self, peer: Peer) -> None:
        for _ in range(LINES_PER_TURN):
            if self._now() < self._redis_down_until:
                return
            if peer.pending is None and not self._parse_next(peer):
                return
            if peer.pending is not None and not self._execute(peer, *peer.pending):
                return

    def _parse_next(self, peer: Peer) -> bool:
        """Parses the next line into `peer.pending`, or sends an error. False if there is no line."""
        try:
            line = peer.lines.pop()
            if line is None:
                return False
            if line.strip():
                peer.pending = peer.lines.number, parse_message(line)
        except InvalidData:
            self._send_error(peer, peer.lines.number, InvalidMessage("the line is too long: at most 1 MiB is allowed"))
        except InvalidMessage as exc:
            self._send_error(peer, peer.lines.number, exc)
        return True

    def _execute(self, peer: Peer, number: int, request: Request) -> bool:
        """False if Redis is unavailable: the request stays pending and is retried."""
        try:
            out = self._requests.execute(request)
        except RedisUnavailable as exc:
            self._redis_lost(exc)
            return False
        except ForqError as exc:
            out = []
            self._send_error(peer, number, exc)
        except Exception as exc:  # a bug must not disconnect all other peers
            log.exception("internal error while executing a message peer=%s line=%s", peer.name, number)
            out = []
            self._send_error(peer, number, ForqError(f"internal error: {type(exc).__name__}"))
        self._redis_restored()
        peer.pending = None
        if isinstance(request, JobReport | WorkerIdle):
            self._bindings[request.queue, request.worker] = WorkerBinding(peer, self._now())
        self._send(peer, out)
        return True

    def _send_error(self, peer: Peer, number: int, exc: ForqError) -> None:
        log.warning("refused peer=%s line=%s reason=%s", peer.name, number, exc)
        reason = str(exc).encode(errors="backslashreplace").decode()
        self._send(peer, [("error", {"line": number, "reason": reason})])

    def _send(self, peer: Peer, out: list[Response]) -> None:
        for topic, payload in out:
            if topic == "job_refused":
                log.warning(
                    "refused peer=%s topic=%s queue=%s job=%s worker=%s",
                    *(peer.name, payload["topic"], payload["queue_name"], shown(payload["uuid"])),
                    payload["worker_uuid"],
                )
            peer.send(self._encoder.encode(topic, payload))

    def _close_if_finished(self, peer: Peer) -> None:
        """Closes a peer whose requests are executed and whose responses are read, or when DRAIN_SECONDS are over."""
        if not peer.ended or peer.pending is not None or peer.lines.has_line():
            return
        since = self._peers[peer]
        if since is None:
            since = self._peers[peer] = self._now()
            self._unregister_workers(peer)
        if not peer.unsent or self._now() - since > DRAIN_SECONDS:
            peer.close()
            del self._peers[peer]

    def _unregister_workers(self, peer: Peer) -> None:
        workers = [key for key, binding in self._bindings.items() if binding.peer is peer]
        for key in workers:
            del self._bindings[key]
        try:
            for queue, worker in workers:
                self._requests.leave(queue, worker)
        except ForqError as exc:
            log.info("failed to unregister idle workers; they will expire peer=%s error=%s", peer.name, exc)


class StandardStreams:
    """stdin and stdout. Writes block: a slow reader delays only its own bridge."""

    unsent = False

    def __init__(self, loop: Loop) -> None:
        self.name = "stdin"
        self.lines = LineBuffer(skip_too_long=True)
        self.pending: tuple[int, Request] | None = None
        self.ended = False
        self.disconnected = False
        self._loop = loop
        self.update_reading()

    def update_reading(self) -> None:
        if self.ended or self.pending is not None or self.lines.has_line():
            self._loop.remove_reader(STDIN)
        else:
            self._loop.add_reader(STDIN, self._read)

    def _read(self) -> None:
        received = os.read(STDIN, READ_BYTES)
        self.lines.push(received)
        if not received:
            self.stop_reading()

    def send(self, line: bytes) -> None:
        left = memoryview(line)
        while left and not self.disconnected:
            try:
                left = left[os.write(STDOUT, left) :]
            except BlockingIOError:
                # Another process made the pipe non-blocking.
                select.select([], [STDOUT], [])
            except OSError:
                self.disconnected = True
                self.stop_reading()

    def stop_reading(self) -> None:
        if not self.ended:
            self.ended = True
            self.lines.end()

    def close(self) -> None:
        """The descriptors belong to the parent process."""


class SocketPeer:
    """A connection to the listening socket."""

    def __init__(self, loop: Loop, connected: socket.socket, name: str) -> None:
        self.name = name
        self.pending: tuple[int, Request] | None = None
        self.ended = False
        self.lines = LineBuffer(skip_too_long=True)
        self._io = LineConnection(loop, connected, self._on_input, lines=self.lines, on_output=self._on_output)

    @property
    def disconnected(self) -> bool:
        return self._io.gone

    @property
    def unsent(self) -> bool:
        return self._io.unsent_bytes > 0

    def update_reading(self) -> None:
        busy = self.ended or self.pending is not None or self.lines.has_line()
        self._io.set_reading(not busy and self._io.unsent_bytes < PAUSE_UNSENT_BYTES)

    def _on_input(self) -> None:
        if self._io.error is not None:
            self._io.close()
        if self._io.ended:
            self.stop_reading()

    def _on_output(self) -> None:
        if self.disconnected:
            self.stop_reading()

    def send(self, line: bytes) -> None:
        self._io.send(line)
        if self._io.unsent_bytes > MAX_UNSENT_BYTES:
            self._io.close()
        self._on_output()

    def stop_reading(self) -> None:
        if not self.ended:
            self.ended = True
            self.lines.end()

    def close(self) -> None:
        self._io.close()
