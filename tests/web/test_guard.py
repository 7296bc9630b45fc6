"""What the dashboard answers to raw requests: real uvicorn on loopback and on a Unix socket."""

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from forq.web.access import Access
from forq.web.guard import HEADERS, MAX_BODY_BYTES
from forq.web.settings import WebSettings
from tests.support.drive.wait import wait_until
from tests.web.serving import NOBODY, Answer, Served, as_user, basic, exchange, request

Serve = Callable[..., Served]

SAME = "same-origin"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def assert_protected(answer: Answer, *, cached: bool = False) -> None:
    """It has all headers, each once: `read_answer` would show the last of two."""
    expected = {name.lower(): value for name, value in HEADERS.items()}
    if cached:
        expected["cache-control"] = "no-cache"
    assert {name: answer.headers.get(name) for name in expected} == expected


def test_the_user_who_runs_forq_may_act_on_loopback(serve: Serve) -> None:
    served = serve()
    answer = served.get()
    assert (answer.status, answer.body.split()[1:3]) == (200, ["act", "local"])
    assert_protected(answer)
    assert served.post(Sec_Fetch_Site=SAME).status == 200
    assert served.site.acted == [(answer.body.split()[0], "mails")]


def test_the_user_who_runs_forq_may_act_on_a_unix_socket(
    serve: Serve, unix_listener: tuple[str, socket.socket]
) -> None:
    path, listener = unix_listener
    served = serve(path, listener=listener)
    assert served.get().body.split()[1:3] == ["act", "local"]
    assert served.post(Sec_Fetch_Site=SAME).status == 200


@needs_root
def test_another_local_user_is_refused_with_the_reason_and_what_to_set(serve: Serve) -> None:
    served = serve()

    def read() -> bytes:
        with served.connect() as sock:
            sock.sendall(request("/", {"Host": served.host, "Accept": "text/html"}))
            return b"".join(iter(lambda: sock.recv(65536), b""))

    answer = as_user(NOBODY, NOBODY, [], read).decode()
    assert answer.startswith("HTTP/1.1 403")
    assert "may not use this dashboard" in answer
    assert "control_group" in answer
    assert "<h1>403 Forbidden</h1>" in answer


@needs_root
@pytest.mark.parametrize(
    ("gid", "groups", "status", "acts"),
    [(1, [2, 54321], 200, 200), (1, [54322], 200, 403), (1, [2], 403, 403), (54321, [], 200, 200)],
)
def test_groups_decide_on_a_unix_socket(
    serve: Serve,
    unix_listener: tuple[str, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    gid: int,
    groups: list[int],
    status: int,
    acts: int,
) -> None:
    monkeypatch.setattr("forq.web.access.group_id", {"operators": 54321, "staff": 54322, None: None}.get)
    path, listener = unix_listener
    served = serve(path, listener=listener, control_group="operators", control_read_group="staff")

    def read() -> bytes:
        looked = served.get().status
        detail = served.get("/data").status
        acted = served.post(Sec_Fetch_Site=SAME).status
        return f"{looked} {detail} {acted}".encode()

    assert as_user(NOBODY, gid, groups, read).decode() == f"{status} {acts} {acts}"
    assert len(served.site.acted) == (acts == 200)


@needs_root
def test_groups_of_a_loopback_client_are_those_of_its_name(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forq.web.access.group_id", {"staff": 54322, None: None}.get)
    monkeypatch.setattr("forq.web.access.groups_of_user", lambda uid: frozenset({54322} if uid == NOBODY else ()))
    served = serve(control_read_group="staff")
    answer = as_user(NOBODY, NOBODY, [], lambda: served.get().body.encode())
    assert answer.split()[1:3] == [b"read", b"local"]


def test_a_request_that_a_proxy_passed_on_is_not_taken_for_the_proxys_user(serve: Serve) -> None:
    served = serve()
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP", "Via", "X-Forwarded-Host"):
        answer = served.send(request("/", {"Host": served.host, header: "10.0.0.9"}))
        assert answer.status == 403, header
        assert "`proxies`" in answer.body


def test_without_the_protocol_that_finds_the_peer_nobody_is_admitted(serve: Serve, monkeypatch: Any) -> None:
    monkeypatch.setattr("forq.web.access.SCOPE_KEY", "another key")
    assert serve().get().status == 403


# Requests of other sites.


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec_Fetch_Site": "same-origin"}, 200),
        ({"Sec_Fetch_Site": "same-origin", "Origin": "null"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "none"}, 403),
        ({"Sec_Fetch_Site": ""}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Origin": "http://HOST"}, 403),
        ({"Origin": "http://HOST"}, 200),
        ({"Origin": "HTTP://HOST"}, 200),
        ({"Origin": "https://HOST"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://HOST.evil.example"}, 403),
        ({"Origin": "http://HOST/"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({}, 403),
        ({"Referer": "http://HOST/"}, 403),
    ],
)
def test_only_our_own_pages_may_act(serve: Serve, headers: dict[str, str], status: int) -> None:
    served = serve()
    answer = served.post(**{name: value.replace("HOST", served.host) for name, value in headers.items()})
    assert answer.status == status
    assert len(served.site.acted) == (status == 200)
    assert_protected(answer)


def test_each_method_that_is_not_safe_is_checked(serve: Serve) -> None:
    served = serve()
    for method in ("POST", "PUT", "PATCH", "DELETE", "TRACE", "QUERY", "post", "BREW"):
        answer = served.send(request("/pause", {"Host": served.host, "Origin": "http://evil.example"}, method=method))
        assert answer.status == 403, method
    assert served.site.acted == []


def test_two_headers_of_a_kind_are_refused(serve: Serve) -> None:
    served = serve()
    twice = request("/pause", {"Host": served.host, "Sec-Fetch-Site": "same-origin"}, method="POST").replace(
        b"\r\n\r\n", b"\r\nSec-Fetch-Site: same-origin\r\n\r\n"
    )
    assert served.send(twice).status == 403
    origin = f"http://{served.host}"
    twice = request("/pause", {"Host": served.host, "Origin": origin}, method="POST").replace(
        b"\r\n\r\n", f"\r\nOrigin: {origin}\r\n\r\n".encode()
    )
    assert served.send(twice).status == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate"}, 200),
        ({"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}, 200),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}, 200),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"}, 403),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"}, 403),
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}, 403),
    ],
)
def test_other_sites_may_link_to_us_and_nothing_else(serve: Serve, headers: dict[str, str], status: int) -> None:
    assert serve().get(**headers).status == status


# The name of the host.


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost.:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:9465", 200),
        ("forq.example.com", 200),
        ("forq.example.com:443", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("evil.example:127.0.0.1", 421),
        ("127.0.0.1@evil.example", 421),
        ("10.0.0.1", 421),
        ("[::1", 200),
        ("", 400),
    ],
)
def test_a_host_of_another_name_is_refused(serve: Serve, host: str, status: int) -> None:
    answer = serve(hosts=("forq.example.com",)).get(Host=host)
    assert answer.status == status
    assert_protected(answer)


def test_a_request_without_a_host_is_refused(serve: Serve) -> None:
    served = serve()
    assert served.send(b"GET / HTTP/1.0\r\n\r\n").status == 400
    assert served.send(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n").status == 400
    twice = f"GET / HTTP/1.1\r\nHost: {served.host}\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert served.send(twice.encode()).status == 400


def test_a_server_that_listens_on_all_addresses_has_any_address_but_no_other_name(serve: Serve) -> None:
    served = serve("0.0.0.0:9465")
    assert served.get(Host="192.0.2.1:9465").status == 200
    assert served.get(Host="[2001:db8::1]").status == 200
    assert served.get(Host="evil.example").status == 421


# Users of lower levels, and a dashboard that is read-only.


def test_a_reader_sees_no_data_and_cannot_act(serve: Serve, users_file: Any) -> None:
    served = serve(users=str(users_file))
    assert served.get(Authorization=basic("bob")).body.startswith("bob read password")
    assert served.get("/data", Authorization=basic("bob")).status == 403
    answer = served.post(Authorization=basic("bob"), Sec_Fetch_Site=SAME)
    assert answer.status == 403
    assert "queue.pause" in answer.body
    assert served.get("/data", Authorization=basic("alice")).status == 200
    assert served.site.acted == []


def test_nobody_can_act_if_it_is_read_only(serve: Serve) -> None:
    served = serve(read_only=True)
    assert served.get("/data").status == 200
    answer = served.post(Sec_Fetch_Site=SAME)
    assert (answer.status, served.site.acted) == (403, [])
    assert "read-only" in answer.body


# Passwords over HTTP; test_passwords.py has the rest.


def test_a_login_is_asked_for(serve: Serve, users_file: Any) -> None:
    served = serve(users=str(users_file))
    for headers in ({}, {"Authorization": basic("alice", "wrong password")}, {"Authorization": "Bearer x"}):
        answer = served.get(**headers)
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == 'Basic realm="forq", charset="UTF-8"'
        assert_protected(answer)
    # Also for the files and for paths that do not exist.
    assert served.get("/static/page.css").status == 401
    assert served.get("/nothing").status == 401
    assert served.get(Authorization=basic("alice")).body.startswith("alice act password")


@pytest.mark.parametrize(
    "header",
    [
        "Basic",
        "Basic ",
        "Basic !!!",
        "Basic YWxpY2U=",
        "Basic /////w==",
        "Basic " + "A" * 3000,
        "Negotiate YWxpY2U6YQ==",
    ],
)
def test_credentials_of_another_form_are_refused(serve: Serve, users_file: Any, header: str) -> None:
    assert serve(users=str(users_file)).get(Authorization=header).status == 401


def test_a_flood_of_wrong_passwords_is_answered_with_429(serve: Serve, users_file: Any) -> None:
    served = serve(users=str(users_file))
    # Logged in before: stays so.
    assert served.get(Authorization=basic("alice")).status == 200
    statuses: list[int] = []
    # On a busy machine the hashes take so long that a few more attempts are allowed meanwhile.
    while 429 not in statuses and len(statuses) < 30:
        statuses.append(served.get(Authorization=basic("bob", f"wrong password {len(statuses)}")).status)
    assert statuses[:10] == [401] * 10
    assert 429 in statuses
    answer = served.get(Authorization=basic("bob"))
    assert answer.status == 429
    assert 0 < int(answer.headers["retry-after"]) <= 6
    assert served.get(Authorization=basic("alice")).status == 200


# The header of a proxy.


def test_the_header_of_a_client_that_is_no_proxy_is_refused(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(proxies=("192.0.2.7",))
    with caplog.at_level(logging.WARNING, "forq.web"):
        answer = served.get(X_Forwarded_User="alice")
    assert answer.status == 403
    assert "not one of the proxies" in answer.body
    assert "request refused status=403 method=GET path='/' from=127.0.0.1" in caplog.text
    assert served.get().status == 403


def test_the_header_is_refused_where_no_proxy_is_configured(serve: Serve, users_file: Any) -> None:
    assert serve().get(X_Forwarded_User="root").status == 403
    answer = serve(users=str(users_file)).get(X_Forwarded_User="alice", Authorization=basic("alice"))
    assert answer.status == 403


def test_a_proxy_on_this_host_names_the_user(serve: Serve) -> None:
    served = serve(proxies=("127.0.0.0/8",), proxy_actors=("alice",))
    assert served.get(X_Forwarded_User="alice").body.startswith("alice act proxy")
    assert served.get(X_Forwarded_User="bob").body.startswith("bob read proxy")
    assert served.get(X_Forwarded_User="bob", X_Forwarded_For="203.0.113.9, 198.51.100.4").body.endswith("198.51.100.4")
    assert served.post(X_Forwarded_User="bob", Sec_Fetch_Site=SAME).status == 403
    assert served.post(X_Forwarded_User="alice", Sec_Fetch_Site=SAME).status == 200
    # It has not authenticated anybody.
    assert served.get().status == 403
    assert served.get(X_Forwarded_User="").status == 403


@needs_root
@pytest.mark.parametrize("unix", [False, True])
def test_a_local_user_who_may_not_act_cannot_pose_as_the_proxy(
    serve: Serve, unix_listener: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch, unix: bool
) -> None:
    monkeypatch.setattr("forq.web.access.group_id", {"staff": 54322, None: None}.get)
    path, listener = unix_listener
    given = {"control_read_group": "staff", "proxies": ("unix", "127.0.0.1")}
    served = serve(path, listener=listener, **given) if unix else serve(**given)
    assert served.get(X_Forwarded_User="alice").body.startswith("alice act proxy")
    answer = as_user(NOBODY, 1, [54322], lambda: served.get(X_Forwarded_User="alice").body.encode()).decode()
    assert answer.startswith("403")
    assert f"the proxy runs as local user {NOBODY}" in answer


def test_another_header_of_the_proxy_can_be_chosen(serve: Serve) -> None:
    served = serve(proxies=("127.0.0.1",), proxy_header="Remote-User")
    assert served.get(Remote_User="alice").body.startswith("alice act proxy")
    assert served.get(X_Forwarded_User="alice").status == 403


@pytest.mark.parametrize("name", ["a, b", "a\x01b", "x" * 129, "\xff\xfe"])
def test_a_name_that_is_none_is_refused(serve: Serve, name: str) -> None:
    served = serve(proxies=("127.0.0.1",))
    raw = f"GET / HTTP/1.1\r\nHost: {served.host}\r\nConnection: close\r\nX-Forwarded-User: {name}\r\n\r\n"
    assert served.send(raw.encode("latin-1")).status in (400, 403)


def test_two_names_are_refused_as_the_client_may_have_sent_one(serve: Serve) -> None:
    served = serve(proxies=("127.0.0.1",))
    raw = request("/", {"Host": served.host, "X-Forwarded-User": "alice"})
    answer = served.send(raw.replace(b"\r\n\r\n", b"\r\nX-Forwarded-User: bob\r\n\r\n"))
    assert answer.status == 403
    assert "does not name one user" in answer.body


def test_a_proxy_that_names_nobody_may_pass_on_a_password(serve: Serve, users_file: Any) -> None:
    served = serve(proxies=("127.0.0.1",), users=str(users_file))
    assert served.get().status == 401
    assert served.get(Authorization=basic("bob"), X_Forwarded_For="203.0.113.9").body == "bob read password 203.0.113.9"
    assert served.get(X_Forwarded_User="carol").body.startswith("carol act proxy")


def test_the_origin_behind_a_proxy_is_the_one_that_the_browser_sees(serve: Serve) -> None:
    served = serve(proxies=("127.0.0.1",), hosts=("forq.example.com",))
    seen = {"X_Forwarded_User": "alice", "X_Forwarded_Proto": "https", "X_Forwarded_Host": "forq.example.com"}
    assert served.post(**seen, Origin="https://forq.example.com").status == 200
    assert served.post(**seen, Origin="http://forq.example.com").status == 403
    assert served.post(**seen, Origin=f"http://{served.host}").status == 403
    assert served.post(**{**seen, "X_Forwarded_Host": "evil.example"}, Origin="https://evil.example").status == 421


def test_the_forwarded_host_of_others_is_not_believed(serve: Serve, users_file: Any) -> None:
    served = serve(users=str(users_file))
    answer = served.post(
        Authorization=basic("alice"),
        X_Forwarded_Host="evil.example",
        X_Forwarded_Proto="http",
        Origin="http://evil.example",
    )
    assert answer.status == 403
    assert served.get(Authorization=basic("alice"), Host="evil.example", X_Forwarded_Host="localhost").status == 421


# Bodies, paths, answers.


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_one_mebibyte_is_refused(serve: Serve, chunked: bool) -> None:
    served = serve()
    body = b"x" * (MAX_BODY_BYTES + 1)
    # A client that asks to close the connection may lose the answer while it still sends.
    fields = {"Host": served.host, "Sec-Fetch-Site": SAME, "Connection": "keep-alive"}
    if chunked:
        head = request("/pause", {**fields, "Transfer-Encoding": "chunked"}, method="POST")
        head = head.replace(b"Content-Length: 0\r\n", b"")
        answer = served.send(head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
    else:
        answer = served.send(request("/pause", fields, method="POST", body=body))
    assert (answer.status, served.site.acted) == (413, [])
    assert_protected(answer)
    assert served.post("/pause", b"x" * MAX_BODY_BYTES, Sec_Fetch_Site=SAME).status == 200


@pytest.mark.parametrize(
    "path",
    ["/static/../secret", "/static/..%2fsecret", "/static/%2e%2e/secret", "/static/....//secret", "/static//etc/passwd",
     "/static/%00", "/static/..\\secret"],
)  # fmt: skip
def test_no_path_leads_out_of_the_static_files(serve: Serve, path: str) -> None:
    answer = serve().get(path)
    assert answer.status == (400 if "%00" in path else 404)
    assert "secret" not in answer.body


def test_only_static_files_may_be_cached(serve: Serve) -> None:
    served = serve()
    assert_protected(served.get("/static/page.css"), cached=True)
    assert_protected(served.get("/static/nothing.css"))
    assert_protected(served.get("/nothing"))
    assert_protected(served.get("/pause"))


def test_the_application_cannot_weaken_the_headers(serve: Serve) -> None:
    served = serve()
    with served.connect() as sock:
        sock.sendall(request("/weak", {"Host": served.host}))
        head = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")[0].decode().lower()
    assert head.count("content-security-policy") == head.count("x-frame-options") == 1
    assert_protected(served.get("/weak"))
    assert "server" not in served.get("/weak").headers


def test_an_error_of_the_application_is_answered_without_its_text(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    answer = serve().get("/broken")
    assert answer.status == 500
    assert "secret" not in answer.body
    assert_protected(answer)
    wait_until(lambda: "a secret of a job" in caplog.text, what="the log has the reason")


def test_pages_of_refusals_are_escaped_and_text_for_programs(serve: Serve) -> None:
    served = serve()
    page = served.get(Host="<script>alert(1)</script>", Accept="text/html,*/*")
    assert page.headers["content-type"].startswith("text/html")
    assert "&lt;script&gt;" in page.body
    assert "<script" not in page.body
    text = served.get(Host="<script>alert(1)</script>", Accept="*/*")
    assert text.headers["content-type"].startswith("text/plain")


def test_a_name_cannot_add_a_header(serve: Serve) -> None:
    served = serve(proxies=("127.0.0.1",))
    answer = served.get(X_Forwarded_User="alice%0d%0aSet-Cookie:%20a=b")
    assert "set-cookie" not in answer.headers
    assert served.get("/%0d%0aSet-Cookie:%20a=b", X_Forwarded_User="alice").headers.keys() >= {"x-frame-options"}


def test_no_answer_sets_a_cookie_or_allows_another_origin(serve: Serve, users_file: Any) -> None:
    served = serve(users=str(users_file))
    for answer in (served.get(), served.get(Authorization=basic("alice"), Origin="http://evil.example")):
        assert not {"set-cookie", "access-control-allow-origin"} & answer.headers.keys()


def test_a_view_that_asks_for_no_permission_is_refused(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    for served in (serve(), serve(access=Access.mounted(lambda request, name: "act"))):
        answer = served.get("/unchecked")
        assert answer.status == 403
        assert "a secret" not in answer.body
        assert_protected(answer)
        # Permission to look is none to act.
        assert served.post("/unchecked-act", Sec_Fetch_Site=SAME).status == 403
    assert "a view asked for no permission; refused path='/unchecked'" in caplog.text


def test_a_request_with_two_lengths_is_refused_and_ends_the_connection(serve: Serve) -> None:
    served = serve()
    smuggled = b"0\r\n\r\nPOST /pause HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: same-origin\r\n\r\n"
    fields = {"Host": served.host, "Sec-Fetch-Site": SAME, "Connection": "keep-alive", "Transfer-Encoding": "chunked"}
    with served.connect() as sock:
        answer = exchange(sock, request("/pause", fields, method="POST", body=smuggled))
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert sock.recv(65536) == b""
    assert served.site.acted == []


# Mounted in another application.


def test_a_mounted_dashboard_leaves_hosts_to_its_application_and_checks_the_rest(serve: Serve) -> None:
    served = serve(access=Access.mounted(lambda request, name: "act"))
    assert served.get(Host="shop.example.com").status == 200
    assert served.post(Host="shop.example.com", Origin="http://shop.example.com").status == 200
    answer = served.post(Host="shop.example.com", Origin="http://evil.example")
    assert answer.status == 403
    assert_protected(answer)
    assert served.post(Host="shop.example.com").status == 403
    # Headers of a proxy are its application's matter, too.
    assert served.get(X_Forwarded_User="root", X_Forwarded_For="10.0.0.1").body.startswith("- forbidden app")


def test_the_settings_refuse_an_open_port_without_authentication() -> None:
    with pytest.raises(Exception, match="not allowed without authentication"):
        WebSettings(listen="0.0.0.0:9465").check("[web]")


def test_refusals_are_logged_escaped_and_limited(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = serve()
    with caplog.at_level(logging.WARNING, "forq.web"):
        for _ in range(20):
            served.get("/%0aforged%1b[2J", Host="evil.example")
    refusals = [record.getMessage() for record in caplog.records if "request refused" in record.getMessage()]
    assert 1 <= len(refusals) < 10
    assert "path='/\\nforged" in refusals[0]
    assert "evil.example" in refusals[0]
