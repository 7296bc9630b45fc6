"""The table of names, levels of each kind of user, and the hook of a mounted dashboard."""

import asyncio
import functools
import grp
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from forq.errors import ConfigError, UsageError
from forq.web.access import Access, User
from forq.web.names import ACTIONS, KINDS, VIEWS, level_for
from forq.web.peers import SCOPE_KEY, WebPeer
from forq.web.refusals import Refused
from forq.web.settings import WebSettings

LOCAL = WebSettings(listen="127.0.0.1:9465")
OPEN = {"overview", "queue", "jobs", "job", "flow", "batch", "processes"}
OTHER = 4_000_000_000


def request(peer: WebPeer | None = None, headers: dict[str, str] | None = None, **scope: Any) -> Request:
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    known = {} if peer is None else {SCOPE_KEY: peer}
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw, **known, **scope})


def local(uid: int, *groups: int) -> Request:
    return request(WebPeer("unix", True, uid, frozenset(groups)))


def permitted(access: Access, made: Request) -> frozenset[str]:
    return asyncio.run(access.permitted(made))


def test_the_table_has_every_view_and_action() -> None:
    assert OPEN | {"job.data", "dead", "schedules", "logs", "stack", "options"} == VIEWS
    assert len(ACTIONS) == 14
    assert set(KINDS) == VIEWS | ACTIONS
    assert all(name.partition(".")[2] for name in ACTIONS)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_what_each_level_may_do(name: str) -> None:
    assert level_for(name, "act") == "act"
    assert level_for(name, "read") == ("read" if name in OPEN else "forbidden")
    assert level_for(name, "forbidden") == "forbidden"


@pytest.mark.parametrize("name", ["", "queue.delete", "Overview", "__class__"])
def test_a_name_that_is_not_in_the_table_is_never_permitted(name: str) -> None:
    access = Access.mounted(lambda request, name: "act")
    for made in (access.permits(request(), name), access.require(request(), name)):
        with pytest.raises(UsageError, match="neither a view nor an action"):
            asyncio.run(made)


def test_local_users_have_the_rights_of_the_control_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forq.web.access.group_id", {"ops": 51, "staff": 52, None: None}.get)
    access = Access(WebSettings(listen="/run/forq/web.sock", control_group="ops", control_read_group="staff"))
    assert permitted(access, local(0)) == set(KINDS)
    assert permitted(access, local(os.geteuid())) == set(KINDS)
    assert permitted(access, local(OTHER, 1, 51)) == set(KINDS)
    assert permitted(access, local(OTHER, 52)) == OPEN
    assert permitted(access, local(OTHER, 51, 52)) == set(KINDS)
    for made in (local(OTHER, 1), request(WebPeer("unix")), request(WebPeer("tcp", False, None, None, "10.0.0.1"))):
        with pytest.raises(Refused) as caught:
            asyncio.run(access.require(made, "overview"))
        assert caught.value.status == 403
        assert "control_group" in caught.value.advice
    with pytest.raises(Refused):
        asyncio.run(access.require(request(), "overview"))


def test_without_groups_only_root_and_our_user_are_admitted() -> None:
    access = Access(LOCAL)
    with pytest.raises(Refused):
        asyncio.run(access.user(local(OTHER, 0)))
    assert permitted(access, local(0)) == set(KINDS)


def test_groups_of_a_loopback_client_are_asked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    now = [0.0]
    group = grp.getgrgid(0).gr_name

    def groups(uid: int) -> frozenset[int]:
        asked.append(uid)
        return frozenset({0})

    monkeypatch.setattr("forq.web.access.groups_of_user", groups)
    access = Access(WebSettings(listen="127.0.0.1:1", control_read_group=group), clock=lambda: now[0])
    peer = WebPeer("tcp", True, OTHER, None, "127.0.0.1")
    for _ in range(5):
        assert asyncio.run(access.user(request(peer))).level == "read"
    assert asked == [OTHER]
    now[0] += 11
    asyncio.run(access.user(request(peer)))
    assert asked == [OTHER, OTHER]


def test_settings_that_cannot_work_are_refused_at_start(tmp_path: Path) -> None:
    for settings in (
        WebSettings(listen="127.0.0.1:1", control_group="no-such-group"),
        WebSettings(listen="127.0.0.1:1", users=str(tmp_path / "nothing")),
    ):
        with pytest.raises(ConfigError):
            Access(settings)
    with pytest.raises(ConfigError, match="authorize"):
        Access(None)


def test_passwords_across_a_network_without_a_proxy_are_warned_of(
    users_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Access(WebSettings(listen="127.0.0.1:1", users=str(users_file))).close()
    Access(WebSettings(listen="0.0.0.0:1", users=str(users_file), proxies=("10.0.0.5",))).close()
    assert "in the clear" not in caplog.text
    Access(WebSettings(listen="0.0.0.0:1", users=str(users_file))).close()
    assert "in the clear" in caplog.text


def test_read_only_forbids_actions_and_nothing_else() -> None:
    for access in (
        Access(WebSettings(listen="127.0.0.1:1", read_only=True)),
        Access.mounted(lambda request, name: "act", read_only=True),
    ):
        assert permitted(access, local(0)) == VIEWS
        with pytest.raises(Refused, match="read-only"):
            asyncio.run(access.require(local(0), "job.kill"))


def test_the_groups_and_the_user_are_found_once_per_request() -> None:
    access = Access(LOCAL)
    made = local(0)
    first = asyncio.run(access.user(made))
    assert asyncio.run(access.user(made)) is first
    assert first == User("root", "act", "local", "uid 0")


def test_a_proxy_elsewhere_is_known_by_its_address() -> None:
    access = Access(WebSettings(listen="0.0.0.0:1", proxies=("10.0.0.0/24", "2001:db8::/64"), proxy_actors=("alice",)))
    header = {"X-Forwarded-User": "alice"}
    for address in ("10.0.0.7", "2001:db8::7"):
        user = asyncio.run(access.user(request(WebPeer("tcp", False, None, None, address), header)))
        assert (user.name, user.level) == ("alice", "act")
    # Local users may have such an address, too.
    for peer in (
        WebPeer("tcp", False, None, None, "10.0.1.7"),
        WebPeer("tcp", True, None, None, "10.0.0.7"),
        WebPeer("tcp", True, OTHER, None, "10.0.0.7"),
        WebPeer("tcp"),
        WebPeer("unix", True, 0, frozenset()),
    ):
        with pytest.raises(Refused):
            asyncio.run(access.user(request(peer, header)))


def test_names_of_a_proxy_may_be_unicode() -> None:
    access = Access(WebSettings(listen="0.0.0.0:1", proxies=("10.0.0.7",)))
    made = request(WebPeer("tcp", False, None, None, "10.0.0.7"), {"X-Forwarded-User": "Zoë"})
    assert asyncio.run(access.user(made)).name == "Zoë"


def test_one_ipv6_client_is_its_network() -> None:
    access = Access(LOCAL)
    for last in ("1", "ffff:1"):
        made = request(WebPeer("tcp", False, None, None, f"2001:db8:0:1::{last}"))
        assert asyncio.run(access.client(made)) == "2001:db8:0:1::/64"


# A mounted dashboard.


def answering(answer: Any) -> Any:
    return lambda request, name: answer


async def coroutine(request: Any, name: str) -> Any:
    return "read" if name == "job.data" else "forbidden"


class Hook:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, request: Any, name: str) -> Any:
        self.asked.append(name)
        return "act"


def test_a_mounted_dashboard_permits_what_the_hook_answers_for_that_name() -> None:
    assert permitted(Access.mounted(answering("forbidden")), request()) == set()
    # Also what may show data: the application has decided about this very name.
    assert permitted(Access.mounted(answering("read")), request()) == VIEWS
    assert permitted(Access.mounted(answering("act")), request()) == set(KINDS)
    assert permitted(Access.mounted(coroutine), request()) == {"job.data"}
    assert permitted(Access.mounted(functools.partial(coroutine)), request()) == {"job.data"}


def test_the_hook_is_asked_once_per_request_and_name() -> None:
    hook = Hook()
    access, made = Access.mounted(hook), request()
    assert permitted(access, made) == permitted(access, made) == set(KINDS)
    assert sorted(hook.asked) == sorted(KINDS)


@pytest.mark.parametrize("answer", [None, True, 1, "", "ACT", "write", ["act"], b"act", object()])
def test_any_other_answer_forbids_and_is_logged(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert permitted(Access.mounted(answering(answer)), request()) == set()
    assert "authorize answered" in caplog.text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_of_the_hook_forbids_and_is_logged(asynchronous: bool, caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: Any, name: str) -> Any:
        raise ValueError("no database")

    async def fail_later(request: Any, name: str) -> Any:
        raise ValueError("no database")

    access = Access.mounted(fail_later if asynchronous else fail)
    with caplog.at_level(logging.ERROR):
        assert not asyncio.run(access.permits(request(), "overview"))
    assert "authorize failed; refused name=overview" in caplog.text
    assert "no database" in caplog.text
    with pytest.raises(Refused) as caught:
        asyncio.run(access.require(request(), "overview"))
    assert "no database" not in caught.value.reason + caught.value.advice


def test_a_hook_that_blocks_does_not_block_the_event_loop() -> None:
    async def both() -> bool:
        loop, running = asyncio.get_running_loop(), asyncio.Event()

        def hook(request: Any, name: str) -> Any:
            # Only an event loop that runs can carry this out.
            return asyncio.run_coroutine_threadsafe(answer(), loop).result(10)

        async def answer() -> str:
            running.set()
            return "act"

        return await Access.mounted(hook).permits(request(), "overview") and running.is_set()

    assert asyncio.run(both())


class Person:
    display_name = "Alice"


class DjangoUser:
    username = "bob"


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ({}, "-"),
        ({"user": Person()}, "Alice"),
        ({"user": DjangoUser()}, "bob"),
        ({"user": object()}, "-"),
        ({"user": Person(), "state": {"forq_user": "carol"}}, "carol"),
        ({"state": {"forq_user": "x" * 500}}, "x" * 128),
    ],
)
def test_the_name_for_the_log_of_actions_comes_from_the_application(scope: dict[str, Any], name: str) -> None:
    user = asyncio.run(Access.mounted(answering("act")).require(request(**scope), "overview"))
    assert (user.name, user.source) == (name, "app")


def test_the_hook_may_name_the_user() -> None:
    def hook(request: Any, name: str) -> Any:
        request.state.forq_user = "dave"
        return "act"

    assert asyncio.run(Access.mounted(hook).require(request(), "job.kill")).name == "dave"
