"""For a dashboard inside another application: finds its path there, and notices the end of the server.

1. `Mounted` finds the part of the path that is the dashboard's own, however the application and proxies cut it.
2. `server_is_ending`: applications send no lifespan events to what they contain.
"""

import signal

from starlette.types import ASGIApp, Receive, Scope, Send


class Mounted:
    """ASGI middleware around the dashboard."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(at_mount(scope) if scope["type"] == "http" else scope, receive, send)


def at_mount(scope: Scope) -> Scope:
    """The scope with a path that begins with `root_path`, as ASGI wants it.

    Behind a proxy that removes its own prefix, `Mount` of Starlette appends its path to a `root_path` that `path` never
    began with. Other routers remove their path.
    """
    root: str = scope.get("root_path", "").rstrip("/")
    path: str = scope["path"]
    # The part of `root_path` that Mount has appended.
    mount = root.removeprefix(scope.get("app_root_path", root))
    own = path
    for start in (root, mount):
        if start and (path == start or path.startswith(f"{start}/")):
            own = path[len(start) :]
            break
    # Without a slash at its end, the mount point is the overview, too.
    return {**scope, "root_path": root, "path": root + (own or "/")}


def server_is_ending() -> bool:
    """Whether uvicorn is about to stop. It waits for open responses, and a live page lasts minutes.

    Its handler of signals is a method of the server. Other servers end such responses themselves.
    """
    servers = (getattr(signal.getsignal(number), "__self__", None) for number in (signal.SIGTERM, signal.SIGINT))
    return any(getattr(server, "should_exit", None) is True for server in servers)
