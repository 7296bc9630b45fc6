"""Gives back jobs that workers were given and do not begin, because their process does not answer.

A worker that waits sends its claim along: the server may make a job active in a process that is stopped, frozen, or
whose interpreter something else keeps.

1. Such a claim is told of (`look`, with the worker and its turn), at most once in 2 s per queue; a look at the queue's
   registrations some time later finds the claims in between. Heartbeats tell of workers that lag behind, too, and of
   jobs that wait while workers rest.
2. A worker lags if its queue has registered a later turn than it has read, or it has read that turn and begun nothing
   of it. The supervisor then asks its process for a sign of life; any beat after that is one.
3. After 0.5 s without one, the turn is marked as taken in the worker's slot, and a moment later, if the worker still
   has not begun, all that it holds goes back. A worker that wakes up publishes its position and then reads the mark:
   either pulse sees the position, or the worker sees the mark.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forq.broker.recovery import Position, WorkerRecovery
from forq.errors import ForqError, RedisUnavailable
from forq.procs.liveness import SLICE_SECONDS, AwakeTime
from forq.procs.scoreboard import Scoreboard, Slot, State

# When a claim that was told of is looked at: usually the worker has long begun.
CLAIM_SECONDS = 0.3
# When the claims after it, which were not told of, are looked for; a little more than turn.lua's CLAIM_NOTICE_MS.
LOOK_AGAIN_SECONDS = 2.2
ANSWER_SECONDS = 0.5
# Between the mark and the look that decides: longer than it takes a running worker from its position to the mark.
MARKED_SECONDS = 0.02

RESTING = frozenset((State.IDLE, State.PARKED, State.LIMITED))

log = logging.getLogger("forq")


@dataclass
class Lagging:
    """A worker that does not begin what it was given with this turn."""

    slot: Slot
    queue: str
    worker: str
    turn: int
    asked_ns: int
    waited: float = 0.0
    # Whether it was marked as taken here; an earlier pulse may have done so, and died before it gave anything back.
    marked: bool = False


class Unread:
    """`later` makes a call after some seconds; `challenge` asks the supervisor to ping the processes of these slots,
    and says whether they have jobs that they do not begin."""

    def __init__(
        self,
        recovery: WorkerRecovery,
        board: Scoreboard,
        *,
        later: Callable[[float, Callable[[], None]], object],
        challenge: Callable[[list[int], bool], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recovery = recovery
        self._board = board
        self._later = later
        self._challenge = challenge
        self._now = now
        self._lagging: dict[int, Lagging] = {}
        self._numbers: dict[str, int] = {}
        # When a queue is looked at next; a later claim that is told of puts it off.
        self._look_at: dict[str, float] = {}
        self._awake = AwakeTime(now())
        self._ticking = False

    def told(self, queue: str, worker: str, turn: int) -> None:
        """This worker was given jobs while it waited."""
        if not self._is_ours(worker):
            return
        slot = self._slot_of(worker)
        if slot is not None and _lags(slot, worker, turn):
            self._later(CLAIM_SECONDS, lambda: self._suspect(queue, {worker: turn}))
        self._look_at[queue] = at = self._now() + LOOK_AGAIN_SECONDS
        self._later(LOOK_AGAIN_SECONDS, lambda: self._look_again(queue, at))

    def lags(self, queue: str, turns: Mapping[str, int]) -> None:
        """These workers have turns that they had not read when their positions were."""
        self._suspect(queue, turns)

    def ask_resting(self, wanted: set[tuple[str, int]]) -> None:
        """Jobs wait for these queues' processes of these roles. A worker that rests all the same may have been woken
        and not know it, because its process does not answer."""
        if not wanted:
            return
        slots = map(self._board.slot, range(self._board.highest))
        resting = [slot.number for slot in slots if slot.state in RESTING and (slot.queue, slot.role) in wanted]
        if resting:
            self._challenge(resting, False)

    def look(self, queue: str) -> None:
        """Looks at the turns that the queue has registered for the workers of this supervisor."""
        self._suspect(queue, self._recovery.registered(queue))

    def _look_again(self, queue: str, at: float) -> None:
        if self._look_at.get(queue) != at:
            return
        del self._look_at[queue]
        try:
            self.look(queue)
        except RedisUnavailable as exc:
            log.info("cannot look for unread jobs queue=%s error=%s", queue, exc)  # the next heartbeat tells

    def _suspect(self, queue: str, turns: Mapping[str, int]) -> None:
        found = [
            Lagging(slot, queue, worker, turn, time.monotonic_ns())
            for worker, turn in turns.items()
            if (slot := self._slot_of(worker)) is not None and _lags(slot, worker, turn)
        ]
        known = self._lagging
        new = [one for one in found if one.slot.number not in known or known[one.slot.number].turn != one.turn]
        if not new:
            return
        for one in new:
            self._inherit(one)
            known[one.slot.number] = one
        self._challenge([one.slot.number for one in new], True)
        if not self._ticking:
            self._ticking = True
            self._plan()

    def _inherit(self, one: Lagging) -> None:
        """A process that has not answered for others need not be waited for again."""
        others = [other for other in self._lagging.values() if other.slot.pid == one.slot.pid]
        silent = [other for other in others if other.slot.beat_ns <= other.asked_ns]
        if silent:
            longest = max(silent, key=lambda other: other.waited)
            one.asked_ns, one.waited = longest.asked_ns, longest.waited

    def _plan(self) -> None:
        self._awake.restart(self._now())
        self._later(SLICE_SECONDS, self._tick)

    def _tick(self) -> None:
        counted = self._awake.count(self._now())
        for number, one in list(self._lagging.items()):
            if not _lags(one.slot, one.worker, one.turn) or one.slot.beat_ns > one.asked_ns:
                del self._lagging[number]
                continue
            one.waited += counted
            if one.waited >= ANSWER_SECONDS and not one.marked:
                one.slot.taken, one.marked = one.turn, True
                self._later(MARKED_SECONDS, lambda one=one: self._give_back(one))  # type: ignore[misc]
        self._ticking = bool(self._lagging)
        if self._ticking:
            self._plan()

    def _give_back(self, one: Lagging) -> None:
        if not _lags(one.slot, one.worker, one.turn):
            return
        try:
            returned = self._recovery.rescue(one.queue, Position(one.worker, one.turn, 0, False))
        except ForqError as exc:
            log.warning("cannot give back unread jobs queue=%s error=%s", one.queue, exc)
            # The mark is written again, and this tried again, with the next slice.
            one.slot.taken, one.marked = 0, False
            return
        if returned:
            log.warning(
                "gave back jobs that an unresponsive process had not begun queue=%s jobs=%s pid=%s",
                *(one.queue, returned, one.slot.pid),
            )
            # Another worker of the same process may have waited for them.
            self._later(MARKED_SECONDS, lambda: self._look_again(one.queue, self._mark_look(one.queue)))

    def _mark_look(self, queue: str) -> float:
        self._look_at[queue] = at = self._now()
        return at

    def _is_ours(self, worker: str) -> bool:
        """By its name, which ends in that of its processor: other supervisors hear of their own."""
        return worker.endswith(self._recovery.processor[-16:])

    def _slot_of(self, worker: str) -> Slot | None:
        """All slots are searched only for a name that is new."""
        number = self._numbers.get(worker)
        if number is None or self._board.slot(number).worker != worker:
            slots = map(self._board.slot, range(self._board.highest))
            self._numbers = {slot.worker: slot.number for slot in slots if slot.worker}
            number = self._numbers.get(worker)
        return None if number is None else self._board.slot(number)


def _lags(slot: Slot, worker: str, turn: int) -> bool:
    """Whether it has not begun what it was given with this turn. One without jobs has read its turn and holds none."""
    at = slot.read_position()
    if at.running or slot.worker != worker or slot.state in (State.EMPTY, State.STARTING):
        return False
    return at.turn < turn or (at.turn == turn and at.index == 0 and slot.held > 0)
