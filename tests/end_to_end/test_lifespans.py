"""Lifespans of an app with a real supervisor: once per process, before its first job and after its last."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forq.queue_spec import QueueSpec
from forq.workers.handlers import load_handlers
from tests.support.drive.supervisor import HANDLERS, Forq, running
from tests.support.drive.wait import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def forq() -> Iterator[Forq]:
    with running() as forq:
        yield forq


def notes(forq: Forq) -> list[tuple[int, str]]:
    path = Path(forq.trace_file).with_name("lifespans")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), text) for pid, _, text in (line.partition(" ") for line in lines)]


def create(forq: Forq, queue: str, *options: str) -> None:
    forq.ctl("create", queue, "--handler", "lifespans:app", "--path", str(HANDLERS), "--set=keep_done=1h", *options)


def test_every_process_of_the_app_enters_and_leaves_its_lifespans(forq: Forq) -> None:
    create(forq, "lively", "--set=concurrency=3")
    queue = forq.client().queue("lively")
    ids = [queue.enqueue({}, type="locked") for _ in range(6)]
    assert [queue.wait(job_id, 30) for job_id in ids] == [True] * 6, "jobs run on the loop of the lifespan"
    main = forq.child("lively")["pid"]
    forq.ctl("restart", "lively")
    wait_until(lambda: (main, "files left") in notes(forq), what="the old process has ended")
    old = [text for pid, text in notes(forq) if pid == main]
    assert old == ["files entered", "pool entered", "pool left", "files left"]
    new = [pid for pid, text in notes(forq) if text == "pool entered" and pid != main]
    assert new == [forq.child("lively")["pid"]], "the retry process has run no job"
    forq.ctl("delete", "lively", "--force")


def test_a_lifespan_that_fails_is_shown_and_tried_again(forq: Forq) -> None:
    broken = Path(forq.trace_file).with_name("broken")
    broken.touch()
    create(forq, "shaky", "--no-wait")
    logged = wait_until(
        lambda: [line for line in forq.log.splitlines() if "child died" in line and "shaky" in line], what="it died"
    )
    assert "the lifespan files of app 'lively' failed: ConnectionError: no database" in logged[0]
    assert 'raise ConnectionError("no database")' in forq.ctl("logs", "shaky")
    broken.unlink()
    wait_until(lambda: forq.queue_status("shaky")["state"] == "running", seconds=60, what="it runs")
    broken.touch()
    refused = forq.run_ctl("restart", "shaky")
    broken.unlink()
    assert refused.returncode == 1
    assert "the lifespan files of app 'lively' failed: ConnectionError: no database" in refused.stderr
    assert forq.queue_status("shaky")["state"] == "running", "the old processes keep working"


@pytest.mark.parametrize("handler", ["plain", "plain_async"])
def test_plain_handlers_of_a_queue_with_an_app_have_its_hooks(handler: str) -> None:
    handlers = load_handlers(
        QueueSpec("q", "work", f"lifespans:{handler}", {}, (str(HANDLERS),), {}, app="lifespans:app")
    )
    (app,) = handlers.apps
    assert [name for name, _, _ in app.lifespans] == [
        "the lifespan files of app 'lively'",
        "the lifespan pool of app 'lively'",
    ]
    assert handlers.for_type(None).__qualname__.startswith("Hooks.around_handler")
