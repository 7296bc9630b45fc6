"""What a handler returned, as its queue keeps it. Whatever that is, it never fails the job."""

from typing import Any

from forq.broker.record import pack_data

# Of the reason why there is no result.
MAX_REASON = 300
# Which a reason begins with.
NO_RESULT = b"!"


def encode_result(value: Any, max_bytes: int) -> bytes:
    """JSON, in one line; or '!' and why there is none."""
    try:
        packed = pack_data(value, "what its handler returned")
    except BaseException as exc:  # the user's own class may raise anything while it is looked at; the job is done
        return _no_result(_reason(exc))
    if len(packed) > max_bytes:
        return _no_result(f"it is longer than max_data = {max_bytes} bytes")
    return packed


def _reason(exc: BaseException) -> str:
    try:
        return str(exc) or type(exc).__name__
    except BaseException as broken:  # even its text is the user's own
        return f"it cannot be written as JSON, and why cannot be told ({type(broken).__name__})"


def _no_result(reason: str) -> bytes:
    """One line, without lone surrogates. The reason may be of a subclass of the user's, with methods of its own."""
    return NO_RESULT + " ".join(str.split(reason))[:MAX_REASON].encode("utf-8", "replace")
