"""etc/examples/sentry: the commands of its README with a local receiver, and the hook with sync and async tasks."""

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import forq
from tests.docs.pages import ROOT, blocks
from tests.examples.guide_code import code_of
from tests.support.drive.readme import EXAMPLES, example
from tests.support.drive.wait import wait_until

pytest.importorskip("sentry_sdk")

import sentry_sdk
from sentry_sdk.transport import Transport

Event = dict[str, Any]


def test_the_files_are_those_of_the_guide() -> None:
    guide = code_of(ROOT / "docs/guide/sentry.md")
    assert guide == {name: (EXAMPLES / "sentry" / name).read_text() for name in ("reporting.py", "tasks.py")}


@pytest.mark.one_server
def test_the_commands_of_the_readme_work_and_the_receiver_prints_what_it_says() -> None:
    (shown,) = [block for block in blocks(EXAMPLES / "sentry/README.md") if block.language == "text"]
    expected = [json.loads(line) for line in shown.text.splitlines()]
    with example("sentry") as project:
        project.follow()
        wait_until(
            lambda: len(project.log_of("receiver").splitlines()) >= len(expected), what="all errors are reported"
        )
    # The end of the processes has sent everything.
    lines = [json.loads(line) for line in project.printed["receiver"].splitlines()]
    assert sorted(map(without_ids, lines)) == sorted(map(without_ids, expected))


def without_ids(event: Event) -> str:
    text = re.sub(r"^print_label: .*", "print_label", event["error"])
    return json.dumps([text, {**event["tags"], "job": ""}])


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES / "sentry")
    yield import_module("reporting")
    sys.modules.pop("reporting", None)


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """What a client of Sentry without a network sends."""
    sent: list[Event] = []

    class Sent(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            sent.append(envelope.get_event())

    sentry_sdk.init(dsn="http://key@127.0.0.1/1", transport=Sent, default_integrations=False)
    yield sent
    sentry_sdk.get_client().close()
    sentry_sdk.get_global_scope().set_client(None)


class Allowed:
    """A worker that allows this many retries."""

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def should_stop(self, position: int) -> bool:
        return False

    def max_retries(self) -> int:
        return self.retries


def job_of(task: str, *, id: str = "1", retry_count: int = 0, max_retries: int = 1) -> forq.Job:
    job = forq.Job("shop", id, id, task, 5, 0.0, 1, (retry_count, 0, 0))
    job._attempts = Allowed(max_retries)
    return job


def fail() -> None:
    raise RuntimeError("it failed")


def fail_for_good() -> None:
    raise forq.Permanent("it failed for good")


def fail_by_type() -> None:
    raise LookupError("it is missing")


def snooze() -> None:
    raise forq.Snooze(5)


def retry_later() -> None:
    raise forq.RetryAt(1e10)


async def fail_later() -> None:
    await asyncio.sleep(0)
    raise RuntimeError("it failed")


def run_job(task: Any, job: forq.Job) -> None:
    returned = task.run_job({}, job)
    asyncio.run(returned)


def attempts_reported(
    reporting: ModuleType, events: list[Event], function: Callable[[], Any], *, every_attempt: bool
) -> list[str]:
    app = forq.App("shop")
    reporting.report_to_sentry(app, every_attempt=every_attempt)
    task = app.task(dead_on=(LookupError,))(function)
    for retry_count in (0, 1):
        with pytest.raises((RuntimeError, LookupError, forq.ForqError)):
            run_job(task, job_of(task.name, retry_count=retry_count))
    return [event["tags"]["attempt"] for event in events]


@pytest.mark.parametrize(
    ("function", "last", "every"),
    [
        (fail, ["2"], ["1", "2"]),
        (fail_later, ["2"], ["1", "2"]),
        (fail_for_good, ["1", "2"], ["1", "2"]),
        (fail_by_type, ["1", "2"], ["1", "2"]),
        (snooze, [], []),
        (retry_later, [], []),
    ],
)
@pytest.mark.parametrize("every_attempt", [False, True])
def test_failures_are_reported(
    reporting: ModuleType,
    events: list[Event],
    function: Callable[[], Any],
    last: list[str],
    every: list[str],
    every_attempt: bool,
) -> None:
    found = attempts_reported(reporting, events, function, every_attempt=every_attempt)
    assert found == (every if every_attempt else last)
    for event in events:
        assert event["transaction"] == function.__name__
        assert {**event["tags"], "attempt": ""} == {
            "queue": "shop",
            "task": function.__name__,
            "job": "1",
            "attempt": "",
        }


both = threading.Barrier(2)


def blame(user: str) -> None:
    sentry_sdk.set_tag("user", user)
    both.wait(10)
    raise RuntimeError(user)


async def blame_later(user: str) -> None:
    sentry_sdk.set_tag(f"user-{user}", user)
    await asyncio.sleep(0.01)
    raise RuntimeError(user)


def test_jobs_in_threads_do_not_share_a_scope(reporting: ModuleType, events: list[Event]) -> None:
    app = forq.App("shop")
    reporting.report_to_sentry(app, every_attempt=True)
    task = app.task(blame)

    def run(user: str) -> None:
        with pytest.raises(RuntimeError):
            task.run_job({"user": user}, job_of("blame", id=user))

    threads = [threading.Thread(target=run, args=(user,)) for user in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((event["tags"]["job"], event["tags"]["user"]) for event in events) == [("a", "a"), ("b", "b")]


def test_coroutines_do_not_share_a_scope(reporting: ModuleType, events: list[Event]) -> None:
    app = forq.App("shop")
    reporting.report_to_sentry(app, every_attempt=True)
    task = app.task(blame_later)

    async def run() -> None:
        jobs = [task.run_job({"user": user}, job_of("blame_later", id=user)) for user in ("a", "b")]
        await asyncio.gather(*map(asyncio.create_task, jobs), return_exceptions=True)

    asyncio.run(run())
    found = {event["tags"]["job"]: {tag for tag in event["tags"] if tag.startswith("user")} for event in events}
    assert found == {"a": {"user-a"}, "b": {"user-b"}}
