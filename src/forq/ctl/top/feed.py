"""The questions that the screen asks, on one connection that is made again when it breaks. Never waits for an answer:
each goes to the function that was given with its question, which gets an error if the connection breaks first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from forq.ctl.client import Client
from forq.errors import ForqError, PermissionRefused, SupervisorUnreachable, TimedOut

RECONNECT_SECONDS = 0.5
Then = Callable[[Any], None]


class Feed:
    """`trouble` says why nobody can be asked now; None while somebody can."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self.trouble: str | None = None
        self._connect = connect
        self._client: Client | None = None
        self._asked: dict[int, Then] = {}
        self._next_try = 0.0

    def fileno(self) -> int | None:
        return None if self._client is None else self._client.fileno()

    def open(self, now: float) -> bool:
        """Whether there is a connection; tries to make one, though not all the time."""
        if self._client is None and now >= self._next_try:
            self._next_try = now + RECONNECT_SECONDS
            try:
                self._client = self._connect()
            except (SupervisorUnreachable, TimedOut) as exc:
                self.trouble = str(exc)
        return self._client is not None

    def ask(self, method: str, params: dict[str, Any], then: Then) -> bool:
        """`then` gets the result or the error. False if nobody can be asked."""
        if self._client is None:
            return False
        try:
            self._asked[self._client.send(method, params)] = then
        except TimedOut as exc:
            self._lose(exc)
            return False
        return True

    def read(self) -> None:
        """Hands out the answers that are there; part of one stays for the next time."""
        while self._client is not None:
            try:
                answered, value = self._client.receive(time.monotonic())
            except TimedOut:
                return
            except PermissionRefused:
                raise
            except ForqError as exc:
                self._lose(exc)
                return
            self.trouble = None
            then = self._asked.pop(answered, None) if isinstance(answered, int) else None
            if then is not None:
                then(value)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _lose(self, why: ForqError) -> None:
        self.trouble = str(why)
        self.close()
        unanswered, self._asked = list(self._asked.values()), {}
        for then in unanswered:
            then(why)
