"""Signatures of tasks: which functions are allowed, what a call stores, and what a worker calls."""

from __future__ import annotations

import asyncio
import functools
import inspect
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypedDict, Unpack

import msgspec
import pytest

from forq.app.signature import NOT_DIRECTLY, Signature
from forq.errors import ArgumentsDoNotFit, DoesNotFit, ForqError, InvalidData, InvalidTask

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass
class Receipt:
    number: int


def send(to: str, subject: str = "hi") -> Receipt:
    return Receipt(len(to + subject))


def plain(first, second=2): ...  # type: ignore[no-untyped-def]


def everything(a: int, /, b: int, c: int = 3, *rest: datetime, key: str, other: str = "o", **more: float) -> None: ...


def only_positional(a: int, b: int = 2, /, **more: int) -> None: ...


def rest_only(*rest: int, **more: int) -> None: ...


def numbered(rest: Later) -> list[Later]:
    return [rest]


@dataclass
class Later:
    number: int


def hidden(price: Fraction) -> None: ...


async def later(user: int) -> None: ...


def signature(function: Any) -> Signature:
    return Signature(function, "task")


def through(function: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    task = signature(function)
    return task.unpack(task.pack(args, kwargs))


def test_arguments_are_stored_by_parameter_name() -> None:
    assert signature(send).pack(("a@b.c", "yo"), {}) == {"to": "a@b.c", "subject": "yo"}
    assert signature(send).pack((), {"subject": "yo", "to": "a@b.c"}) == {"to": "a@b.c", "subject": "yo"}


def test_defaults_are_not_stored() -> None:
    assert signature(send).pack(("a@b.c",), {}) == {"to": "a@b.c"}


def test_a_default_given_explicitly_is_stored() -> None:
    assert signature(send).pack(("a@b.c", "hi"), {}) == {"to": "a@b.c", "subject": "hi"}


def test_variadic_positional_arguments_are_a_list_under_their_name() -> None:
    assert signature(rest_only).pack((1, 2), {}) == {"rest": [1, 2]}
    assert through(rest_only, 1, 2) == ([1, 2], {})


def test_variadic_keyword_arguments_are_merged() -> None:
    assert signature(rest_only).pack((), {"x": 1}) == {"x": 1}
    assert through(rest_only, x=1) == ([], {"x": 1})


def test_a_keyword_may_have_the_name_of_the_variadic_keywords() -> None:
    assert through(rest_only, more=1) == ([], {"more": 1})


@pytest.mark.parametrize(("function", "name"), [(only_positional, "a"), (rest_only, "rest")])
def test_a_merged_keyword_with_the_name_of_another_parameter_is_a_type_error(function: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"cannot store the keyword argument '{name}'"):
        signature(function).pack((1,), {name: 2})


def test_a_call_with_every_kind_of_parameter_comes_back() -> None:
    now = datetime(2026, 1, 2, 3, 4)
    args, kwargs = through(everything, 1, 2, 4, now, now, key="k", extra=1.5)
    bound = inspect.signature(everything).bind(*args, **kwargs).arguments
    assert bound == {"a": 1, "b": 2, "c": 4, "rest": (now, now), "key": "k", "more": {"extra": 1.5}}


def test_parameters_before_variadic_arguments_get_their_default_if_they_are_not_stored() -> None:
    """As after a deploy that added c."""
    stored = {"a": 1, "b": 2, "rest": ["2026-01-02T03:04:00"], "key": "k"}
    args, kwargs = signature(everything).unpack(stored)
    assert args == [1, 2, 3, datetime(2026, 1, 2, 3, 4)]
    assert kwargs == {"key": "k"}


def test_positional_only_parameters_are_passed_by_position() -> None:
    assert through(only_positional, 1) == ([1, 2], {})
    assert through(only_positional, 1, 5, z=3) == ([1, 5], {"z": 3})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        (("a", "b", "c"), {}),
        (("a",), {"to": "b"}),
        (("a",), {"cc": "b"}),
    ],
)
def test_wrong_arguments_raise_the_type_error_of_the_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as expected:
        send(*args, **kwargs)
    with pytest.raises(TypeError) as raised:
        signature(send).pack(args, kwargs)
    assert str(raised.value) == str(expected.value)
    assert type(raised.value) is TypeError


def test_a_value_that_does_not_fit_is_a_type_error_and_invalid_data() -> None:
    with pytest.raises(DoesNotFit, match=r"\Aargument to: 5 is int, expected str\Z") as raised:
        signature(send).pack((5,), {})
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, InvalidData)
    assert isinstance(raised.value, ForqError)


def test_values_of_variadic_parameters_are_converted() -> None:
    with pytest.raises(DoesNotFit, match=r"argument rest\[1\]: 'x' is str, expected datetime"):
        signature(everything).pack((1, 2, 3, datetime(2026, 1, 1), "x"), {"key": "k"})
    with pytest.raises(DoesNotFit, match=r"argument more\['speed'\]: 'x' is str, expected float"):
        signature(everything).pack((1, 2), {"key": "k", "speed": "x"})


class Options(TypedDict, total=False):
    speed: float
    at: datetime


def unpacked(**options: Unpack[Options]) -> None: ...


def test_variadic_keywords_may_be_a_typed_dict() -> None:
    assert through(unpacked, at=datetime(2026, 1, 1)) == ([], {"at": datetime(2026, 1, 1)})
    with pytest.raises(DoesNotFit, match="argument options has the key 'size', which its TypedDict does not declare"):
        signature(unpacked).pack((), {"size": 1})


def pair(*both: *tuple[int, str]) -> None: ...


def test_variadic_arguments_may_be_a_tuple_of_given_types() -> None:
    assert through(pair, 1, "a") == ([1, "a"], {})


def test_unannotated_parameters_take_json_types() -> None:
    assert through(plain, [1, {"a": None}], second=1.5) == ([[1, {"a": None}], 1.5], {})
    with pytest.raises(DoesNotFit, match=r"argument first\['at'\] is of type datetime; allowed are str, int"):
        signature(plain).pack(({"at": datetime(2026, 1, 1)},), {})


@dataclass
class Node:
    children: list[Node]


def walk(node: Node, data: Any = None) -> Node:
    return node


def test_values_that_contain_themselves_are_refused() -> None:
    node = Node([])
    node.children.append(node)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(DoesNotFit, match="argument node: nested too deeply, or contains itself"):
        signature(walk).pack((node,), {})
    with pytest.raises(DoesNotFit, match="argument data: "):
        signature(walk).pack((Node([]), endless), {})
    with pytest.raises(DoesNotFit, match="result: nested too deeply, or contains itself"):
        signature(walk).pack_result(node)


def limited(count: Annotated[int, msgspec.Meta(le=10)]) -> None: ...


def test_limits_in_annotations_hold_for_both_sides() -> None:
    with pytest.raises(DoesNotFit, match="argument count: expected int <= 10"):
        signature(limited).pack((11,), {})
    with pytest.raises(ArgumentsDoNotFit, match="argument count: expected int <= 10"):
        signature(limited).unpack({"count": 11})


def by_name_only(function: Any) -> Any:
    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        return function(**arguments)

    return call


def two(first: int, second: str | None) -> Any:
    return (first, second)


def with_every_kind(a: int, /, b: str, *rest: int, key: float, **more: int) -> Any:
    return (a, b, rest, key, more)


def unchecked(first, second):  # type: ignore[no-untyped-def]
    return (first, second)


@pytest.mark.parametrize(
    ("function", "data", "result"),
    [
        (two, {"first": 1, "second": "x"}, (1, "x")),
        (two, {"second": None, "first": 1}, (1, None)),
        (by_name_only(two), {"first": 1, "second": "x"}, (1, "x")),
        (with_every_kind, {"a": 1, "b": "x", "key": 0.5}, (1, "x", (), 0.5, {})),
        (unchecked, {"first": [1], "second": {"a": None}}, ([1], {"a": None})),
    ],
)
def test_arguments_that_need_no_conversion_are_passed_directly(function: Any, data: Any, result: object) -> None:
    signature = Signature(function, "task")
    assert signature.call_directly(data) is NOT_DIRECTLY, "the annotations are not resolved"
    args, kwargs = signature.unpack(data)
    assert signature.call_directly(data) == function(*args, **kwargs) == result


@pytest.mark.parametrize(
    ("function", "data"),
    [
        (two, {"first": 1}),
        (two, {"first": 1, "third": "x"}),
        (two, {"first": 1, "second": "x", "third": 1}),
        (two, {"first": True, "second": "x"}),
        (two, {"first": 1, "second": 2}),
        (two, [1, "x"]),
        (two, None),
        (two, "first"),
        (with_every_kind, {"a": 1, "b": "x", "key": 1}),
        (with_every_kind, {"a": 1, "b": "x", "key": 0.5, "rest": [1]}),
        (with_every_kind, {"a": 1, "b": "x", "key": 0.5, "more": 1}),
        (send, {"to": "x"}),
    ],
)
def test_other_arguments_are_not_passed_directly(function: Any, data: Any) -> None:
    signature = Signature(function, "task")
    signature.check()
    assert signature.call_directly(data) is NOT_DIRECTLY


def test_required_parameters_are_those_without_default() -> None:
    assert signature(everything).required() == ["a", "b", "key"]
    assert signature(rest_only).required() == []


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (send, "send(to: str, subject: str = 'hi') -> Receipt"),
        (plain, "plain(first, second=2)"),
        (only_positional, "only_positional(a: int, b: int = 2, /, **more: int) -> None"),
        (numbered, "numbered(rest: Later) -> list[Later]"),
    ],
)
def test_the_text_is_the_signature_as_written(function: Any, text: str) -> None:
    assert signature(function).text == text


def test_the_text_shows_resolved_annotations_without_their_modules() -> None:
    def named(at: Any, many: Any) -> None: ...

    named.__annotations__ = {"at": datetime | None, "many": dict[Literal["a.b"], list[Receipt]], "return": Receipt}
    named.__qualname__ = "named"
    assert signature(named).text == "named(at: datetime | None, many: dict[Literal['a.b'], list[Receipt]]) -> Receipt"


def test_annotations_may_name_classes_that_are_defined_later() -> None:
    assert through(numbered, Later(1)) == ([], {"rest": Later(1)})
    task = signature(numbered)
    assert task.unpack_result(task.pack_result([Later(1)])) == [Later(1)]


def test_making_a_signature_resolves_no_annotation() -> None:
    task = signature(hidden)
    assert task.text == "hidden(price: Fraction) -> None"
    with pytest.raises(InvalidTask, match="name 'Fraction' is not defined; import types outside `if TYPE_CHECKING`"):
        task.check()
    with pytest.raises(InvalidTask, match="name 'Fraction' is not defined"):
        task.pack((1,), {})


def test_annotations_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = signature(send)
    task.check()
    monkeypatch.setattr("forq.app.signature.get_type_hints", None)
    task.check()
    assert task.pack(("a",), {}) == {"to": "a"}


def no_annotation(): ...  # type: ignore[no-untyped-def]


def never() -> NoReturn:
    raise ValueError


@pytest.mark.parametrize(
    ("function", "keeps"), [(send, True), (numbered, True), (later, False), (no_annotation, False), (never, False)]
)
def test_a_result_is_kept_if_its_annotation_is_neither_missing_nor_none(function: Any, keeps: bool) -> None:
    task = signature(function)
    assert task.keeps_result is keeps
    task.check()


def test_a_result_that_does_not_fit_names_the_place() -> None:
    with pytest.raises(DoesNotFit, match=r"\Aresult\[1\]\.number: 'x' is str, expected int\Z"):
        signature(numbered).pack_result([Later(1), Later("x")])  # type: ignore[arg-type]


def test_a_stored_result_of_another_version_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match=r"result: object missing required field number \(of send\(to: str"):
        signature(send).unpack_result({})


def test_results_without_annotation_are_json_types() -> None:
    task = signature(no_annotation)
    assert task.unpack_result(task.pack_result({"a": [1]})) == {"a": [1]}
    with pytest.raises(DoesNotFit, match=r"result\['a'\] is of type Receipt"):
        task.pack_result({"a": Receipt(1)})


def test_coroutine_functions_are_tasks() -> None:
    assert through(later, 5) == ([5], {})
    assert asyncio.iscoroutinefunction(later)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "the data lacks to"),
        ({"to": 5}, "argument to: expected str, got int"),
        ({"to": "a", "cc": 1, "bcc": 2}, "it has no parameter 'cc', 'bcc'"),
        (["a"], "the data is list, expected an object of arguments by name"),
        (None, "the data is NoneType, expected an object of arguments by name"),
    ],
)
def test_stored_arguments_that_do_not_fit_name_the_signature_and_the_place(data: Any, reason: str) -> None:
    with pytest.raises(ArgumentsDoNotFit) as raised:
        signature(send).unpack(data)
    assert str(raised.value) == (
        f"the arguments do not fit task task, send(to: str, subject: str = 'hi') -> Receipt: {reason}"
    )


def test_no_text_is_taken_for_a_number() -> None:
    with pytest.raises(ArgumentsDoNotFit, match="argument user: expected int, got str"):
        signature(later).unpack({"user": "5"})


class Methods:
    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...


def generator() -> Any:
    yield 1


async def async_generator() -> Any:
    yield 1


def local() -> Any:
    def inside() -> None: ...

    return inside


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: None, "a lambda cannot be a task; write a function with def"),
        (Methods.method, "Methods.method is a method; write a function of the module"),
        (Methods.static, "Methods.static is a method"),
        (Methods().method, "is not a function"),
        (Methods, "is not a function"),
        (functools.partial(send, "a"), "is not a function; decorate a function of a module"),
        (len, "is not a function"),
        (local(), "is a local function, which workers cannot import; move it to the top of its module"),
        (generator, "generator is a generator; return a list"),
        (async_generator, "async_generator is a generator"),
    ],
)
def test_functions_that_cannot_be_tasks_are_refused(function: Any, reason: str) -> None:
    with pytest.raises(InvalidTask) as raised:
        signature(function)
    assert str(raised.value).startswith("task task: ")
    assert reason in str(raised.value)


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@wrapped
def decorated(at: datetime) -> None: ...


def test_a_decorated_function_has_the_signature_of_the_function_inside() -> None:
    task = signature(decorated)
    assert task.text == "decorated(at: datetime) -> None"
    assert task.pack((datetime(2026, 1, 1),), {}) == {"at": "2026-01-01T00:00:00"}


def test_importing_forq_imports_no_msgspec() -> None:
    program = "import sys, forq; forq.Client; forq.Job; sys.exit('msgspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_converting_imports_neither_pydantic_nor_attrs() -> None:
    program = "import sys, forq.app.signature; sys.exit(bool({'pydantic', 'attr', 'attrs'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
