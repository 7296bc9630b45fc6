"""The dashboard inside a Django project: users, permissions, sessions, hosts, and everything else is Django's."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from django.apps import apps
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.core.asgi import get_asgi_application
from django.core.exceptions import ImproperlyConfigured
from django.db.backends.signals import connection_created
from django.test import override_settings

from forq.client import Client, Queue
from forq.contrib.django.dashboard import dashboard_application
from forq.web.names import ACTIONS
from tests.docs.pages import ROOT
from tests.examples.guide_code import code_of
from tests.support.drive.asgi_site import Reply, Site, crawl, open_stream, rest_of
from tests.support.drive.dead_jobs import bury
from tests.support.drive.wait import wait_until

PROJECT = "tests.support.django_project"
REMOVING = {"job.cancel", "job.kill", "job.discard"}
MODEL_BACKEND = "django.contrib.auth.backends.ModelBackend"


@pytest.fixture
def mails(project: None, redis_url: str) -> Queue:
    client = Client(redis_url)
    client.create_queue("shop")
    mails = client.create_queue("mails")
    mails.enqueue({"to": "secret@example.com"}, id="first", type="send")
    bury(redis_url, "mails", "m1@1")
    return mails


def site(**options: Any) -> Site:
    return Site(dashboard_application(get_asgi_application()), **options)


def user(*permissions: str, superuser: bool = False, name: str = "ann") -> Any:
    found = apps.get_model("auth", "User").objects.create(username=name, is_staff=True, is_superuser=superuser)
    found.user_permissions.set(apps.get_model("auth", "Permission").objects.filter(codename__in=permissions))
    return found


def cookie(user: Any, backend: str = MODEL_BACKEND) -> str:
    """Of a new session of this user."""
    session = import_module(settings.SESSION_ENGINE).SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = backend
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save()
    return f"{settings.SESSION_COOKIE_NAME}={session.session_key}"


def act(site: Site, name: str, who: str, **headers: str) -> Reply:
    body = "queue=mails&id=m1@1&confirmed=yes&back=/queues/mails"
    return site.post(f"/forq/do/{name}", body, cookie=who, **headers)


@override_settings(LOGIN_URL="admin:login")
def test_a_browser_without_a_user_is_sent_to_the_login_page_and_back(mails: Queue) -> None:
    assert site().get("/forq").headers["location"] == "/admin/login/?next=/forq/"
    for path in ("/forq/", "/forq/queues/mails/jobs?state=dead&type=a%26b", "/forq/queues/none"):
        reply = site().get(path)
        assert reply.status == 302
        target = urlsplit(reply.headers["location"])
        assert (target.scheme, target.netloc, target.path) == ("", "", "/admin/login/")
        assert parse_qs(target.query) == {"next": [path]}
    below = site(root_path="/shop").get("/shop/forq/dead")
    assert below.headers["location"] == f"/shop/admin/login/?next={quote('/shop/forq/dead')}"


@override_settings(LOGIN_URL="https://login.example.com/")
def test_a_login_page_elsewhere_gets_the_whole_address(mails: Queue) -> None:
    location = site().get("/forq/dead").headers["location"]
    assert location == f"https://login.example.com/?next={quote('http://testserver/forq/dead')}"


def test_other_requests_without_a_user_are_refused(mails: Queue) -> None:
    for reply in (
        site().get("/forq/live/", accept="text/event-stream"),
        act(site(), "queue.pause", ""),
        site().get("/forq/", accept="*/*", cookie="sessionid=unknown"),
    ):
        assert reply.status == 403
        assert "not logged in" in reply.text
    assert not mails.status()["paused"]


def test_a_user_who_becomes_inactive_is_refused(mails: Queue) -> None:
    ann = user(superuser=True)
    all_users = "django.contrib.auth.backends.AllowAllUsersModelBackend"
    with override_settings(AUTHENTICATION_BACKENDS=[MODEL_BACKEND, all_users]):
        strict, lax = cookie(ann), cookie(ann, all_users)
        assert site().get("/forq/", cookie=strict).status == site().get("/forq/", cookie=lax).status == 200
        ann.is_active = False
        ann.save()
        # Django's default backend finds no inactive user.
        assert site().get("/forq/", cookie=strict).status == 302
        assert site().get("/forq/", cookie=lax).status == 403
        assert {act(site(), "queue.pause", who).status for who in (strict, lax)} == {403}


@pytest.mark.parametrize("permissions", [(), ("delete_deadjob",), ("view_outboxentry", "change_user")])
def test_a_user_without_a_permission_is_told_which_one_is_needed(mails: Queue, permissions: tuple[str, ...]) -> None:
    who = cookie(user(*permissions))
    for path in ("/forq/", "/forq/queues/none", "/forq/nothing", "/forq/live/"):
        reply = site().get(path, cookie=who)
        assert reply.status == 403
        assert "You (ann) may not use this dashboard." in reply.text
        assert "forq.view_deadjob" in reply.text
    assert act(site(), "job.discard", who).status == 403


def test_with_the_permission_to_view_a_user_sees_everything_and_changes_nothing(mails: Queue) -> None:
    who = cookie(user("view_deadjob"))
    page = site().get("/forq/queues/mails/job?id=first&show=data", cookie=who)
    assert "secret@example.com" in page.text
    for path in ("/forq/", "/forq/dead", "/forq/queues/mails/dead", "/forq/queues/mails/options", "/forq/schedules"):
        reply = site().get(path, cookie=who)
        assert reply.status == 200
        assert 'method="post" action="/forq/do/job' not in reply.text
    assert {act(site(), name, who).status for name in ACTIONS} == {403}
    assert mails.status()["dead"] == 1


def test_with_the_permission_to_change_jobs_are_kept(mails: Queue) -> None:
    who = cookie(user("change_deadjob"))
    assert {act(site(), name, who).status for name in REMOVING} == {403}
    assert act(site(), "queue.pause", who).status == 303
    assert mails.status()["paused"]
    assert act(site(), "job.retry", who).status == 303
    assert mails.status()["dead"] == 0


def test_with_the_permission_to_delete_jobs_are_removed(mails: Queue) -> None:
    who = cookie(user("view_deadjob", "delete_deadjob"))
    assert {act(site(), name, who).status for name in ACTIONS - REMOVING} == {403}
    assert act(site(), "job.discard", who).status == 303
    assert mails.status()["dead"] == 0


def test_a_superuser_may_do_everything_and_is_named_in_the_log(mails: Queue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forq.web.actions")
    who = cookie(user(superuser=True))
    found = crawl(site(), "/forq/", cookie=who)
    assert all(url.startswith("/forq/") for url in found)
    assert {url: status for url, status in found.items() if status >= 400 and "/do/" not in url} == {}
    assert "/forq/queues/mails/job?id=m1&fence=1" in found
    done = act(site(), "queue.pause", who)
    assert (done.status, done.headers["location"].partition("=")[0]) == (303, "/forq/queues/mails?note")
    assert mails.status()["paused"]
    assert "ann" in next(line for line in caplog.messages if "queue.pause" in line)


def test_a_read_only_dashboard_refuses_actions_of_a_superuser(mails: Queue) -> None:
    only = Site(dashboard_application(get_asgi_application(), read_only=True))
    who = cookie(user(superuser=True))
    assert only.get("/forq/", cookie=who).status == 200
    assert {act(only, name, who).status for name in ACTIONS} == {403}


def test_a_request_of_another_site_is_refused(mails: Queue) -> None:
    who = cookie(user(superuser=True))
    for headers in (
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "", "origin": "https://evil.example"},
        {"sec_fetch_site": "", "origin": ""},
    ):
        assert act(site(), "queue.pause", who, **headers).status == 403
    assert not mails.status()["paused"]
    assert act(site(), "queue.pause", who, sec_fetch_site="", origin="http://testserver").status == 303


@pytest.mark.parametrize("debug", [False, True])
def test_only_allowed_hosts_are_answered(mails: Queue, debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    who = cookie(user(superuser=True))
    with override_settings(DEBUG=debug, ALLOWED_HOSTS=["shop.example"]):
        assert site().get("/forq/", cookie=who, host="shop.example:8000").status == 200
        for host in ("evil.example", "shop.example.evil.example", "a b", ""):
            for path in ("/forq/", "/forq/static/forq.css", "/forq/live/"):
                reply = site().get(path, cookie=who, host=host)
                assert reply.status == 400
                assert "mails" not in reply.text
        assert act(site(), "queue.pause", who, host="evil.example").status == 400
    assert not mails.status()["paused"]
    assert "evil.example" in caplog.text
    with override_settings(DEBUG=debug, ALLOWED_HOSTS=[]):
        assert site().get("/forq/", cookie=who, host="localhost:8000").status == (200 if debug else 400)
        assert site().get("/forq/", cookie=who, host="evil.example").status == 400


def test_behind_a_proxy_the_settings_of_django_say_what_the_browser_sees(mails: Queue) -> None:
    who = cookie(user(superuser=True))
    sent = {"host": "10.0.0.1:8000", "x_forwarded_host": "shop.example", "x_forwarded_proto": "https"}
    own = {"sec_fetch_site": "", "origin": "https://shop.example"}
    assert act(site(), "queue.pause", who, **sent, **own).status == 403
    with override_settings(
        USE_X_FORWARDED_HOST=True,
        SECURE_PROXY_SSL_HEADER=("HTTP_X_FORWARDED_PROTO", "https"),
        ALLOWED_HOSTS=["shop.example"],
    ):
        assert act(site(), "queue.pause", who, **sent, **own).status == 303
        assert act(site(), "queue.resume", who, **{**sent, "x_forwarded_host": "evil.example"}, **own).status == 400


@pytest.mark.parametrize(
    ("path", "root_path", "script_name"),
    [("/shop/forq/", "/shop", None), ("/shop/forq/", "", "/shop"), ("/forq/", "", None)],
)
def test_links_and_live_pages_are_below_the_place_of_the_project(
    mails: Queue, path: str, root_path: str, script_name: str | None
) -> None:
    who = cookie(user(superuser=True))
    with override_settings(FORCE_SCRIPT_NAME=script_name):
        found = crawl(site(root_path=root_path), path, cookie=who)
        assert all(url.startswith(path) for url in found)
        assert {url: status for url, status in found.items() if status >= 400 and "/do/" not in url} == {}
        assert f"{path}live/queues/mails" in found


@pytest.mark.parametrize("engine", ["db", "cached_db", "cache", "file", "signed_cookies"])
def test_sessions_of_every_backend_are_read(mails: Queue, engine: str, tmp_path: Path) -> None:
    with override_settings(
        SESSION_ENGINE=f"django.contrib.sessions.backends.{engine}",
        SESSION_FILE_PATH=str(tmp_path),
        SESSION_COOKIE_NAME="own_name",
    ):
        who = cookie(user("view_deadjob"))
        assert site().get("/forq/", cookie=who).status == 200
        assert "set-cookie" not in site().get("/forq/", cookie=who).headers


def test_a_session_ends_with_the_password_and_its_cookie_is_removed(mails: Queue) -> None:
    ann = user(superuser=True)
    who = cookie(ann)
    ann.set_password("another")
    ann.save()
    reply = site().get("/forq/", cookie=who)
    assert reply.status == 302
    assert 'sessionid=""' in reply.headers["set-cookie"]


def test_a_session_lives_on_as_the_settings_say(mails: Queue) -> None:
    ann = user(superuser=True)
    who = cookie(ann)
    with override_settings(SESSION_SAVE_EVERY_REQUEST=True):
        reply = site().get("/forq/", cookie=who)
        assert reply.headers["set-cookie"].startswith(who)
    # A new key makes Django store the session under another name.
    with override_settings(SECRET_KEY="new", SECRET_KEY_FALLBACKS=[settings.SECRET_KEY]):
        reply = site().get("/forq/", cookie=who)
        assert reply.status == 200
        renewed = reply.headers["set-cookie"].partition(";")[0]
        assert renewed.startswith("sessionid=")
        assert renewed != who
        assert site().get("/forq/", cookie=renewed).status == 200


def test_without_sessions_nobody_is_admitted_and_the_log_says_why(
    mails: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    who = cookie(user(superuser=True))

    def fail(request: Any) -> Any:
        raise OSError("the database is gone")

    monkeypatch.setattr("forq.contrib.django.dashboard_users.get_user", fail)
    for reply in (site().get("/forq/", cookie=who), act(site(), "queue.pause", who)):
        assert reply.status == 403
        assert "database" not in reply.text
    assert "the database is gone" in caplog.text
    assert not mails.status()["paused"]


def test_the_database_connections_of_a_request_are_closed_before_its_live_page_begins(mails: Queue) -> None:
    who = cookie(user("view_deadjob"))
    opened: list[Any] = []

    def note(connection: Any, **_: Any) -> None:
        opened.append(connection)

    connection_created.connect(note)
    try:
        stream = site().events("/forq/live/", 2, cookie=who)
    finally:
        connection_created.disconnect(note)
    assert stream.text.count("event: update") == 2
    assert len(opened) == 1
    assert opened[0].connection is None


def test_everything_else_is_for_django(mails: Queue) -> None:
    for path, status in (("/admin/login/", 200), ("/", 404), ("/forqs/", 404), ("/shop/forq/", 404)):
        reply = site().get(path)
        assert reply.status == status
        assert "content-security-policy" not in reply.headers
    seen: list[tuple[str, str]] = []

    async def record(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["type"], scope.get("path", "")))

    app = dashboard_application(record, "/jobs/board")
    for scope in ({"type": "lifespan"}, {"type": "websocket", "path": "/jobs/board/x"}, {"type": "http", "path": "/x"}):
        asyncio.run(app(scope, None, None))  # type: ignore[arg-type]
    assert seen == [("lifespan", ""), ("websocket", "/jobs/board/x"), ("http", "/x")]
    assert Site(app).get("/jobs/board/static/forq.css").status == 200


@pytest.mark.parametrize("prefix", ["", "/", "forq", "/forq/", "//forq"])
def test_a_wrong_prefix_is_explained(project: None, prefix: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="such as '/forq'"):
        dashboard_application(get_asgi_application(), prefix)


def test_a_project_without_users_is_refused(project: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "is_installed", lambda name: name != "django.contrib.auth")
    with pytest.raises(ImproperlyConfigured, match=r"needs 'django\.contrib\.auth' in INSTALLED_APPS"):
        dashboard_application(get_asgi_application())


WITHOUT_EXTRA = """
import sys
for name in ("starlette", "jinja2", "uvicorn"):
    sys.modules[name] = None
from forq.contrib.django.dashboard import dashboard_application
from django.core.asgi import get_asgi_application
from django.core.exceptions import ImproperlyConfigured
django = get_asgi_application()
from forq.contrib.django import app
try:
    dashboard_application(django)
except ImproperlyConfigured as exc:
    print(app.name, exc)
"""


def test_without_the_extra_all_but_the_dashboard_works(project_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRA], env=project_environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "shop the dashboard needs the package starlette: pip install 'forq[web]'\n", done.stderr


@pytest.fixture
def served(mails: Queue, project_environment: dict[str, str], tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """The project under uvicorn."""
    pytest.importorskip("uvicorn")
    code = code_of(ROOT / "docs/guide/dashboard.md")["shop/asgi.py"]
    (tmp_path / "asgi.py").write_text(code.replace("shop.settings", f"{PROJECT}.settings"))
    address = tmp_path / "web.sock"
    # The module names them.
    without_settings = {key: each for key, each in project_environment.items() if key != "DJANGO_SETTINGS_MODULE"}
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "asgi:application", "--uds", str(address)],
        cwd=tmp_path,
        env={**without_settings, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: address.exists() or process.poll() is not None, what="uvicorn listens")
        yield process, address
    finally:
        process.kill()
        process.communicate()


def test_a_server_with_an_open_live_page_ends_at_once(served: tuple[Any, Path]) -> None:
    process, address = served
    stream = open_stream(address, "/forq/live/", cookie(user("view_deadjob")))
    process.send_signal(signal.SIGTERM)
    assert rest_of(stream).endswith(b"0\r\n\r\n")
    _, errors = process.communicate(timeout=20)
    assert "Traceback" not in errors
