"""Dead jobs in Django's admin: list, detail, retry, discard, permissions, hostile texts, and no Redis."""

import re
from collections.abc import Iterator
from datetime import UTC
from html import unescape
from io import StringIO
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.test import Client as Browser
from django.test.utils import setup_test_environment, teardown_test_environment
from django.utils import timezone

from forq.client import Client, Queue
from tests.support.drive.dead_jobs import bury

LIST = "/admin/forq/deadjob/"
HOSTILE = "<script>alert('x')</script>\"'&"


@pytest.fixture(scope="module", autouse=True)
def _test_environment() -> Iterator[None]:
    setup_test_environment()
    yield
    teardown_test_environment()


@pytest.fixture
def mails(project: None, redis_url: str) -> Queue:
    client = Client(redis_url)
    client.create_queue("shop")
    return client.create_queue("mails")


def browser(*permissions: str, superuser: bool = False) -> Browser:
    """Logged in as a member of the staff with these permissions."""
    user = apps.get_model("auth", "User").objects.create(username="ann", is_staff=True, is_superuser=superuser)
    user.user_permissions.set(apps.get_model("auth", "Permission").objects.filter(codename__in=permissions))
    found = Browser()
    found.force_login(user)
    return found


def rows(page: Any) -> list[list[str]]:
    """The texts of the columns."""
    found = []
    table = page.content.decode().partition('<table id="result_list">')[2].partition("</table>")[0]
    for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)[1:]:
        cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
        found.append([unescape(" ".join(re.sub(r"<[^>]*>", " ", cell).split())) for cell in cells][1:])
    return found


def ids(page: Any) -> list[str]:
    return [row[0] for row in rows(page)]


def post(user: Browser, action: str, *references: str, **more: str) -> Any:
    return user.post(LIST, {"action": action, "_selected_action": references, **more}, follow=True)


def texts(response: Any) -> list[str]:
    return [str(message) for message in response.context["messages"]]


def log_entries() -> list[tuple[str, int, str]]:
    entries = apps.get_model("admin", "LogEntry").objects.order_by("pk")
    return [(entry.object_id, entry.action_flag, entry.get_change_message()) for entry in entries]


def test_the_list_has_all_queues_newest_first_and_a_filter(mails: Queue, redis_url: str) -> None:
    bury(redis_url, "mails", "m1@1", died_ms=1_000, job_type="orders.send_receipt")
    bury(redis_url, "shop", "s1@1", died_ms=2_000, attempts=10)
    bury(redis_url, "mails", "m2@2", died_ms=3_000)
    user = browser(superuser=True)
    with timezone.override(UTC):
        page = user.get(LIST)
    assert rows(page) == [
        ["m2", "-", "ValueError no", "mails", "1970-01-01 00:00:03", "1"],
        ["s1", "-", "ValueError no", "shop", "1970-01-01 00:00:02", "10+"],
        ["m1", "orders.send_receipt", "ValueError no", "mails", "1970-01-01 00:00:01", "1"],
    ]
    assert ids(user.get(LIST, {"queue": "shop"})) == ["s1"]
    assert user.get(LIST, {"queue": "other"}).status_code == 404
    assert "Dead jobs" in user.get("/admin/").content.decode()


def test_pages_over_several_queues_have_each_job_once(
    mails: Queue, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forq.contrib.django.dead_job_admin.PER_PAGE", 3)
    # Several died in the same millisecond, in both queues, and across the end of a page.
    for number in range(16):
        bury(redis_url, ("mails", "shop")[number % 2], f"j{number}@{number}", died_ms=1_000 + number // 6)
    user = browser(superuser=True)
    found: list[str] = []
    page, url = None, LIST
    while url:
        page = user.get(url)
        found += ids(page)
        url = LIST + page.context["next_page"] if page.context["next_page"] else ""
    assert len(found) == 16
    assert set(found) == {f"j{number}" for number in range(16)}
    assert user.get(LIST, {"after": "x"}).status_code == 400


def test_detail_shows_the_error_and_the_data_on_request_only(mails: Queue, redis_url: str) -> None:
    bury(redis_url, "mails", "m1@1", data={"secret": HOSTILE}, error=HOSTILE)
    user = browser("view_deadjob")
    url = f"{LIST}mails_2Fm1_401/change/"
    assert url in user.get(LIST).content.decode()
    page = user.get(url).content.decode()
    assert "line 2 of the traceback" in page
    assert "secret" not in page
    shown = user.get(url, {"data": ""}).content.decode()
    assert "secret" in shown
    for text in (page, shown, user.get(LIST).content.decode()):
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert" in text


@pytest.mark.parametrize(
    "packed", [b"broken", b"c5 1\n[1]\n\xff\n[", b'c5 1000000 0 0 0\n[null,null,1]\n"text"\n["x"]']
)
def test_a_broken_record_is_shown_as_far_as_possible(mails: Queue, redis_url: str, packed: bytes) -> None:
    bury(redis_url, "mails", "m1@1", packed=packed)
    user = browser("view_deadjob")
    assert user.get(LIST).status_code == 200
    assert user.get(f"{LIST}mails_2Fm1_401/change/", {"data": ""}).status_code == 200


def test_hostile_ids_and_references_are_escaped_and_refused(mails: Queue, redis_url: str) -> None:
    job_id = "<b>'\"&/_2F@x%2e"
    bury(redis_url, "mails", f"{job_id}@7")
    user = browser(superuser=True)
    page = user.get(LIST).content.decode()
    assert "<b>'" not in page
    (link,) = re.findall(r'href="([^"]*/change/)"', page)
    assert user.get(unescape(link)).status_code == 200
    assert user.get(f"{LIST}mails_2F{HOSTILE}/change/", follow=True).status_code == 200
    for reference in (HOSTILE, "other/x@1", "mails/x", "mails/x@1", "mails/\n@1", "/", ""):
        response = post(user, "retry", reference)
        assert texts(response)[0].startswith("Could not retry 1")
        assert "<script>alert" not in response.content.decode()
    assert post(user, "discard", HOSTILE).status_code == 200
    assert texts(post(user, "retry", f"mails/{job_id}@7")) == ["Retried 1 job."]
    assert mails.job(job_id)["state"] == "waiting"


def test_retry_and_discard_are_logged(mails: Queue, redis_url: str) -> None:
    for number in range(4):
        bury(redis_url, "mails", f"m{number}@{number}")
    user = browser(superuser=True)
    mails.enqueue({}, id="m1")
    response = post(user, "retry", "mails/m0@0", "mails/m1@1")
    assert texts(response)[0] == "Retried 1 job."
    assert texts(response)[1].startswith("Could not retry 1: mails/m1@1: ")
    assert mails.job("m0")["state"] == "waiting"
    confirmation = post(user, "discard", "mails/m2@2")
    assert "Discard 1 job?" in confirmation.content.decode()
    assert sorted(ids(user.get(LIST))) == ["m1", "m2", "m3"]
    assert texts(post(user, "discard", "mails/m2@2", "mails/m3@3", post="yes")) == ["Discarded 2 jobs."]
    assert ids(user.get(LIST)) == ["m1"]
    assert log_entries() == [
        ("mails/m0@0", 2, "Retried."),
        ("mails/m2@2", 3, "Discarded."),
        ("mails/m3@3", 3, "Discarded."),
    ]
    gone = user.get(f"{LIST}mails_2Fm2_402/change/", follow=True)
    assert "It was retried or discarded" in texts(gone)[0]
    assert texts(post(user, "retry")) == ["No job was selected."]
    assert texts(post(user, "", "mails/m1@1")) == ["No action was selected."]


@pytest.mark.parametrize(
    ("permissions", "allowed"),
    [
        ((), set()),
        (("view_deadjob",), set()),
        (("change_deadjob",), {"retry"}),
        (("delete_deadjob",), set()),
        (("view_deadjob", "delete_deadjob"), {"discard"}),
    ],
)
def test_without_permission_nothing_is_shown_and_changes_are_refused(
    mails: Queue, redis_url: str, permissions: tuple[str, ...], allowed: set[str]
) -> None:
    bury(redis_url, "mails", "m1@1")
    user = browser(*permissions)
    may_view = bool({"view_deadjob", "change_deadjob"} & set(permissions))
    page = user.get(LIST)
    assert page.status_code == (200 if may_view else 403)
    assert user.get(f"{LIST}mails_2Fm1_401/change/").status_code == page.status_code
    assert (LIST in user.get("/admin/").content.decode()) == may_view
    offered = {action for action in ("retry", "discard") if f'value="{action}"' in page.content.decode()}
    assert offered == allowed
    for action in ("retry", "discard"):
        assert (post(user, action, "mails/m1@1").status_code == 200) == (action in allowed)


def test_a_visitor_has_to_log_in_and_posts_need_the_token(mails: Queue) -> None:
    assert Browser().get(LIST).status_code == 302
    user = Browser(enforce_csrf_checks=True)
    user.cookies = browser(superuser=True).cookies
    assert user.post(LIST, {"action": "retry", "_selected_action": "mails/m1@1"}).status_code == 403


def test_the_pages_say_that_redis_is_down(project: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.conf import settings

    monkeypatch.setitem(settings.FORQ, "URL", "redis://127.0.0.1:1/0")
    user = browser(superuser=True)
    for url in (LIST, f"{LIST}mails_2Fm1_401/change/"):
        page = user.get(url)
        assert page.status_code == 503
        assert "cannot reach Redis" in page.content.decode()
    response = user.post(LIST, {"action": "retry", "_selected_action": "mails/m1@1"})
    assert response.status_code == 302
    ((reference, flag, message),) = log_entries()
    assert (reference, flag) == ("mails/m1@1", 2)
    assert message.startswith("Tried to retry: cannot reach Redis")


def test_dumpdata_does_not_look_for_a_table(project: None) -> None:
    for everything in (False, True):
        dumped = StringIO()
        call_command("dumpdata", "forq", "orders", all=everything, stdout=dumped)
        assert dumped.getvalue().strip() == "[]"


def test_migrations_are_complete(project: None) -> None:
    out = StringIO()
    call_command("makemigrations", "forq", check=True, dry_run=True, stdout=out)
    assert "No changes" in out.getvalue()
