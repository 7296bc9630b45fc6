"""Carrying out a plan of `forqctl apply`, with fake children and a clerk that answers when the test calls `answer`."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forq.errors import ForqError, PlanChanged, RedisUnavailable
from forq.supervisor.apply import ConfigChanges
from forq.supervisor.apps import Apps
from forq.supervisor.config import Config, load
from tests.supervisor.fakes import CRASHED
from tests.supervisor.test_queues import MADE, Stage

Q = '[queues.q]\nhandler = "m:f"\n'


class Applying:
    """A supervisor that serves the queues of its config file."""

    def __init__(self, stage: Stage, directory: Path, *, opened: bool = True) -> None:
        self.stage = stage
        self.file = directory / "forq.toml"
        self.results: list[dict[str, Any]] = []
        self.write(Q)
        config = self.read(self.file)
        queues = stage.queues
        stage.state.load_queue.return_value = None
        apps = Apps(config, stage.state, stage.loop, stage.services, queues, lambda: None)  # type: ignore[arg-type]
        self.supervisor = SimpleNamespace(
            config=config, queues=queues, apps=apps, services=stage.services, state=stage.state, stopping=False
        )
        self.supervisor.use_config = self.use_config
        self.use_config(config)
        queues.open(queues.add(config.queues[0]))
        if opened:
            stage.answer(MADE)
        for child in stage.children:
            child.receive(ready=0)
        self.changes = ConfigChanges(self.supervisor, config, self.read)  # type: ignore[arg-type]

    def read(self, file: Path) -> Config:
        return load({"config": file, "state_dir": "/srv/state"}, {})

    def use_config(self, config: Config) -> None:
        self.supervisor.config = config
        self.supervisor.queues.use_config(config)
        self.supervisor.apps.use_config(config)

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def apply(self, text: str) -> None:
        self.write(text)
        self.changes.apply(self.changes.plan(None), 60.0, self.results.append)

    def left(self) -> list[str | None]:
        return [change.key for change in self.changes.plan(None).changes]


@pytest.fixture
def applying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Applying:
    return Applying(Stage(monkeypatch), tmp_path)


def test_a_live_option_is_set_in_redis_and_no_process_is_started(applying: Applying) -> None:
    applying.apply(Q + "priority = 3\n")
    [(verb, params, _)] = applying.stage.clerk.requests
    assert (verb, params) == ("set", {"name": "q", "options": {"priority": 3}})
    assert applying.results == []
    applying.stage.answer({})
    assert [change["key"] for change in applying.results[0]["applied"]] == ["priority"]
    assert len(applying.stage.children) == 2
    assert applying.stage.queues.by_name["q"].options["priority"] == 3
    assert applying.supervisor.config.queues[0].options == {"priority": 3}
    assert applying.left() == []


def test_an_option_of_a_queue_that_is_not_yet_in_redis_is_set_when_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    applying = Applying(Stage(monkeypatch), tmp_path, opened=False)
    applying.apply(Q + "priority = 3\n")
    assert [verb for verb, *_ in applying.stage.clerk.requests] == ["create"]
    applying.stage.answer(MADE)
    assert [verb for verb, *_ in applying.stage.clerk.requests] == ["set"]
    applying.stage.answer({})
    assert [change["key"] for change in applying.results[0]["applied"]] == ["priority"]


@pytest.mark.parametrize("failing", [0, 1])
def test_while_redis_is_down_nothing_counts_as_applied(applying: Applying, failing: int) -> None:
    text = Q + 'priority = 3\n[queues.q.schedules.k]\nevery = "1h"\n'
    applying.apply(text)
    for _ in range(failing):
        applying.stage.answer({})
    applying.stage.answer(RedisUnavailable("down"))
    [result] = applying.results
    assert (result["applied"], result["failed"][0]["code"]) == ([], "redis_unavailable")
    assert applying.supervisor.config.schedules["q"] == {}
    assert applying.left() == ["priority", "k"]
    # The plan does not take the old value for one of `forqctl set`.
    assert [change.note for change in applying.changes.plan(None).changes] == [None, None]
    applying.apply(text)
    applying.stage.answer({})
    assert applying.stage.clerk.requests[0][:2] == (
        "set_config_schedules",
        {"name": "q", "schedules": {"k": {"every": "1h"}}, "app_schedules": {}},
    )
    applying.stage.answer({"unscheduled": []})
    assert applying.left() == []


def test_new_processes_import_first_and_a_failure_keeps_the_old_ones(applying: Applying) -> None:
    text = Q + 'concurrency = 2\n[queues.q.schedules.k]\nevery = "1h"\n'
    applying.apply(text)
    applying.stage.loop.run()
    old, new = applying.stage.children[:2], applying.stage.children[2:]
    new[0].die(CRASHED)
    new[1].die(CRASHED)
    assert not any(child.stopping for child in old)
    assert applying.results[0]["failed"][0]["step"] == "queue q"
    assert applying.supervisor.config.schedules["q"] == {}
    assert applying.left() == ["concurrency", "k"]


def test_a_change_whose_new_processes_do_not_join_is_planned_again(applying: Applying) -> None:
    applying.apply(Q + "concurrency = 2\n")
    stage = applying.stage
    stage.loop.run()
    for child in stage.children[2:]:
        child.receive(imported=0)
    stage.answer(MADE)
    stage.loop.run(61.0)
    for child in stage.children[2:]:
        child.die(CRASHED)
    stage.loop.run()
    assert applying.results[0]["failed"]
    assert applying.left() == ["concurrency"]


def test_a_queue_that_is_deleted_meanwhile_is_a_failure(applying: Applying) -> None:
    applying.apply(Q + "priority = 3\n")
    applying.stage.queues.drop("q", lambda survivors: None)
    applying.stage.answer({})
    assert applying.results[0]["failed"][0]["message"] == "queue 'q' was deleted or replaced in the meantime"


def test_a_queue_that_is_being_restarted_is_a_failure(applying: Applying) -> None:
    applying.stage.queues.restart(applying.stage.queues.by_name["q"], 60, lambda error: None)
    applying.apply(Q + "concurrency = 2\n")
    assert "is being restarted or changed by another request; try again" in applying.results[0]["failed"][0]["message"]


def test_one_apply_at_a_time(applying: Applying) -> None:
    applying.apply(Q + "priority = 3\n")
    with pytest.raises(ForqError, match="another request is applying the config file"):
        applying.apply(Q + "priority = 4\n")
    applying.stage.answer({})
    applying.apply(Q + "priority = 4\n")
    applying.stage.answer({})
    assert len(applying.results) == 2
    applying.supervisor.stopping = True
    with pytest.raises(ForqError, match="this supervisor is stopping"):
        applying.apply(Q)


def test_an_internal_error_does_not_lock_out_later_requests(
    applying: Applying, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(applying.supervisor, "use_config", lambda config: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            applying.apply(Q + "priority = 3\n")
    applying.apply(Q + "priority = 3\n")
    assert [verb for verb, _, _ in applying.stage.clerk.requests] == ["set"]


def test_a_removed_queue_stops_and_its_name_is_free(applying: Applying) -> None:
    applying.apply("")
    assert all(child.stopping for child in applying.stage.children)
    assert applying.results == []
    applying.stage.kill_all()
    assert [change["effect"] for change in applying.results[0]["applied"]] == ["unserved"]
    # Redis is not asked for anything: the jobs stay.
    assert applying.stage.clerk.requests == []
    assert not applying.stage.queues.is_declared("q")
    assert applying.left() == []


def test_another_plan_is_refused(applying: Applying) -> None:
    applying.write(Q + "priority = 3\n")
    plan = applying.changes.plan(None)
    applying.changes.check_hash(applying.changes.plan(None), plan.hash)
    applying.write(Q + "priority = 4\n")
    with pytest.raises(PlanChanged, match="has changed since the changes were shown"):
        applying.changes.check_hash(applying.changes.plan(None), plan.hash)
