"""The retry child's worker: fail jobs at once, and jobs of the retry lane while nothing else waits.

It works on two queues, the queue itself (its retry lane) and the fail queue below it, with one slot and one count of
turns. It blocks on one list, `failed`, into which scripts put a token when there may be something for it.

A helper's worker serves one of these alone, suspects or fail jobs, and ends when there is none.
"""

from collections.abc import Callable

from forq.procs.scoreboard import Slot
from forq.workers.loop import WorkerLoop


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

    def blocked_client(self) -> int | None:
        return self._lane.blocked_client()

    def doing(self) -> str | None:
        return None

    def _has_work(self, loop: WorkerLoop) -> bool:
        """To serve it takes capacity; for a lane that is empty no fail job should have to wait for that."""
        return loop is not self._lane or len(self._all) == 1 or loop.may_have_work()

    def run(self, on_ready: Callable[[], None]) -> None:
        if not all(loop.join() for loop in self._all):
            return
        on_ready()
        while not self.stopping:
            served = next((loop for loop in self._all if self._has_work(loop) and loop.serve()), None)
            if served is not None:
                # Before the other queue's turn: that one would move the position away from what ran here.
                served.settle()
            elif not self.stopping:
                self._lane.rest()
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

    def blocked_client(self) -> int | None:
        """It never blocks in Redis."""
        return None

    def doing(self) -> str | None:
        return None

    def run(self, on_ready: Callable[[], None]) -> None:
        if not self._jobs.join():
            return
        on_ready()
        while not self.stopping and self._jobs.serve():
            pass
        self._jobs.leave()

    def close(self) -> None:
        self._jobs.close()
