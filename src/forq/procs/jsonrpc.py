"""Newline-delimited JSON-RPC 2.0, for both ends of the control protocol (docs/reference/protocol.md).

Uses the standard library's json: importing orjson would take longer than the rest of forqctl's start.
"""

from __future__ import annotations

import json
import re

from forq.errors import BY_CODE, CannotImport, ForqError, InvalidData, UnknownVerb, UsageError
from forq.procs.lines import MAX_LINE_BYTES as MAX_LINE_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


_RAW_ANSWER = re.compile(rb'{"jsonrpc":"2\.0","id":([0-9]+),"result":')

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
UNKNOWN_METHOD = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
SERVER_ERROR = -32000


class Call:
    """A request. `expects_answer` is false for a notification."""

    __slots__ = ("expects_answer", "id", "method", "params")

    def __init__(self, id: str | int | None, method: str, params: dict[str, Any], expects_answer: bool) -> None:
        self.id = id
        self.method = method
        self.params = params
        self.expects_answer = expects_answer


class Malformed(UsageError):
    """An invalid request, with its JSON-RPC code and, if readable, its id."""

    def __init__(self, message: str, rpc_code: int, id: str | int | None = None) -> None:
        super().__init__(message)
        self.rpc_code = rpc_code
        self.id = id
        self.code = InvalidData.code if rpc_code == PARSE_ERROR else UsageError.code


class RawResult:
    """A result as received bytes, to be forwarded: decoding and encoding it would take ten times as long."""

    __slots__ = ("_rest",)

    def __init__(self, rest: memoryview) -> None:
        """`rest`: the line from the result to its end, including the closing brace."""
        self._rest = rest

    def line(self, id: str | int | None) -> bytes:
        """The same result for another request id."""
        return b"".join((b'{"jsonrpc":"2.0","id":', encode(id), b',"result":', self._rest, b"\n"))


def read_raw_answer(line: bytes) -> tuple[int, RawResult] | None:
    """Splits a line made by `result` for a numeric id; None for any other line."""
    found = _RAW_ANSWER.match(line)
    return None if found is None else (int(found[1]), RawResult(memoryview(line)[found.end() :]))


def encode(value: object) -> bytes:
    """Compact JSON in UTF-8, without NaN and Infinity. Raises InvalidData for anything that JSON cannot express."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidData(f"not JSON: {exc}") from exc


def decode(text: bytes) -> Any:
    """Raises InvalidData for anything that is not strict JSON in UTF-8."""
    try:
        value = json.loads(text.decode(), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as exc:
        raise InvalidData(f"not JSON: {exc}") from exc
    if b"\\ud" in text or b"\\uD" in text:
        # A lone surrogate is a legal escape, but cannot be stored or sent.
        encode(value)
    return value


def request(id: str | int, method: str, params: dict[str, Any]) -> bytes:
    return encode({"jsonrpc": "2.0", "id": id, "method": method, "params": params}) + b"\n"


def notification(method: str) -> bytes:
    return encode({"jsonrpc": "2.0", "method": method}) + b"\n"


def result(id: str | int | None, value: object) -> bytes:
    if isinstance(value, RawResult):
        return value.line(id)
    return encode({"jsonrpc": "2.0", "id": id, "result": value}) + b"\n"


def failure(id: str | int | None, error: ForqError, rpc_code: int | None = None) -> bytes:
    if rpc_code is None:
        rpc_code = UNKNOWN_METHOD if isinstance(error, UnknownVerb) else SERVER_ERROR
    # A message may quote the request: characters that cannot be encoded must not prevent the reply.
    message = str(error).encode(errors="backslashreplace").decode()
    data = {"code": error.code}
    if isinstance(error, CannotImport) and error.traceback:
        data["traceback"] = error.traceback.encode(errors="backslashreplace").decode()
    body = {"code": rpc_code, "message": message, "data": data}
    return encode({"jsonrpc": "2.0", "id": id, "error": body}) + b"\n"


def read_request(line: bytes) -> Call:
    """Raises Malformed, never anything else."""
    try:
        message = decode(line)
    except InvalidData as exc:
        raise Malformed(str(exc), PARSE_ERROR) from exc
    if isinstance(message, list):
        raise Malformed("batches are not supported: send one request per line", INVALID_REQUEST)
    if not isinstance(message, dict):
        raise Malformed("a request must be a JSON object", INVALID_REQUEST)
    id = message.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int | None):
        raise Malformed("id must be a string or a whole number", INVALID_REQUEST)
    method = message.get("method")
    if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
        raise Malformed('a request needs "jsonrpc": "2.0" and a "method" (a string)', INVALID_REQUEST, id)
    params = message.get("params", {})
    if not isinstance(params, dict):
        raise Malformed("params must be an object: parameters are passed by name", INVALID_PARAMS, id)
    return Call(id, method, params, "id" in message)


def read_answer(line: bytes | dict[str, Any]) -> tuple[str | int | None, Any]:
    """The id, and either the result or a ForqError (returned, not raised: the caller dispatches it). `line` may be
    decoded already."""
    message = decode(line) if isinstance(line, bytes) else line
    if not isinstance(message, dict) or ("result" in message) == ("error" in message):
        raise InvalidData("the supervisor sent an invalid reply")
    if "error" in message:
        return message.get("id"), to_error(message["error"])
    return message.get("id"), message["result"]


def to_error(body: object) -> ForqError:
    """Only classes in the table of forq.errors are created from received data."""
    if not isinstance(body, dict):
        return ForqError("the supervisor sent an invalid error")
    data = body.get("data")
    code = data.get("code") if isinstance(data, dict) else None
    cls = BY_CODE.get(code, ForqError) if isinstance(code, str) else ForqError
    error = cls(str(body.get("message", "the supervisor sent an error without a message")))
    if isinstance(error, CannotImport) and isinstance(data, dict) and isinstance(data.get("traceback"), str):
        error.traceback = data["traceback"]
    return error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:
        raise ValueError(f"number {text[:40]} is too large")
    return number
