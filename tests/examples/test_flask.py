"""etc/examples/flask: the commands of its README, its files, its answers, and a client that was used before a fork."""

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from forq import Client
from tests.docs.pages import ROOT
from tests.examples.guide_code import code_of
from tests.support.drive.readme import EXAMPLES, example

pytest.importorskip("flask")
pytest.importorskip("gunicorn")
pytestmark = pytest.mark.one_server

MODULES = ("tasks", "web", "worker")


def test_the_files_are_those_of_the_guide() -> None:
    guide = code_of(ROOT / "docs/guide/flask.md")
    assert guide == {f"{name}.py": (EXAMPLES / "flask" / f"{name}.py").read_text() for name in MODULES}


def test_the_commands_of_the_readme_work_also_with_a_client_that_was_used_before_the_fork() -> None:
    with example("flask") as project:
        # gunicorn preloads the application, so this opens a connection in the parent of its workers.
        web = project.home / "web.py"
        web.write_text(web.read_text().replace("    return web\n", "    bill.app.client.queues()\n    return web\n"))
        project.follow()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the example, importable."""
    monkeypatch.syspath_prepend(EXAMPLES / "flask")
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_endpoints_report_each_state(modules: None, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORQ_REDIS", redis_url)
    web: Any = import_module("web").create_app().test_client()
    stored = web.post("/orders/7", json=["1"])
    assert stored.status_code == 202
    job = stored.json["job"]
    assert web.post("/orders/7", json=["1"]).json == {"job": job}
    waiting = web.get(f"/jobs/{job}")
    assert (waiting.status_code, waiting.json) == (202, {"state": "waiting"})
    Client(redis_url).queue("shop").cancel(job)
    assert web.get(f"/jobs/{job}").status_code == 404


def test_an_outage_of_redis_is_answered_with_503(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORQ_REDIS", "unix:///nonexistent/redis.sock")
    answer: Any = import_module("web").create_app().test_client().post("/orders/7", json=["1"])
    assert (answer.status_code, answer.json, answer.headers["Retry-After"]) == (503, {"error": "try again"}, "1")
