"""One served queue with fake children: respawn, restart with new code, and stop."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from forq.errors import CannotImport, ExitCode, ForqError
from forq.procs.scoreboard import Role, Scoreboard, State
from forq.queue_spec import QueueSpec
from forq.settings import defaults
from forq.supervisor import process as process_module
from forq.supervisor import queue as queue_module
from forq.supervisor.child import Exit
from forq.supervisor.pacing import FLAPPING_DEATHS, Admission
from forq.supervisor.process import ProcessDeps
from forq.supervisor.queue import Change, ServedQueue
from tests.supervisor.fakes import CRASHED, FakeChild, FakeLoop, fake_child_class

STOPPED = Exit(ExitCode.STOPPED, None)


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, processes: int = 1) -> None:
        self.loop = FakeLoop()
        self.child_class = fake_child_class(self.loop)
        monkeypatch.setattr(process_module, "Child", self.child_class)
        self.events: list[str] = []
        self.deps: Any = ProcessDeps(
            children=SimpleNamespace(loop=self.loop),  # type: ignore[arg-type]
            scoreboard=Scoreboard.create(64),
            grants=MagicMock(),
            admission=Admission(self.loop),  # type: ignore[arg-type]
            child_main=MagicMock(),
            recover=lambda params, finish: finish(),
            queue_gone=lambda name: self.events.append(f"gone {name}"),
            heartbeat=lambda name: self.events.append(f"heartbeat {name}"),
            changed=lambda: None,
            processor=lambda: "p",
            check_unread=MagicMock(),
            warden=MagicMock(),
        )
        self.spec = QueueSpec("q", "work", None, {}, (), {})
        self.queue = ServedQueue(self.spec, {**defaults("work"), "processes": processes}, self.deps)

    @property
    def children(self) -> list[FakeChild]:
        return self.child_class.made

    def start(self) -> None:
        self.queue.start()
        for child in self.children:
            child.receive(ready=0)

    def restart(self, seconds: float = 60.0) -> list[ForqError | None]:
        """Returns a list that gets the result when the restart is over."""
        results: list[ForqError | None] = []
        self.queue.restart(seconds, results.append)
        self.loop.run()
        return results

    def import_all(self) -> None:
        for child in self.children:
            if not child.ended:
                child.receive(imported=0)

    def join_all(self) -> None:
        """Lets the new processes import their code and join the queue."""
        self.import_all()
        for child in self.children:
            if not child.ended:
                child.receive(ready=0)
        self.answer_stops()
        self.loop.run()

    def answer_stops(self) -> None:
        for child in self.children:
            if child.stopping and not child.ended:
                child.receive(stopping=True)

    def alive(self) -> list[str]:
        """Names of the processes that claim jobs, or will."""
        return [child.name for child in self.children if not (child.ended or child.stopping or child.signals)]

    def end_stopping(self) -> None:
        for child in list(self.children):
            if child.stopping and not child.ended:
                child.die(STOPPED)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def names(children: list[FakeChild]) -> list[str]:
    return [child.name for child in children]


def test_a_queue_is_running_when_its_main_process_is_ready(stage: Stage) -> None:
    assert stage.queue.opening
    stage.queue.start()
    assert names(stage.children) == ["q main", "q retry"]
    assert stage.queue.state == "starting"
    stage.children[1].receive(ready=0)
    assert stage.queue.state == "starting"
    stage.children[0].receive(ready=0)
    assert stage.queue.state == "running"
    assert stage.queue.main_pid() == stage.children[0].pid


def test_a_process_that_dies_is_restarted_after_a_delay(stage: Stage) -> None:
    stage.start()
    stage.children[0].die()
    assert len(stage.children) == 2
    assert stage.queue.describe_children()[0]["state"] == "backoff"
    stage.loop.run(1.0)
    assert names(stage.children) == ["q main", "q retry", "q main"]
    assert stage.queue.describe_children()[0]["restarts"] == 1


def test_a_process_that_keeps_dying_is_flapping_and_always_restarted(stage: Stage) -> None:
    stage.start()
    for _ in range(FLAPPING_DEATHS):
        next(child for child in stage.children if child.name == "q main" and not child.ended).die()
        while stage.children[-1].ended or stage.children[-1].name == "q retry":
            stage.loop.run(0.1)
    assert stage.queue.state == "flapping"
    assert not stage.children[-1].ended
    trouble = stage.queue.trouble()
    assert trouble is not None
    assert "forqctl logs q" in trouble


def test_a_fork_that_fails_is_tried_again(stage: Stage) -> None:
    stage.child_class.refused.append(OSError("no more processes"))
    stage.queue.start()
    assert names(stage.children) == ["q retry"]
    stage.loop.run(1.0)
    assert names(stage.children) == ["q retry", "q main"]


def test_a_queue_whose_handler_cannot_be_imported_stops_all_its_processes(stage: Stage) -> None:
    stage.queue.start()
    main, retry = stage.children
    main.receive(exiting=ExitCode.CONFIG, reason="no module named x")
    main.die(Exit(ExitCode.CONFIG, None))
    assert (stage.queue.state, stage.queue.config_error) == ("config_error", "no module named x")
    assert retry.stopping
    retry.die(STOPPED)
    stage.loop.run(60.0)
    assert len(stage.children) == 2, "no respawn"


def test_an_exit_code_of_a_handler_is_not_a_config_error(stage: Stage) -> None:
    """Only announced codes have a meaning."""
    stage.start()
    stage.children[0].die(Exit(ExitCode.CONFIG, None))
    assert stage.queue.config_error is None


@pytest.mark.parametrize(
    ("code", "event"), [(ExitCode.QUEUE_GONE, "gone q"), (ExitCode.FENCED, "heartbeat q")], ids=["gone", "fenced"]
)
def test_what_an_announced_exit_code_reports_is_verified_elsewhere(stage: Stage, code: int, event: str) -> None:
    stage.start()
    stage.children[0].receive(exiting=code, reason="")
    stage.children[0].die(Exit(code, None))
    assert stage.events == [event]


def test_stop_ends_when_the_last_process_is_gone(stage: Stage) -> None:
    stage.start()
    stopped: list[str] = []
    stage.queue.stop(lambda: stopped.append("stopped"))
    assert all(child.stopping for child in stage.children)
    stage.children[0].die(STOPPED)
    assert stopped == []
    stage.children[1].die(STOPPED)
    assert stopped == ["stopped"]
    stage.loop.run(60.0)
    assert len(stage.children) == 2


def test_a_process_waiting_for_its_respawn_is_not_started_after_a_stop(stage: Stage) -> None:
    stage.start()
    stage.children[0].die()
    stage.queue.stop()
    stage.loop.run(60.0)
    assert len(stage.children) == 2


def test_the_new_processes_of_a_restart_join_before_the_old_ones_stop(stage: Stage) -> None:
    stage.start()
    old = list(stage.children)
    results = stage.restart()
    new = stage.children[2:]
    assert names(new) == ["q main", "q retry"]
    new[0].receive(imported=0)
    assert [child.sent for child in new] == [[], []], "the other one is still importing"
    new[1].receive(imported=0)
    assert [child.sent for child in new] == [[{"begin": 0}], [{"begin": 0}]]
    new[0].receive(ready=0)
    assert not any(child.stopping for child in old), "the other one has not joined yet"
    new[1].receive(ready=0)
    assert all(child.stopping for child in old)
    old[0].receive(stopping=True)
    assert results == [], "the other one may still begin a job"
    old[1].receive(stopping=True)
    assert results == [None], "it does not wait for the running jobs of the old ones"
    assert [child["state"] for child in stage.queue.describe_children()] == ["empty", "empty", "stopping", "stopping"]
    stage.end_stopping()
    assert len(stage.children) == 4


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "silent"])
def test_a_restart_ends_if_an_old_process_ended_or_does_not_answer(stage: Stage, ended: bool) -> None:
    stage.start()
    old = list(stage.children)
    results = stage.restart()
    stage.import_all()
    for child in stage.children[2:]:
        child.receive(ready=0)
    old[1].receive(stopping=True)
    again = stage.restart()
    assert (results, len(stage.children)) == ([], 4)
    if ended:
        old[0].die(STOPPED)
    else:
        stage.loop.run(queue_module.STOPPING_SECONDS)
    assert results == [None]
    stage.loop.run()
    assert len(stage.children) == 6, "the next restart begins"
    stage.join_all()
    assert again == [None]


def test_new_processes_that_cannot_join_leave_the_old_ones_serving(stage: Stage) -> None:
    stage.start()
    results = stage.restart()
    stage.import_all()
    stage.children[3].receive(ready=0)
    stage.children[2].die()
    assert "(SIGKILL) before it joined the queue" in str(results[0])
    assert stage.children[3].signals == [15], "it has joined, and may run a job"
    assert not any(child.stopping for child in stage.children[:2])
    again = stage.restart()
    assert len(stage.children) == 4, "the next restart waits until it is gone"
    stage.children[3].die(STOPPED)
    stage.loop.run()
    stage.join_all()
    assert again == [None]


def test_new_processes_that_do_not_join_in_time_leave_the_old_ones_serving(stage: Stage) -> None:
    stage.start()
    results = stage.restart(seconds=5.0)
    stage.import_all()
    stage.loop.run(5.1)
    assert [child.kills for child in stage.children] == [0, 0, 1, 1]
    for child in stage.children[2:]:
        child.die()
    assert "have not joined the queue in Redis after 5 s" in str(results[0])


def test_a_restart_replaces_several_main_processes_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, processes=3)
    stage.start()
    assert names(stage.children) == ["q main 1/3", "q main 2/3", "q main 3/3", "q retry"]
    results = stage.restart()
    for step in (["q main 1/3", "q retry"], ["q main 2/3"], ["q main 3/3"]):
        assert names([child for child in stage.children if not child.ended][-len(step) :]) == step
        assert results == []
        stage.join_all()
        stage.end_stopping()
        assert sorted(set(stage.alive())) == ["q main 1/3", "q main 2/3", "q main 3/3", "q retry"]
    assert results == [None]
    assert len(stage.alive()) == 4
    assert len(stage.children) == 8


def test_a_later_step_that_fails_ends_the_restart_and_tells_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, processes=3)
    stage.start()
    results = stage.restart()
    stage.join_all()
    stage.children[-1].receive(exiting=ExitCode.CONFIG, reason="out of memory", traceback="line 1")
    stage.children[-1].die(Exit(ExitCode.CONFIG, None))
    (error,) = results
    assert isinstance(error, CannotImport)
    assert str(error) == "out of memory; 1 of its 3 main processes run the new code already"
    assert error.traceback == "line 1"
    assert sorted(stage.alive()) == ["q main 1/3", "q main 2/3", "q main 3/3", "q retry"]


def set_processes(stage: Stage, processes: int) -> None:
    stage.queue.options = {**stage.queue.options, "processes": processes}
    stage.queue.options_changed()


def test_more_processes_start_and_fewer_retire_after_their_jobs(stage: Stage) -> None:
    stage.start()
    set_processes(stage, 3)
    assert names(stage.children) == ["q main", "q retry", "q main 2/3", "q main 3/3"]
    assert stage.children[0].sent == [{"name": "q main 1/3"}]
    set_processes(stage, 2)
    assert stage.children[3].signals == [15]
    assert not stage.children[3].stopping, "without a time limit"
    assert stage.children[2].sent == [{"name": "q main 2/2"}]
    stage.children[3].die(STOPPED)
    stage.loop.run(60.0)
    assert len(stage.children) == 4, "it is not respawned"
    assert [child["number"] for child in stage.queue.describe_children()] == [1, 2, 1]


def test_fewer_processes_during_a_restart_skip_its_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, processes=3)
    stage.start()
    results = stage.restart()
    set_processes(stage, 1)
    stage.join_all()
    assert results == [None]
    assert sorted(stage.alive()) == ["q main 1/3", "q retry"]


def test_a_process_that_can_no_longer_import_its_code_leaves_the_others_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(monkeypatch, processes=2)
    stage.start()
    stage.children[0].receive(exiting=ExitCode.CONFIG, reason="syntax error", traceback="line 1")
    stage.children[0].die(Exit(ExitCode.CONFIG, None))
    assert (stage.queue.state, stage.queue.config_error) == ("running", None)
    error = stage.queue.restart_error
    assert error is not None
    assert (error["message"], error["traceback"]) == ("syntax error", "line 1")
    stage.loop.run(60.0)
    stage.children[-1].receive(ready=0)
    assert stage.queue.restart_error is None, "the code can be imported again"


def test_a_restart_whose_import_fails_keeps_the_old_processes(stage: Stage) -> None:
    stage.start()
    results = stage.restart()
    new = stage.children[2:]
    new[0].receive(exiting=ExitCode.CONFIG, reason="syntax error", traceback="line 1")
    new[0].die(Exit(ExitCode.CONFIG, None))
    assert results == [], "not before the other new process is gone"
    new[1].die()
    (error,) = results
    assert isinstance(error, CannotImport)
    assert not any(child.stopping for child in stage.children[:2])
    assert stage.queue.state == "running"
    restart_error = stage.queue.restart_error
    assert restart_error is not None
    assert (restart_error["message"], restart_error["traceback"]) == ("syntax error", "line 1")


def test_an_import_that_takes_too_long_ends_the_restart(stage: Stage) -> None:
    stage.start()
    results = stage.restart(seconds=5.0)
    stage.loop.run(5.1)
    assert [child.kills for child in stage.children] == [0, 0, 1, 1]
    for child in stage.children[2:]:
        child.die()
    assert "not imported after 5 s" in str(results[0])


def test_a_new_process_that_dies_after_it_has_joined_is_replaced(stage: Stage) -> None:
    """A job may have killed it; its code is not at fault."""
    stage.start()
    results = stage.restart()
    stage.import_all()
    stage.children[2].receive(ready=0)
    stage.children[2].die()
    assert results == []
    stage.children[3].receive(ready=0)
    stage.answer_stops()
    assert results == [None]
    assert stage.alive() == ["q retry", "q main"]
    assert stage.children[4].name == "q main"


def test_an_old_process_that_cannot_import_its_code_does_not_stop_new_ones_that_join(stage: Stage) -> None:
    stage.start()
    results = stage.restart()
    stage.import_all()
    for old in stage.children[:2]:
        old.receive(exiting=ExitCode.CONFIG, reason="syntax error")
        old.die(Exit(ExitCode.CONFIG, None))
    assert stage.queue.config_error is None
    for new in stage.children[2:]:
        new.receive(ready=0)
    assert results == [None]
    assert (stage.queue.state, stage.queue.restart_error) == ("running", None)
    stage.loop.run(60.0)
    assert len(stage.children) == 4, "the old ones are not respawned"


def test_a_new_process_that_wants_to_be_replaced_while_another_joins_gets_a_successor(stage: Stage) -> None:
    stage.start()
    results = stage.restart()
    stage.import_all()
    stage.children[2].receive(ready=0)
    stage.children[2].receive(replace="max_jobs")
    stage.children[3].receive(ready=0)
    stage.answer_stops()
    assert results == [None]
    assert stage.alive() == ["q retry", "q main"]
    stage.children[2].die(STOPPED)
    assert len(stage.children) == 5


def test_restarts_requested_during_a_restart_share_the_next_one(stage: Stage) -> None:
    """Their code may be newer than the code that the first one has imported."""
    stage.start()
    first, second, third = stage.restart(), stage.restart(), stage.restart()
    assert len(stage.children) == 4
    stage.join_all()
    assert (first, second, third) == ([None], [], [])
    assert len(stage.children) == 6
    stage.join_all()
    assert (first, second, third) == ([None], [None], [None])


def test_a_restart_waits_while_too_many_old_processes_run_jobs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_RETIRING", 2)
    stage.start()
    first = stage.restart()
    stage.join_all()
    second = stage.restart()
    assert (first, len(stage.children)) == ([None], 4)
    stage.end_stopping()
    stage.loop.run()
    stage.join_all()
    assert second == [None]


def test_a_stop_during_a_restart_waits_for_the_new_processes_and_fails_the_restart(stage: Stage) -> None:
    stage.start()
    results, stopped = stage.restart(), list[str]()
    waiting = stage.restart()
    stage.queue.stop(lambda: stopped.append("stopped"), now=True)
    for child in stage.children[:2]:
        child.die()
    assert stopped == []
    for child in stage.children[2:]:
        child.die()
    assert stopped == ["stopped"]
    assert [len(results), len(waiting)] == [1, 1]
    assert "were stopped in the meantime" in str(results[0])
    assert "were stopped in the meantime" in str(waiting[0])


def change(stage: Stage, accept: Callable[[Callable[[ForqError | None], None]], None], **options: int) -> Change:
    return Change(replace(stage.spec, handler="m:new"), {**stage.queue.options, **options}, accept)


def begin_change(stage: Stage, changed: Change) -> list[ForqError | None]:
    results: list[ForqError | None] = []
    stage.queue.restart(5.0, results.append, changed)
    stage.loop.run()
    return results


def test_a_restart_that_waited_begins_when_the_join_of_the_first_fails(stage: Stage) -> None:
    stage.start()
    first, second = stage.restart(seconds=5.0), stage.restart(seconds=5.0)
    stage.import_all()
    stage.loop.run(5.1)
    for child in stage.children[2:]:
        child.die()
    stage.loop.run()
    assert (len(first), len(stage.children)) == (1, 6)
    stage.join_all()
    assert second == [None]


def test_a_change_is_complete_only_when_all_processes_have_joined(stage: Stage) -> None:
    """Otherwise the same request again would find nothing to do."""
    stage.start()
    changed = change(stage, lambda answer: answer(None))
    results = begin_change(stage, changed)
    stage.import_all()
    stage.loop.run(5.1)
    for child in stage.children[2:]:
        child.die()
    assert results[0] is not None
    assert stage.queue.definition == stage.spec
    again = begin_change(stage, changed)
    stage.join_all()
    assert again == [None]
    assert stage.queue.definition == changed.spec


def test_processes_added_during_a_change_get_the_new_definition_too(stage: Stage) -> None:
    stage.start()
    results = begin_change(stage, change(stage, lambda answer: answer(None), processes=2))
    set_processes(stage, 2)
    for _ in range(2):
        stage.join_all()
        stage.loop.run()
    assert results == [None]
    specs = [process.spec.handler for process in stage.queue._processes() if not process.child.stopping]
    assert specs == ["m:new"] * 3


def test_a_new_process_that_dies_while_redis_is_asked_ends_the_change(stage: Stage) -> None:
    stage.start()
    asked: list[Callable[[ForqError | None], None]] = []
    results = begin_change(stage, change(stage, asked.append))
    stage.import_all()
    stage.children[2].die()
    asked[0](None)
    assert "died before it joined" in str(results[0])
    assert not any(child.stopping for child in stage.children[:2])


def test_opening_a_queue_again_does_not_disturb_its_restart(stage: Stage) -> None:
    stage.start()
    results = stage.restart()
    stage.import_all()
    stage.queue.start()
    stage.join_all()
    assert results == [None]


def test_the_error_of_a_failed_restart_stays_after_an_older_one_has_ended(stage: Stage) -> None:
    stage.start()
    stage.children[1].receive(exiting=ExitCode.CONFIG, reason="older")
    stage.children[1].die(Exit(ExitCode.CONFIG, None))
    stage.loop.run(1.0)
    stage.children[2].receive(ready=0)
    stage.restart()
    stage.children[3].receive(exiting=ExitCode.CONFIG, reason="newer")
    stage.children[3].die(Exit(ExitCode.CONFIG, None))
    stage.children[4].die()
    error = stage.queue.restart_error
    assert error is not None
    assert error["message"] == "newer"


def test_the_import_error_of_a_retry_process_lasts_until_one_has_imported(stage: Stage) -> None:
    """A retry process joins before it imports."""
    stage.start()
    stage.children[1].receive(exiting=ExitCode.CONFIG, reason="syntax error")
    stage.children[1].die(Exit(ExitCode.CONFIG, None))
    stage.loop.run(1.0)
    stage.children[2].receive(ready=0)
    assert stage.queue.restart_error is not None
    stage.children[2].receive(imported=0)
    assert stage.queue.restart_error is None


def test_a_retry_process_that_imports_its_code_counts_as_busy(stage: Stage) -> None:
    stage.start()
    retry = stage.queue._retry_process()
    assert retry is not None
    stage.deps.scoreboard.slot(retry.slots[0]).state = State.STARTING
    assert retry in stage.queue.busy_processes()


def test_a_graceful_stop_does_not_kill_a_process_whose_first_workers_run_jobs_already(
    stage: Stage,
) -> None:
    stage.start()
    stage.restart()
    stage.import_all()
    (main, _) = stage.queue._successor_processes()
    stage.deps.scoreboard.slot(main.slots[0]).state = State.BUSY
    stage.queue.stop()
    assert [child.kills for child in stage.children[2:]] == [0, 1]


def test_processes_are_recycled_while_many_others_retire_because_fewer_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_module, "MAX_RETIRING", 2)
    stage = Stage(monkeypatch, processes=6)
    stage.start()
    set_processes(stage, 2)
    stage.children[0].receive(replace="max_jobs")
    stage.children[1].receive(replace="max_jobs")
    assert sorted(stage.alive()) == ["q main 1/2", "q main 2/2", "q retry"]


def test_too_many_retiring_processes_delay_the_successor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_RETIRING", 2)
    stage.start()
    for _ in range(2):
        next(child for child in reversed(stage.children) if child.name == "q main").receive(replace="max_jobs")
    mains = [child for child in stage.children if child.name == "q main"]
    assert len(mains) == 2, "the second one waits: two are retiring"
    mains[0].die(STOPPED)
    assert len([child for child in stage.children if child.name == "q main"]) == 3


def test_survivors_of_all_its_processes_are_reported(stage: Stage) -> None:
    stage.start()
    stage.queue.stop(now=True)
    stage.children[0].die(CRASHED, frozenset({7}))
    stage.children[1].die(CRASHED, frozenset({8}))
    assert stage.queue.survivors == {7, 8}


def test_callbacks_for_the_opening_are_called_once_opened_or_abandoned(stage: Stage) -> None:
    calls: list[str] = []

    def note(text: str) -> Callable[[], None]:
        return lambda: calls.append(text)

    stage.queue.when_opened(note("opened"), otherwise=note("abandoned"))
    stage.queue.start()
    stage.queue.abandon()
    assert calls == ["opened"]
    other = ServedQueue(stage.spec, defaults("work"), stage.deps)
    other.when_opened(note("opened"), otherwise=note("abandoned"))
    other.abandon()
    assert calls == ["opened", "abandoned"]


def test_only_a_queue_of_mode_work_or_auto_release_has_a_retry_process(stage: Stage) -> None:
    queue = ServedQueue(QueueSpec("r", "on_request", None, {}, (), {}), defaults("on_request"), stage.deps)
    queue.start()
    assert [child["role"] for child in queue.describe_children()] == [Role.MAIN.name.lower()]
