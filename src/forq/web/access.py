"""Identifies the user of a request, and decides what that user may see and do.

1. Local: on a loopback address or a Unix socket, without `users` and `proxies`. The rules of the control socket.
2. Passwords: HTTP Basic, checked against the file `users`.
3. Proxies: a header of a proxy that has authenticated the user.
4. Mounted: the hook `authorize` of the application that contains the dashboard.

forq.web.names has the views and actions, and the level that each needs.
"""

import asyncio
import base64
import binascii
import inspect
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from starlette.requests import HTTPConnection

from forq.errors import ConfigError
from forq.logging_setup import WarningThrottle
from forq.procs.sock_diag import plain_address
from forq.procs.unix_socket import allowed_to
from forq.web.names import KINDS, LEVELS, Level, kind_of, level_for
from forq.web.passwords import Passwords
from forq.web.peers import SCOPE_KEY, WebPeer, group_id, groups_of_user, user_name
from forq.web.refusals import Refused, password_needed
from forq.web.settings import WebSettings, is_loopback

Authorize = Callable[[HTTPConnection, str], "Level | Awaitable[Level]"]
Source = Literal["local", "password", "proxy", "app"]

USER_KEY = "forq.user"
LEVELS_KEY = "forq.levels"
# Names that were asked for and permitted. forq.web.guard puts a set there, and refuses pages that asked for nothing.
PERMITTED_KEY = "forq.permitted"
# A change of the groups or names of local users takes effect after this time.
LOOKUP_SECONDS = 10.0
MAX_LOOKUPS = 256
MAX_PROXY_USER = 128
MAX_CREDENTIALS = 1024
# Headers of a proxy. Its own user says nothing about the user behind it.
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")

LOCAL_ADVICE = (
    "Admitted are root, the user that forq runs as, members of control_group, and, to look only, members of "
    "control_read_group (in forq.toml). To admit others, set `users` or `proxies` in [web]."
)

log = logging.getLogger("forq.web")


@dataclass(frozen=True)
class User:
    """`name`: as shown and logged. `level`: what the source grants; "forbidden" for none, and for a mounted app, which
    is asked for each name. `origin`: the address or local user that the request comes from."""

    name: str
    level: Level
    source: Source
    origin: str


class Access:
    """Decides for requests. `Access(settings)` for the dashboard as a process of its own, `mounted` inside another
    application."""

    def __init__(
        self,
        settings: WebSettings | None,
        authorize: Authorize | None = None,
        *,
        read_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError: an unknown group, a file of users that cannot be used."""
        self.read_only = read_only or (settings is not None and settings.read_only)
        self._settings = settings
        self._authorize = authorize
        self._groups = _Lookup(groups_of_user, clock)
        self._names = _Lookup(user_name, clock)
        self._passwords: Passwords | None = None
        self._warnings = throttled(log)
        if settings is None:
            if authorize is None:
                raise ConfigError("a mounted dashboard needs authorize: a function of the request and a name")
            return
        self._group = _group(settings.control_group)
        self._readers = _group(settings.control_read_group)
        self._networks = [ipaddress.ip_network(proxy) for proxy in settings.proxies if proxy != "unix"]
        if settings.users:
            self._passwords = Passwords(Path(settings.users), clock=clock)
            if not settings.unix_socket and not is_loopback(settings.listen.rpartition(":")[0]) and not self._networks:
                log.warning("passwords cross the network in the clear: put a proxy with TLS in front, and name it")

    @classmethod
    def mounted(cls, authorize: Authorize, *, read_only: bool = False) -> "Access":
        return cls(None, authorize, read_only=read_only)

    def close(self) -> None:
        if self._passwords is not None:
            self._passwords.close()

    @property
    def is_mounted(self) -> bool:
        return self._settings is None

    async def user(self, request: HTTPConnection) -> User:
        """The user of the request. Raises Refused if nobody is admitted: 401, 403, 429 or 503."""
        if self._settings is None:
            # Not kept: the hook may find the name.
            return _user_in_app(request)
        user = request.scope.get(USER_KEY)
        if user is None:
            request.scope[USER_KEY] = user = await self._identify(request, self._settings)
        return cast(User, user)

    async def level(self, request: HTTPConnection, name: str) -> Level:
        """What the user may do with this view or action: "forbidden" if anything prevents it. An action needs "act"."""
        level = await self._level(request, name)
        if level != "forbidden":
            request.scope.setdefault(PERMITTED_KEY, set()).add(name)
        return level

    async def _level(self, request: HTTPConnection, name: str) -> Level:
        kind = kind_of(name)
        if kind == "action" and self.read_only:
            return "forbidden"
        user = await self.user(request)
        if self._authorize is None:
            return level_for(name, user.level)
        asked = request.scope.setdefault(LEVELS_KEY, {})
        if name not in asked:
            asked[name] = await self._ask(self._authorize, request, name)
        level: Level = asked[name]
        return "forbidden" if kind == "action" and level != "act" else level

    async def permits(self, request: HTTPConnection, name: str) -> bool:
        return await self.level(request, name) != "forbidden"

    async def permitted(self, request: HTTPConnection, names: Collection[str] = tuple(KINDS)) -> frozenset[str]:
        """Those of the names that are permitted, for a template."""
        return frozenset([name for name in names if await self.permits(request, name)])

    async def require(self, request: HTTPConnection, name: str) -> User:
        """The user. Raises Refused (403) if the view or action is not permitted."""
        permitted = await self.permits(request, name)
        user = await self.user(request)
        if permitted:
            return user
        if kind_of(name) == "action" and self.read_only:
            raise Refused(403, "This dashboard is read-only.", "read_only is set.")
        self._warnings.warn(f"refused name={name} user={user.name!a} source={user.source} from={user.origin}")
        raise Refused(403, f"You ({user.name}) may not use {name}.", _advice(user))

    async def is_proxy(self, request: HTTPConnection) -> bool:
        """Whether the request comes from a proxy of `proxies`, whose headers are believed.

        On this host an address is not enough, as every local user can connect from it. There, the proxy has to run as a
        user who may act: then nobody gains anything by claiming another name.
        """
        peer = peer_of_request(request)
        if self._settings is None or not self._is_named(peer):
            return False
        return not peer.local or await self._local_level(peer) == "act"

    async def client(self, request: HTTPConnection) -> str:
        """Where the request comes from: the address or the local user; behind a proxy, the address that it reports."""
        reported = request.headers.getlist("x-forwarded-for")
        if reported and await self.is_proxy(request):
            try:
                return _block(str(plain_address(reported[-1].rpartition(",")[2].strip())))
            except ValueError:
                pass
        return _block(peer_of_request(request).origin)

    async def _identify(self, request: HTTPConnection, settings: WebSettings) -> User:
        if settings.proxies and (found := await self._of_proxy(request, settings)):
            return found
        if request.headers.get(settings.proxy_header) is not None:
            raise self._spoofed(request, settings)
        if self._passwords is not None:
            return await self._by_password(request, self._passwords)
        if settings.proxies:
            raise Refused(
                403, "Only a proxy may connect here.", f"It has to name the user in the header {settings.proxy_header}."
            )
        return await self._local(request)

    async def _local(self, request: HTTPConnection) -> User:
        peer = peer_of_request(request)
        if peer.uid is None:
            raise Refused(403, "It is not known which local user you are.", LOCAL_ADVICE)
        if passed := [name for name in FORWARDED if name in request.headers]:
            raise Refused(
                403,
                f"A proxy has passed this request on (header {passed[0]}), and forq cannot tell for whom.",
                "Name the proxy in `proxies` of [web], or set `users`.",
            )
        level = await self._local_level(peer)
        name = await self._names.get(peer.uid)
        if level == "forbidden":
            raise Refused(403, f"The local user {name} may not use this dashboard.", LOCAL_ADVICE)
        return User(name, level, "local", peer.origin)

    async def _local_level(self, peer: WebPeer) -> Level:
        if peer.uid is None:
            return "forbidden"
        groups = peer.groups
        if groups is None and (self._group, self._readers) != (None, None):
            groups = await self._groups.get(peer.uid)
        return allowed_to(peer.uid, lambda: groups or (), group=self._group, readers=self._readers) or "forbidden"

    async def _by_password(self, request: HTTPConnection, passwords: Passwords) -> User:
        sent = request.headers.getlist("authorization")
        if not sent:
            raise password_needed("Log in with a name and a password.")
        credentials = _basic(sent[0]) if len(sent) == 1 else None
        if credentials is None:
            raise password_needed("The header Authorization is not of the form that browsers send.")
        client = await self.client(request)
        name, password = credentials
        level = await passwords.check(name, password, client)
        return User(name, level, "password", client)

    async def _of_proxy(self, request: HTTPConnection, settings: WebSettings) -> User | None:
        """None if the request does not come from a proxy, or the proxy names no user."""
        named = request.headers.getlist(settings.proxy_header)
        if not named or not await self.is_proxy(request):
            return None
        name = _proxy_user(named)
        if name is None:
            raise Refused(
                403,
                f"The header {settings.proxy_header} does not name one user.",
                "The proxy has to replace what the client sends in it.",
            )
        actors = settings.proxy_actors
        level: Level = "act" if not actors or name in actors else "read"
        return User(name, level, "proxy", await self.client(request))

    def _spoofed(self, request: HTTPConnection, settings: WebSettings) -> Refused:
        peer = peer_of_request(request)
        if self._is_named(peer):
            return Refused(
                403,
                f"The header {settings.proxy_header} is refused: the proxy runs as local user {peer.uid}.",
                "A proxy on this host has to run as a user who may act: root, the user that forq runs as, or a member "
                "of control_group. Otherwise each local user could claim to be somebody else.",
            )
        return Refused(
            403,
            f"The header {settings.proxy_header} is refused: {peer.origin} is not one of the proxies.",
            "Only those of `proxies` in [web] may name a user.",
        )

    def _is_named(self, peer: WebPeer) -> bool:
        assert self._settings is not None
        if peer.kind == "unix":
            return "unix" in self._settings.proxies
        if peer.address is None:
            return False
        address = ipaddress.ip_address(peer.address)
        return any(address in network for network in self._networks)

    async def _ask(self, authorize: Authorize, request: HTTPConnection, name: str) -> Level:
        """A hook that fails or answers anything else forbids."""
        try:
            # Of an object with a method __call__, too.
            method = getattr(authorize, "__call__", None)  # noqa: B004
            if inspect.iscoroutinefunction(authorize) or inspect.iscoroutinefunction(method):
                answer = authorize(request, name)
            else:
                # It may query a database.
                answer = await asyncio.to_thread(authorize, request, name)
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception:
            log.exception("authorize failed; refused name=%s", name)
            return "forbidden"
        if not isinstance(answer, str) or answer not in LEVELS:
            log.error("authorize answered %.100r; refused name=%s: it has to answer one of %s", answer, name, LEVELS)
            return "forbidden"
        return answer


class _Lookup:
    """Answers of the databases of users and groups, which may be on another host: asked in a thread, kept a moment."""

    def __init__(self, ask: Callable[[int], Any], clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._known: dict[int, tuple[float, Any]] = {}

    async def get(self, uid: int) -> Any:
        at, answer = self._known.get(uid, (float("-inf"), None))
        if self._clock() - at > LOOKUP_SECONDS:
            answer = await asyncio.to_thread(self._ask, uid)
            if len(self._known) >= MAX_LOOKUPS:
                self._known.clear()
            self._known[uid] = (self._clock(), answer)
        return answer


def _group(name: str | None) -> int | None:
    try:
        return group_id(name)
    except KeyError as exc:
        raise ConfigError(f"there is no group {name!r}") from exc


def throttled(logger: logging.Logger) -> WarningThrottle:
    """For warnings that a client can cause. It may only warn while an event loop runs."""
    return WarningThrottle(logger, lambda seconds, end: asyncio.get_running_loop().call_later(seconds, end))


def peer_of_request(request: HTTPConnection) -> WebPeer:
    """Without the protocol of forq.web.connections nothing is known."""
    peer = request.scope.get(SCOPE_KEY)
    return peer if isinstance(peer, WebPeer) else WebPeer("tcp")


def _block(client: str) -> str:
    """One IPv6 client has a whole /64."""
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    return client if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))


def _basic(header: str) -> tuple[str, str] | None:
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic" or len(encoded) > MAX_CREDENTIALS:
        return None
    try:
        text = base64.b64decode(encoded.strip(), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    name, colon, password = text.partition(":")
    return (name, password) if colon else None


def _proxy_user(values: list[str]) -> str | None:
    """The name in the header. Starlette decodes headers as latin-1; proxies send UTF-8."""
    if len(values) != 1:
        return None
    try:
        name = values[0].encode("latin-1").decode().strip()
    except UnicodeDecodeError:
        return None
    return name if 0 < len(name) <= MAX_PROXY_USER and name.isprintable() and "," not in name else None


def _user_in_app(request: HTTPConnection) -> User:
    """The name that the hook left in request.state.forq_user, or of the user that a middleware has found."""
    found = request.scope.get("state", {}).get("forq_user") or request.scope.get("user")
    names = [found, *(getattr(found, attribute, None) for attribute in ("display_name", "username"))]
    name = next((name for name in names if isinstance(name, str) and name), "-")
    return User(name[:MAX_PROXY_USER], "forbidden", "app", request.client.host if request.client else "-")


def _advice(user: User) -> str:
    match user.source:
        case "local":
            return "It needs root, the user that forq runs as, or a member of control_group."
        case "password":
            return "It needs a user with the level act: forq web-user FILE NAME --level act."
        case "proxy":
            return "It needs a user of proxy_actors in [web]."
        case "app":
            return "The application that contains this dashboard decides about it (authorize)."
