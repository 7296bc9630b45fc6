"""The examples of the guide and the reference, run against a real supervisor."""

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forq import Job, Queue, Snooze
from forq.errors import NoReplica
from tests.docs.pages import APP_GUIDES, PAGES, ROOT, Block, blocks
from tests.support.drive.supervisor import BIN, Forq, running
from tests.support.drive.wait import wait_until

EXAMPLES = [
    block
    for page in PAGES
    if page.parent.name in {"guide", "reference"} and page not in APP_GUIDES
    for block in blocks(page)
    if block.language == "python"
]


def examples(page: str) -> list[Block]:
    return [block for block in EXAMPLES if block.page == ROOT / page]


HANDLER, LONG_HANDLER, ASYNC_HANDLER = examples("docs/guide/handlers.md")
TASKS, ENQUEUEING, DECLARATIONS, HOOK = examples("docs/guide/apps.md")
(FAIL_HANDLER,) = examples("docs/guide/retries-and-failures.md")
PRODUCING, PARTLY = examples("docs/guide/producing.md")
(RESULTS,) = examples("docs/guide/results.md")
(DURABLE,) = examples("docs/guide/redis.md")
(SCHEDULES,) = examples("docs/guide/schedules.md")
(RELEASES,) = examples("docs/guide/releases.md")
CLIENT, ASYNC_CLIENT, DEAD_JOBS, DRAIN, BULK = examples("docs/reference/python.md")
HANDLER_BLOCKS = (HANDLER, LONG_HANDLER, ASYNC_HANDLER, FAIL_HANDLER, TASKS, DECLARATIONS, HOOK)
RUN_BLOCKS = (
    ENQUEUEING,
    PRODUCING,
    PARTLY,
    RESULTS,
    DURABLE,
    SCHEDULES,
    RELEASES,
    CLIENT,
    ASYNC_CLIENT,
    DEAD_JOBS,
    DRAIN,
    BULK,
)
# The first needs Spark. test_testing_guide.py, tests/web, tests/end_to_end, tests/contrib and tests/examples run the
# others.
_PAGES_NOT_RUN = (
    *("pipeline", "fastapi", "flask", "sentry", "testing", "django", "django-outbox", "django-tasks"),
    "dashboard",
)
NOT_RUN = [block for page in _PAGES_NOT_RUN for block in examples(f"docs/guide/{page}.md")]


def execute(block: Block, **names: object) -> dict[str, Any]:
    exec(compile(block.text, str(block), "exec"), names)
    return names


# Replaces the package, which need not be installed.
AIOHTTP = """
class ClientSession:
    status = 200

    def get(self, url):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass
"""
# A module with the handlers of the guide and their dependencies.
HANDLERS = [
    "def send_mail(to): pass",
    HANDLER.text,
    FAIL_HANDLER.text,
    ASYNC_HANDLER.text,
    "def thumbnail(data, job): return data['path']",
]
SETTINGS = """
[queues.mails]
handler = "examples:handle"
fail_handler = "examples:failed"
path = ["{path}"]
keep_done = "1h"

[queues.pages]
handler = "examples:fetch"
path = ["{path}"]
keep_done = "1h"

[queues.thumbnails]
handler = "examples:thumbnail"
path = ["{path}"]
keep_done = "1h"

[queues.shop]
handler = "shop_tasks:app"
path = ["{path}"]
keep_done = "1h"

[queues.emails]
handler = "examples:handle"
path = ["{path}"]

[queues.slow]
handler = "hello:slow"
path = ["{hello}"]

[queues.crawl]
mode = "auto_release"
release_interval = "100ms"

[queues.orders]
mode = "on_request"
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("handlers")
    (path / "examples.py").write_text("\n\n".join(HANDLERS))
    (path / "shop_tasks.py").write_text(TASKS.text)
    (path / "aiohttp.py").write_text(AIOHTTP)
    return path


@pytest.fixture(scope="module")
def forq(path: Path) -> Iterator[Forq]:
    with running(settings=SETTINGS.format(path=path, hello=ROOT / "etc/examples")) as forq:
        wait_until(lambda: all(each["state"] == "running" for each in forq.status()["queues"]), what="queues run")
        yield forq


@pytest.fixture
def environment(forq: Forq, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Client()` connects to this supervisor's Redis."""
    monkeypatch.setenv("FORQ_REDIS", forq.url)


@pytest.fixture
def queue(forq: Forq) -> Callable[[str], Queue]:
    client = forq.client()
    return client.queue


def test_the_handlers_of_the_guide_run(forq: Forq, queue: Callable[[str], Queue]) -> None:
    mails = queue("mails")
    good = mails.enqueue({"to": "a@example.org"})
    mails.enqueue({}, id="bad")
    assert mails.wait(good, timeout=30) == {"sent": 1}
    wait_until(lambda: "bad failed: Permanent: no recipient" in forq.ctl("logs", "mails"), what="fail handler")
    pages = queue("pages")
    assert pages.wait(pages.enqueue({"url": "http://example.org"}), timeout=30) == 200


def test_the_long_handler_of_the_guide_continues_where_it_stopped() -> None:
    stored: list[int] = []
    saved: dict[str, int] = {}
    names = execute(
        LONG_HANDLER,
        rows_after=lambda number: range(number + 1, 10),
        saved_position=lambda run: saved.get(run, -1),
        store=lambda row: stored.append(row),
        save_position=saved.__setitem__,
    )
    job: Any = SimpleNamespace(run_id="j1@1", should_stop=True)
    with pytest.raises(Snooze):
        names["import_rows"](None, job)
    job.should_stop = False
    names["import_rows"](None, job)
    assert stored == list(range(10))


def test_the_tasks_of_the_guide_run(
    environment: None, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(path)
    execute(ENQUEUEING)
    printed = [line.partition("# ")[2] for line in ENQUEUEING.text.splitlines() if line.startswith("print")]
    assert capsys.readouterr().out.splitlines() == printed


def test_the_hook_of_the_guide_runs_around_a_task(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(path)
    app = execute(HOOK)["app"]
    app({"to": "a", "prices": []}, Job("shop", "1", "1", "bill", 5, 0.0, 1))
    assert re.fullmatch(r"bill took 0\.\d{3} s\n", capsys.readouterr().out)


def test_the_declarations_of_the_guide_are_shown_by_forq_app(path: Path) -> None:
    (path / "shop_mails.py").write_text(DECLARATIONS.text)
    ran = subprocess.run([BIN / "forq", "app", "shop_mails:app", "--json"], cwd=path, capture_output=True, check=True)
    definitions = json.loads(ran.stdout)
    assert definitions["queues"]["mails"] == {
        "concurrency": 8,
        "rate": "100/1m",
        "fail_handler": "shop_mails:notify",
    }
    assert definitions["schedules"].keys() == {"feeds", "mails"}


def test_the_examples_for_producers_run(environment: None, queue: Callable[[str], Queue]) -> None:
    names = execute(PRODUCING)
    assert names["queue"].job("42")["state"] == "scheduled"
    thumbnails = queue("thumbnails")
    assert execute(RESULTS, queue=thumbnails)["job_id"]
    assert thumbnails.job(thumbnails.jobs(state="done").jobs[0]["id"])["result"] == "a.png"
    with pytest.raises(NoReplica):  # this server has none
        execute(DURABLE, queue=queue("emails"), data={"to": "a@example.org"})


def test_the_example_of_a_bulk_enqueue_that_is_partly_stored(environment: None, forq: Forq) -> None:
    limited = forq.client().create_queue("limited", mode="on_request", max_items=700)
    names = execute(PARTLY, queue=limited, rows=list(range(1200)))
    assert names["left"] == list(range(500, 1000))
    assert names["perhaps"] == []


def test_the_examples_of_schedules_run(queue: Callable[[str], Queue]) -> None:
    emails = queue("emails")
    execute(SCHEDULES, queue=emails)
    assert [each["key"] for each in emails.schedules()] == ["poll"]
    emails.unschedule("poll")


def test_the_examples_of_releases_run(environment: None, queue: Callable[[str], Queue]) -> None:
    crawl = queue("crawl")
    # When the example awaits them.
    crawl.enqueue(1, id="page1", run_in=0.3)
    crawl.enqueue(2, id="page2", run_in=0.3)
    queue("orders").enqueue({"dish": "soup"}, id="o1")
    assert execute(RELEASES)["order"].data == {"dish": "soup"}
    wait_until(lambda: crawl.status()["waiting"] + crawl.status()["scheduled"] == 0, what="both are released")


def test_the_examples_of_the_python_reference_run(environment: None, queue: Callable[[str], Queue]) -> None:
    emails = execute(CLIENT)["queue"]
    emails.enqueue({}, id="order-7")
    wait_until(lambda: emails.job("order-7")["state"] == "dead", what="a dead job")
    changed = execute(DEAD_JOBS, queue=emails)["changed"]
    assert (changed.done, [*changed.refused]) == (1, ["order-8@1042"])
    emails.remove("42")
    execute(DRAIN, queue=emails, migrate_database=lambda: None)
    rows = [{"to": "a@example.org"}] * 3
    execute(BULK, queue=emails, read_rows=lambda name: rows)
    execute(BULK, queue=emails, read_rows=lambda name: rows)
    emails.drain(timeout=30)


def test_the_example_for_asyncio_runs(environment: None, forq: Forq, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(execute(ASYNC_CLIENT)["main"]())
    assert capsys.readouterr().out == "/a.png\n"


def test_the_transcript_of_the_control_protocol_is_correct(forq: Forq) -> None:
    page = ROOT / "docs/reference/protocol.md"
    (transcript,) = [block for block in blocks(page) if block.text.startswith('> {"jsonrpc"')]
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(forq.state_dir / "control.sock"))
        control.settimeout(30)
        answers = control.makefile("r")
        for line in transcript.text.splitlines():
            if line.startswith("> "):
                control.sendall(line[2:].encode() + b"\n")
            else:
                assert without_pid(answers.readline()) == without_pid(line.removeprefix("< "))


def without_pid(line: str) -> Any:
    return json.loads(re.sub(r'"pid":\d+', '"pid":0', line))


def test_every_python_example_except_those_for_spark_is_run() -> None:
    assert {str(block) for block in EXAMPLES} == {str(block) for block in (*HANDLER_BLOCKS, *RUN_BLOCKS, *NOT_RUN)}
