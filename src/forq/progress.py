"""The progress of a running job: how it is checked, and how it is shown."""

from forq.errors import InvalidData
from forq.values import shown

MAX_TEXT = 200


def check_progress(fraction: object, text: object = "") -> tuple[float, str]:
    """The fraction and the text, cut at 200 characters, with control characters replaced by blanks."""
    try:
        allowed = 0 <= fraction <= 1  # type: ignore[operator]
    except TypeError:
        allowed = False
    if not allowed:
        raise InvalidData(f"progress {shown(fraction)} is not allowed: a number from 0 to 1")
    if not isinstance(text, str):
        raise InvalidData(f"progress text {shown(text)} is not allowed: it must be text")
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT]
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return float(fraction), text  # type: ignore[arg-type]


def show_progress(fraction: float, text: str) -> str:
    """`40% page 12 of 30`. Rounded down, so that unfinished work never shows 100%."""
    return f"{int(round(fraction * 100, 6))}% {text}".rstrip()
