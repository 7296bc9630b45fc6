"""The example project for Django, with the commands of its README: a supervisor, a web server, an order."""

import http.cookiejar
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import psutil
import pytest

from forq import Client
from forq.errors import RedisUnavailable
from tests.docs.pages import ROOT, blocks
from tests.support.drive.wait import wait_until

pytest.importorskip("django")
pytestmark = pytest.mark.timeout(120)

EXAMPLE = ROOT / "etc/examples/django"
ADDRESS = "127.0.0.1:8000"
# Their work is done already: this is the environment of the tests.
INSTALLATION = ("make setup", ". .venv/bin/activate", "pip install 'django>=4.2'", "cd etc/examples/django")


class Site:
    """The project in a directory of its own, and its processes."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        shutil.copytree(EXAMPLE, self.project, ignore=shutil.ignore_patterns("db.sqlite3", "__pycache__"))
        self.state = folder / "state"
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{found.getsockname()[1]}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("FORQ_", "DJANGO_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
        self.environment = {**clean, "PATH": path, "FORQ_STATE_DIR": str(self.state), "PYTHONUNBUFFERED": "1"}
        self.log = folder / "log"
        self.processes: list[psutil.Popen] = []
        self.browser: OpenerDirector = build_opener(HTTPCookieProcessor(http.cookiejar.CookieJar()))

    def shell(self, line: str) -> str:
        done = subprocess.run(
            line, shell=True, cwd=self.project, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def begin(self, line: str) -> None:
        with self.log.open("ab") as log:
            command = f"exec {line.replace(ADDRESS, self.address)}"
            self.processes.append(
                psutil.Popen(command, shell=True, cwd=self.project, env=self.environment, stdout=log, stderr=log)
            )

    def end(self) -> None:
        for process in self.processes:
            if process.is_running():
                # runserver has a child that does the work.
                below = process.children(recursive=True) if "runserver" in process.cmdline() else []
                for each in [*below, process]:
                    each.terminate()
                process.wait(30)

    def get(self, path: str) -> str:
        with self.browser.open(f"http://{self.address}{path}", timeout=20) as page:
            text: str = page.read().decode()
            return text

    def post(self, path: str, **fields: str) -> str:
        """Fills in the form of a page; returns the address that it leads to."""
        token = re.findall(r'name="csrfmiddlewaretoken" value="(\w+)"', self.get(path))[0]
        body = urlencode({**fields, "csrfmiddlewaretoken": token}).encode()
        with self.browser.open(f"http://{self.address}{path}", body, timeout=20) as page:
            return str(page.url).removeprefix(f"http://{self.address}")

    def orders(self, product: str) -> bool:
        try:
            return bool(self.post("/", email="cec@example.com", product=product))
        except OSError:
            return False

    def is_up(self) -> bool:
        """The web server answers, and the workers have created their queues."""
        try:
            return bool(self.get("/")) and "mails" in Client(f"unix://{self.state}/redis.sock").queues()
        except (OSError, RedisUnavailable):
            return False


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    found.end()


def test_an_order_is_confirmed_by_a_job_and_a_dead_job_is_in_the_admin(site: Site) -> None:
    prepare, workers, web, others = [
        block.text.strip().splitlines() for block in blocks(EXAMPLE / "README.md") if block.language == "sh"
    ]
    assert tuple(prepare[: len(INSTALLATION)]) == INSTALLATION
    for line in prepare[len(INSTALLATION) :]:
        site.shell(line)
    site.begin(workers[0])
    site.begin(web[0])
    wait_until(site.is_up, 40, f"the project is up ({site.log.read_text()})")
    order = site.post("/", email="ann@example.com", product="tea")
    wait_until(lambda: "A confirmation was sent to ann@example.com" in site.get(order), 40, "the order is confirmed")
    wait_until(lambda: "Thank you for ordering: tea" in site.log.read_text(), what="the mail")
    site.post("/", email="bob@example.com", product="unicorn")
    assert site.post("/admin/login/?next=/admin/forq/deadjob/", username="admin", password="admin") == (
        "/admin/forq/deadjob/"
    )
    wait_until(lambda: "there are no unicorns" in site.get("/admin/forq/deadjob/"), what="the dead job")
    status, tasks = [site.shell(line) for line in others]
    assert "mails" in status
    assert "orders.confirm(order_id: int)" in tasks
    # --reload loads a changed task.
    code = site.project / "orders/tasks.py"
    code.write_text(code.read_text().replace("Thank you for ordering", "We thank you for"))
    wait_until(lambda: "restarted app app=shop" in site.log.read_text(), 30, "the app is loaded again")
    wait_until(lambda: site.orders("milk"), 30, "an order; the web server restarts for the new code, too")
    wait_until(lambda: "We thank you for: milk" in site.log.read_text(), 30, "the new code runs")
