"""The nemesis: injects faults on schedule, undoes them, and logs both."""

import heapq
import random
import time
from collections.abc import Callable
from itertools import count

import redis

from forq import ForqError
from tests.chaos.faults import FAULTS, fired
from tests.chaos.ground import append
from tests.chaos.hit import Hit
from tests.chaos.schedule import Strike
from tests.chaos.stage import Stage
from tests.support.drive.wait import wait_until

_AGAIN_SECONDS = 0.05
# How long a run on a busy machine is extended for faults that have found nothing to hit yet.
_PATIENCE_SECONDS = 30.0
# The interval at which they are retried meanwhile; longer than any of them takes to show.
_STRIKE_AGAIN_SECONDS = 4.0


class Nemesis:
    def __init__(self, stage: Stage, strikes: list[Strike], armed: list[str], seconds: float) -> None:
        self.struck: dict[str, list[str]] = {fault: [] for fault in armed}
        self._stage = stage
        self._began = time.monotonic()
        self._end = self._strike_again_at = self._began + seconds
        self._order = count()
        self._plan: list[tuple[float, int, Callable[[], None]]] = []
        self._to_undo: dict[int, Callable[[], bool]] = {}
        for strike in strikes:
            self._at(self._began + strike.at_seconds, self._striking(strike))

    def run(self) -> None:
        """Runs until the time is over and every fault has fired or had its chance; then undoes everything."""
        while not self._is_over(time.monotonic()):
            self._stage.watch()
            while self._plan and self._plan[0][0] <= time.monotonic():
                heapq.heappop(self._plan)[2]()
            # The pace of a schedule, not a wait for a condition.
            time.sleep(0.005)
        wait_until(self._undo_all, 60.0, "every fault is undone")

    def _undo_all(self) -> bool:
        """In rounds: one fault may hold a part that another needs to end."""
        for undo in list(self._to_undo.values()):
            undo()
        return not self._to_undo

    def _is_over(self, now: float) -> bool:
        if now < self._end:
            return False
        # An armed fault (a crash point, a reply to lose) may fire later.
        slept = [fault for fault, hits in fired(self._stage, self.struck).items() if not hits and fault in FAULTS]
        if slept and now >= self._strike_again_at:
            self._strike_again_at = now + _STRIKE_AGAIN_SECONDS
            for number, fault in enumerate(slept):
                self._striking(Strike(now - self._began, fault, number))()
        return now > self._end + _PATIENCE_SECONDS or all(fired(self._stage, self.struck).values())

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._plan, (when, next(self._order), what))

    def _striking(self, strike: Strike) -> Callable[[], None]:
        def try_it() -> None:
            chance = random.Random(strike.seed)
            try:
                hit = FAULTS[strike.fault][1](self._stage, chance)
            except (redis.RedisError, ForqError) as exc:
                self._tell(f"{strike.fault} failed: {exc}")
                hit = None
            if hit is None:
                self._at(time.monotonic() + _AGAIN_SECONDS, try_it)
                return
            self.struck[strike.fault].append(hit.what)
            self._tell(f"{strike.fault} {hit.what}")
            if hit.undo is not None:
                self._plan_undo(strike.fault, hit, hit.undo)

        return try_it

    def _plan_undo(self, fault: str, hit: Hit, undo: Callable[[], bool]) -> None:
        number, deadline = next(self._order), time.monotonic() + hit.seconds

        def undone() -> bool:
            try:
                over = undo()
            except (redis.RedisError, ForqError) as exc:
                self._tell(f"{fault} is not over: {exc}")
                return False
            if over:
                del self._to_undo[number]
                self._tell(f"{fault} is over")
            return over

        def look() -> None:
            may_end = hit.enough() or time.monotonic() >= deadline
            if not (may_end and undone()):
                self._at(time.monotonic() + _AGAIN_SECONDS, look)

        self._to_undo[number] = undone
        self._at(time.monotonic() + min(hit.seconds, _AGAIN_SECONDS), look)

    def _tell(self, what: str) -> None:
        append(self._stage.ground.story, f"{time.monotonic():.3f} {time.monotonic() - self._began:7.3f} {what}")
