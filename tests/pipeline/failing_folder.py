"""A Folder that stops before its n-th change, as after a kill."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from forq.pipeline.history import Folder

CHANGES = ("make", "move_file", "delete", "write")


class Killed(BaseException):
    """Simulates a kill: no code of the project may catch it."""


def count_changes(patch: pytest.MonkeyPatch, at_change: Callable[[int], None]) -> None:
    """Calls `at_change` with the number of each change, before the change."""
    seen = [0]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Folder, *args: Any) -> Any:
            seen[0] += 1
            at_change(seen[0])
            return change(self, *args)

        return wrapper

    for name in CHANGES:
        patch.setattr(Folder, name, counted(getattr(Folder, name)))


@contextmanager
def killed_at(change: int) -> Iterator[list[bool]]:
    """Stops the block before its n-th change. The yielded list has True if that change was reached."""
    came_so_far = [False]

    def at_change(number: int) -> None:
        if number == change:
            came_so_far[0] = True
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        count_changes(patch, at_change)
        with suppress(Killed):
            yield came_so_far
