"""Decides which users of a Django project may use its dashboard:

1. The host has to be in ALLOWED_HOSTS, as for Django's views.
2. Session, user and permissions are read once per request, in a thread of its own.
3. A browser without a user is sent to LOGIN_URL; others, and users without a permission, are refused.
"""

import logging
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.contrib.auth import get_user
from django.contrib.auth.decorators import login_required
from django.contrib.sessions.middleware import SessionMiddleware
from django.core.exceptions import SuspiciousOperation
from django.core.handlers.asgi import ASGIRequest
from django.db import connections
from django.http import HttpResponse
from django.urls import set_script_prefix
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forq.web.guard import HEADERS, SAFE_METHODS, STATIC
from forq.web.names import Level, kind_of
from forq.web.refusals import Refused

VIEW, CHANGE, DELETE = (f"forq.{verb}_deadjob" for verb in ("view", "change", "delete"))
# Jobs never run after these. As in the admin, that needs the permission to delete.
REMOVES = frozenset(("job.cancel", "job.kill", "job.discard"))
# Of the scope.
VISITOR = "forq.visitor"

log = logging.getLogger("forq.web")


@dataclass(frozen=True)
class Visitor:
    """The user of a request. `name`: empty without one. `login`: where a browser can log in. `cookies`: new ones of the
    session."""

    name: str = ""
    may_view: bool = False
    may_change: bool = False
    may_delete: bool = False
    login: str = ""
    cookies: tuple[bytes, ...] = ()

    def level(self, name: str) -> Level:
        if not self.may_view:
            return "forbidden"
        if kind_of(name) != "action":
            return "read"
        return "act" if (self.may_delete if name in REMOVES else self.may_change) else "forbidden"


async def authorize(request: HTTPConnection, name: str) -> Level:
    visitor = request.scope.get(VISITOR)
    return visitor.level(name) if isinstance(visitor, Visitor) else "forbidden"


class ForUsers:
    """ASGI middleware around the dashboard, whose `root_path` ends with `prefix`."""

    def __init__(self, dashboard: ASGIApp, prefix: str) -> None:
        self._dashboard = dashboard
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = ASGIRequest(scope, BytesIO())
            # Raises if it is not allowed.
            host = request.get_host()
        except (SuspiciousOperation, UnicodeDecodeError) as exc:
            logging.getLogger(f"django.security.{type(exc).__name__}").error("%s", exc)
            refusal = _refused(scope, 400, "The host of this request is not allowed, or its address is broken.")
            await refusal(scope, receive, send)
            return
        # As Django sees them: behind a proxy, what its settings say about headers.
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope = {**scope, "scheme": request.scheme, "headers": [*others, (b"host", host.encode())]}
        if scope["path"].startswith(f"{scope['root_path']}{STATIC}"):
            await self._dashboard(scope, receive, send)
            return
        try:
            async with ThreadSensitiveContext():
                root = scope["root_path"].removesuffix(self._prefix)
                visitor = await sync_to_async(_look_up, thread_sensitive=True)(request, root)
        except Exception:
            log.exception("the user of a request could not be found")
            refusal = _refused(scope, 403, "Your session cannot be read now.", "The log of the server says why.")
            await refusal(scope, receive, send)
            return
        answer = self._dashboard if visitor.may_view else _answer_to(visitor, scope)
        # The dashboard logs the name with each action.
        state = {**scope.get("state", {}), "forq_user": visitor.name}
        await answer({**scope, VISITOR: visitor, "state": state}, receive, _with_cookies(visitor, send))


def _look_up(request: ASGIRequest, root: str) -> Visitor:
    # For the name of a view in LOGIN_URL.
    set_script_prefix(f"{root}/")
    session, response = SessionMiddleware(lambda _: HttpResponse()), HttpResponse()
    try:
        session.process_request(request)
        user: Any = get_user(request)
        request.user = user
        # It may have a new key, be ended, or live longer with each request.
        session.process_response(request, response)
        cookies = tuple(cookie.output(header="").strip().encode() for cookie in response.cookies.values())
        if not user.is_authenticated:
            redirect = login_required(lambda _: HttpResponse())(request)
            return Visitor(login=redirect.headers["Location"], cookies=cookies)
        view, change, delete = (user.is_active and user.has_perm(name) for name in (VIEW, CHANGE, DELETE))
        return Visitor(user.get_username(), view or change, change, delete, cookies=cookies)
    finally:
        # This thread ends with the request. With a caller's transaction, it is the thread of a test.
        for connection in connections.all(initialized_only=True):
            if not connection.in_atomic_block:
                connection.close()


def _answer_to(visitor: Visitor, scope: Scope) -> Response:
    """The answer to a visitor who may see nothing."""
    if visitor.name:
        advice = f"It needs the permission {VIEW} or {CHANGE}."
        return _refused(scope, 403, f"You ({visitor.name}) may not use this dashboard.", advice)
    if scope["method"] in SAFE_METHODS and "text/html" in Headers(scope=scope).get("accept", ""):
        return RedirectResponse(visitor.login, 302, HEADERS)
    return _refused(scope, 403, "You are not logged in.", f"Log in: {visitor.login}")


def _refused(scope: Scope, status: int, reason: str, advice: str = "") -> Response:
    return Refused(status, reason, advice, HEADERS).response(Headers(scope=scope))


def _with_cookies(visitor: Visitor, send: Send) -> Send:
    if not visitor.cookies:
        return send

    async def add(message: Message) -> None:
        if message["type"] == "http.response.start":
            cookies: list[Any] = [(b"set-cookie", cookie) for cookie in visitor.cookies]
            message = {**message, "headers": [*message.get("headers", ()), *cookies]}
        await send(message)

    return add
