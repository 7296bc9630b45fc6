"""Requests of a Client to the supervisor that runs a queue: kill, stack, logs, restart. They go through Redis."""

import time
from collections import deque
from typing import Any, cast

from forq.api_types import KillInfo, LogRecord, StackInfo
from forq.broker.control import ANSWER_SECONDS as ANSWER_SECONDS
from forq.broker.control import READ_SECONDS, Control
from forq.broker.link import Link
from forq.broker.supervisors import Supervisors
from forq.broker.targets import Target, find_target
from forq.errors import UsageError
from forq.values import shown


class QueueControl:
    """`timeout_seconds`: how long a request may take; a restart may take the time of its import longer."""

    def __init__(self, link: Link, prefix: str, name: str, timeout_seconds: float) -> None:
        self._supervisors = Supervisors(link, prefix)
        self._control = Control(link, prefix)
        self._name = name
        self._until = time.monotonic() + timeout_seconds

    def kill(self, job_id: str, *, retry: bool, on: str | None) -> KillInfo:
        return cast(KillInfo, self._ask("kill", {"id": job_id, "retry": retry}, on))

    def stack(self, *, on: str | None) -> list[StackInfo]:
        return cast(list[StackInfo], self._ask("stack", {}, on)["stacks"])

    def logs(self, *, lines: int, job: str | None, on: str | None) -> list[LogRecord]:
        """In parts: an answer is limited."""
        if not isinstance(lines, int) or isinstance(lines, bool) or lines < 0:
            raise UsageError(f"lines {shown(lines)} is not allowed: a whole number from 0 up")
        params: dict[str, Any] = {"lines": lines, "job": job}
        target = self._find("logs", params, on)
        last: deque[LogRecord] = deque(maxlen=lines)
        cursor = None
        while True:
            answer = self._send("logs", Target(target.supervisor, {**target.params, "cursor": cursor}))
            last.extend(answer["records"])
            cursor = answer["cursor"]
            if not answer["more"]:
                return list(last)

    def restart(self, *, wait_seconds: float, on: str | None) -> None:
        self._ask("queue.restart", {"wait": wait_seconds}, on)

    def _ask(self, method: str, params: dict[str, Any], on: str | None) -> Any:
        return self._send(method, self._find(method, params, on))

    def _find(self, method: str, params: dict[str, Any], on: str | None) -> Target:
        return find_target(self._supervisors, method, {"name": self._name, **params}, on=on)

    def _send(self, method: str, target: Target) -> Any:
        left_seconds = max(0.001, self._until - time.monotonic())
        read_seconds = min(READ_SECONDS, left_seconds)
        sent = self._control.send(target.supervisor, method, target.params, read_seconds=read_seconds)
        return self._control.wait_for_answer(sent, left_seconds + target.work_seconds)
