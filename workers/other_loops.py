"""The loops of processes other than a queue's main process, and of queues that run no jobs themselves.

1. RetryLoop: runs fail jobs at once, and jobs of the retry lane while no other job is ready.
2. HelperLoop: runs suspects or fail jobs until none is left.
3. ReleaseLoop (mode auto_release): tries to release the first item whenever the gate opens. The gate is in Redis: the
   reply to an early try is the time left to wait. So there is one try per interval, however many supervisors run.
4. IdleLoop (modes on_request and external): items leave on request, so this loop only waits until it is stopped.
"""

import logging
import threading
from collections.abc import Callable

from forq.broker.claim import Consumer
from forq.errors import BackPressure, ForqError, RedisUnavailable
from forq.procs.backoff import reconnecting
from forq.procs.scoreboard import DONE, STATE, Slot, State
from forq.workers.event_loop import Cancelled
from forq.workers.loop import OUT_OF_MEMORY_SECONDS, WorkerLoop

log = logging.getLogger("forq")


class RetryLoop:
    """Serves two queues with one slot and one count of turns: the queue (its retry lane) and its fail queue. Blocks on
    one list, `failed`, into which scripts push a token when there may be a job for it.

    `import_handlers` is called before the first turn that may claim a job: most retry processes never have one, and the
    memory of an application would be used twice.
    """

    def __init__(self, lane: WorkerLoop, fails: WorkerLoop | None, import_handlers: Callable[[], None]) -> None:
        self._lane = lane
        self._fails = fails
        self._loops = [lane] if fails is None else [fails, lane]
        self._import_handlers = import_handlers

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
        for loop in self._loops:
            loop.stop()

    def cancel(self, position: int | None, outcome: Cancelled, cause: str) -> None:
        for loop in self._loops:
            loop.cancel(position, outcome, cause)

    def coroutine_stack(self) -> str | None:
        return next((stack for loop in self._loops if (stack := loop.coroutine_stack()) is not None), None)

    def blocked_client_id(self) -> int | None:
        return self._lane.blocked_client_id()

    def title_text(self) -> str | None:
        return None

    def _has_work(self, loop: WorkerLoop) -> bool:
        """Serving a batch takes capacity. Fail jobs must not wait while an empty lane requests some."""
        return loop is not self._lane or len(self._loops) == 1 or loop.lane_may_have_jobs()

    def _may_have_first_job(self) -> bool:
        """Asks until Redis answers: the token that ended the last wait is gone, so there may be no other one."""
        backoff = reconnecting()
        while not self.stopping:
            try:
                return self._lane.consumer.lane_has_jobs() or (
                    self._fails is not None and self._fails.consumer.queue_has_jobs()
                )
            except RedisUnavailable as exc:
                self._lane.back_off(backoff, exc)
        return False

    def run(self, on_ready: Callable[[], None]) -> None:
        if not all(loop.join() for loop in self._loops):
            return
        on_ready()
        while not self.stopping and not self._may_have_first_job():
            self._lane.wait_for_work()
        if not self.stopping:
            self.slot.words[STATE] = State.STARTING
            self._import_handlers()
        while not self.stopping:
            served = next((loop for loop in self._loops if self._has_work(loop) and loop.serve_batch()), None)
            if served is not None:
                # Before a turn on the other queue, which would overwrite the position of the jobs that ran here.
                served.settle()
            elif not self.stopping:
                self._lane.wait_for_work()
        for loop in self._loops:
            loop.leave()

    def close(self) -> None:
        for loop in self._loops:
            loop.close()


class HelperLoop(WorkerLoop):
    """Serves one list, suspects or fail jobs, and ends when it is empty. Never blocks in Redis."""

    def run(self, on_ready: Callable[[], None]) -> None:
        if not self.join():
            return
        on_ready()
        while not self.stopping and self.serve_batch():
            pass
        self.leave()


class _LoopWithoutJobs:
    """Stops when told to. Has no job to cancel, and no stack to show."""

    def __init__(self, slot: Slot, queue: str) -> None:
        self.slot = slot
        self.queue = queue
        self._stop = threading.Event()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def cancel(self, position: int | None, outcome: Cancelled, cause: str) -> None:
        pass

    def coroutine_stack(self) -> None:
        return None


class IdleLoop(_LoopWithoutJobs):
    def __init__(self, slot: Slot, queue: str, mode: str) -> None:
        super().__init__(slot, queue)
        self._mode = mode

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


class ReleaseLoop(_LoopWithoutJobs):
    """One lane of an auto_release queue."""

    def __init__(
        self, consumer: Consumer, slot: Slot, *, expiry_ms: int, idle_state: State, on_try: Callable[[], None]
    ) -> None:
        super().__init__(slot, consumer.queue)
        self._consumer = consumer
        self._expiry_ms = expiry_ms
        self._idle_state = idle_state
        self._on_try = on_try
        self._blocking = False
        self._releasing = False
        self._backoff = reconnecting()

    def blocked_client_id(self) -> int | None:
        return self._consumer.link.client_id if self._blocking else None

    def title_text(self) -> str:
        state = "releasing" if self._releasing else State(self.slot.state).name.lower()
        return f"{state} {self.slot.done:,} released"

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serves until stopped. Raises UnknownQueue or Fenced when this worker is no longer registered."""
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
        """Tries once, then waits until the next try."""
        tried = self._consumer.release()
        self.slot.words[DONE] += tried.leased
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
            # Redis refuses BLMOVE when out of memory, but not a try.
            log.warning("redis is out of memory; retrying queue=%s error=%s", self.queue, exc)
            self._stop.wait(OUT_OF_MEMORY_SECONDS)
        finally:
            self._blocking = False

    def _back_off(self, exc: RedisUnavailable) -> None:
        if not self._backoff.failures:
            log.warning("redis is gone; retrying queue=%s error=%s", self.queue, exc)
        self._stop.wait(self._backoff.fail())

    def _leave(self) -> None:
        """Best effort: recovery does the same."""
        self.slot.words[STATE] = State.STOPPING
        try:
            self._consumer.leave(0)
        except ForqError as exc:
            log.warning("failed to unregister; recovery will clean up queue=%s error=%s", self.queue, exc)
        finally:
            self._consumer.close()

    def close(self) -> None:
        pass
