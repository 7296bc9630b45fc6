"""Waiting for the end of a job and its result."""

import select
import time
from collections.abc import Iterable
from typing import Any

from forq.broker.pubsub import Subscription
from forq.broker.results import DoneJob, ResultWaiter, WaitTarget
from forq.errors import JobDead, NoResult, RedisUnavailable, UnknownJob, WaitTimeout
from forq.procs.backoff import reconnecting

# A waiter for a result is registered in Redis for this long.
REGISTRATION_SECONDS = 60.0


class ResultWait:
    """The end of one job, as its status is checked again and again. `target`: None until a check has found the job."""

    def __init__(self, queue: str, job_id: str, timeout_seconds: float | None) -> None:
        self.target: WaitTarget | None = None
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._timeout_seconds = timeout_seconds
        self._job = f"job {job_id!r} of queue {queue!r}"
        self._why = f"`forqctl why {queue} {job_id}` explains why"

    def check(self, waiter: ResultWaiter) -> DoneJob | None:
        """None if the job has not ended. This registers the waiter: later changes are published to it."""
        status = waiter.check(self.target, round(REGISTRATION_SECONDS * 1000))
        while waiter.is_other_job(status):
            status = waiter.check(None, round(REGISTRATION_SECONDS * 1000))
        self.target = status.target
        match status.state:
            case "live":
                return None
            case "done" if status.done is not None:
                if not status.target.mark:
                    # The job had ended before the first check: a later job with this id may be dead.
                    self._raise_if_dead(waiter.error_of_last_dead(status.target, status.done.fence))
                return status.done
            case "done":
                raise UnknownJob(f"{self._job} is done, but its result is not kept: {waiter.why_not_kept()}")
            case "dead":
                self._raise_if_dead(waiter.error_of_dead(status.fence))
                raise JobDead(f"{self._job} failed for good; its error is no longer kept")
            case "gone":
                self._raise_if_dead(waiter.error_of_last_dead(status.target))
                why = waiter.why_not_kept()
                raise UnknownJob(f"there is no {self._job}: it never existed, or has ended and is not kept: {why}")
            case "cancelled":
                raise UnknownJob(f"{self._job} was cancelled or removed")

    def seconds_until(self, check_at: float) -> float:
        """How long to wait for a message. WaitTimeout if the time is up."""
        if self._deadline is None:
            return check_at - time.monotonic()
        if time.monotonic() >= self._deadline:
            raise WaitTimeout(f"{self._job} has not ended within {self._timeout_seconds:g} s; {self._why}")
        return min(check_at, self._deadline) - time.monotonic()

    def concerns(self, messages: Iterable[str]) -> bool:
        """Whether a message may be about this job and not an earlier one with its id. A message is OUTCOME FENCE MARK;
        earlier releases send no mark."""
        marks = ((*message.split(" "), "", "")[2] for message in messages)
        return self.target is None or any(mark in (self.target.mark, "", "-") for mark in marks)

    def result_of(self, done: DoneJob) -> Any:
        if done.result_error is not None:
            raise NoResult(f"{self._job} is done: {done.result_error}")
        return done.result

    def pause_seconds(self, seconds: float, exc: RedisUnavailable) -> float:
        """How long to pause while Redis is unavailable. WaitTimeout if the time is up."""
        if self._deadline is None:
            return seconds
        left_seconds = self._deadline - time.monotonic()
        if left_seconds <= 0:
            raise WaitTimeout(f"{self._job} has not ended, or its end is unknown: {exc}") from exc
        return min(seconds, left_seconds)

    def _raise_if_dead(self, error: Any) -> None:
        if error is not None:
            text = f"{error.get('name')}: {error.get('message')}" if isinstance(error, dict) else str(error)
            raise JobDead(f"{self._job} failed for good: {text}", error)


def wait_for_result(waiter: ResultWaiter, timeout_seconds: float | None) -> Any:
    """Waits for the end of a job without polling.

    1. Checks the job: one that has ended needs no subscription.
    2. Subscribes, then checks the job.
    3. Checks again after a message, and after half the time of the registration.
    4. After a broken connection starts over with the same target; the check finds a job that ended meanwhile.
    """
    wait = ResultWait(waiter.queue, waiter.job_id, timeout_seconds)
    # Without Redis it fails here at once, like any other call.
    if (ended := wait.check(waiter)) is not None:
        return wait.result_of(ended)
    subscription, backoff = waiter.subscription(), reconnecting()
    try:
        while True:
            try:
                if not subscription.connected:
                    subscription.connect()
                while (done := wait.check(waiter)) is None:
                    _wait_for_message(wait, subscription)
                return wait.result_of(done)
            except RedisUnavailable as exc:
                subscription.close()
                time.sleep(wait.pause_seconds(backoff.fail(), exc))
    finally:
        subscription.close()


def _wait_for_message(wait: ResultWait, subscription: Subscription) -> None:
    """Returns when the job may have ended, or the next check is due."""
    check_at = time.monotonic() + REGISTRATION_SECONDS / 2
    while time.monotonic() < check_at:
        seconds = wait.seconds_until(check_at)
        poll = select.poll()
        poll.register(subscription.fileno(), select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)
        if wait.concerns(message for _, message in subscription.receive()):
            return
