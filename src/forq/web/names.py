"""The table of views and actions, with the level that each needs."""

from collections.abc import Mapping
from typing import Literal

from forq.errors import UsageError

Level = Literal["forbidden", "read", "act"]
LEVELS: tuple[Level, ...] = ("forbidden", "read", "act")

Kind = Literal["view", "detail", "action"]

# view: what members of control_read_group see: no data, no messages. detail: may show data, so it needs "act", unless
# the hook of a mounted app allows this very name. action: changes something.
KINDS: Mapping[str, Kind] = {
    "overview": "view",
    "queue": "view",
    "jobs": "view",
    "job": "view",
    "flow": "view",
    "batch": "view",
    "processes": "view",
    "job.data": "detail",
    "dead": "detail",
    "schedules": "detail",
    "logs": "detail",
    "stack": "detail",
    "options": "detail",
    "queue.pause": "action",
    "queue.resume": "action",
    "queue.drain": "action",
    "queue.restart": "action",
    "queue.set": "action",
    "job.cancel": "action",
    "job.kill": "action",
    "job.retry": "action",
    "job.run": "action",
    "job.discard": "action",
    "batch.cancel": "action",
    "schedule.pause": "action",
    "schedule.resume": "action",
    "schedule.trigger": "action",
}
VIEWS = frozenset(name for name, kind in KINDS.items() if kind != "action")
ACTIONS = frozenset(name for name, kind in KINDS.items() if kind == "action")


def kind_of(name: str) -> Kind:
    """A name that is not in the table is a mistake of the caller, and is never allowed."""
    kind = KINDS.get(name)
    if kind is None:
        raise UsageError(f"{name!r:.100} is neither a view nor an action: forq.web.names.KINDS has them all")
    return kind


def level_for(name: str, level: Level) -> Level:
    """What a user of this level may do with the view or action: the level, or "forbidden"."""
    if kind_of(name) != "view" and level != "act":
        return "forbidden"
    return level
