"""Requests to a supervisor through Redis: which verbs may come this way, and the level of remote_control each needs."""

from collections.abc import Mapping
from typing import Any

from forq.api_types import RemoteControl
from forq.errors import PermissionRefused

LEVELS: tuple[RemoteControl, ...] = ("off", "read", "full")

# Verbs that are not listed (create, set, delete, shutdown …) never come from elsewhere: access to Redis must not be
# enough to choose the code that runs.
REMOTE_VERBS: Mapping[str, RemoteControl] = {
    "status": "read",
    "why": "read",
    "ping": "read",
    "version": "read",
    "kill": "full",
    "stack": "full",
    "logs": "full",
    "queue.restart": "full",
    "app.restart": "full",
}


def check_allowed(method: str, about: Mapping[str, Any]) -> None:
    """Raises PermissionRefused unless the supervisor described by `about` accepts this verb from elsewhere."""
    needed = REMOTE_VERBS.get(method)
    if needed is None:
        raise PermissionRefused(
            f"{method} cannot be requested from elsewhere: run it on the host of the supervisor. From elsewhere: "
            f"{', '.join(REMOTE_VERBS)}"
        )
    level = about["remote_control"]
    if level not in LEVELS or LEVELS.index(level) < LEVELS.index(needed):
        file = about["config"] or "its config file"
        raise PermissionRefused(
            f"supervisor {about['processor']} on host {about['host']} does not accept {method} from elsewhere "
            f'(remote_control = "{level}"): set remote_control = "{needed}" in {file} there and restart it, or run '
            "forqctl on that host"
        )
