"""The outermost layer of the dashboard: refuses requests that other sites cause, and protects answers.

1. Host: a name that is not ours means that a page of an attacker has made its name point here (DNS rebinding).
2. Requests of other pages: those that change something (CSRF), and those that embed or probe our pages.
3. The user: nobody who is not admitted reaches the application.
4. The size of the body. It is read before the application runs.
5. Views and actions that have asked forq.web.access for nothing: a mistake must not be open to everybody.
6. Headers of each answer, also of errors.
"""

import ipaddress
import logging
from collections.abc import Mapping, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forq.web.access import PERMITTED_KEY, Access, peer_of_request, throttled
from forq.web.names import ACTIONS
from forq.web.refusals import Refused
from forq.web.settings import LOCALHOST, WebSettings

MAX_BODY_BYTES = 1 << 20
# Path, query and headers.
MAX_HEAD_BYTES = 16 << 10
STATIC = "/static/"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
DEFAULT_PORTS = {"http": 80, "https": 443}

# Referrer-Policy: under "no-referrer" browsers send "Origin: null" with a form of our own page, and one without
# Sec-Fetch-Site could not be told from an attack. "same-origin" keeps our addresses from other sites just as well.
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": (
        "accelerometer=(), autoplay=(), camera=(), clipboard-read=(), display-capture=(), fullscreen=(), "
        "geolocation=(), gyroscope=(), microphone=(), midi=(), payment=(), usb=()"
    ),
    "Cache-Control": "no-store",
}

UNCHECKED = Refused(403, "This view asks for no permission.", "That is a mistake in forq: please report it.")

log = logging.getLogger("forq.web")


class Guard:
    """ASGI middleware around the whole dashboard. `settings` None: mounted; the host is the application's matter."""

    def __init__(self, app: ASGIApp, access: Access, settings: WebSettings | None) -> None:
        self._app = app
        self._access = access
        self._hosts = None if settings is None else Hosts(settings)
        # Clients that are refused must not be able to fill the log.
        self._warnings = throttled(log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(scope, send)
        request = HTTPConnection(scope)
        try:
            await self._check(request)
            body = await _read_body(request, receive)
            await self._app(scope, _Replay(body, receive) if body is not None else receive, answer.send)
        except Refused as refused:
            self._log(refused, request)
            await answer.refuse(refused, request)
        except ClientDisconnect:
            return
        except Exception:
            # The page says nothing of it: messages and stacks may contain data.
            log.exception("a request failed method=%s path=%.200r", scope["method"], scope["path"])
            await answer.refuse(Refused(500, "The dashboard has failed.", "The log of forq says why."), request)
            if self._hosts is None:
                # The error reports of the application.
                raise

    def _log(self, refused: Refused, request: HTTPConnection) -> None:
        # 401: the first request of each browser. forq.web.passwords logs failed logins, and why there are none (503).
        if refused.status not in (401, 503):
            method, path = request.scope["method"][:10], request.scope["path"][:200]
            self._warnings.warn(
                f"request refused status={refused.status} method={method} path={path!a} "
                f"from={peer_of_request(request).origin} reason={refused.reason!a}"
            )

    async def _check(self, request: HTTPConnection) -> None:
        by_proxy = await self._access.is_proxy(request)
        host = _single(request, "x-forwarded-host" if by_proxy and "x-forwarded-host" in request.headers else "host")
        if self._hosts is not None and not self._hosts.allow(host):
            raise Refused(
                400 if host is None else 421,
                "The request names no host." if host is None else f"{host[:100]} is not a name of this dashboard.",
                "Names besides localhost and the address of `listen` have to be in `hosts` of [web].",
            )
        if any(character < " " or character == "\x7f" for character in request.scope["path"]):
            raise Refused(400, "The path has control characters.")
        if self._hosts is not None and _head_bytes(request.scope) > MAX_HEAD_BYTES:
            # uvicorn limits only a head that comes in more than one piece.
            raise Refused(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes.")
        scheme = request.scope.get("scheme", "http")
        if by_proxy:
            scheme = _single(request, "x-forwarded-proto") or scheme
        check_site(request, f"{scheme}://{host}")
        await self._access.user(request)


class Hosts:
    """The names under which browsers may reach the dashboard, without ports: of a port forward, it is another one."""

    def __init__(self, settings: WebSettings) -> None:
        self._names = {_host_name(name) for name in settings.hosts} | {LOCALHOST, "127.0.0.1", "[::1]"}
        self._any_address = False
        if not settings.unix_socket:
            listen = _host_name(settings.listen)
            self._names.add(listen)
            self._any_address = listen in ("0.0.0.0", "[::]")

    def allow(self, host: str | None) -> bool:
        if not host:
            return False
        name = _host_name(host)
        # An attacker's page cannot have an address of ours as its name.
        return name in self._names or (self._any_address and _is_address(name))


def check_site(request: HTTPConnection, own_origin: str) -> None:
    """Raises Refused (403) if a page of another site has caused the request.

    All browsers of today send Sec-Fetch-Site, but only to https and to this machine. Without it, the origin has to be
    ours. A client that is no browser sends `Origin`, or `Sec-Fetch-Site: same-origin`.
    """
    site = request.headers.getlist("sec-fetch-site")
    if request.scope["method"] in SAFE_METHODS:
        opened = request.headers.get("sec-fetch-mode") == "navigate" and (
            request.headers.get("sec-fetch-dest", "document") == "document"
        )
        if site and site not in (["same-origin"], ["none"]) and not opened:
            raise Refused(403, "A page of another site asks for this.", "Open the dashboard in a tab of its own.")
        return
    if site:
        if site != ["same-origin"]:
            raise Refused(
                403, "The request was sent by a page of another site.", "Open the dashboard itself and try it there."
            )
        return
    origin = _single(request, "origin")
    if origin is None:
        raise Refused(
            403,
            "The request does not say which page has sent it.",
            f"Programs have to send the header Origin: {own_origin[:200]}",
        )
    if _plain_origin(origin) is None or _plain_origin(origin) != _plain_origin(own_origin):
        raise Refused(
            403,
            f"The request was sent by a page of {origin[:200]}, and this is {own_origin[:200]}.",
            "Behind a proxy: name it in `proxies` of [web], and let it send X-Forwarded-Proto and X-Forwarded-Host.",
        )


class _Answer:
    """Sends an answer with the headers above. The application cannot weaken them."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._unchecked = self._refusing = False
        self.started = False
        # The same set in all copies of the scope that are made from here on.
        self._permitted: set[str] = set()
        scope[PERMITTED_KEY] = self._permitted
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        self._is_static = path.startswith(STATIC)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not self._refusing and self._is_unchecked(message["status"]):
                log.error("a view asked for no permission; refused path=%.200r", self._scope["path"])
                self._unchecked = True
                await self.refuse(UNCHECKED, HTTPConnection(self._scope))
                return
            self.started = True
            headers = MutableHeaders(raw=list(message.get("headers", ())))
            may_cache = self._is_static and message["status"] in (HTTPStatus.OK, HTTPStatus.NOT_MODIFIED)
            for name, value in HEADERS.items():
                if name == "Cache-Control" and may_cache:
                    headers.setdefault(name, "no-cache")
                else:
                    headers[name] = value
            message = {**message, "headers": headers.raw}
        elif self._unchecked and not self._refusing:
            return
        await self._send(message)

    def _is_unchecked(self, status: int) -> bool:
        if self._scope["method"] in SAFE_METHODS:
            # A redirect shows nothing.
            return 200 <= status < 300 and not self._is_static and not self._permitted
        return status < 400 and not self._permitted & ACTIONS

    async def refuse(self, refused: Refused, request: HTTPConnection) -> None:
        if not self.started:
            self._refusing = True
            await refused.response(request.headers)(request.scope, _nothing, self.send)
            self._refusing = False


class _Replay:
    """`receive` for the application: the body at once, then what comes after it (the end of the connection)."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _read_body(request: HTTPConnection, receive: Receive) -> bytes | None:
    """None if the request has none. Raises Refused (413) and ClientDisconnect."""
    length = request.headers.get("content-length")
    if "transfer-encoding" not in request.headers:
        if length is None:
            return None
    elif length is not None:
        # A proxy in front may see another end of this request, and another request behind it.
        raise Refused(400, "The request has two lengths.", headers={"Connection": "close"})
    too_large = Refused(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    if length is not None and (not length.isascii() or not length.isdigit() or int(length[:20]) > MAX_BODY_BYTES):
        raise too_large
    body = bytearray()
    while True:
        message: MutableMapping[str, Any] = await receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _single(request: HTTPConnection, name: str) -> str | None:
    """None if the header is absent or given twice."""
    values = request.headers.getlist(name)
    return values[0].strip() if len(values) == 1 and values[0].strip() else None


def _head_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) for name, value in scope["headers"])
    return fields + len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")


def _host_name(host: str) -> str:
    """Without the port and the final dot. An IPv6 address stays in brackets."""
    host = host.lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _plain_origin(text: str) -> tuple[str, str, int] | None:
    """Scheme, host, port; None if it is no origin, such as "null"."""
    try:
        parts = urlsplit(text)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return None
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or port is None:
        return None
    return (
        None if parts.path or parts.query or parts.fragment or parts.username else (parts.scheme, parts.hostname, port)
    )
