"""The part of the model about held jobs: what each waits for, and what happens when that ends."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.models.queue import ModelJob

SUCCESS = ("done", "released")
# In lua/flows.lua.
MISSING_RESULT = "!its result was not kept"


@dataclass(frozen=True)
class After:
    """What a new job waits for."""

    names: tuple[str, ...]
    when: str = "done"
    use: int = 0


@dataclass
class Dependency:
    name: str
    # ID of a live job, or 'ID blocked' for the enqueue behind an active one; '' once it has ended.
    source: str


@dataclass(eq=False)
class ModelHold:
    job: "ModelJob"
    after: After
    expires_in: int  # ms, from the time at which it is ready; 0: never
    dependencies: list[Dependency] = field(default_factory=list)
    inputs: dict[int, str] = field(default_factory=dict)  # number -> HOW RESULT

    def open(self) -> dict[int, Dependency]:
        return {number: each for number, each in enumerate(self.dependencies, 1) if each.source}

    def end(self, number: int, how: str, result: str | None) -> str:
        """One dependency has ended. Returns what happens to the job: "" (nothing), "ready", "dead" or "cancelled"."""
        self.dependencies[number - 1].source = ""
        if self.after.use:
            missing = MISSING_RESULT if how in SUCCESS else ""
            self.inputs[number] = f"{how} {missing if result is None else result}"
        if self.after.when == "done" and how not in SUCCESS:
            return "dead"
        if self.after.when == "dead" and how == "dead":
            return "ready"
        if self.open():
            return ""
        return "cancelled" if self.after.when == "dead" else "ready"


def waiting_for(held: dict[str, ModelHold], source: str) -> Iterator[tuple[str, ModelHold, int]]:
    """The open dependencies on this source: id and hold of the job that waits, and the number."""
    for job_id, hold in list(held.items()):
        for number, each in hold.open().items():
            if each.source == source:
                yield job_id, hold, number
