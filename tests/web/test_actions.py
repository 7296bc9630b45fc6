"""What a form may contain, and what the actions make of it."""

import pytest

from forq.errors import InvalidName, UsageError
from forq.web.actions import ACTIONS, Form
from forq.web.names import KINDS


def form(*items: tuple[str, str]) -> Form:
    return Form(items)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            "mails",
            "//evil.example",
            "/\\evil.example",
            "https://evil.example/",
            "javascript:alert(1)",
            "/a\nb",
            "/a b",
        ),
        *("/..", "/../logout", "/queues/../../x", "/.%2E/x", "/a\\..\\x", "/./x", "/..?a=b", "/..#a"),
    ],
)
def test_an_action_returns_only_to_pages_of_the_dashboard(path: str) -> None:
    assert form(("back", path)).back == "/"


def test_an_action_returns_to_the_page_it_came_from() -> None:
    assert form(("back", "/queues/mails/jobs?state=dead")).back == "/queues/mails/jobs?state=dead"


@pytest.mark.parametrize("name", ["", "a b", "../etc", "{x}", "<b>", "a" * 65])
def test_a_queue_has_an_allowed_name(name: str) -> None:
    with pytest.raises(InvalidName):
        _ = form(("queue", name)).queue


def test_no_selection_is_an_error() -> None:
    with pytest.raises(UsageError, match="no job is selected"):
        _ = form(("queue", "mails")).ids


def test_too_many_jobs_are_an_error() -> None:
    with pytest.raises(UsageError, match="at most 1000"):
        _ = form(*(("id", str(number)) for number in range(1001))).ids


def test_selected_jobs_are_taken_once_each() -> None:
    assert form(("id", "a"), ("id", "b"), ("id", "a")).ids == ["a", "b"]


def test_only_changed_options_are_sent() -> None:
    given = form(
        *(("option.rate", "off"), ("before.rate", "off"), ("option.timeout", "30s"), ("before.timeout", "1m")),
    )
    assert given.options == {"timeout": "30s"}


def test_a_filter_counts_only_for_all_matching_jobs() -> None:
    fields = (("filter.type", "send"), ("filter.since", "12.5"))
    assert form(("which", "selected"), *fields).filter is None
    assert form(("which", "matching"), *fields).filter == {"type": "send", "since": 12.5}


def test_the_log_names_the_jobs_that_an_action_is_about() -> None:
    fields = (("queue", "mails"), ("id", "a"), ("filter.type", "send"))
    assert form(("which", "selected"), *fields).target() == {"queue": "mails", "which": "selected", "ids": ["a"]}
    assert form(("which", "matching"), *fields).target() == {"queue": "mails", "which": "matching"}


@pytest.mark.parametrize("text", ["yesterday", "nan", "inf", "-inf"])
def test_a_broken_time_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="seconds"):
        _ = form(("which", "matching"), ("filter.since", text)).filter


def test_a_form_is_read_as_browsers_send_it() -> None:
    given = Form.read("application/x-www-form-urlencoded; charset=utf-8", b"queue=mails&id=a%26b&id=%C3%BC&key=")
    assert given.items() == [("queue", "mails"), ("id", "a&b"), ("id", "\u00fc"), ("key", "")]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data; boundary=x", b""),
        ("", b"queue=mails"),
        ("application/x-www-form-urlencoded", b"\xff"),
        ("application/x-www-form-urlencoded", b"a=1&" * 3000),
    ],
)
def test_other_bodies_are_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(UsageError):
        Form.read(content_type, body)


def test_each_action_has_a_name_that_access_knows() -> None:
    assert set(ACTIONS) <= set(KINDS)
