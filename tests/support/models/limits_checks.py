"""Checks a real queue's limits against the model: no worker sleeps that may begin, no token is lost or doubled."""

import time
from typing import Any

from forq.broker.claim import Turn
from forq.broker.keys import wake_key
from tests.support.drive.one_queue import OneQueue, State
from tests.support.models.limits import BURST
from tests.support.models.queue import ModelQueue, ModelWorker


class LimitChecks:
    def __init__(self, queue: OneQueue, model: ModelQueue) -> None:
        self._queue = queue
        self._model = model
        self._subscription: Any = None

    def listen(self) -> None:
        """From here on, messages published for pulse set its timer in the model."""
        self._subscription = self._queue.redis.pubsub(ignore_subscribe_messages=True)
        self._subscription.subscribe(self._queue.channel("due"))
        self._subscription.get_message(timeout=1)

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()

    def within(self, state: State, worker: ModelWorker, want: int) -> int:
        """How many of `want` jobs the worker may claim."""
        limits = self._model.limits
        if not limits or self._model.paused:
            return want
        room = self.room(state, worker.lane)
        return max(0, min(want, room, 1 if limits.max_active else room))

    def room(self, state: State, lane: str = "main") -> int:
        room = self._model.limits.room(self._model.active())
        return room - self.left_to_suspects(state) if lane == "main" else room

    def left_to_suspects(self, state: State) -> int:
        """Whether the only free place is reserved for the retry child, which has requested it."""
        suspects = state.suspects or any(job.suspect and job.waits for job in self._model.jobs.values())
        return int(bool(suspects) and int(state.counts.get("left_until_ms", 0)) > time.time() * 1000)

    def turns(self, worker: ModelWorker) -> None:
        """Uses up whatever woke the worker."""
        if self._model.limits or worker.limited:
            self._queue.redis.delete(self._wake(worker))
        worker.limited = False

    def is_woken(self, worker: ModelWorker) -> bool:
        return bool(self._queue.redis.exists(self._wake(worker)))

    def check_answer(self, worker: ModelWorker, answer: Turn, *, limited: bool) -> None:
        waits = any(job.waits for job in self._model.jobs.values())
        hints = self._queue.summary().other_hints > 0
        assert answer.limited == (limited and worker.lane == "main" and (waits or hints))

    def sleeps(self, worker: ModelWorker, answer: Turn, *, heard: bool) -> None:
        worker.limited = answer.limited and heard

    def promoted(self, due_ms: int | None) -> None:
        """Records when pulse calls promote next, after a call of promote or a heartbeat."""
        self._model.limits.promised = False
        self._receive()
        self._model.limits.timer = due_ms is not None

    def may_be_due(self, state: State) -> bool:
        """Whether promote has to be called again for a token."""
        limits = self._model.limits
        return limits.rate and self._model.limits.used > 0 and bool(self._sleepers() or state.suspects)

    def check(self, state: State, workers: list[ModelWorker]) -> None:
        limits = self._model.limits
        if not limits:
            assert not self._sleepers()
            return
        self._check_room()
        by_member = {f"{worker.processor} {worker.name}": worker for worker in workers}
        sleepers = {by_member[member].name for member in self._sleepers()}
        woken = {worker.name for worker in workers if self.is_woken(worker)}
        asleep = {worker.name for worker in workers if worker.limited}
        repeats = {worker.name for worker in workers if worker.unsettled}
        assert sleepers <= asleep | repeats, "a worker is to be woken that does not sleep"
        assert asleep <= sleepers | woken, "a worker sleeps but is not registered"
        if self._model.paused or limits.promised or not sleepers:
            return
        if self.room(state) > 0:
            assert woken & (asleep | repeats), "a job may begin but all workers sleep"
        elif limits.rate and limits.used == BURST:
            self._check_timer()

    def _check_room(self) -> None:
        limits = self._queue.inspector.counts().limits
        assert limits is not None
        assert limits["may_begin"] == self._model.limits.room(self._model.active())

    def _check_timer(self) -> None:
        deadline = time.monotonic() + 0.5
        while not self._model.limits.timer and time.monotonic() < deadline:
            self._receive(0.05)
        assert self._model.limits.timer, "a worker waits for a token but pulse has no timer"

    def _receive(self, seconds: float = 0) -> None:
        while self._subscription is not None and self._subscription.get_message(timeout=seconds) is not None:
            self._model.limits.timer = True
            seconds = 0

    def _sleepers(self) -> list[str]:
        return [member.decode() for member in self._queue.redis.zrange(self._queue.key("limited"), 0, -1)]

    def _wake(self, worker: ModelWorker) -> str:
        return wake_key(self._queue.base, worker.processor, worker.name)
