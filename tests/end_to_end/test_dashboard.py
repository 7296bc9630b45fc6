"""The dashboard of a supervisor: its process, its actions, its charts, and what it costs without a viewer."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from forq import Client
from tests.support.drive.server import Server
from tests.support.drive.supervisor import BIN, HANDLERS, Forq, running
from tests.support.drive.wait import wait_until
from tests.web.serving import NOBODY, as_user

QUEUE = f'[queues.mails]\nhandler = "traced:noop"\npath = ["{HANDLERS}"]\n'
SAME_SITE = {"Sec-Fetch-Site": "same-origin", "Content-Type": "application/x-www-form-urlencoded"}


class Dashboard:
    def __init__(self, forq: Forq | None, port: int) -> None:
        self.supervisor = forq
        self.port = port

    @property
    def forq(self) -> Forq:
        assert self.supervisor is not None
        return self.supervisor

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str, str]:
        """The status, the body, and the header Location."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            given = {"Accept": "text/html", **{name.replace("_", "-"): value for name, value in headers.items()}}
            connection.request(method, path, body or None, given)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers.get("Location", "")
        finally:
            connection.close()

    def get(self, path: str) -> str:
        status, text, _ = self.ask("GET", path)
        assert status == 200, text
        return text

    def act(self, action: str, fields: str) -> str:
        """Carries out an action; returns its note."""
        status, text, location = self.ask("POST", f"/do/{action}", fields, **SAME_SITE)
        assert status == 303, text
        note = re.search(r'class="note"[^>]*>([^<]*)<', self.get(location))
        assert note is not None
        return note[1]

    def pid(self) -> int | None:
        """Of the process `forq: web`; None while it is replaced."""
        services = self.forq.status()["supervisor"]["services"]
        pid: int | None = next(each["pid"] for each in services if each["name"] == "web")
        return pid

    def process(self) -> psutil.Process:
        pid = self.pid()
        assert pid is not None
        return psutil.Process(pid)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def dashboard(settings: str = QUEUE) -> Iterator[Dashboard]:
    port = free_port()
    with running(settings=f'{settings}\n[web]\nlisten = "127.0.0.1:{port}"\n') as forq:
        yield Dashboard(forq, port)


def test_a_queue_is_shown_and_steered() -> None:
    with dashboard() as page:
        page.forq.wait_for_child("mails")
        assert page.act("queue.pause", "queue=mails&back=/queues/mails") == "paused queue mails"
        assert page.forq.queue_status("mails")["state"] == "paused"
        queue = page.forq.client().queue("mails")
        queue.enqueue({}, id="first")
        assert "paused" in page.get("/queues/mails")
        assert "first" in page.get("/queues/mails/jobs?state=waiting")
        assert "paused" in page.get("/queues/mails/job?id=first")
        pid = page.forq.child("mails")["pid"]
        assert f">{pid}<" in page.get("/queues/mails")
        assert page.act("queue.resume", "queue=mails") == "resumed queue mails"
        wait_until(lambda: queue.status()["done"] == 1, what="the job is done")
        old = page.forq.child("mails")["pid"]
        assert "restarted" in page.act("queue.restart", "queue=mails")
        assert page.forq.child("mails")["pid"] != old


def test_every_action_is_logged_before_and_after_it() -> None:
    with dashboard() as page:
        page.act("queue.pause", "queue=mails")
        page.ask("POST", "/do/queue.pause", "queue=none", **SAME_SITE)
        path = page.forq.state_dir / "actions.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line.get("action") or line["result"] for line in lines] == [
            "queue.pause",
            "done",
            "queue.pause",
            "refused",
        ]
        assert lines[0]["target"] == {"queue": "mails"}
        assert lines[0]["user"]
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_killed_process_is_replaced_and_no_request_is_lost() -> None:
    with dashboard() as page:
        old = page.process()
        assert "mails" in page.get("/")
        old.kill()
        # The address stays bound: the request waits for the new process.
        assert "mails" in page.get("/")
        assert page.pid() != old.pid


def test_a_frozen_process_is_replaced() -> None:
    with dashboard() as page:
        old = page.process()
        old.suspend()
        wait_until(lambda: page.pid() not in (None, old.pid), 30.0, "the frozen process is replaced")
        assert "mails" in page.get("/")


def test_the_process_ends_with_its_supervisor() -> None:
    with dashboard() as page:
        process = page.process()
        assert page.forq.process is not None
        page.forq.process.kill()
        page.forq.process.wait()
        wait_until(lambda: not process.is_running(), what="the process has ended")


def commands_of(forq: Forq) -> int:
    """The commands that the dashboard's connections have sent."""
    lines = forq.client().link().call("CLIENT", "LIST").decode().splitlines()
    clients = [dict(part.partition("=")[::2] for part in line.split(" ")) for line in lines]
    return sum(int(client["tot-cmds"]) for client in clients if client["name"] == "forq-web")


def test_without_a_viewer_it_sends_nothing_to_redis() -> None:
    with dashboard() as page:
        page.get("/queues/mails")
        before = commands_of(page.forq)
        cpu = sum(page.process().cpu_times()[:2])
        began = time.monotonic()
        # What it must not do can only be watched for a while.
        wait_until(lambda: time.monotonic() - began > 5.0, 10.0, "some idle seconds")
        assert commands_of(page.forq) == before
        assert sum(page.process().cpu_times()[:2]) - cpu < 0.1


def test_a_live_page_follows_a_job_and_ends_with_its_viewer() -> None:
    with dashboard() as page:
        page.forq.wait_for_child("mails")
        viewer = socket.create_connection(("127.0.0.1", page.port), timeout=20)
        viewer.sendall(f"GET /live/queues/mails HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\n\r\n".encode())
        received = b""
        while b"</section>" not in received:
            received += viewer.recv(65536)
        page.forq.client().queue("mails").enqueue({}, id="a")
        while b"Done 1 (" not in received:
            received += viewer.recv(65536)
        viewer.close()
        commands, since = commands_of(page.forq), time.monotonic()

        def quiet() -> bool:
            nonlocal commands, since
            sent = commands_of(page.forq)
            if sent != commands:
                commands, since = sent, time.monotonic()
            return time.monotonic() - since > 2.5

        wait_until(quiet, 20.0, "the snapshots end with the viewer")


def test_queues_of_another_supervisor_are_shown(server: Server, redis_url: str) -> None:
    port = free_port()
    web = f'{QUEUE}[web]\nlisten = "127.0.0.1:{port}"\n'
    theirs = QUEUE.replace("mails", "theirs")
    with running(redis=redis_url, settings=web) as here, running(redis=redis_url, settings=theirs) as there:
        there.wait_for_child("theirs")
        there.client().queue("theirs").enqueue({}, id="x1", run_in=3600)
        page = Dashboard(here, port)
        wait_until(lambda: "elsewhere" in page.get("/"), what="the overview shows the other queue")
        assert "served on" in page.get("/queues/theirs")
        assert "scheduled" in page.get("/find?id=x1")


def test_draining_ends_by_itself_and_leaves_no_connection() -> None:
    with dashboard() as page:
        page.forq.wait_for_child("mails")
        page.act("queue.drain", "queue=mails")
        before = page.process().num_fds()
        for _ in range(5):
            assert "draining queue mails" in page.act("queue.drain", "queue=mails")
        wait_until(lambda: page.process().num_fds() <= before + 1, what="the connections are closed")
        status, text, _ = page.ask("POST", "/do/queue.drain", "queue=none", **SAME_SITE)
        assert status == 404, text


def test_an_action_without_an_answer_is_logged_as_unknown() -> None:
    with dashboard() as page:
        page.get("/")
        supervisor = psutil.Process(page.forq.pid)
        supervisor.suspend()
        try:
            status, text, _ = page.ask("POST", "/do/queue.pause", "queue=mails", **SAME_SITE)
        finally:
            supervisor.resume()
        assert status == 503
        assert "may have been carried out" in text
        lines = (page.forq.state_dir / "actions.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["result"] == "unknown"


def test_while_redis_is_down_processes_are_shown() -> None:
    with dashboard() as page:
        page.forq.wait_for_child("mails")
        pid = page.forq.child("mails")["pid"]
        server = next(each for each in page.forq.processes() if "redis" in each.name() or "valkey" in each.name())
        server.suspend()
        try:
            wait_until(lambda: "Redis does not answer" in page.get("/"), 30.0, "the page says that Redis is down")
            assert f">{pid}<" in page.get("/queues/mails")
        finally:
            server.resume()
        wait_until(lambda: "Redis does not answer" not in page.get("/"), 30.0, "the page shows the counts again")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_other_local_users_are_refused() -> None:
    with dashboard() as page:
        request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{page.port}\r\nConnection: close\r\n\r\n".encode()
        assert as_user(NOBODY, NOBODY, [], lambda: _first_line(page.port, request)) == b"HTTP/1.1 403 Forbidden"
        assert page.ask("GET", "/")[0] == 200


def test_it_serves_a_unix_socket_and_removes_it_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "web.sock"
    request = b"GET /queues/mails HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\nConnection: close\r\n\r\n"
    with running(settings=f'{QUEUE}[web]\nlisten = "{path}"\n') as forq:
        forq.wait_for_child("mails")
        with socket.socket(socket.AF_UNIX) as browser:
            browser.settimeout(20)
            browser.connect(str(path))
            browser.sendall(request)
            answer = b"".join(iter(lambda: browser.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"<h1>mails</h1>" in answer
        forq.stop()
        assert not path.exists()


def test_an_open_address_without_authentication_is_refused_at_the_start() -> None:
    forq = Forq(settings='[web]\nlisten = "0.0.0.0:0"\n'.replace(":0", ":9999"))
    try:
        forq.start(ready=False)
        assert forq.process is not None
        assert forq.process.wait(30) == 78
        assert "is not allowed without authentication" in forq.log
        assert "forq web-user" in forq.log
    finally:
        forq.remove()


@contextmanager
def web_alone(url: str, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """`forq web` without a supervisor."""
    port = free_port()
    command = [str(BIN / "forq"), "web", "--redis", url, "--listen", f"127.0.0.1:{port}", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert f"http://127.0.0.1:{port}/" in process.stderr.readline()
        yield process, port
    finally:
        process.kill()
        process.wait()


def test_without_a_supervisor_it_shows_and_steers_any_redis(redis_url: str, tmp_path: Path) -> None:
    queue = Client(redis_url).create_queue("mails")
    queue.enqueue({}, id="first", run_in=3600)
    log = tmp_path / "actions.jsonl"
    with web_alone(redis_url, "--action-log", str(log)) as (_, port):
        page = Dashboard(None, port)
        assert "mails" in page.get("/")
        assert page.act("queue.pause", "queue=mails") == "paused queue mails"
        assert queue.status()["paused"]
        assert "made ready" in page.act("job.run", "queue=mails&id=first")
        assert queue.status()["waiting"] == 1
        assert "no supervisor serves it" in page.get("/queues/mails").lower()
        assert [json.loads(line).get("result") for line in log.read_text().splitlines()] == [None, "done"] * 2


def test_alone_it_believes_a_proxy_that_has_authenticated_the_user(redis_url: str) -> None:
    queue = Client(redis_url).create_queue("mails")
    arguments = ("--proxy", "127.0.0.1", "--proxy-header", "X-User", "--proxy-actor", "alice")
    with web_alone(redis_url, *arguments) as (_, port):
        page = Dashboard(None, port)

        def pause(user: str) -> int:
            return page.ask("POST", "/do/queue.pause", "queue=mails", **SAME_SITE, X_User=user)[0]

        assert page.ask("GET", "/")[0] == 403, "nobody is named"
        assert page.ask("GET", "/", X_User="bob")[0] == 200
        assert pause("bob") == 403
        assert not queue.status()["paused"]
        assert pause("alice") == 303
        assert queue.status()["paused"]


def test_it_ends_at_once_although_a_page_is_open(redis_url: str) -> None:
    with web_alone(redis_url) as (process, port), socket.create_connection(("127.0.0.1", port)) as viewer:
        viewer.sendall(f"GET /live/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert viewer.recv(65536).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGINT)
        assert process.wait(4) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "says"),
    [
        (["--listen", "0.0.0.0:9999"], 78, "not allowed without authentication"),
        (["--listen", "nowhere"], 2, "HOST:PORT"),
        (["--redis", "unix:///none.sock"], 1, "cannot reach Redis"),
        (["--redact", "("], 2, "regular expressions"),
        (["--proxy", "somewhere"], 78, "'somewhere' is not allowed"),
        (["--proxy-header", "X User"], 2, "letters, digits and hyphens"),
    ],
)
def test_wrong_arguments_of_forq_web(redis_url: str, arguments: list[str], exit_code: int, says: str) -> None:
    command = [str(BIN / "forq"), "web", "--redis", redis_url, "--listen", f"127.0.0.1:{free_port()}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert says in done.stderr
    assert done.returncode == exit_code
    assert "Traceback" not in done.stderr


def test_without_its_packages_forq_web_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'uvicorn' else find(name, *more)\n"
    )
    done = subprocess.run(
        [str(BIN / "forq"), "web"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (78, "forq: forq web needs uvicorn: pip install 'forq[web]'\n")


def _first_line(port: int, request: bytes) -> bytes:
    # Not create_connection, which would import a codec that the other user may not read.
    with socket.socket() as client:
        client.settimeout(20)
        client.connect(("127.0.0.1", port))
        client.sendall(request)
        return client.recv(65536).partition(b"\r\n")[0].rstrip()
