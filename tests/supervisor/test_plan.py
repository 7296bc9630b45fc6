"""The plan of `forqctl apply`: from the served state and a config file to changes and steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forq.app_spec import AppSpec, Definitions, configured
from forq.queue_spec import QueueSpec
from forq.supervisor.config import Config, load
from forq.supervisor.plan import AppState, Plan, Served, make_plan

Load = Callable[[str], Config]
Q = '[queues.q]\nhandler = "m:f"\n'


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    def load_text(text: str) -> Config:
        (tmp_path / "forq.toml").write_text(text)
        return load({"config": tmp_path / "forq.toml", "state_dir": "/srv/state", "socket": "/srv/socket"}, {})

    return load_text


def serving(config: Config, **changes: Any) -> Served:
    """The state right after a start with these settings."""
    return Served(config, {**{spec.name: spec for spec in config.queues}, **changes.pop("queues", {})}, **changes)


def shown(plan: Plan) -> list[tuple[object, ...]]:
    return [(c.kind, c.name, c.key, c.old, c.new, c.effect) for c in plan.changes]


def steps(plan: Plan) -> dict[str, str]:
    return {step.name: step.action for step in plan.queue_steps}


def planned(load_text: Load, before: str, after: str) -> Plan:
    served, new = load_text(before), load_text(after)
    return make_plan(serving(served), new, served)


def test_the_file_of_the_start_needs_no_change(load_text: Load) -> None:
    text = Q + 'timeout = "5s"\n[queues.q.schedules.k]\nevery = "1h"\n[queues.r]\nmode = "external"\n'
    plan = planned(load_text, text, text)
    assert (plan.changes, plan.queue_steps, plan.settings, plan.warnings) == ((), (), (), ())


@pytest.mark.parametrize(
    ("before", "after", "change", "action"),
    [
        ('timeout = "5s"', 'timeout = "1m"', ("timeout", "5s", "1m", "live"), "set"),
        ('timeout = "5s"', "", ("timeout", "5s", "1m", "live"), "set"),
        ("", 'stop_grace = "1m"', ("stop_grace", "10s", "1m", "live"), "set"),
        ("", 'max_data = "2mb"', ("max_data", "1mb", "2mb", "live"), "set"),
        ("", "journal = false", ("journal", "true", "false", "live"), "set"),
        ("", 'rate = "5/1s"', ("rate", "off", "5/1s", "live"), "set"),
        ("", "concurrency = 3", ("concurrency", "1", "3", "new_processes"), "replace"),
        ("", 'max_age = "1h"', ("max_age", "0s", "1h", "new_processes"), "replace"),
        ("", 'path = ["/a", "/b"]', ("path", None, "/a, /b", "new_processes"), "replace"),
        ('fail_handler = "m:g"', "", ("fail_handler", "m:g", None, "new_processes"), "replace"),
        ("", 'handlers.a = "m:a"', ("handlers", None, '{"a": "m:a"}', "new_processes"), "replace"),
    ],
)
def test_a_changed_part_of_a_queue(
    load_text: Load, before: str, after: str, change: tuple[str, ...], action: str
) -> None:
    plan = planned(load_text, Q + before, Q + after)
    assert shown(plan) == [("queue", "q", *change)]
    assert steps(plan) == {"q": action}


def test_an_option_that_is_set_to_its_default_is_no_change(load_text: Load) -> None:
    assert planned(load_text, Q, Q + 'timeout = "60s"\nconcurrency = 1\n').changes == ()


def test_live_and_process_options_together_are_one_step(load_text: Load) -> None:
    plan = planned(load_text, Q, Q + "concurrency = 2\nmax_retries = 1\n")
    assert [change.effect for change in plan.changes] == ["new_processes", "live"]
    assert steps(plan) == {"q": "replace"}


def test_queues_that_are_added_and_removed(load_text: Load) -> None:
    plan = planned(load_text, Q, '[queues.r]\nhandler = "m:g"\n[queues.r.schedules.k]\nevery = "5m"\n')
    assert shown(plan) == [
        ("queue", "q", None, "m:f", None, "unserved"),
        ("queue", "r", None, None, "m:g", "created"),
        ("schedule", "r", "k", None, "every 5m", "created"),
    ]
    assert plan.changes[0].note == "its jobs stay in Redis; forqctl delete q deletes the queue"
    assert steps(plan) == {"r": "create", "q": "stop"}


def test_schedules(load_text: Load) -> None:
    before = Q + '[queues.q.schedules]\na.every = "1h"\nb.every = "1h"\nc.cron = "1 2 * * *"\nd = {every = "1h"}\n'
    after = Q + (
        '[queues.q.schedules]\na.every = "60m"\nb = {every = "1h", data = {n = 1}, priority = 2}\n'
        'c = {cron = "1 2 * * *", zone = "Europe/Berlin"}\ne.cron = "5 4 * * *"\n'
    )
    plan = planned(load_text, before, after)
    assert shown(plan) == [
        ("schedule", "q", "b", "data = None, priority = 5", 'data = {"n": 1}, priority = 2', "live"),
        ("schedule", "q", "c", "1 2 * * *", "1 2 * * * (Europe/Berlin)", "live"),
        ("schedule", "q", "d", "every 1h", None, "live"),
        ("schedule", "q", "e", None, "5 4 * * *", "live"),
    ]
    [step] = plan.queue_steps
    assert (step.action, step.schedules, step.options) == ("set", True, {})


def test_options_of_forqctl_set_go_back(load_text: Load) -> None:
    config = load_text(Q + "max_retries = 4\n")
    live = replace(config.queues[0], options={"max_retries": 9, "priority": 1})
    plan = make_plan(serving(config, queues={"q": live}), config, config)
    assert shown(plan) == [
        ("queue", "q", "max_retries", "9", "4", "live"),
        ("queue", "q", "priority", "1", "0", "live"),
    ]
    assert {change.note for change in plan.changes} == {"was changed with forqctl set"}
    assert plan.queue_steps[0].options == {"max_retries": 4, "priority": 0}


def test_queues_of_the_state_directory_stay(load_text: Load) -> None:
    config = load_text(Q)
    own = QueueSpec("own", "work", "m:f", {}, (), {})
    assert make_plan(serving(config, queues={"own": own}), config, config).changes == ()


def test_a_queue_that_the_file_no_longer_has_is_the_one_of_the_state_directory(load_text: Load) -> None:
    config, new = load_text(Q), load_text("")
    saved = QueueSpec("q", "work", "m:f", {}, (), {"priority": 3})
    plan = make_plan(serving(config, saved={"q": saved}), new, config)
    assert [(change.key, change.new) for change in plan.changes] == [(None, None), ("priority", "3")]
    assert steps(plan) == {"q": "set"}


def test_a_queue_that_was_deleted_is_created_again_or_forgotten(load_text: Load) -> None:
    config = load_text(Q)
    plan = make_plan(Served(config, {}), config, config)
    assert steps(plan) == {"q": "create"}
    plan = make_plan(Served(config, {}), load_text(""), config)
    assert (steps(plan), plan.changes[0].note) == ({"q": "stop"}, "it was not served")


def test_the_mode_and_fixed_options_are_refused(load_text: Load) -> None:
    plan = planned(load_text, '[queues.q]\nmode = "external"\n', Q)
    assert {change.effect for change in plan.changes} == {"refused"}
    assert "exists with mode 'external'; a queue's mode never changes" in str(plan.queue_steps[0].error)
    release = '[queues.q]\nmode = "on_request"\n'
    plan = planned(load_text, release, release + 'lease = "20s"\nmax_items = 5\n')
    assert {change.effect for change in plan.changes} == {"refused"}
    assert "lease of queue 'q' cannot be changed: it is fixed" in str(plan.queue_steps[0].error)


def test_queues_of_shared_modes(load_text: Load) -> None:
    config, new = load_text(""), load_text('[queues.q]\nmode = "external"\nlease = "20s"\n')
    found = QueueSpec("q", "external", None, {}, (), {})
    plan = make_plan(serving(config, queues={"q": found}, found=frozenset({"q"})), new, config)
    assert steps(plan) == {"q": "adopt"}
    assert plan.changes[0].note == "was created by another supervisor; now the file defines it"
    plan = make_plan(serving(new), config, new)
    assert steps(plan) == {"q": "release"}
    assert "still served" in str(plan.changes[0].note)


def test_a_size_above_the_running_capacity_is_refused(load_text: Load) -> None:
    plan = planned(load_text, "capacity = 10\n" + Q + "size = 5", "capacity = 50\n" + Q + "size = 20")
    assert "size = 20 is not allowed: capacity is 10 units" in str(plan.queue_steps[0].error)
    assert [(change.name, change.old, change.new) for change in plan.settings] == [("capacity", "10", "50")]


def test_settings_of_the_service_need_a_restart_and_stay(load_text: Load) -> None:
    before = 'heartbeat = "2s"\nredis = "redis://u:secret@h:1"\nlog_redact = ["a", "b"]\n'
    after = 'heartbeat = "3s"\nredis = "redis://u:other@h:2"\n[metrics]\n[[bridge]]\nlisten = "b.sock"\n'
    plan = planned(load_text, before, after)
    assert {(change.name, change.old, change.new) for change in plan.settings} >= {
        ("heartbeat", "2s", "3s"),
        ("log_redact", "a, b", ""),
        ("[metrics]", None, "listen = 127.0.0.1:9464, health = 60.0"),
    }
    assert "secret" not in str([change.describe() for change in plan.settings])
    assert {change.effect for change in plan.settings} == {"restart"}
    assert [change.name for change in plan.settings][-1] == "[[bridge]]"
    assert plan.changes == ()
    assert (plan.config.heartbeat_seconds, plan.config.metrics) == (2.0, None)


def test_the_hash_changes_with_the_file_and_with_the_state(load_text: Load) -> None:
    config, new, other = load_text(Q), load_text(Q + "priority = 1\n"), load_text(Q + "priority = 2\n")
    plan = make_plan(serving(config), new, config)
    assert plan.hash == make_plan(serving(config), load_text("# a comment\n" + Q + "priority = 1\n"), config).hash
    assert plan.hash != make_plan(serving(config), other, config).hash
    live = replace(config.queues[0], options={"priority": 5})
    assert plan.hash != make_plan(serving(config, queues={"q": live}), new, config).hash


def test_another_file_than_that_of_the_start_is_a_warning(load_text: Load, tmp_path: Path) -> None:
    config = load_text(Q)
    plan = make_plan(serving(config), replace(config, file=Path("/other.toml")), config)
    assert plan.warnings == (f"a restart of the supervisor reads {config.file}, not /other.toml",)
    assert plan.config.file == Path("/other.toml")


def test_more_workers_than_the_capacity_allows_are_a_warning(load_text: Load) -> None:
    plan = planned(load_text, "capacity = 20\n" + Q, "capacity = 20\n" + Q + "concurrency = 5\n")
    assert "queue q: concurrency = 5 with size = 10 needs 50 units, but capacity is 20" in plan.warnings[0]


SHOP = '[apps.shop]\napp = "shop"\npath = ["/srv"]\n'


def code_of_shop() -> Definitions:
    def queue(name: str, **options: int) -> QueueSpec:
        return QueueSpec(name, "work", "shop:app", {}, ("/srv",), options, app="shop:app", definitions_hash="h")

    own = {"mails": {"send": frozenset({"timeout"})}, "bills": {"bill": frozenset[str]()}}
    return Definitions("shop", (queue("mails", max_retries=4), queue("bills")), {}, own)


def served_shop(config: Config) -> Served:
    definitions = configured(code_of_shop(), config.apps[0], config.overrides)
    queues = {spec.name: spec for spec in definitions.queues}
    return serving(config, queues=queues, apps=(AppState(config.apps[0], definitions, queues),))


def planned_shop(load_text: Load, before: str, after: str) -> Plan:
    config = load_text(before)
    return make_plan(served_shop(config), load_text(after), config)


def test_an_unchanged_app_needs_no_change(load_text: Load) -> None:
    text = SHOP + "[apps.shop.tasks.send]\nmax_retries = 1\n[queues.mails]\nconcurrency = 2\n"
    plan = planned_shop(load_text, text, text)
    assert (plan.changes, plan.queue_steps) == ((), ())
    assert [step.reads for step in plan.app_steps] == [False]


def test_overrides_of_an_app_are_compared_with_the_options_of_its_code(load_text: Load) -> None:
    override = "[queues.mails]\nmax_retries = 9\nconcurrency = 2\n"
    assert shown(planned_shop(load_text, SHOP, SHOP + override)) == [
        ("queue", "mails", "concurrency", "1", "2", "new_processes"),
        ("queue", "mails", "max_retries", "4", "9", "live"),
    ]
    plan = planned_shop(load_text, SHOP + override, SHOP)
    assert [(change.key, change.new) for change in plan.changes] == [("concurrency", "1"), ("max_retries", "4")]
    assert steps(plan) == {"mails": "replace"}


def test_options_of_a_task_need_new_processes_only_in_its_queue(load_text: Load) -> None:
    plan = planned_shop(load_text, SHOP, SHOP + '[apps.shop.tasks.send]\ntimeout = "5s"\n')
    assert shown(plan) == [("task", "shop", "send", None, '{"timeout": "5s"}', "new_processes")]
    # Later processes of the other queue get them, too.
    assert steps(plan) == {"mails": "replace", "bills": "set"}
    assert plan.queue_steps[1].options == {}


def test_an_unknown_task_is_refused_and_nothing_else_changes_in_the_app(load_text: Load) -> None:
    text = SHOP + "[apps.shop.tasks.sned]\nmax_retries = 1\n[queues.mails]\nmax_retries = 9\n"
    plan = planned_shop(load_text, SHOP, text)
    assert [(change.kind, change.effect) for change in plan.changes] == [("app", "refused")]
    assert "the app has no task 'sned'; did you mean send?" in str(plan.app_steps[0].error)
    assert plan.queue_steps == ()


def test_apps_that_are_added_removed_and_moved(load_text: Load) -> None:
    plan = planned_shop(load_text, SHOP, '[apps.other]\napp = "other"\n' + Q.replace(".q]", ".bills]"))
    assert shown(plan)[:2] == [
        ("app", "other", None, None, "other:app", "read"),
        ("app", "shop", None, "shop:app", None, "unserved"),
    ]
    # The file defines `bills` now; `mails` is no longer served.
    assert steps(plan) == {"bills": "replace"}
    assert ("queue", "mails", None, "app shop", None, "unserved") in shown(plan)
    assert [step.reads for step in plan.app_steps] == [False, True]
    plan = planned_shop(load_text, SHOP, SHOP.replace("/srv", "/opt"))
    assert shown(plan) == [("app", "shop", "path", "/srv", "/opt", "read")]
    assert (plan.queue_steps, plan.app_steps[0].reads) == ((), True)


def test_a_queue_of_an_app_cannot_have_a_handler_in_the_file(load_text: Load) -> None:
    plan = planned_shop(load_text, SHOP, SHOP + Q.replace(".q]", ".mails]"))
    assert "queue 'mails' is a queue of app 'shop', too: remove the handler from [queues.mails]" in str(
        plan.queue_steps[0].error
    )


def test_an_override_without_a_queue_is_a_warning(load_text: Load) -> None:
    plan = planned_shop(load_text, SHOP, SHOP + "[queues.mials]\nmax_retries = 9\n")
    assert "[queues.mials] has no handler, and no app has a queue of this name" in plan.warnings[0]


def test_an_app_of_the_command_line_that_gets_a_table_is_the_same_app(load_text: Load) -> None:
    config, new = load_text(""), load_text(SHOP + "[apps.shop.tasks.send]\nmax_retries = 1\n")
    flag = AppSpec(None, "shop:app", ("/srv",))
    definitions = configured(code_of_shop(), flag, {})
    queues = {spec.name: spec for spec in definitions.queues}
    served = serving(replace(config, apps=(flag,)), queues=queues, apps=(AppState(flag, definitions, queues),))
    plan = make_plan(served, new, config)
    assert [(change.kind, change.effect) for change in plan.changes] == [("task", "new_processes")]


def test_an_app_that_could_not_be_read_is_read_again_if_its_table_changes(load_text: Load) -> None:
    config = load_text(SHOP)
    served = serving(config, apps=(AppState(config.apps[0], None),))
    assert make_plan(served, config, config).app_steps == ()
    for text in (SHOP.replace("/srv", "/opt"), SHOP + "[apps.shop.tasks.send]\nmax_retries = 1\n"):
        plan = make_plan(served, load_text(text), config)
        assert [step.reads for step in plan.app_steps] == [True]
        assert [change.effect for change in plan.changes] == ["read"]
