"""The dashboard: `asgi` makes an ASGI application that shows and steers the queues of one Redis.

Needs the extra forq[web].
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forq.web.app import asgi

__all__ = ["asgi"]


def __getattr__(name: str) -> Any:
    # The supervisor imports forq.web.settings without the packages of the extra.
    if name == "asgi":
        try:
            from forq.web.app import asgi
        except ModuleNotFoundError as exc:
            package = str(exc.name).partition(".")[0]
            raise ModuleNotFoundError(
                f"forq.web.asgi needs the package {package}: pip install 'forq[web]'", name=exc.name
            ) from exc
        return asgi
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
