"""A trivial application behind the guard and the access rules, served by uvicorn; and requests as raw bytes."""

import base64
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from forq.web.access import Access
from forq.web.connections import OPTIONS
from forq.web.guard import Guard
from forq.web.refusals import Refused, refused
from forq.web.settings import WebSettings
from tests.support.drive.wait import wait_until

NOBODY = 65534
PASSWORD = "correct horse battery"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: str


class Site:
    """`acted`: the queues that were paused, with the user. `large`: the body of /large."""

    def __init__(self, access: Access, settings: WebSettings | None, static: Path) -> None:
        self.access = access
        self.acted: list[tuple[str, str]] = []
        self.large = b""
        app = Starlette(
            routes=[
                Route("/", self.overview),
                Route("/data", self.data),
                Route("/pause", self.pause, methods=["POST"]),
                Route("/broken", self.broken),
                Route("/weak", self.weak),
                Route("/large", self.send_large),
                Route("/unchecked", self.unchecked),
                Route("/unchecked-act", self.unchecked_act, methods=["POST"]),
                Mount("/static", StaticFiles(directory=static)),
            ],
            exception_handlers={Refused: refused},
        )
        self.app = Guard(app, access, settings)

    async def overview(self, request: Request) -> Response:
        user = await self.access.require(request, "overview")
        return PlainTextResponse(f"{user.name} {user.level} {user.source} {user.origin}")

    async def data(self, request: Request) -> Response:
        await self.access.require(request, "job.data")
        return PlainTextResponse("data")

    async def pause(self, request: Request) -> Response:
        user = await self.access.require(request, "queue.pause")
        self.acted.append((user.name, (await request.body()).decode()))
        return PlainTextResponse("paused")

    async def broken(self, request: Request) -> Response:
        raise ValueError("a secret of a job")

    async def weak(self, request: Request) -> Response:
        await self.access.require(request, "overview")
        return HTMLResponse("x", headers={"Content-Security-Policy": "default-src *", "X-Frame-Options": "SAMEORIGIN"})

    async def send_large(self, request: Request) -> Response:
        await self.access.require(request, "overview")
        return Response(self.large)

    async def unchecked(self, request: Request) -> Response:
        return PlainTextResponse("a secret")

    async def unchecked_act(self, request: Request) -> Response:
        await self.access.require(request, "overview")
        return RedirectResponse("/", 303)


class Served:
    def __init__(self, site: Site, listener: socket.socket) -> None:
        self.site = site
        self.listener = listener
        self.family = listener.family
        self.address: Any = listener.getsockname()
        self.server = uvicorn.Server(uvicorn.Config(site.app, **OPTIONS))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started, what="uvicorn is started")

    @property
    def port(self) -> int:
        return int(self.address[1])

    @property
    def host(self) -> str:
        return "localhost" if self.family == socket.AF_UNIX else f"127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        sock = socket.socket(self.family)
        sock.settimeout(20)
        sock.connect(self.address)
        return sock

    def send(self, data: bytes) -> Answer:
        with self.connect() as sock:
            return exchange(sock, data)

    def get(self, path: str = "/", /, **headers: str) -> Answer:
        return self.send(request(path, {"Host": self.host, **named(headers)}))

    def post(self, path: str = "/pause", body: bytes = b"mails", /, **headers: str) -> Answer:
        return self.send(request(path, {"Host": self.host, **named(headers)}, method="POST", body=body))

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.site.access.close()


def named(headers: Mapping[str, str]) -> dict[str, str]:
    """Sec_Fetch_Site is Sec-Fetch-Site."""
    return {name.replace("_", "-"): value for name, value in headers.items()}


def request(path: str, headers: Mapping[str, str], *, method: str = "GET", body: bytes = b"") -> bytes:
    fields = {"Connection": "close", **({"Content-Length": str(len(body))} if method != "GET" else {}), **headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def exchange(sock: socket.socket, data: bytes) -> Answer:
    sock.sendall(data)
    return read_answer(sock)


def read_answer(sock: socket.socket) -> Answer:
    """To its end by Content-Length, or to the end of the connection."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = sock.recv(65536)
        assert chunk, f"the connection was closed after {received!r}"
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 1 << 40)) and (chunk := sock.recv(65536)):
        body += chunk
    return Answer(int(status.split()[1]), headers, body.decode())


def basic(name: str, password: str = PASSWORD) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@contextmanager
def serving(
    settings: WebSettings | None, static: Path, *, access: Access | None = None, listener: socket.socket | None = None
) -> Iterator[Served]:
    access = access or Access(settings)
    served = Served(Site(access, settings, static), listener or socket.create_server(("127.0.0.1", 0)))
    try:
        yield served
    finally:
        served.close()


def as_user(uid: int, gid: int, groups: list[int], act: Callable[[], bytes]) -> bytes:
    """The result of `act` in a process of this user. Only root can."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.setgroups(groups)
            os.setgid(gid)
            os.setuid(uid)
            os.write(writing, act())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        result = answer.read()
    os.waitpid(pid, 0)
    return result
