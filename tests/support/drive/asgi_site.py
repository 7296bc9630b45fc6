"""Visits an ASGI application as a browser does: requests, the beginning of live streams, and all links of all pages."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from tests.support.drive.wait import wait_until

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]

_LINKS = re.compile(r'\b(href|src|action|formaction|data-live)="([^"]*)"')
BROWSER = {"accept": "text/html", "sec-fetch-site": "same-origin", "host": "testserver"}


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


class Site:
    """An application behind a proxy that removes `removed` from each path. `root_path`: what the server is told."""

    def __init__(self, app: ASGIApp, *, removed: str = "", root_path: str = "") -> None:
        self.app = app
        self.removed = removed
        self.root_path = root_path

    def get(self, url: str, **headers: str) -> Reply:
        return asyncio.run(self.request("GET", url, headers))

    def post(self, url: str, body: str = "", **headers: str) -> Reply:
        given = {"content-type": "application/x-www-form-urlencoded", **named(headers)}
        return asyncio.run(self.request("POST", url, given, body.encode()))

    def events(self, url: str, count: int = 1, **headers: str) -> Reply:
        """The beginning of a stream, until it has had so many events."""
        return asyncio.run(self.request("GET", url, {"accept": "text/event-stream", **headers}, events=count))

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes = b"", events: int = 0
    ) -> Reply:
        parts = urlsplit(url)
        path = unquote(parts.path)
        assert path.startswith(self.removed), f"{url} does not reach the proxy"
        fields = {**BROWSER, **({"content-length": str(len(body))} if body else {}), **named(headers)}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.removeprefix(self.removed),
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": self.root_path,
            "headers": [(name.encode(), value.encode()) for name, value in fields.items() if value],
            "client": ("127.0.0.1", 5000),
            "server": ("testserver", 80),
            "state": {},
        }
        return await exchange(self.app, scope, body, events)


async def exchange(app: ASGIApp, scope: Any, body: bytes, events: int) -> Reply:
    status, fields, received = 0, {}, b""
    asked, enough = False, asyncio.Event()

    async def receive() -> Mapping[str, Any]:
        nonlocal asked
        if asked:
            await enough.wait()
            return {"type": "http.disconnect"}
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, fields, received
        if message["type"] == "http.response.start":
            status = message["status"]
            fields = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            received += message.get("body", b"")
            if events and received.count(b"\nevent: ") >= events:
                enough.set()

    async with asyncio.timeout(30):
        await app(scope, receive, send)
    return Reply(status, fields, received.decode(errors="replace"))


def named(headers: Mapping[str, str]) -> dict[str, str]:
    """sec_fetch_site is sec-fetch-site; an empty value removes a header."""
    return {name.replace("_", "-"): value for name, value in headers.items()}


def crawl(site: Site, start: str, **headers: str) -> dict[str, int]:
    """The status of every address that the pages from `start` on name: links, static files, streams, and actions."""
    found: dict[str, int] = {}
    waiting = [(start, "href")]
    while waiting:
        url, kind = waiting.pop()
        if url in found:
            continue
        reply = site.events(url, 1, **headers) if kind == "data-live" else site.get(url, **headers)
        found[url] = reply.status
        if not reply.headers.get("content-type", "").startswith("text/html"):
            continue
        for attribute, link in _LINKS.findall(reply.text):
            if link:
                target = urljoin(url, unescape(link)).partition("#")[0]
                waiting.append((target, attribute))
    return found


def open_stream(address: Path, path: str, cookie: str = "") -> socket.socket:
    """A live page of a server at this Unix socket, after its first update."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(30)
    wait_until(lambda: stream.connect_ex(str(address)) == 0, what="a connection")
    head = f"GET {path} HTTP/1.1\r\nHost: testserver\r\nAccept: text/event-stream\r\nCookie: {cookie}\r\n\r\n"
    stream.sendall(head.encode())
    received = b""
    while b"event: update" not in received:
        chunk = stream.recv(65536)
        assert chunk, received
        received += chunk
    assert received.startswith(b"HTTP/1.1 200 ")
    return stream


def rest_of(stream: socket.socket) -> bytes:
    with stream:
        received = b""
        while chunk := stream.recv(65536):
            received += chunk
        return received
