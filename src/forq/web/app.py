"""The ASGI application of the dashboard: routes, rendering, live pages, and errors as pages."""

import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from forq.async_client import AsyncClient
from forq.charts import SCRIPT, STYLE
from forq.client import Client
from forq.errors import ForqError, PermissionRefused, RedisUnavailable, SupervisorUnreachable, TimedOut, UsageError
from forq.log_format import Redaction
from forq.version import VERSION
from forq.web import display, flow_pages, job_pages, queue_pages, system_pages
from forq.web.access import Access, Authorize
from forq.web.action_log import UNANSWERED, ActionLog
from forq.web.actions import ACTIONS, NEED_SUPERVISOR, Form
from forq.web.feed import Feed, View
from forq.web.guard import Guard
from forq.web.mounted import Mounted, server_is_ending
from forq.web.page import Page, Visit
from forq.web.refusals import Refused
from forq.web.settings import WebSettings
from forq.web.source import Source

OWN_FILES = tuple(Path(__file__).with_name("static").iterdir())
# A live page connects again after this time, and its user is authorized again.
STREAM_SECONDS = 300.0
# A comment on an unchanged stream shows which clients are gone.
QUIET_SECONDS = 15.0
MAX_STREAMS = 500
MAX_NOTES = 1000

PageFunction = Callable[[Visit], Awaitable[Page]]
# By path: the name of the view (names.py), which its user must be permitted, and its function.
PAGES: Mapping[str, tuple[str, PageFunction]] = {
    "/": ("overview", queue_pages.overview),
    "/queues/{queue}": ("queue", queue_pages.queue),
    "/queues/{queue}/options": ("options", queue_pages.options),
    "/queues/{queue}/jobs": ("jobs", job_pages.jobs),
    "/queues/{queue}/job": ("job", job_pages.job),
    "/queues/{queue}/flow": ("flow", flow_pages.flow),
    "/queues/{queue}/batch": ("batch", flow_pages.batch),
    "/queues/{queue}/dead": ("dead", job_pages.dead),
    "/queues/{queue}/schedule": ("schedules", system_pages.schedule),
    "/dead": ("dead", job_pages.all_dead),
    "/find": ("jobs", job_pages.find),
    "/schedules": ("schedules", system_pages.schedules),
    "/processes": ("processes", system_pages.processes),
}

log = logging.getLogger("forq.web")


def asgi(
    client: Client | AsyncClient | None = None,
    *,
    authorize: Authorize,
    read_only: bool = False,
    redact: Sequence[str] = (),
) -> ASGIApp:
    """The dashboard as an ASGI application, to mount in another: `app.mount("/forq", forq.web.asgi(client, …))`.

    `client`: names the Redis and the prefix; default: Client(). `authorize(request, name)` is called with the name of
    each view and action (docs/guide/dashboard.md lists them), and returns "read", "act" or "forbidden"; it may be a
    coroutine function. `read_only`: refuses all actions. `redact`: patterns, as in the setting log_redact.
    """
    known = client or Client()
    source = Source(known.url, known.prefix)
    access = Access.mounted(authorize, read_only=read_only)
    return Mounted(dashboard(source, Feed(source), access, ActionLog(None), redact=redact))


def dashboard(
    source: Source,
    feed: Feed,
    access: Access,
    action_log: ActionLog,
    *,
    redact: Sequence[str] = (),
    settings: WebSettings | None = None,
    is_ending: Callable[[], bool] = server_is_ending,
) -> ASGIApp:
    """The application over these facts. `settings`: None if it is mounted in another one. `is_ending`: whether live
    pages have to end, because the server does."""
    site = Site(source, feed, access, action_log, Redaction(redact), is_ending)
    pages = [
        route
        for path, (name, page) in PAGES.items()
        for route in (
            Route(path, site.page(name, page), methods=["GET"]),
            Route(f"/live{path}", site.live(name, page), methods=["GET"]),
        )
    ]
    app = Starlette(
        routes=[
            *pages,
            Route("/do/{action}", site.act, methods=["POST"]),
            # Not Mount, which would change the root of the links on error pages.
            *(Route(f"/static/{file.name}", _file(file), methods=["GET"]) for file in (STYLE, SCRIPT, *OWN_FILES)),
        ],
        exception_handlers={
            ForqError: site.on_error,
            Refused: site.on_refused,
            404: site.on_missing,
            405: site.on_missing,
        },
        lifespan=site.lifespan,
    )
    # A redirect would name the scheme and the host as the server sees them, not as the browser does.
    app.router.redirect_slashes = False
    return Guard(app, access, settings)


class Site:
    def __init__(
        self,
        source: Source,
        feed: Feed,
        access: Access,
        action_log: ActionLog,
        redact: Redaction,
        is_ending: Callable[[], bool],
    ) -> None:
        self._source = source
        self._feed = feed
        self._access = access
        self._action_log = action_log
        self._redact = redact
        self._is_ending = is_ending
        self._streams = 0
        # Results of actions, shown once after the redirect. Not in the URL: a link could contain any text.
        self._notes: OrderedDict[str, str] = OrderedDict()
        self._templates = _templates()

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self._source.close()
            self._access.close()
            self._action_log.close()

    def page(self, name: str, page: PageFunction) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            await self._access.require(request, name)
            visit = await self._visit(request)
            return self._html(request, visit, await page(visit))

        return show

    def live(self, name: str, page: PageFunction) -> Callable[[Request], Awaitable[Response]]:
        """Server-sent events: the part of the page that changes, whenever it does."""

        async def stream(request: Request) -> Response:
            await self._access.require(request, name)
            visit = await self._visit(request)
            first = await page(replace(visit, live=True))  # errors get a status code
            if not first.live:
                # Such pages may scan many jobs.
                raise UsageError(f"the page {first.title!r} has no live updates")
            if request.method == "HEAD":
                # Starlette routes it here, too. It has no body to wait for.
                return Response(media_type="text/event-stream")
            if self._streams >= MAX_STREAMS:
                raise ForqError(f"{MAX_STREAMS} live pages are open; reload this page to see its present state")
            return StreamingResponse(
                self._events(request, visit, page),
                media_type="text/event-stream",
                # Compression would hold updates back: in nginx, in the middleware of an application.
                headers={"X-Accel-Buffering": "no", "Content-Encoding": "identity"},
            )

        return stream

    async def act(self, request: Request) -> Response:
        name = request.path_params["action"]
        action = ACTIONS.get(name)
        if action is None:
            raise UsageError(f"there is no action {name!r}: {', '.join(ACTIONS)}")
        form = Form.read(request.headers.get("content-type", ""), await request.body())
        if self._source.redis_error:
            # It may answer again: only a snapshot tells.
            await self._feed.current()
        user = await self._access.require(request, action.name)
        if (question := await action.question(self._source, form)) is not None:
            fields = [*form.items(), ("confirmed", "yes")]
            values = {"question": question, "action": name, "fields": fields, "back": form.back}
            page = Page("confirm.html", question.title, values, live=False)
            return self._html(request, await self._visit(request), page)
        try:
            async with self._action_log.recorded(user, name, form.target(), form.params()) as entry:
                note = await action.run(self._source, form)
                entry.detail = note.text
        finally:
            self._feed.expire()
        if note.fields is not None:
            values = {"result": note, "action": name, "back": form.back}
            page = Page("more.html", note.text, values, live=False)
            return self._html(request, await self._visit(request), page)
        return RedirectResponse(self._url(request, form.back, note=self._keep(note.text)), 303)

    async def on_error(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, ForqError)
        status = _status_of(exc)
        unanswered = request.method == "POST" and isinstance(exc, UNANSWERED)
        hint = "It may have been carried out: check before you repeat it." if unanswered else ""
        title = "Not found" if status == 404 else "Not possible"
        page = Page("error.html", title, {"status": status, "reason": str(exc), "hint": hint}, live=False)
        return await self._error_page(request, page, status)

    async def on_missing(self, request: Request, exc: Exception) -> Response:
        status = getattr(exc, "status_code", 404)
        reason = "There is no such page." if status == 404 else f"{request.method} is not possible here."
        title = "Not found" if status == 404 else "Not possible"
        page = Page("error.html", title, {"status": status, "reason": reason, "hint": ""}, live=False)
        return await self._error_page(request, page, status)

    async def on_refused(self, request: Request, exc: Exception) -> Response:
        assert isinstance(exc, Refused)
        if "text/html" not in request.headers.get("accept", ""):
            return exc.response(request.headers)
        values = {"status": exc.status, "reason": exc.reason, "hint": exc.advice}
        answer = await self._error_page(request, Page("error.html", "Not allowed", values, live=False), exc.status)
        answer.headers.update(exc.headers)
        return answer

    async def _error_page(self, request: Request, page: Page, status: int) -> Response:
        """Without a snapshot: taking one may have failed."""
        permitted = await self._access.permitted(request)
        visit = Visit(request, self._source, self._feed, None, permitted, self._redact)
        return self._html(request, visit, page, status)

    async def _visit(self, request: Request) -> Visit:
        permitted = await self._access.permitted(request)
        if not self._source.has_supervisor:
            permitted -= NEED_SUPERVISOR
        view = await self._feed.current()
        if request.path_params.get("queue", "") not in ("", *view.queues):
            # It may be new.
            self._feed.expire()
            view = await self._feed.current()
        return Visit(request, self._source, self._feed, view, permitted, self._redact)

    async def _events(self, request: Request, visit: Visit, page: PageFunction) -> AsyncIterator[bytes]:
        key = (request.scope["path"], _query(request), visit.permitted, request.scope.get("root_path"))
        ends = time.monotonic() + STREAM_SECONDS
        sent, sent_at = b"", time.monotonic()
        self._streams += 1
        try:
            yield b"retry: 2000\n\n"
            async for view in self._feed.views(self._is_ending):

                async def event(view: View = view) -> bytes:
                    try:
                        now = visit.at(view)
                        return _event("update", self._live_part(request, now, await page(now)))
                    except ForqError as exc:
                        return _event("problem", str(exc))

                made = await self._feed.shared(view, key, event)
                digest = hashlib.sha256(made).digest()
                if digest != sent:
                    sent, sent_at = digest, time.monotonic()
                    yield made
                elif time.monotonic() - sent_at > QUIET_SECONDS:
                    sent_at = time.monotonic()
                    yield b": unchanged\n\n"
                if time.monotonic() > ends:
                    return
        finally:
            self._streams -= 1

    def _html(self, request: Request, visit: Visit, page: Page, status: int = 200) -> Response:
        template = self._templates.get_template(page.template)
        note = self._notes.pop(request.query_params.get("note", ""), None)
        return HTMLResponse(template.render(self._values(request, visit, page), note=note), status)

    def _live_part(self, request: Request, visit: Visit, page: Page) -> str:
        template = self._templates.get_template(page.template)
        context = template.new_context({**self._values(request, visit, page), "note": None})
        return "".join(template.blocks["live"](context))

    def _values(self, request: Request, visit: Visit, page: Page) -> dict[str, Any]:
        def url(path: str, **query: object) -> str:
            return self._url(request, path, **query)

        return {
            "url": url,
            "page": page,
            "view": visit.view,
            "can": visit.permitted.__contains__,
            "path": _own_path(request),
            "here": _own_address(request),
            "version": VERSION,
            **page.values,
        }

    def _url(self, request: Request, path: str, **query: object) -> str:
        given = {name: value for name, value in query.items() if value is not None}
        joint = "&" if "?" in path else "?"
        return quote(request.scope.get("root_path", "")) + path + (joint + urlencode(given) if given else "")

    def _keep(self, text: str) -> str:
        token = secrets.token_urlsafe(12)
        self._notes[token] = text
        while len(self._notes) > MAX_NOTES:
            self._notes.popitem(last=False)
        return token


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("forq.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(display.FILTERS)
    environment.globals.update(display.GLOBALS)
    return environment


def _file(path: Path) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        response = FileResponse(path, stat_result=path.stat())
        if request.headers.get("if-none-match") == response.headers["etag"]:
            return Response(status_code=304, headers={"etag": response.headers["etag"]})
        return response

    return send


def _event(name: str, text: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines}\n".encode()


def _own_path(request: Request) -> str:
    """The path below the mount point, without /live."""
    root = request.scope.get("root_path", "")
    return str(request.scope["path"]).removeprefix(root).removeprefix("/live") or "/"


def _query(request: Request) -> str:
    # Not request.url: before Starlette 1.0 a question mark in the path begins its query.
    return str(request.scope["query_string"].decode("latin-1"))


def _own_address(request: Request) -> str:
    """The path with the query, without the note of an action, which is shown once."""
    kept = [(name, value) for name, value in parse_qsl(_query(request), keep_blank_values=True) if name != "note"]
    return _own_path(request) + (f"?{urlencode(kept)}" if kept else "")


_STATUS: Mapping[type[ForqError], int] = {
    PermissionRefused: 403,
    UsageError: 400,
    RedisUnavailable: 503,
    SupervisorUnreachable: 503,
    TimedOut: 503,
}


def _status_of(error: ForqError) -> int:
    if error.code.startswith("unknown_") and error.code != "unknown_verb":
        return 404
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 409)
