"""What a running job says of its progress: checked where it comes in, and shown in the same words everywhere."""

from forq.errors import InvalidData
from forq.values import shown

MAX_TEXT = 200


def check_progress(fraction: object, text: object = "") -> tuple[float, str]:
    """The fraction, and the text in one line: cut at 200 characters, a blank for what a terminal would obey."""
    try:
        allowed = 0 <= fraction <= 1  # type: ignore[operator]
    except TypeError:
        allowed = False
    if not allowed:
        raise InvalidData(f"progress {shown(fraction)} is not allowed: a number from 0 to 1")
    if not isinstance(text, str):
        raise InvalidData(f"the text of a progress {shown(text)} is not allowed: a text is needed")
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT]
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return float(fraction), text  # type: ignore[arg-type]


def show_progress(fraction: float, text: str) -> str:
    """For people: `40% page 12 of 30`, rounded down: what is not done yet is never 100%."""
    return f"{int(round(fraction * 100, 6))}% {text}".rstrip()
