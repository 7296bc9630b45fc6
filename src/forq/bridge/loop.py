"""The bridge's loop: one thread, one poll.

1. Lines of every peer, some of each in turn; what Redis has not taken is put again until it has, and that peer waits.
2. Rings: a channel of its own tells for which of its idle workers there may be work.
3. Ticks: silent workers, leases and what is due.
4. Peers that leave: what was read is dealt with first; then their idle workers are forgotten.
"""

import logging
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from forq.bridge.desk import Desk, Out
from forq.bridge.lines import TooLong
from forq.bridge.messages import BadMessage, Envelopes, Held, Request, WorkerIdle, read_message
from forq.bridge.peers import Connection, Peer
from forq.broker.keys import queue_of_channel
from forq.broker.listening import Listener
from forq.errors import ForqError, RedisUnavailable
from forq.names import shown
from forq.procs.liveness import passed

RETRY_SECONDS = 0.25
LINES_PER_TURN = 50
# A connection takes a descriptor, and up to a line of 1 MiB that is not complete.
MAX_CLIENTS = 1000
ACCEPT_PAUSE_SECONDS = 0.5
# The supervisor sends nothing else, one short line at a time.
PING_BYTES = 4096
# How long a peer that has ended gets to read what was answered.
FAREWELL_SECONDS = 30.0
# A worker that was not heard for so long is not remembered.
FORGET_SECONDS = 86400.0 * 2
# How long Redis may be away when the bridge is told to end and has not dealt with all that it read.
END_SECONDS = 10.0

log = logging.getLogger("forq")


@dataclass(eq=False)
class Bound:
    """Where a worker has spoken last, and when."""

    peer: Peer
    heard: float


class Bridge:
    """`watched`: descriptors whose first byte ends the bridge. `leash`: its end does; what comes on it are pings."""

    def __init__(
        self,
        desk: Desk,
        ears: Listener,
        envelopes: Envelopes,
        *,
        tick_seconds: float,
        peers: tuple[Peer, ...] = (),
        listener: socket.socket | None = None,
        watched: tuple[int, ...] = (),
        leash: socket.socket | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._ears = ears
        self._envelopes = envelopes
        self._tick_seconds = tick_seconds
        self._peers: dict[Peer, float | None] = dict.fromkeys(peers)  # and since when it is about to leave
        self._listener = listener
        self._watched = watched if leash is None else (*watched, leash.fileno())
        self._leash = leash
        self._now = now
        self._poll = select.poll()
        self._polled: dict[int, int] = {}
        self._peer_of: dict[int, Peer] = {}
        self._bound: dict[tuple[str, str], Bound] = {}
        self._rung: dict[tuple[str, str], None] = {}
        self._due: dict[str, float] = {}
        self._next_tick = now()
        self._away_until = 0.0
        self._accept_after = 0.0
        self._clients = 0
        self._stopping = False
        self._give_up_at = float("inf")

    def run(self) -> None:
        """Until nobody is left who could say anything, or it is told to end."""
        while self._peers or (self._listener is not None and not self._stopping):
            self._step()
            if self._now() > self._give_up_at:
                lost = sum(len(peer.lines) + (peer.pending is not None) for peer in self._peers)
                raise RedisUnavailable(
                    f"told to end while Redis is away: {lost} lines that were read are not dealt with"
                )

    def _step(self) -> None:
        ready = self._wait()
        for fd, events in ready:
            self._dispatch(fd, events)
        if self._now() >= self._away_until:
            self._try(self._look_after)
        for peer in list(self._peers):
            self._serve(peer)
            self._part_with(peer)

    def stop(self) -> None:
        """Nothing more is read; what was read is dealt with."""
        self._stopping = True
        self._give_up_at = self._now() + END_SECONDS
        for peer in self._peers:
            peer.end()

    # What is waited for

    def _wait(self) -> list[tuple[int, int]]:
        wanted = {} if self._stopping else dict.fromkeys(self._watched, select.POLLIN)
        if self._ears.connected:
            wanted[self._ears.fileno()] = select.POLLIN
        if self._listener is not None and not self._stopping and self._now() >= self._accept_after:
            wanted[self._listener.fileno()] = select.POLLIN
        self._peer_of = {fd: peer for peer in self._peers for fd in peer.interest()}
        for peer in self._peers:
            wanted |= peer.interest()
        for fd in self._polled.keys() - wanted.keys():
            self._poll.unregister(fd)
        for fd, events in wanted.items():
            if self._polled.get(fd) != events:
                self._poll.register(fd, events)
        self._polled = wanted
        passed()
        return self._poll.poll(self._patience_ms())

    def _patience_ms(self) -> float:
        now = self._now()
        if now < self._away_until:
            return (self._away_until - now) * 1000 + 1
        if self._rung or any(peer.pending is not None or len(peer.lines) for peer in self._peers):
            return 0.0
        times = [self._next_tick, *self._due.values()]
        if self._accept_after > now:
            times.append(self._accept_after)
        return max(0.0, min(times) - now) * 1000 + 1

    def _dispatch(self, fd: int, events: int) -> None:
        if self._leash is not None and fd == self._leash.fileno():
            if not self._leash.recv(PING_BYTES):
                self.stop()
        elif fd in self._watched:
            self.stop()
        elif self._ears.connected and fd == self._ears.fileno():
            self._hear()
        elif self._listener is not None and fd == self._listener.fileno():
            self._accept()
        else:
            self._peer_of[fd].ready(fd, events)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            log.warning("no new connections for a while error=%s", exc)
            self._accept_after = self._now() + ACCEPT_PAUSE_SECONDS
            return
        if len(self._peers) >= MAX_CLIENTS:
            self._turn_away(connected)
            return
        self._clients += 1
        self._peers[Connection(connected, f"client-{self._clients}")] = None

    def _turn_away(self, connected: socket.socket) -> None:
        reason = f"too many connections: at most {MAX_CLIENTS} at a time"
        with connected, suppress(OSError):  # it may have left already
            connected.setblocking(False)
            connected.send(self._envelopes.line("error", {"line": 0, "reason": reason}))

    # What is done for workers without their asking

    def _look_after(self) -> None:
        """Listens, ticks, and gives work to those who were rung."""
        if not self._ears.connected:
            self._ears.connect()
            # What was published meanwhile is lost.
            self._rung |= dict.fromkeys(self._bound)
        now = self._now()
        if now >= self._next_tick:
            self._tick(now)
        for queue in [queue for queue, at in self._due.items() if at <= now]:
            self._plan(queue, self._desk.promote(queue))
        for key in list(self._rung)[:LINES_PER_TURN]:
            bound = self._bound.get(key)
            if bound is not None and not bound.peer.gone:
                self._send(bound.peer, self._desk.rung(*key))
            del self._rung[key]

    def _tick(self, now: float) -> None:
        self._next_tick = now + self._tick_seconds
        for queue, due_ms in self._desk.tick().items():
            self._plan(queue, due_ms)
        for key, bound in list(self._bound.items()):
            if now - bound.heard > FORGET_SECONDS:
                del self._bound[key]

    def _plan(self, queue: str, due_ms: int | None) -> None:
        """Something is due before the next tick."""
        self._due.pop(queue, None)
        if due_ms is not None and due_ms / 1000 < self._tick_seconds:
            self._due[queue] = self._now() + due_ms / 1000

    def _hear(self) -> None:
        try:
            heard = self._ears.hear()
        except RedisUnavailable as exc:
            self._away(exc)
            return
        for channel, worker in heard:
            self._rung[queue_of_channel(channel), worker] = None

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
            self._back()
        except RedisUnavailable as exc:
            self._away(exc)
        except ForqError as exc:
            log.error("the bridge could not finish what was due error=%s", exc)

    def _away(self, exc: RedisUnavailable) -> None:
        if self._away_until == 0.0:
            log.warning("redis is gone, what was read is kept until it is back error=%s", exc)
        self._away_until = self._now() + RETRY_SECONDS

    def _back(self) -> None:
        if self._away_until:
            log.info("redis is back")
            self._away_until = 0.0

    # What peers say

    def _serve(self, peer: Peer) -> None:
        for _ in range(LINES_PER_TURN):
            if self._now() < self._away_until:
                return
            if peer.pending is None and not self._read(peer):
                return
            if peer.pending is not None and not self._answer(peer, *peer.pending):
                return

    def _read(self, peer: Peer) -> bool:
        """The next line becomes what is pending, or an error; False if there is none."""
        line = peer.lines.pop()
        if line is None:
            return False
        number, text = line
        try:
            if isinstance(text, TooLong):
                raise BadMessage("the line is too long: at most 1 MiB is allowed")
            if text.strip():
                peer.pending = number, read_message(text)
        except BadMessage as exc:
            self._refuse(peer, number, exc)
        return True

    def _answer(self, peer: Peer, number: int, request: Request) -> bool:
        """False if Redis is away: the same request is put again."""
        try:
            out = self._desk.answer(request)
        except RedisUnavailable as exc:
            self._away(exc)
            return False
        except ForqError as exc:
            out = []
            self._refuse(peer, number, exc)
        except Exception as exc:  # a fault of ours must not end the bridge: all others would lose theirs too
            log.exception("a message could not be dealt with peer=%s line=%s", peer.name, number)
            out = []
            self._refuse(peer, number, ForqError(f"internal error: {type(exc).__name__}"))
        self._back()
        peer.pending = None
        if isinstance(request, Held | WorkerIdle):
            self._bound[request.queue, request.worker] = Bound(peer, self._now())
        self._send(peer, out)
        return True

    def _refuse(self, peer: Peer, number: int, exc: ForqError) -> None:
        log.warning("refused peer=%s line=%s reason=%s", peer.name, number, exc)
        reason = str(exc).encode(errors="backslashreplace").decode()
        self._send(peer, [("error", {"line": number, "reason": reason})])

    def _send(self, peer: Peer, out: list[Out]) -> None:
        for topic, payload in out:
            if topic == "job_refused":
                log.warning(
                    "refused peer=%s topic=%s queue=%s job=%s worker=%s",
                    *(peer.name, payload["topic"], payload["queue_name"], shown(payload["uuid"])),
                    payload["worker_uuid"],
                )
            peer.send(self._envelopes.line(topic, payload))

    def _part_with(self, peer: Peer) -> None:
        """When all that it said is dealt with, and it has read what was answered, or had time to."""
        if not peer.ended or peer.pending is not None or len(peer.lines):
            return
        since = self._peers[peer]
        if since is None:
            since = self._peers[peer] = self._now()
            self._forget_workers(peer)
        if not peer.unsent or self._now() - since > FAREWELL_SECONDS:
            peer.close()
            del self._peers[peer]

    def _forget_workers(self, peer: Peer) -> None:
        mine = [key for key, bound in self._bound.items() if bound.peer is peer]
        for key in mine:
            del self._bound[key]
        try:
            for queue, worker in mine:
                self._desk.leave(queue, worker)
        except ForqError as exc:
            log.info("idle workers are forgotten when they have been silent for long enough error=%s", exc)
