"""The loop of a worker with a scripted broker: a consumer that answers from a list, a slot and a clock."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forq.broker.claim import Limits, Turn
from forq.procs.scoreboard import PositionParts, Scoreboard, Slot, unpack_position
from forq.settings import defaults
from forq.workers.attempt import AttemptRunner
from forq.workers.grant import Grant
from forq.workers.handlers import Handlers
from forq.workers.loop import WorkerLoop
from forq.workers.recycling import Recycling


class Clock:
    def __init__(self) -> None:
        self.ns = 10**9

    def __call__(self) -> int:
        self.ns += 1000
        return self.ns


@dataclass
class Call:
    number: int
    done: list[Any]
    failed: list[Any]
    keep: int
    want: int
    results: list[Any] = field(default_factory=list)


@dataclass
class ScriptedConsumer:
    """Answers turns from a list; exceptions in the list are raised."""

    answers: Iterator[Turn | Exception]
    calls: list[Call] = field(default_factory=list)
    waits: int = 0
    queue: str = "q"
    on_turn: Callable[[], None] = lambda: None

    def turn(self, number: int, done: list[Any], failed: list[Any], keep: int, want: int, results: list[Any]) -> Turn:
        self.calls.append(Call(number, list(done), list(failed), keep, want, list(results)))
        self.on_turn()
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    # Settles that were sent along with a wait, and what happens before they are answered, and after.
    settles: list[list[Any]] = field(default_factory=list)
    before_settled: Callable[[], None] = lambda: None
    after_settled: Callable[[], None] = lambda: None
    is_cluster: bool = False

    def wait_for_turn(self, number: int, want: int) -> Turn | None:
        self.after_settled()
        return self.turn(number, [], [], 0, want, [])

    def settle_and_wait(
        self, number: int, want: int, done: list[Any], settled: Callable[[list[bytes]], None]
    ) -> Turn | None:
        self.settles.append(list(done))
        self.before_settled()
        settled([])
        return self.wait_for_turn(number, want)

    def read_inputs(self, job_id: str, count: int) -> list[bytes] | None:
        return None

    def wait_for_job(self) -> bool:
        self.waits += 1
        return True

    @property
    def link(self) -> "ScriptedConsumer":
        return self

    def fetch_client_id(self) -> None:
        pass


LIMITS = Limits(timeout_ms=0, size=10, priority=0)


def jobs(*ids: str, fence: str = "7", limits: Limits = LIMITS) -> Turn:
    flat = [part for job_id in ids for part in (job_id.encode(), b"p5 1000000\n[null,null,1]")]
    return Turn(paused=False, held=True, refused=[], fence=fence, limits=limits, jobs=flat)


NOTHING = jobs(fence="")


class Rig:
    """A loop, its slot and its clock."""

    def __init__(self, handler: Callable[[Any, Any], Any], *answers: Turn | Exception, **options: int) -> None:
        self.clock = Clock()
        self.board = Scoreboard.create(4)
        self.slot: Slot = self.board.slot(self.board.take())
        self.consumer = ScriptedConsumer(iter(answers))
        self.batches: list[int] = []
        self.messages: list[dict[str, object]] = []
        self.unguarded = 0
        self.replaced: list[str] = []
        self.grant = Grant(self._receive, self.slot.number)
        # The supervisor's answer to a request for units.
        self.answer = "go"
        self.loop = WorkerLoop(
            self.consumer,  # type: ignore[arg-type]
            AttemptRunner("q", Handlers({None: handler}), self.slot),
            self.slot,
            expiry_ms=1000,
            limits=LIMITS,
            grant=self.grant,
            recycling=Recycling({**defaults(), **options}, [self.slot], self.replaced.append),
            on_batch=self.batches.append,
            on_unguarded=self._count_unguarded,
            clock_ns=self.clock,
        )

    def _receive(self, message: dict[str, object]) -> None:
        self.messages.append(message)
        if "want" in message:
            # The grant sends while it holds its lock, before it has recorded the request.
            threading.Thread(target=self.grant.receive, args=(self.answer,)).start()

    def _count_unguarded(self) -> None:
        self.unguarded += 1

    def pass_ms(self, ms: int) -> None:
        self.clock.ns += ms * 1_000_000

    def step(self) -> None:
        """One pass of run(), without blocking."""
        batch = self.loop._claim()
        if batch:
            self.loop._run_batch(batch)

    @property
    def word(self) -> PositionParts:
        return unpack_position(self.slot.position)
