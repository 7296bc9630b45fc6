"""The retry child's worker: fail jobs at once, and jobs of the retry lane while nothing else waits.

It works on two queues, the queue itself (its retry lane) and the fail queue below it, with one slot and one count of
turns. It blocks on one list, `failed`, into which scripts put a token when there may be something for it.

A helper's worker serves one of these alone, suspects or fail jobs, and ends when there is none.

What the children of a queue do that runs nothing itself.

1. ReleaseLoop (auto_release): one try after the other to release the item at the head of the line, when the gate opens.
   The gate is in Redis; whoever comes too early is told how long to wait, and so one item is tried per interval,
   however many supervisors there are. With nothing in line it blocks, like any worker.
2. IdleLoop (on_request, external): items leave when somebody asks for them;
   nothing is to be done here but to be there.
"""

import logging
import threading
from collections.abc import Callable

from forq.broker.claim import Consumer, Releaser
from forq.errors import BackPressure, ForqError, RedisUnavailable
from forq.procs.backoff import reconnecting
from forq.procs.scoreboard import DONE, STATE, Slot, State
from forq.workers.loop import OUT_OF_MEMORY_SECONDS, WorkerLoop

log = logging.getLogger("forq")


class RetryLoop:
    def __init__(self, lane: WorkerLoop, fails: WorkerLoop | None) -> None:
        self._lane = lane
        self._all = [lane] if fails is None else [fails, lane]

    @property
    def slot(self) -> Slot:
        return self._lane.slot

    @property
    def queue(self) -> str:
        return self._lane.queue

    @property
    def stopping(self) -> bool:
        return self._lane.stopping

    def stop(self) -> None:
        for loop in self._all:
            loop.stop()

    def blocked_client_id(self) -> int | None:
        return self._lane.blocked_client_id()

    def title_text(self) -> str | None:
        return None

    def _has_work(self, loop: WorkerLoop) -> bool:
        """To serve it takes capacity; for a lane that is empty no fail job should have to wait for that."""
        return loop is not self._lane or len(self._all) == 1 or loop.lane_may_have_jobs()

    def run(self, on_ready: Callable[[], None]) -> None:
        if not all(loop.join() for loop in self._all):
            return
        on_ready()
        while not self.stopping:
            served = next((loop for loop in self._all if self._has_work(loop) and loop.serve_batch()), None)
            if served is not None:
                # Before the other queue's turn: that one would move the position away from what ran here.
                served.settle()
            elif not self.stopping:
                self._lane.wait_for_work()
        for loop in self._all:
            loop.leave()

    def close(self) -> None:
        for loop in self._all:
            loop.close()


class HelperLoop:
    """Serves until nothing is left to claim."""

    def __init__(self, jobs: WorkerLoop) -> None:
        self._jobs = jobs

    @property
    def slot(self) -> Slot:
        return self._jobs.slot

    @property
    def queue(self) -> str:
        return self._jobs.queue

    @property
    def stopping(self) -> bool:
        return self._jobs.stopping

    def stop(self) -> None:
        self._jobs.stop()

    def blocked_client_id(self) -> int | None:
        """It never blocks in Redis."""
        return None

    def title_text(self) -> str | None:
        return None

    def run(self, on_ready: Callable[[], None]) -> None:
        if not self._jobs.join():
            return
        on_ready()
        while not self.stopping and self._jobs.serve_batch():
            pass
        self._jobs.leave()

    def close(self) -> None:
        self._jobs.close()


class IdleLoop:
    """Sleeps until it is stopped."""

    def __init__(self, slot: Slot, queue: str, mode: str) -> None:
        self.slot = slot
        self.queue = queue
        self._mode = mode
        self._stop = threading.Event()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def blocked_client_id(self) -> int | None:
        return None

    def title_text(self) -> str:
        return self._mode.replace("_", " ")

    def run(self, on_ready: Callable[[], None]) -> None:
        self.slot.words[STATE] = State.IDLE
        on_ready()
        self._stop.wait()
        self.slot.words[STATE] = State.STOPPING

    def close(self) -> None:
        pass


class ReleaseLoop:
    """One lane of an auto_release queue."""

    def __init__(
        self, consumer: Consumer, slot: Slot, *, expiry_ms: int, idle_state: State, on_try: Callable[[], None]
    ) -> None:
        self.slot = slot
        self.queue = consumer.queue
        self._consumer = consumer
        self._releaser = Releaser(consumer)
        self._expiry_ms = expiry_ms
        self._idle_state = idle_state
        self._on_try = on_try
        self._stop = threading.Event()
        self._blocking = False
        self._releasing = False
        self._backoff = reconnecting()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def blocked_client_id(self) -> int | None:
        return self._consumer.link.client_id if self._blocking else None

    def title_text(self) -> str:
        what = "releasing" if self._releasing else State(self.slot.state).name.lower()
        return f"{what} {self.slot.done:,} released"

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until it is stopped; raises UnknownQueue or Fenced when its place is gone."""
        joined = False
        while not self.stopping:
            try:
                if not joined:
                    self.slot.epoch = int(self._consumer.join(self._expiry_ms))
                    joined = True
                    on_ready()
                self._step()
                self._backoff.reset()
            except RedisUnavailable as exc:
                self._back_off(exc)
        self._leave()

    def _step(self) -> None:
        """One try, and the wait until the next one can be made."""
        tried = self._releaser.release()
        self.slot.words[DONE] += tried.handed_over
        self.slot.words[STATE] = State.PARKED if tried.paused else self._idle_state
        self._releasing = tried.wait_seconds > 0
        if self._releasing:
            self._on_try()
            self._stop.wait(tried.wait_seconds)
        else:
            self._block(self._consumer.wait_for_wake if tried.paused else self._wait_for_item)

    def _wait_for_item(self) -> None:
        while not self.stopping and not self._consumer.wait_for_job():
            pass

    def _block(self, wait: Callable[[], None]) -> None:
        self._blocking = True
        try:
            self._consumer.fetch_client_id()
            if not self.stopping:
                wait()
        except BackPressure as exc:
            # Out of memory BLMOVE is refused, but a try is not.
            log.warning("redis is out of memory queue=%s error=%s", self.queue, exc)
            self._stop.wait(OUT_OF_MEMORY_SECONDS)
        finally:
            self._blocking = False

    def _back_off(self, exc: RedisUnavailable) -> None:
        if not self._backoff.failures:
            log.warning("redis is gone, trying again queue=%s error=%s", self.queue, exc)
        self._stop.wait(self._backoff.fail())

    def _leave(self) -> None:
        """Best effort: recovery does the same."""
        self.slot.words[STATE] = State.STOPPING
        try:
            self._consumer.leave(0)
        except ForqError as exc:
            log.warning("could not leave in order, recovery will do it queue=%s error=%s", self.queue, exc)
        finally:
            self._consumer.close()

    def close(self) -> None:
        pass
