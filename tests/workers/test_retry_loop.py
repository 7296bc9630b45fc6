"""When a retry process imports its handlers."""

from typing import Any
from unittest.mock import MagicMock, create_autospec

from forq.broker.claim import Consumer
from forq.errors import OutcomeUnknown
from forq.workers.loop import WorkerLoop
from forq.workers.other_loops import RetryLoop


class Lane:
    """A WorkerLoop whose checks for jobs get these answers. Ends when the answers are used up."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.waits = 0
        self.loop: Any = create_autospec(WorkerLoop, instance=True)
        self.loop.consumer = create_autospec(Consumer, instance=True)
        self.loop.slot = MagicMock()
        self.loop.stopping = False
        self.loop.consumer.lane_has_jobs.side_effect = self._answer
        self.loop.wait_for_work.side_effect = self._wait

    def _answer(self) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _wait(self) -> None:
        self.waits += 1
        self.loop.stopping = not self.answers


def imports(lane: Lane) -> int:
    """How often the handlers are imported."""
    imported: list[int] = []

    def import_handlers() -> None:
        imported.append(1)
        lane.loop.stopping = True

    RetryLoop(lane.loop, None, import_handlers).run(lambda: None)
    return len(imported)


def test_it_imports_before_the_first_turn_that_may_claim_a_job() -> None:
    lane = Lane(False, False, True)
    assert imports(lane) == 1
    assert lane.waits == 2
    lane.loop.serve_batch.assert_not_called()


def test_without_work_it_never_imports() -> None:
    assert imports(Lane(False, False)) == 0


def test_it_asks_again_if_redis_does_not_answer_after_a_token_was_taken() -> None:
    """The token is gone, so another wait might last until the next heartbeat."""
    lane = Lane(False, OutcomeUnknown("the connection broke"), True)
    assert imports(lane) == 1
    assert lane.waits == 1
    lane.loop.back_off.assert_called_once()
