"""The JSON-RPC wire format: requests, results, errors."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forq import errors
from forq.procs import jsonrpc

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_a_request_is_read_back_as_it_was_sent(value: object) -> None:
    line = jsonrpc.request(7, "push", {"data": value})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    call = jsonrpc.read_request(line[:-1])
    assert (call.id, call.method, call.params, call.expects_answer) == (7, "push", {"data": value}, True)


@given(json_values)
def test_a_result_is_read_back_as_it_was_sent(value: object) -> None:
    assert jsonrpc.read_answer(jsonrpc.result("a", value)) == ("a", value)


def test_a_request_without_an_id_expects_no_reply() -> None:
    assert not jsonrpc.read_request(b'{"jsonrpc":"2.0","method":"ping"}').expects_answer


@pytest.mark.parametrize(
    ("line", "rpc_code", "code", "id"),
    [
        (b"{", -32700, "invalid_data", None),
        (b"\xff", -32700, "invalid_data", None),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"a":NaN}}', -32700, "invalid_data", None),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"a":1e999}}', -32700, "invalid_data", None),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"a":"\\ud800"}}', -32700, "invalid_data", None),
        (b"[" * 100_000, -32700, "invalid_data", None),
        (b"9" * 100_000, -32700, "invalid_data", None),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', -32600, "usage", None),
        (b"1", -32600, "usage", None),
        (b'{"id":1,"method":"ping"}', -32600, "usage", 1),
        (b'{"jsonrpc":"2.0","id":1}', -32600, "usage", 1),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600, "usage", None),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600, "usage", None),
        (b'{"jsonrpc":"2.0","id":"q","method":"ping","params":[1]}', -32602, "usage", "q"),
    ],
)
def test_a_malformed_request_is_refused_with_its_code(line: bytes, rpc_code: int, code: str, id: object) -> None:
    with pytest.raises(jsonrpc.Malformed) as caught:
        jsonrpc.read_request(line)
    assert (caught.value.rpc_code, caught.value.code, caught.value.id) == (rpc_code, code, id)


@given(st.binary(max_size=200))
def test_reading_any_bytes_gives_a_call_or_malformed(line: bytes) -> None:
    with contextlib.suppress(jsonrpc.Malformed):
        jsonrpc.read_request(line)


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_every_error_arrives_as_its_own_class(code: str) -> None:
    id, error = jsonrpc.read_answer(jsonrpc.failure(3, errors.BY_CODE[code]("what happened")))
    assert id == 3
    assert type(error) is errors.BY_CODE[code]
    assert str(error) == "what happened"


def test_a_failure_has_the_standard_error_number() -> None:
    def number(line: bytes) -> object:
        return json.loads(line)["error"]["code"]

    assert number(jsonrpc.failure(1, errors.UnknownVerb("x"))) == -32601
    assert number(jsonrpc.failure(1, errors.UnknownQueue("x"))) == -32000
    assert number(jsonrpc.failure(1, errors.ForqError("x"), jsonrpc.INTERNAL_ERROR)) == -32603


@pytest.mark.parametrize("body", [None, [], {"data": {"code": "KeyboardInterrupt"}}, {"data": {"code": ["x"]}}, {}])
def test_an_unknown_error_becomes_the_base_class(body: object) -> None:
    assert type(jsonrpc.to_error(body)) is errors.ForqError


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), "\ud800", {1, 2}])
def test_values_outside_json_are_refused(value: object) -> None:
    with pytest.raises(errors.InvalidData):
        jsonrpc.encode({"data": value})


@given(json_values, st.integers(0, 10**9), st.text(max_size=5) | st.integers() | st.none())
def test_a_forwarded_result_has_the_same_bytes_as_a_newly_encoded_one(
    value: object, number: int, id: str | int | None
) -> None:
    found = jsonrpc.read_raw_answer(jsonrpc.result(number, value)[:-1])
    assert found is not None
    assert found[0] == number
    assert jsonrpc.result(id, found[1]) == jsonrpc.result(id, value)


def test_errors_and_events_are_not_forwarded_unread() -> None:
    assert jsonrpc.read_raw_answer(jsonrpc.failure(7, errors.UnknownJob("no"))) is None
    assert jsonrpc.read_raw_answer(b'{"event":"redis","ok":true}') is None
