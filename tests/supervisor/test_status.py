"""The verb status, when what it asks for comes late."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

from forq.supervisor.status import Status


class Asked:
    """A supervisor without queues whose clerk answers when the test says so."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[Any], None]] = {}
        self.time_is_over: Callable[[], None] = lambda: None
        self.supervisor = MagicMock()
        self.supervisor.loop.now.return_value = self.supervisor.started = 0.0
        self.supervisor.loop.call_later.side_effect = self._call_later
        self.supervisor.queues.units = {}
        services = self.supervisor.services
        services.redis_state = {"ok": True, "error": None}
        services.status_of_redis.return_value = {"url": "unix://x", "ok": True, "error": None}
        services.all, services.failed_log_errors = (), {}
        services.clerk.unresponsive = False
        services.clerk.ask.side_effect = self._ask

    def _ask(self, verb: str, params: dict[str, Any], answer: Callable[[Any], None]) -> None:
        assert verb not in self.answers, f"{verb} was asked twice"
        self.answers[verb] = answer

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> MagicMock:
        self.time_is_over = callback
        return MagicMock()


def test_counts_that_come_late_while_the_memory_is_read_are_no_second_answer() -> None:
    asked = Asked()
    request = MagicMock(params={"memory": True}, answered=False)
    Status(asked.supervisor).status(request)
    asked.time_is_over()
    asked.answers["counts"]({})
    asked.answers["memory"]({})
    request.reply.assert_called_once()
    redis = request.reply.call_args.args[0]["supervisor"]["redis"]
    assert redis["ok"] is False
    assert redis["error"].startswith("no answer from Redis within")
