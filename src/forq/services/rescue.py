"""Rescue: returns jobs that a live worker holds and has not started, so that other workers can run them."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from forq.broker.recovery import Position, WorkerRecovery
from forq.errors import ForqError, RedisUnavailable
from forq.procs.liveness import SLICE_SECONDS, AwakeTime
from forq.procs.scoreboard import Scoreboard, Slot, State, age_ms

BATCH_CHECK_SECONDS = 0.02
RESCUE_AFTER_MS = 20.0
# Polling stops after this many checks without a batch.
QUIET_CHECKS = 50
RESCUES_LOG_SECONDS = 60.0

# A worker has usually started a published claim by then.
CLAIM_SECONDS = 0.3
# Finds the claims that were not published; slightly longer than CLAIM_NOTICE_MS in turn.lua.
RECHECK_SECONDS = 2.2
ANSWER_SECONDS = 0.5
# Between the mark and the decision: longer than a running worker needs from its position to the mark.
MARKED_SECONDS = 0.02

RESTING = frozenset((State.IDLE, State.PARKED, State.LIMITED))

log = logging.getLogger("forq")

CallLater = Callable[[float, Callable[[], None]], object]


class BatchRescue:
    """Rescues the rest of a batch from behind a slow job.

    It polls the scoreboard while any worker holds a batch; `scoreboard.watching` is 1 while it polls. A worker that
    starts a batch while it is 0 wakes pulse through the eventfd.
    """

    def __init__(
        self,
        recovery: WorkerRecovery,
        board: Scoreboard,
        *,
        later: CallLater,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recovery = recovery
        self._board = board
        self._later = later
        self._now_ns = now_ns
        self._quiet_checks = 0
        # Slot -> the position at which its batch was rescued.
        self._rescued: dict[int, int] = {}
        # Queue -> jobs rescued since its last log line, which is less than a minute old.
        self._unlogged: dict[str, int] = {}
        # Queues whose last rescue failed.
        self._failing: set[str] = set()

    def start(self) -> None:
        """Polls even if `watching` is 1: a pulse that died while polling left it at 1, and no worker wakes us."""
        self._board.watching = 1
        self._later(0, self._check)

    def wake(self) -> None:
        """A worker has started a batch."""
        if not self._board.watching:
            self._board.watching = 1
            self._quiet_checks = 0
            self._later(BATCH_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        self._quiet_checks = 0 if self._rescue_stuck() else self._quiet_checks + 1
        if self._quiet_checks >= QUIET_CHECKS:
            self._board.watching = 0
            # A worker that started a batch just before the flag was cleared did not wake pulse.
            if not self._rescue_stuck():
                return
            self._board.watching = 1
            self._quiet_checks = 0
        self._later(BATCH_CHECK_SECONDS, self._check)

    def _rescue_stuck(self) -> bool:
        """Rescues jobs that are stuck behind slow ones; True if any worker holds a batch."""
        now = self._now_ns()
        batches = False
        for number in range(self._board.highest):
            slot = self._board.slot(number)
            packed = slot.position
            if slot.held < 2 or self._rescued.get(number) == packed:
                continue
            batches = True
            at = slot.read_position(packed)
            position = Position(slot.worker, at.turn, at.index, True)
            # Read after the position: it is set before the position of the next job.
            has_results = slot.has_results
            if not at.running or age_ms(packed, now) <= RESCUE_AFTER_MS:
                continue
            if self.rescue(slot.queue, position, has_results=has_results):
                self._rescued[number] = packed
        return batches

    def rescue(self, queue: str, at: Position, *, has_results: bool = False) -> bool:
        """False if the next check must try again."""
        try:
            rescued = self._recovery.rescue(queue, at, has_results=has_results)
        except ForqError as exc:
            # Once per failure, since every check retries.
            if queue not in self._failing:
                log.warning("rescue failed; retrying queue=%s error=%s", queue, exc)
            self._failing.add(queue)
            return False
        self._failing.discard(queue)
        if rescued:
            self._count(queue, rescued)
        return True

    def _count(self, queue: str, jobs: int) -> None:
        """Logs the first rescue at once and the others once a minute: a busy queue may need several a second."""
        if queue in self._unlogged:
            self._unlogged[queue] += jobs
        else:
            self._log(queue, jobs)

    def _log(self, queue: str, jobs: int) -> None:
        log.info("rescued jobs stuck behind a slow one queue=%s jobs=%s", queue, jobs)
        self._unlogged[queue] = 0
        self._later(RESCUES_LOG_SECONDS, partial(self._log_rest, queue))

    def _log_rest(self, queue: str) -> None:
        jobs = self._unlogged.pop(queue)
        if jobs:
            self._log(queue, jobs)


@dataclass
class UnreadClaim:
    """A worker that has not started the jobs it claimed with this turn."""

    slot: Slot
    queue: str
    worker: str
    turn: int
    probed_ns: int
    waited_seconds: float = 0.0
    # Set by this pulse. An earlier one may have marked the slot and died before it returned anything.
    marked: bool = False


class UnreadClaims:
    """Rescues jobs from workers whose process does not respond.

    An idle worker leaves its claim at the server. So the server may assign a job to a process that is stopped, frozen,
    or whose interpreter is blocked.

    1. Such a claim is published (`look`, with the worker and its turn), at most once in 2 s per queue. A check of the
       queue's registrations some time later finds the claims in between. Heartbeats report workers that lag behind,
       and jobs that wait while workers rest.
    2. A worker lags if its queue has registered a later turn than it has read, or if it has read that turn and started
       nothing of it. The supervisor then probes its process; any beat after that is a sign of life.
    3. After 0.5 s without one, the turn is marked as taken in the worker's slot. A moment later, if the worker still
       has not started, all its jobs are returned. A worker that wakes up publishes its position and then reads the
       mark: either pulse sees the position, or the worker sees the mark.

    `probe` makes the supervisor ping the processes of these slots. Its flag: whether they have unread claims.
    """

    def __init__(
        self,
        recovery: WorkerRecovery,
        board: Scoreboard,
        *,
        later: CallLater,
        probe: Callable[[list[int], bool], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recovery = recovery
        self._board = board
        self._later = later
        self._probe = probe
        self._now = now
        # By slot number.
        self._claims: dict[int, UnreadClaim] = {}
        self._slot_numbers: dict[str, int] = {}
        # Queue -> time of its next check; a later published claim postpones it.
        self._check_at: dict[str, float] = {}
        self._awake = AwakeTime(now())
        self._ticking = False

    def on_claim(self, queue: str, worker: str, turn: int) -> None:
        """A waiting worker was given jobs."""
        if not self._is_ours(worker):
            return
        slot = self._slot_of(worker)
        if slot is not None and _lags(slot, worker, turn):
            self._later(CLAIM_SECONDS, lambda: self.suspect(queue, {worker: turn}))
        self._check_at[queue] = at = self._now() + RECHECK_SECONDS
        self._later(RECHECK_SECONDS, lambda: self._check_if_due(queue, at))

    def suspect(self, queue: str, turns: Mapping[str, int]) -> None:
        """These workers may not have read these turns: probes those that lag."""
        found = [
            UnreadClaim(slot, queue, worker, turn, time.monotonic_ns())
            for worker, turn in turns.items()
            if (slot := self._slot_of(worker)) is not None and _lags(slot, worker, turn)
        ]
        known = self._claims
        new = [
            claim for claim in found if claim.slot.number not in known or known[claim.slot.number].turn != claim.turn
        ]
        if not new:
            return
        for claim in new:
            self._inherit_wait(claim)
            known[claim.slot.number] = claim
        self._probe([claim.slot.number for claim in new], True)
        if not self._ticking:
            self._ticking = True
            self._start_slice()

    def probe_resting(self, wanted: set[tuple[str, int]]) -> None:
        """Jobs wait for processes of these queues and roles. A worker that still rests may have been woken, but
        its process does not respond."""
        if not wanted:
            return
        slots = map(self._board.slot, range(self._board.highest))
        resting = [slot.number for slot in slots if slot.state in RESTING and (slot.queue, slot.role) in wanted]
        if resting:
            self._probe(resting, False)

    def check(self, queue: str) -> None:
        """Compares the turns that the queue has registered for this supervisor's workers with those they have read."""
        self.suspect(queue, self._recovery.registered(queue))

    def _check_if_due(self, queue: str, at: float) -> None:
        if self._check_at.get(queue) == at:
            self._check_now(queue)

    def _check_now(self, queue: str) -> None:
        self._check_at.pop(queue, None)
        try:
            self.check(queue)
        except RedisUnavailable as exc:
            # The next heartbeat reports the same workers.
            log.info("cannot check for unread claims queue=%s error=%s", queue, exc)

    def _inherit_wait(self, claim: UnreadClaim) -> None:
        """Counts the time since an earlier probe if the same process has not responded to that."""
        others = [other for other in self._claims.values() if other.slot.pid == claim.slot.pid]
        unresponsive = [other for other in others if other.slot.beat_ns <= other.probed_ns]
        if unresponsive:
            longest = max(unresponsive, key=lambda other: other.waited_seconds)
            claim.probed_ns, claim.waited_seconds = longest.probed_ns, longest.waited_seconds

    def _start_slice(self) -> None:
        self._awake.restart(self._now())
        self._later(SLICE_SECONDS, self._tick)

    def _tick(self) -> None:
        counted = self._awake.count(self._now())
        for number, claim in list(self._claims.items()):
            if not _lags(claim.slot, claim.worker, claim.turn) or claim.slot.beat_ns > claim.probed_ns:
                del self._claims[number]
                continue
            claim.waited_seconds += counted
            if claim.waited_seconds >= ANSWER_SECONDS and not claim.marked:
                claim.slot.taken, claim.marked = claim.turn, True
                self._later(MARKED_SECONDS, partial(self._return_jobs, claim))
        self._ticking = bool(self._claims)
        if self._ticking:
            self._start_slice()

    def _return_jobs(self, claim: UnreadClaim) -> None:
        if not _lags(claim.slot, claim.worker, claim.turn):
            return
        try:
            returned = self._recovery.rescue(claim.queue, Position(claim.worker, claim.turn, 0, False))
        except ForqError as exc:
            log.warning("cannot return the jobs of an unresponsive process queue=%s error=%s", claim.queue, exc)
            # The next slice writes the mark again and retries.
            claim.slot.taken, claim.marked = 0, False
            return
        if returned:
            log.warning(
                "returned jobs that an unresponsive process had not started queue=%s jobs=%s pid=%s",
                *(claim.queue, returned, claim.slot.pid),
            )
            # Another worker of the same process may have been waiting for them.
            self._later(MARKED_SECONDS, partial(self._check_now, claim.queue))

    def _is_ours(self, worker: str) -> bool:
        """The name of a worker ends in the name of its processor."""
        return worker.endswith(self._recovery.processor[-16:])

    def _slot_of(self, worker: str) -> Slot | None:
        """Searches all slots only for a new name."""
        number = self._slot_numbers.get(worker)
        if number is None or self._board.slot(number).worker != worker:
            slots = map(self._board.slot, range(self._board.highest))
            self._slot_numbers = {slot.worker: slot.number for slot in slots if slot.worker}
            number = self._slot_numbers.get(worker)
        return None if number is None else self._board.slot(number)


def _lags(slot: Slot, worker: str, turn: int) -> bool:
    """Whether the worker has not started the jobs it claimed with this turn. `held` is 0 if it claimed none."""
    at = slot.read_position()
    if at.running or slot.worker != worker or slot.state in (State.EMPTY, State.STARTING):
        return False
    return at.turn < turn or (at.turn == turn and at.index == 0 and slot.held > 0)
