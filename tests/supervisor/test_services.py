"""All services of a supervisor with fake children: repeated requests, and the list of served queues."""

from pathlib import Path
from typing import Any

import pytest

from forq.errors import ForqError, RedisUnavailable
from forq.supervisor import service as service_module
from forq.supervisor.config import load
from forq.supervisor.services import (
    LAST_OUTPUT_SECONDS,
    LOAD_RETRY_SECONDS,
    RETRY_SECONDS,
    SAVE_RETRY_SECONDS,
    Services,
)
from forq.supervisor.statedir import PreviousRun, StateDir
from tests.supervisor.fakes import FakeChild, FakeLoop, fake_child_class

REDIS_DOWN = {"code": -32000, "message": "down", "data": {"code": RedisUnavailable.code}}


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.loop = FakeLoop()
        self.child_class = fake_child_class(self.loop)
        monkeypatch.setattr(service_module, "Child", self.child_class)
        # It would search all of /proc.
        monkeypatch.setattr(StateDir, "_kill_marked", lambda *arguments: None)
        self.state = StateDir(tmp_path / "state", strict_modes=False)
        self.state.lock()
        given = {"redis": "redis://127.0.0.1:1", "state_dir": str(tmp_path / "state"), "cgroup": "off"}
        config = load(given, {"FORQ_STRICT_MODES": "no"})
        self.events: list[dict[str, Any]] = []
        self.served: tuple[list[str], list[str]] = (["q"], [])
        self.services = Services(
            config,
            self.state,
            self.loop,  # type: ignore[arg-type]
            served=lambda: self.served,
            on_pulse=self.events.append,
        )
        self.services.start()
        self.loop.run()

    def child(self, name: str) -> FakeChild:
        return next(child for child in reversed(self.child_class.made) if child.name == name)

    def requests(self, name: str, verb: str) -> list[dict[str, Any]]:
        return [message for message in self.child(name).sent if message.get("method") == verb]

    def answer(self, name: str, verb: str, *, error: object = None) -> None:
        """Answers the latest request of this verb."""
        number = self.requests(name, verb)[-1]["id"]
        outcome = {"result": {}} if error is None else {"error": error}
        self.child(name).receive(jsonrpc="2.0", id=number, **outcome)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    stage = Stage(monkeypatch, tmp_path)
    yield stage
    stage.state.unlock()


def test_a_recovery_is_repeated_until_redis_has_done_it(stage: Stage) -> None:
    done: list[str] = []
    stage.services.recover({"queue": "q", "worker": "w"}, lambda: done.append("done"))
    assert stage.services.unrecovered == 1
    stage.answer("pulse", "recover", error=REDIS_DOWN)
    assert len(stage.requests("pulse", "recover")) == 1, "not at once"
    stage.loop.run(RETRY_SECONDS)
    assert len(stage.requests("pulse", "recover")) == 2
    assert (done, stage.services.unrecovered) == ([], 1)
    stage.answer("pulse", "recover")
    assert (done, stage.services.unrecovered) == (["done"], 0)


def test_a_recovery_survives_the_death_of_pulse(stage: Stage) -> None:
    done: list[str] = []
    stage.services.recover({"queue": "q", "worker": "w"}, lambda: done.append("done"))
    stage.child("pulse").die()
    stage.loop.run(0.8 * RETRY_SECONDS)
    assert len(stage.requests("pulse", "recover")) == 1, "with the start of the new pulse"
    stage.answer("pulse", "recover")
    assert done == ["done"]


def test_a_refused_recovery_frees_its_slot(stage: Stage) -> None:
    done: list[str] = []
    stage.services.recover({"queue": "q", "worker": "w"}, lambda: done.append("done"))
    stage.answer("pulse", "recover", error={"code": -32603, "message": "internal error"})
    assert (done, stage.services.unrecovered) == (["done"], 0)


def test_many_changes_of_the_queues_are_sent_as_one_list(stage: Stage) -> None:
    before = len(stage.requests("pulse", "serve"))
    for _ in range(1000):
        stage.services.send_served()
    stage.loop.run(0.1)
    assert len(stage.requests("pulse", "serve")) - before == 1


def test_the_lists_of_many_queues_are_spaced_out(stage: Stage) -> None:
    stage.services.output_pipes._fds = dict.fromkeys(map(str, range(1000)), -1)
    stage.services.send_served()
    stage.loop.run(2.0)
    before = len(stage.requests("pulse", "serve"))
    stage.services.send_served()
    stage.loop.run()
    stage.services.send_served()
    stage.loop.run(0.9)
    assert len(stage.requests("pulse", "serve")) - before == 1
    stage.loop.run(0.2)
    assert len(stage.requests("pulse", "serve")) - before == 2


def test_a_new_pulse_gets_the_list_of_queues(stage: Stage) -> None:
    stage.child("pulse").die()
    stage.loop.run(1.0)
    assert stage.requests("pulse", "serve")[0]["params"]["queues"] == ["q"]


def test_functions_are_loaded_again_if_redis_came_back_during_a_load(stage: Stage) -> None:
    pulse = stage.child("pulse")
    pulse.receive(event="redis_back")
    assert stage.requests("clerk", "offer") == [], "the first load comes after the server check"
    stage.services.load_functions()
    pulse.receive(event="redis_back")
    assert len(stage.requests("clerk", "offer")) == 1
    stage.answer("clerk", "offer")
    assert len(stage.requests("clerk", "offer")) == 2
    stage.answer("clerk", "offer")
    assert len(stage.requests("clerk", "offer")) == 2


def test_functions_are_loaded_later_if_redis_is_down(stage: Stage) -> None:
    stage.services.load_functions()
    stage.answer("clerk", "offer", error=REDIS_DOWN)
    stage.loop.run(LOAD_RETRY_SECONDS)
    assert len(stage.requests("clerk", "offer")) == 2


def test_the_previous_run_is_evicted_only_if_it_has_certainly_ended(stage: Stage) -> None:
    stage.services.predecessor = PreviousRun("old", "the directory is a copy")
    stage.services.end_predecessor(["q"])
    assert stage.requests("pulse", "evict") == []
    stage.services.predecessor = PreviousRun("old", "")
    stage.services.end_predecessor(["q"])
    (request,) = stage.requests("pulse", "evict")
    assert request["params"] == {"processor": "old", "cause": "supervisor_lost", "queues": ["q"]}


def test_a_stop_kills_the_logger_after_it_has_read_the_last_output(stage: Stage) -> None:
    stopped: list[str] = []
    stage.services.stop(lambda: stopped.append("stopped"))
    assert (stage.child("pulse").kills, stage.child("logger").kills, stopped) == (1, 0, [])
    stage.answer("logger", "drain")
    assert (stage.child("logger").kills, stopped) == (1, ["stopped"])
    stage.loop.run(2 * LAST_OUTPUT_SECONDS)
    assert stopped == ["stopped"], "the timeout does not end it twice"


def test_a_stop_waits_for_the_logger_only_for_a_limited_time(stage: Stage) -> None:
    stopped: list[str] = []
    stage.services.stop(lambda: stopped.append("stopped"))
    stage.loop.run(LAST_OUTPUT_SECONDS)
    assert stopped == ["stopped"]


def test_a_new_name_that_cannot_be_saved_is_saved_later(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []

    def fail(name: str) -> None:
        raise ForqError("disk full")

    monkeypatch.setattr(stage.state, "save_processor", fail)
    before = stage.services.processor
    assert stage.services.new_processor() == before
    monkeypatch.setattr(stage.state, "save_processor", saved.append)
    stage.loop.run(SAVE_RETRY_SECONDS)
    assert saved == [stage.services.processor]
    assert stage.services.processor != before


def test_errors_of_the_failed_log_are_kept_until_it_works_or_a_new_scribe_starts(stage: Stage) -> None:
    scribe = stage.child("scribe")
    for name in ("a", "b"):
        scribe.receive(event="failed_log", queue=name, error="full", failures=2)
    scribe.receive(event="failed_log", queue="a", error=None, failures=0)
    assert stage.services.failed_log_errors == {"b": "full (tried 2 times)"}
    scribe.die()
    stage.loop.run(1.0)
    assert stage.services.failed_log_errors == {}
