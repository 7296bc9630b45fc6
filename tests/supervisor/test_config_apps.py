"""Apps in the config file and on the command line, and the check of the definitions that an app reports."""

import json
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forq.app_spec import AppSpec, Definitions, QueueOverride, check_definitions
from forq.errors import ConfigError, ForqError
from forq.supervisor.census import CENSUS_SECONDS
from forq.supervisor.config import Config, load
from forq.supervisor.supervisor import Supervisor

SPEC = AppSpec(None, "shop:app", ("/srv",))
DEFINITIONS: dict[str, Any] = {
    "format": 1,
    "app": "shop",
    "tasks": {"send": {"queue": "mails", "options": {"timeout": "30s", "backoff": ["1s"]}}},
    "queues": {"mails": {"concurrency": 8, "rate": "100/1m", "fail_handler": "shop:notify"}, "feeds": {}},
    "schedules": {"feeds": {"refresh": {"every": "5m", "type": "refresh", "data": {}}}},
    "hooks": {"lifespan": 1, "around": 2},
}

Load = Callable[..., Config]


@pytest.fixture
def load_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, **flags: object) -> Config:
        (tmp_path / "forq.toml").write_text(text)
        return load({"config": tmp_path / "forq.toml", "state_dir": "/srv/state", **flags}, {})

    return load_text


def check(given: object, *, spec: AppSpec = SPEC, hash: object = "abc", **overrides: QueueOverride) -> Definitions:
    def drive() -> Generator[None, None, None]:
        found.append((yield from check_definitions(spec, given, hash, overrides)))

    found: list[Definitions] = []
    for _ in drive():
        pass
    return found[0]


def test_apps_of_the_file_and_of_the_command_line(load_text: Load, tmp_path: Path) -> None:
    text = '[apps.shop]\napp = "shop.tasks"\npath = ["src", "/srv"]\n[apps.shop.tasks.send]\nbackoff = [1, "5m"]\n'
    shop, other = load_text(text, apps=["other:app", "shop.tasks:app"]).apps
    assert (shop.name, shop.app, shop.path) == ("shop", "shop.tasks:app", (str(tmp_path / "src"), "/srv"))
    assert shop.task_options == {"send": {"backoff": [1, "5m"]}}
    assert (other.name, other.app, other.path) == (None, "other:app", (str(tmp_path),))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("apps = 1", r"forq.toml: apps = 1 is not allowed: use tables \[apps.NAME\]"),
        ("[apps]\nshop = 1", r"\[apps.shop\]: 1 is not allowed: use a table"),
        ("[apps.shop]", r'\[apps.shop\]: app is required: app = "package.module:app"'),
        ('[apps.shop]\napp = "a b"', r"\[apps.shop\]: app = 'a b' is not allowed"),
        ('[apps.shop]\napp = "m"\npaht = "x"', r"\[apps.shop\]: there is no setting 'paht'; did you mean path\?"),
        ('[apps.shop]\napp = "m"\npath = 1', r"\[apps.shop\]: path = 1 is not allowed: a directory"),
        ('[apps."a b"]\napp = "m"', r"queue name 'a b' is not allowed"),
        ('[apps.a]\napp = "m"\n[apps.b]\napp = "m:app"', r"\[apps.b\]: app = 'm:app' is also the app of .*\[apps.a\]"),
        ('[apps.a]\napp = "m"\ntasks = 1', r"\[apps.a\]: tasks = 1 is not allowed"),
        ('[apps.a]\napp = "m"\n[apps.a.tasks.t]\ntimout = 1', r"\[apps.a.tasks.t\]: .* did you mean timeout\?"),
        ('[apps.a]\napp = "m"\n[apps.a.tasks.t]\ntimeout = "x"', r"\[apps.a.tasks.t\]: timeout = 'x' is not allowed"),
        ('[apps.a]\napp = "m"\n[queues.q]\npath = "x"', r"\[queues.q\]: path is not allowed without a handler"),
        (
            '[apps.a]\napp = "m"\n[queues.q]\nsizee = 1',
            r"\[queues.q\]: there is no option 'sizee'; did you mean size\?",
        ),
        ('[apps.a]\napp = "m"\n[queues.q]\napp = 1', r"\[queues.q\]: app = 1 is not allowed"),
        ('[apps.a]\napp = "m"\n[queues.q]\nhandler = "x"\napp = "b"', r"no table \[apps.NAME\] has this name \(a\)"),
        ('[queues.q]\nhandler = "x"\napp = "b"', r"no table \[apps.NAME\] has this name \(none\)"),
        ("[queues.q]\nsize = 1", r"a queue of mode work needs handler"),
        ('[apps.a]\napp = "m"\n[queues.q]\nmode = "external"\napp = "a"', "a queue of mode external runs no code"),
    ],
)
def test_mistakes_are_one_sentence_with_their_place(load_text: Load, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_text(text)


def test_a_table_without_a_handler_is_for_a_queue_of_an_app(load_text: Load) -> None:
    config = load_text(
        '[apps.a]\napp = "m"\n[queues.q]\nsize = 2\nfail_handler = "m:f"\n[queues.q.schedules.k]\nevery = 5'
    )
    assert config.queues == ()
    override = config.overrides["q"]
    assert (override.options, override.fail_handler, override.app) == ({"size": 2}, "m:f", None)
    assert config.schedules["q"]["k"] == {"every": 5}


def test_a_plain_handler_gets_the_app_and_its_path(load_text: Load, tmp_path: Path) -> None:
    [queue] = load_text('[apps.a]\napp = "m"\npath = "."\n[queues.q]\nhandler = "x"\npath = "lib"\napp = "a"').queues
    assert (queue.handler, queue.app, queue.definitions_hash) == ("x", "m:app", None)
    assert queue.path == (str(tmp_path / "lib"), str(tmp_path))


def test_valid_definitions() -> None:
    found = check(DEFINITIONS)
    mails, feeds = found.queues
    assert (found.name, mails.options) == ("shop", {"concurrency": 8, "rate": "100/1m"})
    assert (mails.handler, mails.app, mails.path, mails.fail_handler) == (
        "shop:app",
        "shop:app",
        ("/srv",),
        "shop:notify",
    )
    assert (feeds.options, feeds.definitions_hash) == ({}, "abc")
    assert found.schedules["feeds"]["refresh"]["every"] == "5m"
    assert found.tasks_overriding("mails", "timeout") == found.tasks_overriding("mails", "min_backoff") == ["send"]
    assert found.tasks_overriding("mails", "size") == found.tasks_overriding("feeds", "timeout") == []


def test_options_of_the_config_file_are_stronger() -> None:
    mails = check(DEFINITIONS, mails=QueueOverride({"concurrency": 1, "size": 2}, None, "shop", "here")).queues[0]
    assert mails.options == {"concurrency": 1, "rate": "100/1m", "size": 2}
    assert mails.fail_handler == "shop:notify"
    with pytest.raises(ConfigError, match="here: app = 'other', but the queue belongs to app 'shop'"):
        check(DEFINITIONS, mails=QueueOverride({}, None, "other", "here"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"more": 1}, "its definitions have an unknown key 'more'"),
        ({"format": 2}, "format 2 of its definitions is unknown: 1"),
        ({"app": "a b"}, "queue name 'a b' is not allowed"),
        ({"app": None}, "queue name None is not allowed"),
        ({"tasks": []}, r"tasks = \[\] is not allowed: it must be a JSON object"),
        ({"tasks": {"t": 1}}, "task 't' = 1 is not allowed"),
        ({"tasks": {"t": {"queue": "q", "options": 1}}}, "options of task 't' = 1 is not allowed"),
        ({"tasks": {"t": {"queue": 1, "options": {}}}}, "task 't': queue name 1 is not allowed"),
        ({"queues": None}, "queues = None is not allowed"),
        ({"queues": {"q": 1}}, "queue 'q': options = 1 is not allowed"),
        ({"queues": {"a b": {}}}, "queue name 'a b' is not allowed"),
        ({"queues": {"q": {"sizee": 1}}}, r"queue 'q': there is no option 'sizee'; did you mean size\?"),
        ({"queues": {"q": {"size": "x"}}}, "queue 'q': size = 'x' is not allowed"),
        ({"queues": {"q": {"mode": "external"}}}, "queue 'q': mode is not an option of app.queue"),
        ({"queues": {"q": {"handler": "os:abort"}}}, "queue 'q': handler is not an option of app.queue"),
        ({"queues": {str(n): {} for n in range(1001)}}, "it defines 1001 queues, but at most 1000 are allowed"),
        ({"schedules": 1}, "schedules = 1 is not allowed"),
        ({"schedules": {"other": {}}}, "schedules for 'other', which is not one of its queues"),
        ({"schedules": {"feeds": 1}}, "schedules.feeds = 1 is not allowed"),
        ({"schedules": {"feeds": {"k": 1}}}, "queue 'feeds': schedules = .* is not allowed"),
        ({"schedules": {"feeds": {"k": {}}}}, "queue 'feeds': schedule 'k': a schedule needs either every or cron"),
    ],
)
def test_wrong_definitions_are_one_sentence_with_the_app(change: dict[str, Any], reason: str) -> None:
    given = json.loads(json.dumps(DEFINITIONS | change))
    with pytest.raises(ForqError, match=f"^app 'shop:app': .*{reason}"):
        check(given)


@pytest.mark.parametrize("hash", [None, "", 1, "x" * 200])
def test_a_wrong_hash_is_refused(hash: object) -> None:
    with pytest.raises(ForqError, match="the hash of its definitions is invalid"):
        check(DEFINITIONS, hash=hash)


def test_the_table_of_an_app_must_have_its_name() -> None:
    spec = AppSpec("store", "shop:app", (), {}, "forq.toml: [apps.store]")
    with pytest.raises(ConfigError, match=r"\[apps.store\]: shop:app is an app of the name 'shop': rename this table"):
        check(DEFINITIONS, spec=spec)


def test_options_of_an_unknown_task_are_refused() -> None:
    spec = AppSpec("shop", "shop:app", (), {"sned": {"timeout": 1}}, "forq.toml: [apps.shop]")
    with pytest.raises(ConfigError, match=r"\[apps.shop.tasks.sned\]: the app has no task 'sned'; did you mean send\?"):
        check(DEFINITIONS, spec=spec)


@pytest.mark.parametrize(("seconds", "ready"), [(CENSUS_SECONDS - 1, False), (CENSUS_SECONDS, True)])
def test_readiness_waits_for_apps_until_their_time_limit(seconds: float, ready: bool) -> None:
    supervisor = SimpleNamespace(
        loop=SimpleNamespace(now=lambda: 1000.0 + seconds), started=1000.0, apps=SimpleNamespace(settled=False)
    )
    assert Supervisor.ready.fget(supervisor) is ready  # type: ignore[attr-defined]
