"""Options of tasks, queues and schedules in code, and the definitions of an app."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import forq
from forq.app.declarations import QueueOptions, ScheduleOptions
from forq.app.definitions import definitions_hash
from forq.errors import ConfigError, InvalidOption, InvalidTask
from forq.job import Job
from forq.job_options import AttemptOptions
from forq.queue_spec import QueueSpec
from forq.schedules import read_schedules
from forq.settings import SCHEDULE, WORK, defaults

HERE = r"tests/app/test_definitions\.py, line \d+"


@dataclass
class Receipt:
    number: int


def send(to: str, subject: str = "hi") -> Receipt:
    return Receipt(len(to + subject))


async def refresh() -> None: ...


def bare(*numbers, **names): ...  # type: ignore[no-untyped-def]


def notify(data: Any, job: Job) -> None: ...


async def notify_async(data: Any, job: Job, more: int = 0) -> None: ...


def takes_one(data: Any) -> None: ...


def yields(data: Any, job: Job) -> Any:
    yield


def broken(order: object) -> None: ...


@functools.wraps(notify)
def wrapper(data: Any, job: Job) -> None: ...


@pytest.fixture
def app() -> forq.App:
    return forq.App("shop")


def test_options_of_a_task_are_checked_and_kept(app: forq.App) -> None:
    decorate = app.task(queue="mails", timeout="30s", max_retries=5, backoff=[1, "5s"], keep_done=timedelta(minutes=1))
    task = decorate(send)
    assert task.options == AttemptOptions(
        timeout_ms=30_000, max_retries=5, backoff_ms=(1000, 5000), keep_done_ms=60_000
    )
    assert task.queue == "mails"


@pytest.mark.parametrize(
    ("function", "given", "keep_done_ms"),
    [
        (send, {}, 3_600_000),
        (send, {"keep_done": 0}, 0),
        (send, {"keep_done": "5m"}, 300_000),
        (refresh, {}, None),
        (bare, {}, None),
        (bare, {"keep_done": "5m"}, 300_000),
    ],
)
def test_results_are_kept_for_an_hour_if_the_task_declares_one(
    app: forq.App, function: Callable[..., Any], given: Any, keep_done_ms: int | None
) -> None:
    assert app.task(**given)(function).options.keep_done_ms == keep_done_ms


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"timeot": 5}, r"@app\.task has no option 'timeot'; did you mean timeout\?"),
        ({"timeout": "soon"}, "timeout = 'soon' is not allowed: a duration from"),
        ({"max_retries": -1}, "max_retries = -1 is not allowed: a whole number from 0"),
        ({"backoff": []}, r"backoff = \[\] is not allowed"),
        ({"queue": "no queue"}, "queue name 'no queue' is not allowed"),
        ({"queue": ""}, "queue name '' is not allowed"),
        ({"dead_on": ["x"]}, r"dead_on = \['x'\] is not allowed: a tuple of exceptions"),
        ({"dead_on": (ValueError, 5)}, "dead_on = .* is not allowed: a tuple of exceptions"),
        ({"aliases": "old"}, "aliases = 'old' is not allowed: a list of names"),
        ({"aliases": 5}, "aliases = 5 is not allowed: a list of names"),
        ({"aliases": ["a b"]}, "job type 'a b' is not allowed: 1 to 200"),
        (
            {"every": "5m"},
            r"a schedule cannot call it without to; .* app\.schedule\(KEY, send\.prepare\(…\), every='5m'",
        ),
    ],
)
def test_wrong_options_of_a_task_are_named_with_their_place(app: forq.App, options: Any, error: str) -> None:
    with pytest.raises(InvalidTask, match=rf"^task send \({HERE}\): {error}"):
        app.task(**options)(send)
    assert app.tasks == {}
    assert app.definitions()["schedules"] == {}


@pytest.mark.parametrize("name", ["", 5, "a b"])
def test_wrong_names_of_tasks_are_refused(app: forq.App, name: Any) -> None:
    with pytest.raises(InvalidTask, match=rf"^task {name} \({HERE}\): job type {name!r} is not allowed: 1 to 200"):
        app.task(name=name)(send)


def test_none_and_a_single_exception_are_allowed(app: forq.App) -> None:
    task = app.task(name=None, queue=None, dead_on=KeyError)(send)  # type: ignore[call-overload]
    assert (task.name, task.queue, task.dead_on) == ("send", "shop", (KeyError,))


@pytest.mark.parametrize("length", [200, 201])
def test_names_have_up_to_200_characters(app: forq.App, length: int) -> None:
    if length == 200:
        assert app.task(name="n" * length)(send).prepare("a").job.body.startswith(b'[null,"nnn')
        return
    with pytest.raises(InvalidTask, match="is not allowed: 1 to 200 of"):
        app.task(name="n" * length)(send)


def test_the_definitions_of_an_app(app: forq.App) -> None:
    task = app.task(queue="mails", aliases=["old"], timeout="30s", max_retries=5)(send)
    app.task(queue="feeds", every=300)(refresh)
    app.task(bare)
    app.queue("mails", concurrency=8, rate="100/m", on_dead=notify, keep_done=timedelta(hours=2), max_data="1024kb")
    app.queue("spare", on_dead=notify_async)
    app.schedule("nightly", task.using(priority=0).prepare("a@b.c"), cron="30  2 * * *", zone="Europe/Berlin", jitter=2)

    @app.around
    def hook(job: Job) -> Any:
        yield

    definitions = app.definitions()
    places = [each.pop("place") for each in definitions["tasks"].values()]  # type: ignore[misc]
    assert [place.partition(",")[0] for place in places] == ["tests/app/test_definitions.py"] * 3
    assert definitions == {
        "format": 1,
        "app": "shop",
        "tasks": {
            "bare": {
                "queue": "shop",
                "aliases": [],
                "async": False,
                "signature": "(*numbers, **names)",
                "options": {},
            },
            "refresh": {
                "queue": "feeds",
                "aliases": [],
                "async": True,
                "signature": "() -> None",
                "options": {},
            },
            "send": {
                "queue": "mails",
                "aliases": ["old"],
                "async": False,
                "signature": "(to: str, subject: str = 'hi') -> Receipt",
                "options": {"timeout": "30s", "max_retries": 5, "keep_done": "1h"},
            },
        },
        "queues": {
            "feeds": {},
            "mails": {
                "concurrency": 8,
                "rate": "100/1m",
                "keep_done": "2h",
                "max_data": "1mb",
                "fail_handler": f"{__name__}:notify",
            },
            "shop": {},
            "spare": {"fail_handler": f"{__name__}:notify_async"},
        },
        "schedules": {
            "feeds": {"refresh": {"every": "5m", "data": {}, "type": "refresh"}},
            "mails": {
                "nightly": {
                    "cron": "30 2 * * *",
                    "zone": "Europe/Berlin",
                    "data": {"to": "a@b.c"},
                    "priority": 0,
                    "type": "send",
                    "jitter": "2s",
                }
            },
        },
        "hooks": {"around": 1, "lifespan": 0},
    }
    assert json.loads(json.dumps(definitions)) == definitions


def test_queues_and_schedules_are_tables_of_the_config_file(app: forq.App) -> None:
    app.task(every="5m")(refresh)
    app.queue("shop", on_dead=notify, max_memory=100_000_001, stop_grace=0.25, journal=False)
    definitions = app.definitions()
    spec = QueueSpec.from_mapping("shop", {"handler": "shop.tasks:app", **definitions["queues"]["shop"]}, "test")
    assert spec.fail_handler == f"{__name__}:notify"
    assert spec.options == {"max_memory": 100_000_001, "stop_grace": 0.25, "journal": False}
    assert read_schedules(definitions["schedules"]["shop"], "test") == definitions["schedules"]["shop"]


def test_every_option_of_a_queue_is_typed() -> None:
    assert QueueOptions.__annotations__.keys() == {"on_dead", *defaults(WORK)}
    assert ScheduleOptions.__annotations__.keys() == SCHEDULE.keys() - {"data", "priority", "type"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"concurency": 8}, "there is no option 'concurency'; did you mean concurrency"),
        ({"on_ded": notify}, "there is no option 'on_ded'; did you mean on_dead"),
        ({"concurrency": 0}, "concurrency = 0 is not allowed: a whole number from 1 to 256"),
        ({"release_interval": 1}, "release_interval is an option of mode auto_release, not of mode work"),
        ({"handler": "x:y"}, r"handler is not an option of app\.queue: the app is the handler"),
        ({"fail_handler": "x:y"}, r"fail_handler is not an option of app\.queue: use on_dead=function"),
        ({"on_dead": "x:y"}, r"on_dead = 'x:y' is not allowed: a function def notify\(data, job\) of a module"),
        ({"on_dead": lambda data, job: None}, "on_dead = <function <lambda>.* is not allowed: a function"),
        ({"on_dead": takes_one}, r"on_dead = takes_one cannot be called with \(data, job\): too many"),
        ({"on_dead": yields}, "on_dead = yields is a generator"),
    ],
)
def test_wrong_options_of_a_queue_are_named_with_their_place(app: forq.App, options: Any, error: str) -> None:
    with pytest.raises(InvalidOption, match=rf"^app 'shop', queue 'mails' \({HERE}\): {error}"):
        app.queue("mails", **options)
    app.queue("mails")


def test_a_task_cannot_be_a_fail_handler(app: forq.App) -> None:
    task = app.task(send)
    with pytest.raises(InvalidOption, match=r"a task gets its own arguments.*it may call send\.enqueue"):
        app.queue("mails", on_dead=task)  # type: ignore[arg-type]


def test_a_fail_handler_must_be_importable_by_its_name(app: forq.App) -> None:
    app.queue("mails", on_dead=wrapper)
    with pytest.raises(InvalidOption, match=r"notify of module .* is not this function, so a worker cannot import it"):
        app.definitions()


def test_a_queue_is_declared_once(app: forq.App) -> None:
    app.queue("mails", concurrency=2)
    with pytest.raises(InvalidOption, match=rf"declares queue 'mails' twice: {HERE} and {HERE}; give all options in"):
        app.queue("mails", concurrency=2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "a schedule needs either every or cron"),
        ({"every": 1, "cron": "* * * * *"}, "a schedule needs either every or cron"),
        ({"every": 1, "zone": "UTC"}, "zone needs cron"),
        ({"cron": "* * *"}, r"cron '\* \* \*' is not allowed: 5 fields"),
        ({"cron": "* * * * *", "zone": "Mars"}, "zone 'Mars' is not allowed"),
        ({"evry": 1}, "a schedule has no option 'evry'; did you mean every"),
        ({"every": 0.01}, "every 0.01 is not allowed: 100 ms to"),
    ],
)
def test_wrong_schedules_are_named_with_their_place(app: forq.App, options: Any, error: str) -> None:
    task = app.task(send)
    with pytest.raises(InvalidTask, match=rf"^app 'shop', schedule 'nightly' \({HERE}\): {error}"):
        app.schedule("nightly", task.prepare("a"), **options)


def test_a_schedule_needs_a_prepared_job_of_the_app(app: forq.App) -> None:
    task = app.task(send)
    for wrong in (task, "send", app.task_ref("send").prepare(to="a"), forq.App("other").task(send).prepare("a")):
        with pytest.raises(InvalidTask, match=r"is not a prepared job of this app; pass TASK\.prepare"):
            app.schedule("nightly", wrong, every=60)  # type: ignore[arg-type]
    with pytest.raises(InvalidTask, match=r"using\(id=…\) is not an option of a schedule; allowed: queue, priority"):
        app.schedule("nightly", task.using(id="1").prepare("a"), every=60)


def test_the_queue_of_a_schedule_must_be_declared_before_the_app_is_read(app: forq.App) -> None:
    task = app.task(send)
    app.schedule("nightly", task.using(queue="slow").prepare("a"), every=60)
    with pytest.raises(InvalidTask, match=rf"'nightly' \({HERE}\): the app has no queue 'slow'; valid names: shop"):
        app.definitions()
    app.queue("slow")
    assert app.definitions()["schedules"].keys() == {"slow"}


def test_two_schedules_of_one_key_and_queue_are_refused(app: forq.App) -> None:
    task = app.task(every="5m")(refresh)
    app.queue("other")
    app.schedule("refresh", task.using(queue="other").prepare(), every=60)
    with pytest.raises(InvalidTask, match=rf"two schedules 'refresh' of queue 'shop': {HERE} and {HERE}; give one of"):
        app.schedule("refresh", task.prepare(), every=60)


def test_a_task_whose_name_cannot_be_a_key_names_app_schedule(app: forq.App) -> None:
    with pytest.raises(InvalidTask, match=r"schedule key 'a:b' is not allowed.*app\.schedule\(KEY, refresh\.prepare"):
        app.task(name="a:b", every=60)(refresh)


def test_large_data_of_a_schedule_is_refused(app: forq.App) -> None:
    task = app.task(send)
    with pytest.raises(InvalidTask, match="the schedule's data is larger than 65536 bytes"):
        app.schedule("nightly", task.prepare("a" * 70_000), every=60)


def test_annotations_that_cannot_be_converted_are_refused_when_the_app_is_read(app: forq.App) -> None:
    app.task(broken)
    with pytest.raises(InvalidTask, match=rf"^task broken: argument order: .*\({HERE}\)$"):
        app.definitions()


def test_the_hash_ignores_places_alone(app: forq.App) -> None:
    app.task(queue="mails")(send)
    definitions = json.loads(json.dumps(app.definitions()))
    known = definitions_hash(app.definitions())
    assert definitions_hash(definitions) == known
    definitions["tasks"]["send"]["place"] = "elsewhere.py, line 1"
    assert definitions_hash(definitions) == known
    assert definitions["tasks"]["send"]["place"] == "elsewhere.py, line 1"
    definitions["tasks"]["send"]["queue"] = "other"
    assert definitions_hash(definitions) != known


def test_definitions_are_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "varying.py").write_text(
        "import forq, time\napp = forq.App('varying')\n"
        "@app.task\ndef f(a: set = {'x', 'y', 'z'}, b=object, at: float = 1.5, *, c: list = [1]) -> set[str]: ...\n"
        "@app.task(queue='zoo')\ndef g(when=frozenset({'a', 'b'}), lock=object()): ...\n"
    )
    program = (
        "import varying, json; from forq.app.definitions import definitions_hash as h; "
        "found = varying.app.definitions(); print(h(found), json.dumps(found))"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(made) == 1
    (text,) = made
    assert "(a: set = ..., b=..., at: float = 1.5, *, c: list = [1]) -> set[str]" in text


def test_options_in_the_config_file_come_before_those_of_the_decorator(app: forq.App) -> None:
    task = app.task(timeout=30, max_retries=5)(send)
    before = app.definitions()
    app.override_task_options({"send": {"timeout": "5m", "keep_done": 0, "backoff": ["1s", 2]}})
    assert task.options == AttemptOptions(timeout_ms=300_000, max_retries=5, backoff_ms=(1000, 2000), keep_done_ms=0)
    assert app.definitions() == before, "workers compare them with those of the code"
    app.override_task_options({})
    assert task.options == task.declared_options


@pytest.mark.parametrize(
    ("tables", "error"),
    [
        ({"sned": {}}, r"^\[apps\.shop\.tasks\.sned\]: app 'shop' has no task 'sned'; did you mean send\?"),
        ({"send": {"timeot": 1}}, r"^\[apps\.shop\.tasks\.send\]: there is no option 'timeot'; did you mean timeout\?"),
        ({"send": {"timeout": "soon"}}, r"^\[apps\.shop\.tasks\.send\]: timeout = 'soon' is not allowed: a duration"),
        ({"send": {"where": "x"}}, "there is no option 'where'"),
        ({"send": 5}, "5 is not allowed: a table with timeout, max_retries, backoff, keep_done"),
    ],
)
def test_wrong_options_in_the_config_file_change_nothing(app: forq.App, tables: Any, error: str) -> None:
    app.task(refresh)
    task = app.task(timeout=30)(send)
    with pytest.raises(ConfigError, match=error):
        app.override_task_options({"refresh": {"timeout": 1}, **tables})
    assert (app.tasks["refresh"].options, task.options) == (AttemptOptions(), task.declared_options)
