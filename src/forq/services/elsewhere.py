"""The clerk's requests to other supervisors: finds the one that runs a job or queue, and waits for its answer."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forq.broker.control import ANSWER_SECONDS, READ_SECONDS, Control, Sent
from forq.broker.keys import answered_channel, control_base
from forq.broker.link import Link
from forq.broker.pubsub import Subscription
from forq.broker.supervisors import Supervisors
from forq.broker.targets import find_target
from forq.errors import ForqError, RedisUnavailable
from forq.job import new_id
from forq.procs.loop import Loop
from forq.redis_url import database_of
from forq.services.rpc import PendingReply

log = logging.getLogger("forq")

# Each has a connection to Redis.
MAX_WAITING = 16


@dataclass(eq=False)
class Waiting:
    """A request without an answer yet. `until`: the end of the wait, on the monotonic clock."""

    subscription: Subscription
    until: float
    sent: Sent | None = None
    reply: PendingReply = field(default_factory=PendingReply)
    done: bool = False


class Elsewhere:
    """Sends requests to other supervisors without blocking for their answers.

    1. Subscribes to the channel that announces the answer, then stores the request, so no message can be missed.
    2. Reads the answer when it is announced, when the subscription breaks, and once more when the time is up.
    """

    def __init__(self, link: Link, prefix: str, loop: Loop, *, now: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._prefix = prefix
        self._loop = loop
        self._now = now
        self._control = Control(link, prefix, now)
        self._waiting: set[Waiting] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def supervisors(self, params: dict[str, Any]) -> object:
        """The verb `supervisors`."""
        return {"supervisors": Supervisors(self._link, self._prefix).all()}

    def ask(self, params: dict[str, Any]) -> object:
        """The verb `elsewhere`: {"here": False, "result"}; {"here": True} if the supervisor `besides` is meant."""
        method, given, besides = params["method"], params["params"], params["besides"]
        if len(self._waiting) >= MAX_WAITING:
            raise ForqError(f"{MAX_WAITING} requests to other supervisors wait for an answer; try again")
        supervisors = Supervisors(self._link, self._prefix)
        target = find_target(supervisors, method, given, on=params["on"], besides=besides)
        if target.supervisor["processor"] == besides:
            return {"here": True}
        request_id = new_id()
        channel = answered_channel(control_base(self._prefix), database_of(self._link.url), request_id)
        subscription = Subscription(self._link.url, channel, name="forq-clerk-answers", exact=True)
        seconds = params["seconds"] or ANSWER_SECONDS
        waiting = Waiting(subscription, self._now() + seconds + target.work_seconds)
        subscription.connect()
        try:
            waiting.sent = self._control.send(
                *(target.supervisor, method, target.params),
                read_seconds=min(READ_SECONDS, seconds),
                request_id=request_id,
            )
        except ForqError:
            subscription.close()
            raise
        self._waiting.add(waiting)
        self._loop.add_reader(subscription.fileno(), lambda: self._receive(waiting))
        self._loop.call_later(max(0.0, waiting.sent.read_by - self._now()), lambda: self._check(waiting))
        self._loop.call_later(seconds + target.work_seconds, lambda: self._check(waiting))
        return waiting.reply

    def _receive(self, waiting: Waiting) -> None:
        fd = waiting.subscription.fileno()
        try:
            announced = bool(waiting.subscription.receive())
        except RedisUnavailable as exc:
            self._loop.remove_reader(fd)
            log.info("lost the subscription to an answer; reading it when its time is up error=%s", exc)
            announced = True
        if announced:
            self._check(waiting)

    def _check(self, waiting: Waiting) -> None:
        """Replies if there is an answer, or if none can come in time."""
        if waiting.done:
            return
        assert waiting.sent is not None
        try:
            answer = self._control.read_answer(waiting.sent)
            if answer is None and self._is_late(waiting, waiting.sent):
                answer = self._control.timed_out(waiting.sent)
        except ForqError as exc:
            answer = exc
        if answer is not None:
            self._end(waiting)
            waiting.reply.resolve(answer if isinstance(answer, ForqError) else {"here": False, "result": answer})

    def _is_late(self, waiting: Waiting, sent: Sent) -> bool:
        now = self._now()
        return now >= waiting.until or (now >= sent.read_by and not self._control.is_read(sent))

    def _end(self, waiting: Waiting) -> None:
        waiting.done = True
        self._waiting.discard(waiting)
        if waiting.subscription.connected:
            self._loop.remove_reader(waiting.subscription.fileno())
            waiting.subscription.close()
