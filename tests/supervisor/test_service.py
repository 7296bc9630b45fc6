"""One service with a fake child: its requests, and its replacement after a death."""

from types import SimpleNamespace
from typing import Any

import pytest

from forq.errors import ForqError, OutcomeUnknown
from forq.supervisor import service as service_module
from forq.supervisor.service import Service
from tests.supervisor.fakes import FakeChild, FakeLoop, fake_child_class


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = FakeLoop()
        self.child_class = fake_child_class(self.loop)
        monkeypatch.setattr(service_module, "Child", self.child_class)
        self.starts = 0
        self.events: list[dict[str, Any]] = []
        table: Any = SimpleNamespace(loop=self.loop)
        self.service = Service(table, "clerk", lambda leash: 0, on_event=self.events.append, on_start=self._started)

    def _started(self) -> None:
        self.starts += 1

    @property
    def children(self) -> list[FakeChild]:
        return self.child_class.made

    def request(self, verb: str, *, repeat: bool = False) -> list[Any]:
        """Returns a list that gets the answer."""
        answers: list[Any] = []
        self.service.request(verb, {}, answers.append, repeat=repeat)
        return answers

    def answer(self, child: FakeChild, position: int, result: object) -> None:
        child.receive(jsonrpc="2.0", id=child.sent[position]["id"], result=result)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def verbs(child: FakeChild) -> list[str]:
    return [message["method"] for message in child.sent]


def test_each_answer_goes_to_its_request(stage: Stage) -> None:
    stage.service.start()
    first, second = stage.request("first"), stage.request("second")
    stage.answer(stage.children[0], 1, "two")
    stage.answer(stage.children[0], 0, "one")
    assert (first, second) == (["one"], ["two"])


def test_requests_before_the_start_are_sent_with_it(stage: Stage) -> None:
    answers = stage.request("early")
    stage.service.start()
    assert verbs(stage.children[0]) == ["early"]
    stage.answer(stage.children[0], 0, "late")
    assert answers == ["late"]


def test_after_a_death_repeatable_requests_are_resent_and_others_fail(stage: Stage) -> None:
    stage.service.start()
    lost, repeated = stage.request("lost"), stage.request("repeated", repeat=True)
    stage.children[0].die()
    assert isinstance(lost[0], OutcomeUnknown)
    assert repeated == []
    stage.loop.run(1.0)
    assert verbs(stage.children[1]) == ["repeated"]
    stage.answer(stage.children[1], 0, "done")
    assert (repeated, stage.service.restarts, stage.starts) == (["done"], 1, 2)


def test_a_request_between_death_and_restart_waits_for_the_new_process(stage: Stage) -> None:
    stage.service.start()
    stage.children[0].die()
    answers = stage.request("meanwhile")
    stage.loop.run(1.0)
    assert verbs(stage.children[1]) == ["meanwhile"]
    assert answers == []


def test_a_callback_that_fails_does_not_affect_the_next_answer(stage: Stage) -> None:
    stage.service.start()

    def fail(answer: Any) -> None:
        raise ForqError("cannot use it")

    stage.service.request("first", {}, fail)
    second = stage.request("second")
    stage.answer(stage.children[0], 0, 1)
    stage.answer(stage.children[0], 1, 2)
    assert second == [2]


def test_a_killed_service_is_not_restarted(stage: Stage) -> None:
    stage.service.start()
    stage.service.kill()
    stage.children[0].die()
    stage.loop.run(60.0)
    assert len(stage.children) == 1


def test_a_service_killed_while_it_waits_for_its_restart_stays_down(stage: Stage) -> None:
    stage.service.start()
    stage.children[0].die()
    stage.service.kill()
    stage.loop.run(60.0)
    assert len(stage.children) == 1


def test_a_failed_fork_is_retried_and_keeps_the_requests(stage: Stage) -> None:
    stage.child_class.refused.append(OSError("no more processes"))
    stage.service.start()
    stage.request("waits")
    assert stage.children == []
    stage.loop.run(1.0)
    assert verbs(stage.children[0]) == ["waits"]


def test_a_requested_restart_happens_at_once_and_does_not_count_as_a_death(stage: Stage) -> None:
    stage.service.start()
    restarted: list[int] = []
    lost = stage.request("under way")
    stage.service.restart(lambda: restarted.append(len(stage.children)))
    assert restarted == []
    stage.children[0].die()
    assert (restarted, stage.service.restarts) == ([2], 0)
    assert verbs(stage.children[1]) == ["under way"]
    assert lost == []


def test_events_are_not_taken_for_answers(stage: Stage) -> None:
    stage.service.start()
    stage.children[0].receive(event="redis", ok=True)
    assert stage.events == [{"event": "redis", "ok": True}]
