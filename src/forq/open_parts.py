"""The parts of a job that readers may see: members of control_read_group, and readers of the dashboard.

No data, no results, no error messages, no stacks. What is not listed here is omitted.
"""

from collections.abc import Mapping
from typing import Any

OPEN_KEYS = (
    *("id", "identifier", "state", "type", "priority", "retry_count", "stall_count", "timeout_count", "suspect"),
    *("enqueued_at", "run_at", "ended_at", "run_seconds", "blocked_behind", "worker", "fence", "removed"),
    *("when", "with_results", "waits_for", "waits_for_count", "waited_for", "dependants", "dependant_count"),
    *("batch", "member_of"),
)
# Of a job in a list. `error` is the name of its exception, `attempts` a number.
OPEN_KEYS_OF_DETAILS = (*OPEN_KEYS, "died_at", "error", "attempts")
OPEN_KEYS_OF_ATTEMPTS = ("started_at", "ended_at", "outcome", "cause", "peak_memory")


def without_data(job: Mapping[str, Any]) -> dict[str, Any]:
    """Of one job."""
    shown_parts = {key: job[key] for key in OPEN_KEYS if key in job}
    if "attempts" in job:
        shown_parts["attempts"] = [_open_part(attempt) for attempt in job["attempts"]]
    return shown_parts


def details_without_messages(job: Mapping[str, Any]) -> dict[str, Any]:
    """Of a job in a list."""
    return {key: job[key] for key in OPEN_KEYS_OF_DETAILS if key in job}


def _open_part(attempt: Any) -> dict[str, Any]:
    if not isinstance(attempt, dict):
        return {}
    shown_parts: dict[str, Any] = {key: attempt[key] for key in OPEN_KEYS_OF_ATTEMPTS if key in attempt}
    error = attempt.get("error")
    if isinstance(error, dict):
        shown_parts["error"] = {key: error.get(key) for key in ("name", "kind")}
    return shown_parts
