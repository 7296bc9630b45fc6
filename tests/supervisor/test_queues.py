"""All queues of a supervisor, with fake children and a clerk that answers when the test calls `answer`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from forq.app_spec import AppSpec, Definitions
from forq.errors import (
    ExitCode,
    ForqError,
    IncompatibleProtocol,
    InvalidOption,
    QueueExists,
    RedisUnavailable,
    UnknownQueue,
)
from forq.procs.scoreboard import Scoreboard
from forq.queue_spec import QueueSpec
from forq.settings import defaults
from forq.supervisor import process as process_module
from forq.supervisor.apps import Apps
from forq.supervisor.census import CensusResult
from forq.supervisor.queues import MAX_REJOINS, REJOIN_SECONDS, Queues
from forq.supervisor.services import RETRY_SECONDS
from tests.supervisor.fakes import CRASHED, FakeChild, FakeLoop, fake_child_class

MADE: dict[str, list[str]] = {"unscheduled": []}


class Clerk:
    """Records the requests; `answer` answers the oldest one."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any], Callable[[Any], None]]] = []

    def request(self, verb: str, params: dict[str, Any], answer: Callable[[Any], None]) -> None:
        self.requests.append((verb, params, answer))

    def answer(self, answer: Any) -> None:
        self.requests.pop(0)[2](answer)


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = FakeLoop()
        self.child_class = fake_child_class(self.loop)
        monkeypatch.setattr(process_module, "Child", self.child_class)
        self.clerk = Clerk()
        self.failures: list[int] = []
        config = MagicMock(capacity=100, capacity_aging_seconds=10.0, pipeline=None, queues=(), schedules={})
        config.options_of = lambda spec: {**defaults(spec.mode), **spec.options}
        self.names = iter(f"processor{n}" for n in range(100))
        self.services = MagicMock(
            children=SimpleNamespace(loop=self.loop),
            scoreboard=Scoreboard.create(64),
            clerk=self.clerk,
            processor="p",
            recover=lambda params, finish: finish(),
            serve_new=lambda name, with_fail_queue, then: then(),
        )
        self.services.context.stats = None
        self.services.new_processor.side_effect = lambda: next(self.names)
        self.services.pulse.restart.side_effect = lambda then: then()
        self.state = MagicMock()
        self.queues = Queues(
            config,
            self.state,
            self.loop,  # type: ignore[arg-type]
            self.services,
            changed=lambda: None,
            fail=lambda code, message: self.failures.append(code),
        )

    @property
    def children(self) -> list[FakeChild]:
        return self.child_class.made

    def serve(self, name: str = "q") -> None:
        """Opens a queue and waits for its processes."""
        self.queues.add(spec_of(name))
        self.queues.open(self.queues.by_name[name])
        self.answer(MADE)
        for child in self.children:
            if not child.ended:
                child.receive(ready=0)

    def answer(self, answer: Any) -> None:
        self.clerk.answer(answer)
        self.loop.run()

    def kill_all(self, survivors: frozenset[int] = frozenset()) -> None:
        for child in list(self.children):
            if child.stopping and not child.ended:
                child.die(CRASHED, survivors)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def spec_of(name: str = "q", **options: int) -> QueueSpec:
    return QueueSpec(name, "work", None, {}, (), options)


def opened(stage: Stage) -> list[ForqError | None]:
    """Starts to open a queue; returns a list that gets the result."""
    results: list[ForqError | None] = []
    stage.queues.open(stage.queues.add(spec_of()), results.append)
    return results


def test_processes_start_when_the_queue_is_in_redis(stage: Stage) -> None:
    results = opened(stage)
    assert (stage.clerk.requests[0][0], stage.children) == ("create", [])
    stage.answer(MADE)
    assert [child.name for child in stage.children] == ["q main", "q retry"]
    assert results == [None]
    assert stage.queues.served() == (["q"], [])


def test_a_queue_that_was_deleted_while_it_was_created_is_not_started(stage: Stage) -> None:
    results = opened(stage)
    stage.queues.drop("q", lambda survivors: None)
    stage.answer(MADE)
    assert stage.children == []
    assert isinstance(results[0], UnknownQueue)


def test_a_queue_that_was_replaced_by_one_of_its_name_while_it_was_created_is_not_started(stage: Stage) -> None:
    results = opened(stage)
    stage.queues.add(spec_of())
    stage.answer(MADE)
    assert stage.children == []
    assert isinstance(results[0], UnknownQueue)


def test_a_queue_created_during_a_stop_is_not_started(stage: Stage) -> None:
    results = opened(stage)
    stage.queues.stop(lambda: None, now=False)
    stage.answer(MADE)
    assert stage.children == []
    assert "this supervisor is stopping (Redis has the queue)" in str(results[0])


def test_opening_is_repeated_while_redis_is_down(stage: Stage) -> None:
    results = opened(stage)
    stage.answer(RedisUnavailable("down"))
    assert stage.clerk.requests == []
    stage.loop.run(RETRY_SECONDS)
    assert [request[0] for request in stage.clerk.requests] == ["create"]
    stage.answer(MADE)
    assert len(stage.children) == 2
    assert len(results) == 1, "the caller got the first result only"


def test_a_queue_that_redis_refuses_has_a_config_error_and_no_retries(stage: Stage) -> None:
    opened(stage)
    stage.answer(InvalidOption("other mode"))
    stage.loop.run(60.0)
    assert stage.clerk.requests == []
    assert stage.queues.by_name["q"].config_error == "other mode"
    assert stage.queues.by_name["q"].refused


def test_an_incompatible_server_stops_the_supervisor(stage: Stage) -> None:
    opened(stage)
    stage.answer(IncompatibleProtocol("newer"))
    assert stage.failures == [ExitCode.INCOMPATIBLE]


def test_a_reopened_queue_that_was_deleted_meanwhile_is_dropped(stage: Stage) -> None:
    queue = stage.queues.add(spec_of())
    stage.queues.open(queue, reopening=True)
    stage.answer(UnknownQueue("gone"))
    assert stage.queues.by_name == {}
    stage.state.drop_queue.assert_called_once_with("q")


def test_a_new_queue_is_created_in_redis_only_after_its_import(stage: Stage) -> None:
    results: list[ForqError | None] = []
    stage.queues.create(spec_of(), 60.0, results.append)
    stage.loop.run()
    assert stage.clerk.requests == []
    for child in stage.children:
        child.receive(imported=0)
    assert [request[0] for request in stage.clerk.requests] == ["create"]
    stage.answer(MADE)
    assert [child.sent for child in stage.children] == [[{"begin": 0}], [{"begin": 0}]]
    assert results == [None]


def test_a_new_queue_whose_import_fails_leaves_nothing(stage: Stage) -> None:
    results: list[ForqError | None] = []
    stage.queues.create(spec_of(), 60.0, results.append)
    stage.loop.run()
    stage.children[0].die()
    stage.children[1].die()
    assert (stage.queues.by_name, stage.clerk.requests) == ({}, [])
    assert str(results[0]).startswith("queue 'q' is not created: ")
    stage.services.output_pipes.remove.assert_called_once_with("q")


def changed(stage: Stage) -> list[ForqError | None]:
    """Starts to change a queue, until its new processes have imported their code."""
    stage.serve()
    results: list[ForqError | None] = []
    stage.queues.replace(stage.queues.by_name["q"], spec_of(concurrency=2), 60.0, results.append)
    stage.loop.run()
    for child in stage.children[2:]:
        child.receive(imported=0)
    return results


def test_a_changed_queue_is_stored_when_its_new_processes_have_imported_the_code(stage: Stage) -> None:
    results = changed(stage)
    ((verb, params, _),) = stage.clerk.requests
    assert (verb, params["options"]["concurrency"]) == ("create", 2)
    stage.answer(MADE)
    assert [child.sent for child in stage.children[2:]] == [[{"begin": 0}], [{"begin": 0}]]
    assert not any(child.stopping for child in stage.children)
    for child in stage.children[2:]:
        child.receive(ready=0)
    assert [child.stopping for child in stage.children] == [True, True, False, False]
    for child in stage.children[:2]:
        child.receive(stopping=True)
    assert results == [None]
    assert stage.queues.by_name["q"].spec == spec_of(concurrency=2)


def test_a_change_that_redis_refuses_changes_nothing(stage: Stage) -> None:
    results = changed(stage)
    stage.answer(QueueExists("lease cannot change"))
    assert "queue 'q' is not changed: lease cannot change; its old process keeps running" in str(results[0])
    assert [child.stopping for child in stage.children] == [False, False, True, True]
    assert stage.queues.by_name["q"].spec == spec_of()


def test_a_change_does_not_create_a_queue_that_was_deleted_elsewhere(stage: Stage) -> None:
    changed(stage)
    assert stage.clerk.requests[-1][1]["reopening"] is True


def test_a_restart_during_the_rejoin_after_an_eviction_is_refused(stage: Stage) -> None:
    stage.serve("a")
    stage.serve("b")
    stage.queues.rejoin()
    results: list[ForqError | None] = []
    stage.queues.restart(stage.queues.by_name["b"], 60.0, results.append)
    stage.kill_all()
    assert "being opened or stopped; try again" in str(results[0])
    assert not stage.queues._rejoining


def test_a_queue_that_is_being_created_during_an_eviction_is_opened_afterwards(stage: Stage) -> None:
    stage.serve("a")
    results: list[ForqError | None] = []
    stage.queues.create(spec_of("new"), 60.0, results.append)
    stage.loop.run()
    for child in stage.children[2:]:
        child.receive(imported=0)
    stage.queues.rejoin()
    stage.answer(MADE)
    stage.kill_all()
    stage.loop.run()
    assert not stage.queues._rejoining
    while stage.clerk.requests:
        stage.answer(MADE)
    assert results == [None]
    assert stage.queues.by_name["new"].wanted


def test_a_restart_before_the_queue_is_opened_is_refused(stage: Stage) -> None:
    queue, results = stage.queues.add(spec_of()), list[ForqError | None]()
    stage.queues.restart(queue, 60.0, results.append)
    assert "being opened or stopped; try again" in str(results[0])
    stage.queues.open_all()
    assert stage.clerk.requests[0][0] == "create"


def test_a_change_during_a_shutdown_is_refused(stage: Stage) -> None:
    stage.serve()
    stopped: list[str] = []
    stage.queues.stop(lambda: stopped.append("stopped"), now=True)
    with pytest.raises(QueueExists, match="is being stopped; try again"):
        stage.queues.replace(stage.queues.by_name["q"], spec_of(concurrency=2), 60.0, lambda error: None)
    stage.kill_all()
    assert stopped == ["stopped"]


def test_a_held_process_that_a_new_definition_does_not_need_is_ended(stage: Stage) -> None:
    stage.serve()
    queue = stage.queues.by_name["q"]
    queue.stop(now=True)
    stage.kill_all()
    queue.config_error = "cannot be imported"
    stage.queues.replace(queue, QueueSpec("q", "on_request", None, {}, (), {}), 60.0, lambda error: None)
    stage.loop.run()
    for child in stage.children[2:]:
        child.receive(imported=0)
    stage.answer(MADE)
    alive = [child.name for child in stage.children if not child.ended and not child.stopping]
    assert alive == ["q main"]


def test_a_deleted_queue_waits_for_an_earlier_definition_of_its_name(stage: Stage) -> None:
    stage.serve()
    stage.queues.replace(stage.queues.by_name["q"], spec_of(concurrency=2), None, lambda error: None)
    survivors: list[set[int]] = []
    stage.queues.drop("q", survivors.append)
    assert survivors == []
    stage.children[0].die(CRASHED, frozenset({7}))
    assert survivors == []
    stage.children[1].die(CRASHED, frozenset({8}))
    assert survivors == [{7, 8}]


def test_a_queue_lost_with_its_data_is_created_again_when_its_processes_are_gone(stage: Stage) -> None:
    stage.serve()
    stage.queues.gone("q")
    assert stage.clerk.requests == []
    stage.kill_all()
    ((verb, params, _),) = stage.clerk.requests
    assert (verb, params["reopening"]) == ("create", True)


def test_an_eviction_kills_all_processes_and_starts_them_under_a_new_name(stage: Stage) -> None:
    stage.serve("a")
    stage.serve("b")
    stage.queues.rejoin()
    stage.queues.rejoin()
    assert stage.services.new_processor.call_count == 1, "reports received meanwhile are about the old name"
    assert [child.kills for child in stage.children] == [1, 1, 1, 1]
    stage.services.pulse.restart.assert_not_called()
    stage.kill_all()
    stage.services.evict.assert_called_once_with("processor0", "evicted", ["a", "b"])
    assert [request[1]["name"] for request in stage.clerk.requests] == ["a", "b"]


def test_a_processor_that_is_evicted_repeatedly_gives_up(stage: Stage) -> None:
    for _ in range(MAX_REJOINS):
        stage.queues.rejoin()
    assert stage.failures == []
    stage.queues.rejoin()
    assert stage.failures == [ExitCode.EVICTED_TOO_OFTEN]


def test_evictions_long_ago_do_not_count(stage: Stage) -> None:
    for _ in range(3 * MAX_REJOINS):
        stage.queues.rejoin()
        stage.loop.run(REJOIN_SECONDS / MAX_REJOINS)
    assert stage.failures == []


def test_a_stop_waits_for_replaced_queues_too(stage: Stage) -> None:
    stage.serve()
    stage.queues.replace(stage.queues.by_name["q"], spec_of(concurrency=2), None, lambda error: None)
    stopped: list[str] = []
    stage.queues.stop(lambda: stopped.append("stopped"), now=True)
    assert stopped == []
    stage.kill_all()
    assert stopped == ["stopped"]


def test_a_found_queue_is_joined_once(stage: Stage) -> None:
    stage.queues.open_all()
    stage.queues.found("r", "on_request")
    stage.queues.found("r", "on_request")
    ((verb, params, _),) = stage.clerk.requests
    assert (verb, params["name"], params["joining"]) == ("create", "r", True)


def test_a_restart_requested_while_the_successors_of_a_refused_one_are_dying_is_served(stage: Stage) -> None:
    opened(stage)
    stage.answer(InvalidOption("another mode"))
    queue, first, second = stage.queues.by_name["q"], list[ForqError | None](), list[ForqError | None]()
    stage.queues.restart(queue, 10.0, first.append)
    stage.loop.run()
    import_all(stage)
    stage.answer(InvalidOption("another mode"))
    assert (len(first), queue.refused, queue.has_successors) == (1, True, True)
    stage.queues.restart(queue, 10.0, second.append)
    stage.kill_all()
    stage.loop.run()
    import_all(stage)
    stage.answer(MADE)
    assert (second, queue.refused) == ([None], False)


def import_all(stage: Stage) -> None:
    for child in stage.children:
        if not child.stopping and not child.ended:
            child.receive(imported=True)
    stage.loop.run()


def test_an_app_takes_over_a_queue_when_another_request_has_changed_it(stage: Stage) -> None:
    stage.serve("mails")
    results: list[ForqError | None] = []
    before = len(stage.children)
    stage.queues.restart(stage.queues.by_name["mails"], 60, results.append)
    config = MagicMock(apps=(AppSpec("shop", "shop:app", ()),), queues=(), overrides={}, capacity=100)
    config.options_of = lambda spec: {**defaults(spec.mode), **spec.options}
    apps = Apps(config, stage.state, stage.loop, stage.services, stage.queues, lambda: None)  # type: ignore[arg-type]
    wanted = spec_of("mails", concurrency=2), spec_of("feeds")
    apps._read_at_start(apps.all[0], CensusResult(Definitions("shop", wanted, {}, {}), None, frozenset()))
    assert "feeds" in stage.queues.by_name, "the other queues of the app do not wait"
    stage.loop.run()
    for child in stage.children[before:]:
        child.receive(imported=True)
        child.receive(ready=True)
    for child in stage.children[:before]:
        child.receive(stopping=True)
    stage.loop.run()
    assert results == [None]
    stage.loop.run(RETRY_SECONDS)
    stage.kill_all()
    assert stage.queues.by_name["mails"].spec == wanted[0]
    assert set(apps.all[0].applied) == {"mails", "feeds"}
