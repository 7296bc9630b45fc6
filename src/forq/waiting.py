"""Waits for the end of a job, without polling.

1. It subscribes, then looks (by which it is written down): whatever happens after the look is heard.
2. It looks again when it has heard something, and in half the time for which it is written down.
3. After a broken connection it starts over, with the same job in mind: what ended meanwhile is found by a look.
"""

import select
import time
from collections.abc import Callable
from typing import Any

from forq.broker.pubsub import Listener
from forq.broker.results import DoneJob, Ends, Place
from forq.errors import JobDead, NoResult, RedisUnavailable, UnknownJob, WaitTimeout
from forq.procs.backoff import reconnecting

VALID_SECONDS = 60.0


def wait_for_result(ends: Ends, timeout_seconds: float | None, now: Callable[[], float] = time.monotonic) -> Any:
    """What the job's handler returned, once it is done."""
    return _Wait(ends, None if timeout_seconds is None else now() + timeout_seconds, now).result()


class _Wait:
    def __init__(self, ends: Ends, deadline: float | None, now: Callable[[], float]) -> None:
        self._ends = ends
        self._deadline = deadline
        self._now = now
        self._listener = ends.listener()
        self._job = f"job {ends.job_id!r} of queue {ends.queue!r}"
        # Which job is meant, once that was seen.
        self._place: Place | None = None

    def result(self) -> Any:
        backoff = reconnecting()
        try:
            while True:
                try:
                    if not self._listener.connected:
                        self._listener.connect()
                    done = self._listen_until_done()
                    return self._result_of(done)
                except RedisUnavailable as exc:
                    # Who has not seen the job yet is told at once, as by any other call.
                    if self._place is None:
                        raise
                    self._listener.close()
                    self._pause(backoff.fail(), exc)
        finally:
            self._listener.close()

    def _listen_until_done(self) -> DoneJob:
        while True:
            look = self._ends.look(self._place, round(VALID_SECONDS * 1000))
            self._place = look.place
            match look.state:
                case "live":
                    self._hear(look.place)
                case "done" if look.done is not None:
                    if not look.place.mark:
                        # Who comes after the end gets what ended last: a later job of that id may be dead.
                        self._raise_if_dead(self._ends.error_of_last_dead(look.place, look.done.fence))
                    return look.done
                case "done":
                    raise UnknownJob(f"{self._job} is done, and its result is not kept: {self._ends.why_not_kept()}")
                case "dead":
                    self._raise_if_dead(self._ends.error_of_dead(look.fence))
                    raise JobDead(f"{self._job} failed for good, and its error is not kept any more")
                case "gone":
                    self._raise_if_dead(self._ends.error_of_last_dead(look.place))
                    why = self._ends.why_not_kept()
                    raise UnknownJob(f"{self._job} is not there: it never was, or has ended and is not kept: {why}")
                case "cancelled":
                    raise UnknownJob(f"{self._job} was cancelled or removed")

    def _hear(self, place: Place) -> None:
        """Returns when the job may have ended, or it is time to look again."""
        look_again_at = self._now() + VALID_SECONDS / 2
        while self._now() < look_again_at:
            self._check_time()
            wake_at = look_again_at if self._deadline is None else min(look_again_at, self._deadline)
            # That of another job of this id may have been on its way before the look. An earlier release tells no mark.
            if any(mark in (place.mark, "", "-") for mark in _marks_heard(self._listener, wake_at - self._now())):
                return

    def _raise_if_dead(self, error: Any) -> None:
        if error is not None:
            raise JobDead(f"{self._job} failed for good: {_shown(error)}", error)

    def _result_of(self, done: DoneJob) -> Any:
        if done.result_error is not None:
            raise NoResult(f"{self._job} is done: {done.result_error}")
        return done.result

    def _check_time(self) -> None:
        if self._deadline is not None and self._now() >= self._deadline:
            raise WaitTimeout(f"{self._job} has not ended yet")

    def _pause(self, seconds: float, exc: RedisUnavailable) -> None:
        if self._deadline is not None:
            left = self._deadline - self._now()
            if left <= 0:
                raise WaitTimeout(f"{self._job} has not ended, as far as is known: {exc}") from exc
            seconds = min(seconds, left)
        time.sleep(seconds)


def _marks_heard(listener: Listener, seconds: float) -> list[str]:
    """Which jobs have ended, of those that end within so long: each message is HOW FENCE MARK."""
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    poll.poll(max(0.0, seconds) * 1000)
    return [(*message.split(" "), "", "")[2] for _, message in listener.hear()]


def _shown(error: Any) -> str:
    return f"{error.get('name')}: {error.get('message')}" if isinstance(error, dict) else str(error)
