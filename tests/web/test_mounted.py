"""The dashboard inside other applications, at every place that they may give it; and the end of their servers."""

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Host, Mount

import forq.web
from forq.async_client import AsyncClient
from forq.client import Client
from forq.web.mounted import at_mount
from forq.web.names import Level
from tests.docs.pages import ROOT, blocks
from tests.support.drive.asgi_site import Site, crawl, open_stream, rest_of
from tests.support.drive.dead_jobs import bury
from tests.support.drive.wait import wait_until

Place = Callable[[Any], tuple[Site, str]]


def act(request: HTTPConnection, name: str) -> Level:
    return "act"


def in_starlette(app: Any) -> tuple[Site, str]:
    return Site(Starlette(routes=[Mount("/forq", app)])), "/forq"


def in_fastapi(app: Any) -> tuple[Site, str]:
    fastapi = pytest.importorskip("fastapi")
    web = fastapi.FastAPI()
    web.mount("/forq", app)
    return Site(web), "/forq"


def in_two_mounts(app: Any) -> tuple[Site, str]:
    return Site(Starlette(routes=[Mount("/admin", Starlette(routes=[Mount("/forq", app)]))])), "/admin/forq"


def at_the_root(app: Any) -> tuple[Site, str]:
    return Site(app), ""


def mounted_at_the_root(app: Any) -> tuple[Site, str]:
    return Site(Starlette(routes=[Mount("/", app)])), ""


def below_the_root_path_of_uvicorn(app: Any) -> tuple[Site, str]:
    """It adds the root path to the path that the proxy has left."""
    return Site(Starlette(routes=[Mount("/forq", app)]), root_path="/api"), "/api/forq"


def below_the_root_path_of_uvicorn_alone(app: Any) -> tuple[Site, str]:
    return Site(app, root_path="/api/"), "/api"


def below_the_root_path_of_fastapi(app: Any) -> tuple[Site, str]:
    fastapi = pytest.importorskip("fastapi")
    with warnings.catch_warnings():
        # New versions advise against it.
        warnings.simplefilter("ignore")
        web = fastapi.FastAPI(root_path="/api")
    web.mount("/forq", app)
    return Site(web, removed="/api"), "/api/forq"


def in_a_router_that_removes_its_path(app: Any) -> tuple[Site, str]:
    async def router(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"].startswith("/forq")
        await app({**scope, "root_path": "/forq", "path": scope["path"].removeprefix("/forq")}, receive, send)

    return Site(router), "/forq"


def at_a_parameter(app: Any) -> tuple[Site, str]:
    return Site(Starlette(routes=[Mount("/{tenant}/forq", app)])), "/a%20b%3F%5C/forq"


def at_a_host(app: Any) -> tuple[Site, str]:
    return Site(Starlette(routes=[Host("testserver", app)])), ""


PLACES = [
    in_starlette,
    in_fastapi,
    in_two_mounts,
    at_the_root,
    mounted_at_the_root,
    below_the_root_path_of_uvicorn,
    below_the_root_path_of_uvicorn_alone,
    below_the_root_path_of_fastapi,
    in_a_router_that_removes_its_path,
    at_a_parameter,
    at_a_host,
]
each_place = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


@pytest.fixture
def client(redis_url: str) -> Client:
    """Two queues with jobs, dead jobs and a schedule."""
    client = Client(redis_url)
    mails = client.create_queue("mails", keep_done="1h")
    client.create_queue("live")
    mails.enqueue({"to": "ann"}, id="first", type="send")
    mails.enqueue({}, id="later", run_in=3600)
    mails.schedule("nightly", cron="0 3 * * *")
    bury(redis_url, "mails", "m1@1", job_type="send")
    return client


@each_place
def test_no_link_leaves_the_prefix_and_none_is_broken(place: Place, client: Client) -> None:
    if place is in_starlette:
        # More than one page.
        client.queue("mails").enqueue_many([{}] * 120)
    site, prefix = place(forq.web.asgi(client, authorize=act))
    found = crawl(site, f"{prefix}/")
    outside = [url for url in found if not url.startswith(f"{prefix}/")]
    assert outside == []
    own = {url.removeprefix(prefix): status for url, status in found.items()}
    broken = {url: status for url, status in own.items() if status >= 400 and not url.startswith("/do/")}
    assert broken == {}
    # Only a form that is sent carries them out.
    assert {status for url, status in own.items() if url.startswith("/do/")} == {405}
    paths = {urlsplit(url).path for url in own}
    wanted = {"/", "/dead", "/schedules", "/processes", "/find", "/queues/mails", "/queues/live", "/queues/mails/jobs"}
    wanted |= {"/queues/mails/job", "/queues/mails/dead", "/queues/mails/options", "/queues/mails/schedule"}
    wanted |= {"/static/forq.css", "/static/forq.js", "/static/charts.js", "/live/", "/live/queues/mails", "/live/dead"}
    assert wanted <= paths


@each_place
def test_an_action_returns_to_its_page_below_the_prefix(place: Place, client: Client) -> None:
    site, prefix = place(forq.web.asgi(client, authorize=act))
    shown = site.get(f"{prefix}/queues/mails").text
    action, back = re.findall(r'action="([^"]*queue\.pause)".*?name="back" value="([^"]*)"', shown, re.DOTALL)[0]
    assert (action, back) == (f"{prefix}/do/queue.pause", "/queues/mails")
    done = site.post(action, f"queue=mails&back={back}")
    assert done.status == 303
    assert done.headers["location"].startswith(f"{prefix}/queues/mails?note=")
    assert client.queue("mails").status()["paused"]
    after = site.get(done.headers["location"])
    assert "paused queue mails" in after.text
    # Neither the next action nor the live page has the note in its address.
    assert "note=" not in after.text
    assert f'data-live="{prefix}/live/queues/mails"' in after.text


@each_place
def test_live_pages_have_links_below_the_prefix(place: Place, client: Client) -> None:
    site, prefix = place(forq.web.asgi(client, authorize=act))
    stream = site.events(f"{prefix}/live/")
    assert stream.status == 200
    assert "event: update" in stream.text
    links = re.findall(r'href="([^"]*)"', stream.text)
    assert f"{prefix}/queues/mails" in links
    assert all(link.startswith(f"{prefix}/") for link in links)


@pytest.mark.parametrize("place", [in_two_mounts, below_the_root_path_of_fastapi, in_a_router_that_removes_its_path])
def test_errors_and_missing_pages_link_below_the_prefix(place: Place, client: Client) -> None:
    site, prefix = place(forq.web.asgi(client, authorize=act))
    for path, status in (("/none", 404), ("/queues/none", 404), ("/queues/mails/", 404), ("/?order=odd", 400)):
        reply = site.get(prefix + path)
        assert reply.status == status
        assert f'<a href="{prefix}/">Overview</a>' in reply.text


def test_the_mount_point_without_a_slash_is_the_overview() -> None:
    scope = {"type": "http", "root_path": "/forq", "path": "/forq"}
    assert at_mount(scope)["path"] == "/forq/"
    assert scope["path"] == "/forq"


def test_every_client_names_the_server(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Client(redis_url, prefix="shop:").create_queue("orders")
    monkeypatch.setenv("FORQ_REDIS", redis_url)
    monkeypatch.setenv("FORQ_PREFIX", "shop:")
    for given in (Client(redis_url, prefix="shop:"), AsyncClient(redis_url, prefix="shop:"), None):
        site, prefix = in_starlette(forq.web.asgi(given, authorize=act))
        assert "/forq/queues/orders" in site.get(f"{prefix}/").text


def test_while_redis_cannot_be_reached_the_pages_say_so(tmp_path: Path) -> None:
    site, prefix = in_starlette(forq.web.asgi(Client(f"unix://{tmp_path}/none"), authorize=act))
    assert "Redis does not answer" in site.get(f"{prefix}/").text
    assert "Redis does not answer" in site.events(f"{prefix}/live/").text
    for path in ("/queues/mails", "/queues/mails/jobs", "/dead", "/schedules", "/find?id=x", "/processes"):
        reply = site.get(prefix + path)
        assert reply.status in (200, 404, 503), path
        assert reply.text.rstrip().endswith("</html>")
        assert path in ("/find?id=x", "/processes") or str(tmp_path) in reply.text, path


@pytest.mark.parametrize("is_async", [False, True])
def test_a_hook_that_fails_forbids_and_is_logged(
    client: Client, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: HTTPConnection, name: str) -> Level:
        raise LookupError("no database")

    async def fail_later(request: HTTPConnection, name: str) -> Level:
        return fail(request, name)

    site, prefix = in_starlette(forq.web.asgi(client, authorize=fail_later if is_async else fail))
    for reply in (
        site.get(f"{prefix}/"),
        site.get(f"{prefix}/queues/none"),
        site.get(f"{prefix}/live/", accept="text/event-stream"),
        site.post(f"{prefix}/do/queue.pause", "queue=mails"),
    ):
        assert reply.status == 403
        assert "no database" not in reply.text
    assert "no database" in caplog.text
    assert not client.queue("mails").status()["paused"]


def test_compression_of_the_application_does_not_hold_live_pages_back(client: Client) -> None:
    app = Starlette(
        routes=[Mount("/forq", forq.web.asgi(client, authorize=act))], middleware=[Middleware(GZipMiddleware)]
    )
    stream = Site(app).events("/forq/live/", accept_encoding="gzip")
    assert "event: update" in stream.text


def test_without_the_extra_the_error_names_it() -> None:
    code = "import sys\nsys.modules['jinja2'] = None\nimport forq.web\nforq.web.asgi"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("forq.web.asgi needs the package jinja2: pip install 'forq[web]'\n")


def test_the_application_of_the_guide_admits_the_users_of_its_session(
    client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("itsdangerous")
    monkeypatch.setenv("FORQ_REDIS", redis_url)
    monkeypatch.setenv("SESSION_KEY", "key")
    block = next(block for block in blocks(ROOT / "docs/guide/dashboard.md") if "FastAPI" in block.text)
    names: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), names)

    async def log_in(request: Request) -> PlainTextResponse:
        request.session["user"] = request.query_params["user"]
        return PlainTextResponse("")

    names["web"].add_route("/login", log_in)
    site, host = Site(names["web"]), {"host": "shop.example.com"}

    def cookie(user: str) -> str:
        return site.get(f"/login?user={user}", **host).headers["set-cookie"].partition(";")[0]

    assert site.get("/forq/", **host).status == 403
    assert site.get("/forq/", cookie=cookie("alice"), host="evil.example").status == 400
    pause = ("/forq/do/queue.pause", "queue=mails")
    for user, status in (("bob", 403), ("alice", 303)):
        assert site.get("/forq/queues/mails", cookie=cookie(user), **host).status == 200
        assert site.post(*pause, cookie=cookie(user), **host).status == status
    assert client.queue("mails").status()["paused"]


APPLICATIONS = {
    "alone": "import forq.web\napp = forq.web.asgi(authorize=lambda request, name: 'act')\n",
    "mounted": (
        "import forq.web\nfrom starlette.applications import Starlette\nfrom starlette.routing import Mount\n"
        "dashboard = forq.web.asgi(authorize=lambda request, name: 'act')\n"
        "app = Starlette(routes=[Mount('/forq', dashboard)])\n"
    ),
}


@contextmanager
def uvicorn_process(folder: Path, code: str, url: str, *options: str) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    pytest.importorskip("uvicorn")
    (folder / "web_app.py").write_text(code)
    address = folder / "web.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "web_app:app", "--uds", str(address), *options],
        cwd=folder,
        env={**os.environ, "FORQ_REDIS": url, "PYTHONPATH": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: address.exists() or process.poll() is not None, what="uvicorn listens")
        yield process, address
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("application", "path", "options"),
    [("alone", "/live/", ()), ("mounted", "/forq/live/", ()), ("mounted", "/forq/live/", ("--root-path", "/api"))],
    ids=["alone", "mounted", "root path"],
)
def test_a_server_with_open_live_pages_ends_at_once(
    tmp_path: Path, client: Client, redis_url: str, application: str, path: str, options: tuple[str, ...], number: int
) -> None:
    with uvicorn_process(tmp_path, APPLICATIONS[application], redis_url, *options) as (process, address):
        streams = [open_stream(address, path) for _ in range(3)]
        process.send_signal(number)
        # The whole answer, and not a connection that was cut.
        assert all(rest_of(stream).endswith(b"0\r\n\r\n") for stream in streams)
        _, errors = process.communicate(timeout=20)
        assert "Traceback" not in errors
        assert "Cancel" not in errors
