"""The signature of a task: stores the arguments of a call by parameter name, and turns them back into a call."""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from inspect import Parameter
from types import GenericAlias
from typing import Any, NoReturn, Unpack, get_args, get_origin, get_type_hints

from forq.app.convert import Converter, show_annotation
from forq.app.packing import Misfit
from forq.errors import ArgumentsDoNotFit, DoesNotFit, InvalidTask, UsageError
from forq.values import shown

_NO_RESULT = (Parameter.empty, None, type(None), NoReturn, "None", "NoReturn", "typing.NoReturn", "Never")
_TOO_DEEP = "nested too deeply, or contains itself"


class _Absent:
    """Stands for a default, which is not stored."""

    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()
# What `call_directly` returns if it has called nothing.
NOT_DIRECTLY = object()
# In forq's directory, like all frames that tracebacks of jobs leave out.
_GENERATED_FILE = os.path.join(os.path.dirname(__file__), "<generated>")


class Signature:
    """The parameters and the result of a task's function, and their conversion to and from JSON types.

    Making one resolves no annotation, so that modules may still import each other. The first use resolves all of them,
    once, and raises InvalidTask for any that cannot be converted back.
    """

    def __init__(self, function: Callable[..., Any], task_name: str) -> None:
        _check_kind(function, task_name)
        self._function = function
        self._task_name = task_name
        self._signature = _read(function)
        parameters = self._signature.parameters.values()
        self._names = [
            each.name for each in parameters if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        ]
        self._positional_only = [each.name for each in parameters if each.kind is Parameter.POSITIONAL_ONLY]
        self._positional = [each.name for each in parameters if each.kind <= Parameter.POSITIONAL_OR_KEYWORD]
        self._rest = next((each.name for each in parameters if each.kind is Parameter.VAR_POSITIONAL), None)
        self._more = next((each.name for each in parameters if each.kind is Parameter.VAR_KEYWORD), None)
        self._required = {name for name in self._names if self._signature.parameters[name].default is Parameter.empty}
        self._bind = self._binder()
        self._resolved = False
        # Calls the function with the data of a job, if they are its arguments as they are. Returns NOT_DIRECTLY if one
        # is missing or needs conversion, and before the annotations are resolved.
        self.call_directly: Callable[[Any], Any] = _not_directly
        self.keeps_result = self._signature.return_annotation not in _NO_RESULT

    @property
    def text(self) -> str:
        """For messages: send(to: str, subject: str = 'hi') -> Receipt."""
        return f"{self._function.__name__}{_show(self._signature, shown)}"

    @property
    def stable_text(self) -> str:
        """The same without the function's name. It is equal in all processes: a default whose text varies is `...`."""
        return _show(self._signature, _stable)

    def check(self) -> None:
        """Raises InvalidTask for an annotation that cannot be converted back."""
        if not self._resolved:
            self._resolve()

    def required(self) -> list[str]:
        """The parameters without a default."""
        return [name for name in self._names if name in self._required]

    def pack(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by parameter name, as JSON types.

        Raises the TypeError of the call itself for wrong arguments, and DoesNotFit, which is a TypeError too, for a
        value of the wrong type.
        """
        return self._pack(self._bind(*args, **kwargs))

    def pack_rest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The same for a call without its first argument, which will be the result of another job."""
        self.first_parameter()
        # An absent value is not stored.
        return self._pack(self._bind(_ABSENT, *args, **kwargs))

    def first_parameter(self) -> str:
        """The parameter that gets the result of another job. UsageError if there is none."""
        if not self._positional:
            raise UsageError(
                f"task {self._task_name}, {self.text}, has no positional parameter, so it cannot get the result of "
                "another job as its first argument; give it one, or read forq.current_job().results()"
            )
        return self._positional[0]

    def _pack(self, values: tuple[Any, ...]) -> dict[str, Any]:
        if not self._resolved:
            self._resolve()
        packed = {}
        name: str | None = None
        try:
            # The keyword `strict` would cost as much as an argument.
            for name, pack, value in zip(self._names, self._packs, values):  # noqa: B905
                if value is not _ABSENT:
                    packed[name] = pack(value)
            if self._rest and (rest := values[len(self._names)]):
                name = self._rest
                packed[name] = self._converters[name].pack(rest)
            if self._more_converter:
                name = self._more
                self._add_more(packed, values[-1])
        except Misfit as misfit:
            raise DoesNotFit(misfit.text(f"argument {name}")) from misfit.__cause__
        except RecursionError:
            raise DoesNotFit(f"argument {name}: {_TOO_DEEP}") from None
        return packed

    def unpack(self, data: Any) -> tuple[list[Any], dict[str, Any]]:
        """The positional and keyword arguments of the call; raises ArgumentsDoNotFit."""
        if not self._resolved:
            self._resolve()
        direct = self._unpack_directly(data)
        if direct is not NOT_DIRECTLY:
            args, kwargs = direct
            return args, kwargs
        if type(data) is not dict:
            raise self._do_not_fit(f"the data is {type(data).__name__}, expected an object of arguments by name")
        arguments: dict[str, Any] = {}
        more: dict[str, Any] = {}
        name: str | None = None
        try:
            for name, value in data.items():
                converter = self._converters.get(name)
                if converter is None:
                    more[name] = value
                elif type(value) in converter.native:
                    arguments[name] = value
                else:
                    arguments[name] = converter.unpack(value)
            if more and self._more_converter:
                name = self._more
                more = self._more_converter.unpack(more)
        except Misfit as misfit:
            raise self._do_not_fit(misfit.text(f"argument {name}")) from misfit.__cause__
        except RecursionError:
            raise self._do_not_fit(f"argument {name}: {_TOO_DEEP}") from None
        if more and not self._more_converter:
            raise self._do_not_fit(f"it has no parameter {', '.join(map(shown, more))}")
        if not self._required <= arguments.keys():
            missing = [name for name in self.required() if name not in arguments]
            raise self._do_not_fit(f"the data lacks {', '.join(missing)}")
        if not self._rest and not self._positional_only:
            return [], arguments | more if more else arguments
        rest = arguments.pop(self._rest, ()) if self._rest else ()
        positional = [self._take(name, arguments) for name in (self._positional if rest else self._positional_only)]
        return [*positional, *rest], arguments | more

    def pack_result(self, value: Any) -> Any:
        """The result as JSON types; raises DoesNotFit."""
        self.check()
        try:
            return self._result.pack(value)
        except Misfit as misfit:
            raise DoesNotFit(misfit.text("result")) from misfit.__cause__
        except RecursionError:
            raise DoesNotFit(f"result: {_TOO_DEEP}") from None

    def unpack_result(self, data: Any) -> Any:
        """The result that pack_result stored; raises DoesNotFit if another version of the task stored it."""
        self.check()
        try:
            return self._result.unpack(data)
        except Misfit as misfit:
            raise DoesNotFit(f"{misfit.text('result')} (of {self.text})") from misfit.__cause__

    def _resolve(self) -> None:
        try:
            hints = get_type_hints(self._function, include_extras=True)
        except Exception as exc:
            raise InvalidTask(
                f"task {self._task_name}: the annotations of {self.text} cannot be resolved: {exc}; "
                "import types outside `if TYPE_CHECKING`, at the top of the module"
            ) from exc
        try:
            converters = {name: Converter(hints.get(name, Any), f"argument {name}") for name in self._names}
            if self._rest:
                hint = hints.get(self._rest, Any)
                several = get_args(hint)[0] if get_origin(hint) is Unpack else GenericAlias(tuple, (hint, ...))
                converters[self._rest] = Converter(several, f"argument {self._rest}")
            more = None
            if self._more:
                hint = hints.get(self._more, Any)
                by_name = get_args(hint)[0] if get_origin(hint) is Unpack else GenericAlias(dict, (str, hint))
                more = Converter(by_name, f"argument {self._more}")
            result = Converter(
                None if not self.keeps_result and "return" in hints else hints.get("return", Any), "result"
            )
        except InvalidTask as exc:
            raise InvalidTask(f"task {self._task_name}: {exc}") from exc
        self._converters = converters
        self._packs = [converters[name].pack for name in self._names]
        self._more_converter = more
        self._result = result
        self.call_directly, self._unpack_directly = self._direct_functions()
        self._resolved = True

    def _binder(self) -> Callable[..., tuple[Any, ...]]:
        """A function with the same parameters that returns their values.

        Python itself binds the arguments: three times as fast as inspect.Signature.bind, with the errors of the call.
        """
        parameters = [
            each.replace(
                annotation=Parameter.empty, default=each.default if each.default is Parameter.empty else _ABSENT
            )
            for each in self._signature.parameters.values()
        ]
        bare = self._signature.replace(parameters=parameters, return_annotation=Parameter.empty)
        names = [*self._names, *filter(None, [self._rest, self._more])]
        scope: dict[str, Any] = {"absent": _ABSENT}
        exec(f"def bind{bare}: return ({''.join(f'{name}, ' for name in names)})", scope)
        bind: Callable[..., tuple[Any, ...]] = scope["bind"]
        bind.__qualname__ = self._function.__qualname__
        return bind

    def _direct_functions(self) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """For data that are the arguments as they are: one calls the function with them, one returns args and kwargs.

        Generated, because one of them runs for every job: `function(v0, v1)` takes half as long as `function(**data)`
        after a loop over the arguments.
        """
        scope: dict[str, Any] = {"function": self._function, "not_directly": NOT_DIRECTLY}
        code = self._function.__code__
        # A decorator's function may have the signature of another, and take no positional arguments.
        undecorated = code.co_varnames[: code.co_argcount] == tuple(self._positional)
        by_position = self._positional if undecorated else self._positional_only
        values, checks = [], []
        args, kwargs = [], []
        for number, name in enumerate(self._names):
            converter, value = self._converters[name], f"v{number}"
            values.append(f"{value} = data[{name!r}]")
            if converter.annotation is not Any:
                scope[f"native{number}"], is_other = converter.native, "not in"
                if len(converter.native) == 1:
                    (scope[f"native{number}"],), is_other = converter.native, "is not"
                checks.append(f"type({value}) {is_other} native{number}")
            if name in by_position:
                args.append(value)
            else:
                kwargs.append(f"{name}={value}")
        for head, end in (
            ("call_directly", f"function({', '.join(args + kwargs)})"),
            ("unpack_directly", f"[{', '.join(args)}], dict({', '.join(kwargs)})"),
        ):
            lines = [
                f"def {head}(data):",
                f"    if type(data) is not dict or len(data) != {len(self._names)}:",
                "        return not_directly",
                "    try:",
                f"        {'; '.join(values) or 'pass'}",
                "    except KeyError:",
                "        return not_directly",
                *(f"    if {check}:\n        return not_directly" for check in checks),
                f"    return {end}",
            ]
            exec(compile("\n".join(lines), _GENERATED_FILE, "exec"), scope)
        return scope["call_directly"], scope["unpack_directly"]

    def _add_more(self, packed: dict[str, Any], more: dict[str, Any]) -> None:
        for name in more:
            if name in self._converters:
                raise TypeError(
                    f"{self._function.__qualname__}() cannot store the keyword argument {name!r}: arguments are stored "
                    "by name, and another parameter has that name"
                )
        assert self._more_converter is not None
        packed.update(self._more_converter.pack(more))

    def _take(self, name: str, arguments: dict[str, Any]) -> Any:
        """Removes an argument for a positional place; a parameter added since has its default."""
        return arguments.pop(name) if name in arguments else self._signature.parameters[name].default

    def _do_not_fit(self, reason: str) -> ArgumentsDoNotFit:
        return ArgumentsDoNotFit(f"the arguments do not fit task {self._task_name}, {self.text}: {reason}")


def _not_directly(data: Any) -> Any:
    return NOT_DIRECTLY


def _check_kind(function: Callable[..., Any], task_name: str) -> None:
    start = f"task {task_name}: "
    if not inspect.isfunction(function):
        raise InvalidTask(f"{start}{shown(function)} is not a function; decorate a function of a module")
    if function.__name__ == "<lambda>":
        raise InvalidTask(f"{start}a lambda cannot be a task; write a function with def")
    if "<locals>" in function.__qualname__:
        raise InvalidTask(
            f"{start}{function.__qualname__} is a local function, which workers cannot import; move it to the top of "
            "its module (decorators under the task need functools.wraps)"
        )
    if "." in function.__qualname__:
        raise InvalidTask(
            f"{start}{function.__qualname__} is a method; write a function of the module that calls the method"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidTask(f"{start}{function.__qualname__} is a generator; return a list instead of yielding")


def _read(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        # The default would resolve names.
        return inspect.signature(function, annotation_format=Format.STRING)
    return inspect.signature(function)


def _stable(default: Any) -> str:
    return shown(default) if _is_stable(default) else "..."


def _is_stable(value: Any) -> bool:
    """Whether repr is the same in all processes. Addresses, the order of a set and the current time are not."""
    if type(value) in (list, tuple):
        return all(map(_is_stable, value))
    if type(value) is dict:
        return all(_is_stable(key) and _is_stable(each) for key, each in value.items())
    return type(value) in (str, int, float, bool, bytes, type(None))


def _show(signature: inspect.Signature, show_default: Callable[[Any], str]) -> str:
    """str(signature) would show quotes around annotations and the modules of types."""
    shown_parameters = [
        parameter.replace(
            annotation=parameter.annotation
            if parameter.annotation is Parameter.empty
            else _Plain(show_annotation(parameter.annotation)),
            default=parameter.default
            if parameter.default is Parameter.empty
            else _Plain(show_default(parameter.default)),
        )
        for parameter in signature.parameters.values()
    ]
    returns = signature.return_annotation
    returns = returns if returns is Parameter.empty else _Plain(show_annotation(returns))
    return str(signature.replace(parameters=shown_parameters, return_annotation=returns))


class _Plain:
    """Text that repr shows as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
