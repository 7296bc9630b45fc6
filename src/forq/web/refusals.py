"""The answers to requests that are refused: what was wrong and what to do, as a small page or as plain text."""

from collections.abc import Mapping
from html import escape
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

REALM = "forq"

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title></head>
<body><h1>{title}</h1><p>{reason}</p>{advice}</body>
</html>
"""


class Refused(Exception):
    """The request is not carried out. `reason`: what was wrong; `advice`: what to do. Both are shown to the client, so
    they name no user that exists and no other secret."""

    def __init__(self, status: int, reason: str, advice: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.advice = advice
        self.headers = dict(headers or {})

    def response(self, headers: Headers) -> Response:
        """For a request with these headers."""
        title = f"{self.status} {HTTPStatus(self.status).phrase}"
        if "text/html" not in headers.get("accept", ""):
            text = "\n".join(part for part in (title, self.reason, self.advice) if part)
            return PlainTextResponse(f"{text}\n", self.status, self.headers)
        advice = f"<p>{escape(self.advice)}</p>" if self.advice else ""
        return HTMLResponse(
            _PAGE.format(title=escape(title), reason=escape(self.reason), advice=advice), self.status, self.headers
        )


def password_needed(reason: str, advice: str = "") -> Refused:
    return Refused(401, reason, advice, {"WWW-Authenticate": f'Basic realm="{REALM}", charset="UTF-8"'})


def too_many(reason: str, seconds: float) -> Refused:
    whole = max(1, int(seconds + 0.999))
    return Refused(429, reason, f"Try again in {whole} s.", {"Retry-After": str(whole)})


async def refused(request: Request, exc: Exception) -> Response:
    """For `exception_handlers={Refused: refused}` of Starlette."""
    assert isinstance(exc, Refused)
    return exc.response(request.headers)
