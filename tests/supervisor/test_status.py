"""The verb status: late answers of the clerk, and the names of counts in all interfaces."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from forq.broker.inspect import Counts
from forq.ctl.commands.service import columns_for
from forq.services.metrics_page import JOB_STATES
from forq.supervisor.status import COUNTS, StatusVerb

STATES_PAGE = Path(__file__).resolve().parent.parent.parent / "docs/design/states.md"


class StatusRig:
    """A supervisor without queues; the test answers for its clerk."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[Any], None]] = {}
        self.time_out: Callable[[], None] = lambda: None
        self.supervisor = MagicMock()
        self.supervisor.loop.now.return_value = self.supervisor.started = 0.0
        self.supervisor.loop.call_later.side_effect = self._call_later
        self.supervisor.queues.by_name = {}
        services = self.supervisor.services
        services.redis_state = {"ok": True, "error": None}
        services.status_of_redis.return_value = {"url": "unix://x", "ok": True, "error": None}
        services.all, services.failed_log_errors = (), {}
        services.clerk.unresponsive = False
        services.clerk.request.side_effect = self._request

    def _request(self, verb: str, params: dict[str, Any], answer: Callable[[Any], None]) -> None:
        assert verb not in self.answers, f"{verb} was requested twice"
        self.answers[verb] = answer

    def _call_later(self, seconds: float, callback: Callable[[], None]) -> MagicMock:
        self.time_out = callback
        return MagicMock()


def test_late_counts_do_not_cause_a_second_answer() -> None:
    rig = StatusRig()
    request = MagicMock(params={"memory": True}, answered=False)
    StatusVerb(rig.supervisor).status(request)
    rig.time_out()
    rig.answers["overview"]({"counts": {}, "unserved": []})
    rig.answers["memory"]({})
    request.reply.assert_called_once()
    redis = request.reply.call_args.args[0]["supervisor"]["redis"]
    assert redis["ok"] is False
    assert redis["error"].startswith("no answer from Redis within")


def test_all_interfaces_use_the_same_names_for_counts() -> None:
    table = STATES_PAGE.read_text().partition("### Counts")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    rows = [(word.strip("`"), title.partition(",")[0], metric) for word, _, title, metric in lines]
    described = {word for word, _, _ in rows}
    # Fields of the queue and its journal that are not counts.
    others = {"paused", "mode", "epoch", "journal_sequence", "journal_hash"}
    assert described == set(COUNTS) == {field.name for field in fields(Counts)} - others
    shown = {
        title.lower() for title, key in columns_for([{"mode": "on_request", "held": 1, "kept": 1}]) if key in COUNTS
    }
    assert shown == {key for _, key in columns_for([{"mode": "on_request", "held": 1, "kept": 1}]) if key in COUNTS}
    assert {word for word, title, _ in rows if title == word.upper()} == shown
    assert {word for word, _, metric in rows if f'forq_jobs{{state="{word}"}}' in metric} == set(JOB_STATES)
    assert {"done", "failed"} <= {word for word, _, metric in rows if f"`forq_{word}_total`" in metric}
