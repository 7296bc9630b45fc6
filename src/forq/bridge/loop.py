"""What a bridge does: it gives each peer its turn, and looks after workers without their asking.

1. Lines of every peer, some of each in turn; what Redis has not taken is put again until it has, and that peer waits.
2. Rings: a channel of its own tells for which of its idle workers there may be work.
3. Ticks: silent workers, leases and what is due.
4. Peers that leave: what was read is dealt with first; then their idle workers are forgotten.
"""

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from forq.bridge.messages import BadMessage, Envelopes, Held, Request, WorkerIdle, read_message
from forq.bridge.peers import Client, Peer
from forq.bridge.requests import Desk, Out
from forq.broker.keys import queue_of_channel
from forq.broker.pubsub import Listener
from forq.errors import ForqError, InvalidData, RedisUnavailable
from forq.procs.loop import Loop
from forq.values import shown

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
    """`leash`: its end ends the bridge; what comes on it are pings."""

    def __init__(
        self,
        loop: Loop,
        desk: Desk,
        ears: Listener,
        envelopes: Envelopes,
        *,
        tick_seconds: float,
        peers: tuple[Peer, ...] = (),
        listener: socket.socket | None = None,
        leash: socket.socket | None = None,
    ) -> None:
        self._loop = loop
        self._desk = desk
        self._ears = ears
        self._envelopes = envelopes
        self._tick_seconds = tick_seconds
        self._peers: dict[Peer, float | None] = dict.fromkeys(peers)  # and since when it is about to leave
        self._listener = listener
        self._leash = leash
        self._now = loop.now
        self._bound: dict[tuple[str, str], Bound] = {}
        self._rung: dict[tuple[str, str], None] = {}
        self._due: dict[str, float] = {}
        self._next_tick = loop.now()
        self._away_until = 0.0
        self._clients = 0
        self._stopping = False
        self._give_up_at = float("inf")

    def run(self) -> None:
        """Until nobody is left who could say anything, or it is told to end."""
        if self._leash is not None:
            self._loop.add_reader(self._leash.fileno(), self._hear_supervisor)
        self._start_accepting()
        self._loop.run(self._after_pass)

    def _after_pass(self) -> float:
        if self._now() >= self._away_until:
            self._try(self._look_after)
        for peer in list(self._peers):
            self._serve(peer)
            self._part_with(peer)
            peer.listen()
        if not self._peers and (self._listener is None or self._stopping):
            self._loop.stop()
        elif self._now() > self._give_up_at:
            lost = sum(peer.lines.count() + (peer.pending is not None) for peer in self._peers)
            raise RedisUnavailable(f"told to end while Redis is away: {lost} lines that were read are not dealt with")
        return self._patience_seconds()

    def stop(self) -> None:
        """Nothing more is read; what was read is dealt with."""
        self._stopping = True
        self._give_up_at = self._now() + END_SECONDS
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
        if self._leash is not None:
            self._loop.remove_reader(self._leash.fileno())
        for peer in self._peers:
            peer.end()

    def _patience_seconds(self) -> float:
        now = self._now()
        if now < self._away_until:
            return self._away_until - now + 0.001
        if self._rung or any(peer.pending is not None or peer.lines.has_line() for peer in self._peers):
            return 0.0
        return max(0.0, min([self._next_tick, *self._due.values()]) - now) + 0.001

    def _hear_supervisor(self) -> None:
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
            log.warning("no new connections for a while error=%s", exc)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._start_accepting)
            return
        if len(self._peers) >= MAX_CLIENTS:
            self._turn_away(connected)
            return
        self._clients += 1
        self._peers[Client(self._loop, connected, f"client-{self._clients}")] = None

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
            self._loop.add_reader(self._ears.fileno(), self._hear)
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
        fd = self._ears.fileno()
        try:
            heard = self._ears.hear()
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
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
        try:
            line = peer.lines.pop()
            if line is None:
                return False
            if line.strip():
                peer.pending = peer.lines.number, read_message(line)
        except InvalidData:
            self._refuse(peer, peer.lines.number, BadMessage("the line is too long: at most 1 MiB is allowed"))
        except BadMessage as exc:
            self._refuse(peer, peer.lines.number, exc)
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
        if not peer.ended or peer.pending is not None or peer.lines.has_line():
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
