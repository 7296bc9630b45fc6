"""The argument (Visit) and the result (Page) of a page function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson
from starlette.requests import Request

from forq.errors import RedisUnavailable, UnknownQueue, UsageError
from forq.log_format import Redaction, without_controls
from forq.values import check_queue_name
from forq.web.feed import Feed, QueueView, View
from forq.web.refusals import Refused
from forq.web.source import Source

# Longer data is cut: the rest is in `forqctl job`.
MAX_SHOWN_BYTES = 256 << 10
MARGIN_BYTES = 64 << 10

T = TypeVar("T")


@dataclass(frozen=True)
class Page:
    """A template and its values. `live`: its block "live" changes by itself."""

    template: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    live: bool = True


@dataclass(frozen=True)
class Visit:
    """One request for a page, or one update of it (`live`). `permitted`: views and actions that its user may use."""

    request: Request
    source: Source
    feed: Feed
    view: View | None
    permitted: frozenset[str]
    redact: Redaction
    live: bool = False

    def at(self, view: View) -> "Visit":
        """For the next update of a live page."""
        return replace(self, view=view, live=True)

    def require(self, name: str, what: str) -> None:
        """`what`: what was asked for, after "You may not"."""
        if name not in self.permitted:
            raise Refused(403, f"You may not {what}.", f"It may show data of jobs, and needs the permission {name}.")

    @property
    def now(self) -> View:
        assert self.view is not None
        return self.view

    @property
    def queue(self) -> QueueView:
        """The queue that the path names."""
        name = check_queue_name(self.request.path_params["queue"])
        found = self.now.queues.get(name)
        if found is not None:
            return found
        if self.now.redis_error:
            raise RedisUnavailable(
                f"queue {name!r} is not known here while Redis does not answer: {self.now.redis_error}"
            )
        raise UnknownQueue(f"there is no queue {name!r}: it never existed, or was deleted")

    def text(self, name: str) -> str | None:
        """A parameter of the URL; None if it is missing or empty."""
        return self.request.query_params.get(name, "").strip() or None

    def part(self, items: Sequence[T], per_page: int) -> tuple[Sequence[T], int]:
        """The part of a list that the parameter `page` asks for, or the last one, and its number."""
        text = self.text("page") or ""
        asked = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
        number = min(asked, max(0, len(items) - 1) // per_page)
        return items[number * per_page : (number + 1) * per_page], number

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name) or allowed[0]
        if value not in allowed:
            raise UsageError(f"{name} = {value[:80]!a} is not allowed: {', '.join(allowed)}")
        return value

    def redacted(self, value: Any) -> Any:
        """The value with all its texts redacted, for messages and stacks."""
        if not self.redact:
            return value
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, dict):
            return {name: self.redacted(each) for name, each in value.items()}
        return [self.redacted(each) for each in value] if isinstance(value, list) else value

    def shown_data(self, value: object) -> tuple[str, int]:
        """Data or a result as JSON, redacted like the log; and its whole size in bytes if it is cut, else 0."""
        whole = _as_json(value)
        if len(whole) <= MAX_SHOWN_BYTES:
            return without_controls(self.redact(whole.decode(errors="replace"))), 0
        # The beginning of a longer secret may stand at the end of what is read: it is cut off after the redaction.
        text = self.redact(whole[: MAX_SHOWN_BYTES + MARGIN_BYTES].decode(errors="ignore"))
        return without_controls(text[: max(0, len(text) - MARGIN_BYTES)]), len(whole)


def _as_json(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str)
    except TypeError:  # too deep, too large a number, a lone surrogate
        return repr(value).encode(errors="backslashreplace")
