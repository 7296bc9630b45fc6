"""Results of handlers: encoded as JSON, or the reason why not. A result never fails the job."""

import enum
import os
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from forq.broker.record import pack_body
from forq.workers.attempt import MAX_REASON, AttemptRunner, encode_result
from forq.workers.handlers import Handlers

RECORD = b"p5 1700000000123456\n" + pack_body(1, None, None)


def result_of(handler: Any, max_bytes: int = 100) -> bytes | None:
    attempts = AttemptRunner("q", Handlers({None: handler}))
    attempts.max_result_bytes = max_bytes
    assert attempts.run("id1", RECORD, 9) is None, "the job is done anyway"
    attempts.close()
    return attempts.result


class Shade(enum.Enum):
    DARK = "dark"


@pytest.mark.parametrize(
    ("value", "packed"),
    [
        (None, b"null"),
        (False, b"false"),
        ("ü\n", '"ü\\n"'.encode()),
        ({"a": (1, 2.5)}, b'{"a":[1,2.5]}'),
        ("x" * 98, b'"' + 98 * b"x" + b'"'),
    ],
)
def test_json_results_are_stored_in_one_line(value: Any, packed: bytes) -> None:
    assert result_of(lambda data, job: value) == packed


def recursive() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own


class Odd(dict[str, Any]):
    """Exits when its contents are read."""

    def items(self) -> Any:
        raise SystemExit("never")


class Silent(Exception):
    def __str__(self) -> str:
        raise SystemExit("never")


class Worse(Odd):
    def items(self) -> Any:
        raise Silent


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "is not JSON: result is of type object; allowed are"),
        (datetime.now(UTC), "is not JSON: result is of type datetime; allowed are"),
        ({"a": [UUID(int=1)]}, "is not JSON: result['a'][0] is of type UUID; allowed are"),
        (Shade.DARK, "is not JSON: result is of type Shade, an Enum; allowed are"),
        ({1: 2}, "is not JSON: result has the key 1, but keys must be str"),
        (2**64, "is not JSON: Integer exceeds 64-bit range"),
        (float("nan"), "result is NaN or Infinity, which are not allowed"),
        ("\ud800", "is not JSON"),
        (recursive(), "is not JSON: Recursion limit reached"),
        (Odd(a=None), "never"),
        (Worse(a=None), "cannot be encoded as JSON, and its error has no text (SystemExit)"),
        ("x" * 99, "it is longer than max_data = 100 bytes"),
        (type("L\noong" * 200, (), {})(), "is not JSON"),
    ],
)
def test_an_invalid_or_too_long_result_is_replaced_by_a_one_line_reason(value: Any, reason: str) -> None:
    packed = result_of(lambda data, job: value)
    assert packed is not None
    assert packed.startswith(b"!")
    assert reason in packed.decode()
    assert b"\n" not in packed
    assert len(packed) <= 1 + MAX_REASON


def test_the_result_of_a_coroutine_is_kept_with_and_without_a_deadline() -> None:
    async def handle(data: Any, job: Any) -> str:
        return "later"

    assert result_of(handle) == b'"later"'


def test_the_result_of_one_attempt_is_not_reused_by_the_next() -> None:
    def handle(data: Any, job: Any) -> int:
        if job.id == "bad":
            raise ValueError("no")
        return 1

    attempts = AttemptRunner("q", Handlers({None: handle}))
    attempts.max_result_bytes = 100
    attempts.run("good", RECORD, 9)
    assert attempts.result == b"1"
    assert attempts.run("bad", RECORD, 9) is not None
    assert attempts.result is None
    attempts.max_result_bytes = 0
    attempts.run("good", RECORD, 9)
    assert attempts.result is None, "its queue keeps nothing"


def test_a_forked_copy_that_returns_reports_no_result() -> None:
    def handle(data: Any, job: Any) -> int:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return 1

    assert result_of(handle) == b"1"


def test_a_reason_contains_no_lone_surrogates() -> None:
    class Strange(Odd):
        def items(self) -> Any:
            raise ValueError("\ud800")

    encode_result(Strange(a=None), 100).decode()
