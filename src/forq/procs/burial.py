"""Kills what dead children have left behind: by the warden on the supervisor's behalf, or by the supervisor itself."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

from forq.procs.cgroup import Cgroup
from forq.procs.own_pids import OwnPids
from forq.procs.tree_mark import TreeMark
from forq.procs.treekill import Hunt, children_of

ORPHANS_SECONDS = 5.0
ESCAPED_SECONDS = 1.0
# What all of it may take, if nothing of it can be killed and one control group was to be emptied.
LONGEST_SECONDS = 15.0


@dataclass(frozen=True)
class Remains:
    """`zombies`: orphans that have ended and only the supervisor can reap. `groups`: who is left in a control group."""

    killed: list[int] = field(default_factory=list)
    survivors: list[int] = field(default_factory=list)
    zombies: list[int] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)


def bury(own: OwnPids, survivors: Collection[int], groups: Collection[str], mark: TreeMark | None) -> Remains:
    """Kills every child of the supervisor but its own and those survivors, with all below: it was left behind by a dead
    one. From the supervisor or another child of it."""
    left = {group: sorted(Cgroup(group).pids()) for group in groups if not Cgroup(group).kill()}
    deadline = time.monotonic() + ORPHANS_SECONDS
    hunt = _HuntForOrphans(own, frozenset(survivors), deadline)
    hunt.kill_all(deadline)
    killed = hunt.killed - hunt.survivors
    if mark is not None:
        # None should have got out of our reach. To look costs as much as our ancestors have children.
        killed |= mark.kill(partial(mark.find_escaped, own.owner), ESCAPED_SECONDS)[0]
    for group in groups:
        Cgroup(group).remove()
    return Remains(sorted(killed), sorted(hunt.survivors), sorted(hunt.zombies), left)


class _HuntForOrphans(Hunt):
    """What the supervisor forks meanwhile is not hunted."""

    def __init__(self, own: OwnPids, survivors: frozenset[int], deadline: float) -> None:
        super().__init__(own.owner)
        self._own = own
        self._known_survivors = survivors
        self._deadline = deadline

    def _children(self) -> list[int]:
        found, own = self._own.look(partial(children_of, self.root), self._deadline)
        self.spare = own | self._known_survivors
        return found
