"""Loading handlers, and the errors when that fails."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forq.errors import CannotImport, ConfigError
from forq.queue_spec import QueueSpec
from forq.workers import handlers
from forq.workers.handlers import MAX_TRACEBACK, fork_mark, load_handler, load_handlers


@pytest.fixture(autouse=True)
def _fresh_path() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.spec("Q33")
def test_a_handler_is_a_function_or_a_module_with_handle(tmp_path: Path) -> None:
    (tmp_path / "both_kinds.py").write_text("def handle(data, job): return 1\ndef other(data, job): return 2\n")
    spec = QueueSpec.from_mapping(
        "q", {"handler": "both_kinds", "handlers": {"o": "both_kinds:other"}, "path": str(tmp_path)}, "test"
    )
    handlers = load_handlers(spec)
    assert handlers.for_type(None)(0, None) == 1  # type: ignore[arg-type]
    assert handlers.for_type("o")(0, None) == 2  # type: ignore[arg-type]


def test_a_missing_path_directory_is_reported(tmp_path: Path) -> None:
    mapping = {"handler": "somewhere_else:f", "path": [str(tmp_path), str(tmp_path / "gone")]}
    with pytest.raises(ConfigError) as caught:
        load_handlers(QueueSpec.from_mapping("q", mapping, "test"))
    assert str(caught.value).endswith(f"No module named 'somewhere_else'; its path {tmp_path}/gone does not exist")


def test_the_app_of_a_queue_is_imported_before_its_handlers(tmp_path: Path) -> None:
    (tmp_path / "set_up.py").write_text("import sys, forq; sys.is_set_up = True; app = forq.App('shop')")
    (tmp_path / "needs_it.py").write_text("import sys; sys.is_set_up\ndef f(data, job): return data")
    spec = replace(
        QueueSpec.from_mapping("q", {"handler": "needs_it:f", "path": [str(tmp_path)]}, "test"), app="set_up:app"
    )
    try:
        assert [app.name for app in load_handlers(spec).apps] == ["shop"]
    finally:
        del sys.is_set_up  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        (None, "not_there_at_all:f", "ModuleNotFoundError"),
        ("import does_not_exist_either", "broken_one:f", "does_not_exist_either"),
        ("def f(: pass", "broken_one:f", "SyntaxError"),
        ("import sys; sys.exit(3)", "broken_one:f", "SystemExit"),
        ("g = 1", "broken_one:f", "has no function f"),
        ("f = 1", "broken_one:f", "has no function f"),
        ("f = 1", "broken_one", "has no function handle"),
    ],
)
def test_a_handler_that_cannot_be_imported_is_reported_with_the_reason(
    tmp_path: Path, source: str | None, path: str, message: str
) -> None:
    sys.path.insert(0, str(tmp_path))
    if source is not None:
        (tmp_path / "broken_one.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_handler(path)


@pytest.mark.parametrize(
    "source",
    [
        "def handle(data, job): pass",
        "async def handle(data, job): pass",
        "def handle(data, job=None, more=1): pass",
        "def handle(data, /, job, **rest): pass",
        "def handle(*given): pass",
        "handle = lambda one, two: None",
        "class handle:\n    def __init__(self, data, job): pass",
        "class C:\n    def __call__(self, data, job): pass\nhandle = C()",
        "class C:\n    def run(self, data, job): pass\nhandle = C().run",
        "from functools import partial\nhandle = partial(lambda db, data, job: None, 7)",
        "from functools import wraps\ndef inner(data, job, db): pass\n@wraps(inner)\ndef handle(data, job): pass",
        "from unittest.mock import Mock\nhandle = Mock()",
        "handle = max",
        "class C:\n    def __call__(self, *a): pass\n    __signature__ = 'none'\nhandle = C()",
    ],
)
def test_any_callable_that_takes_data_and_job_is_a_handler(tmp_path: Path, source: str) -> None:
    (tmp_path / "takes_both.py").write_text(source + "\n")
    sys.path.insert(0, str(tmp_path))
    assert callable(load_handler("takes_both"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def handle(): pass",
            "it is handle() (FILE, line 1), too many positional arguments; define it as def handle(",
        ),
        ("\ndef handle(data): pass", "it is handle(data) (FILE, line 2), too many positional arguments; define it as "),
        ("def handle(data, *, job): pass", "it is handle(data, *, job) (FILE, line 1), too many positional arguments"),
        (
            "def handle(data, job, db): pass",
            "it is handle(data, job, db) (FILE, line 1), missing a required argument: ",
        ),
        ("class handle:\n    def __init__(self, data): pass", "it is handle(data), too many positional arguments"),
        ("class C:\n    def run(data, job): pass\nhandle = C().run", "it is run(job)"),
    ],
)
def test_a_callable_that_cannot_take_data_and_job_is_refused_at_import(
    tmp_path: Path, source: str, message: str
) -> None:
    file = tmp_path / "takes_other.py"
    file.write_text(source + "\n")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(CannotImport) as caught:
        load_handler("takes_other")
    text = str(caught.value)
    assert text.startswith("handler 'takes_other' cannot be called with (data, job): ")
    assert message.replace("FILE", str(file)) in text


def test_a_traceback_and_its_causes_contain_only_frames_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "deep_one.py").write_text(
        "import importlib\ntry:\n    importlib.import_module('deep_two')\n"
        "except ZeroDivisionError as exc:\n    raise RuntimeError('no') from exc\n"
    )
    (tmp_path / "deep_two.py").write_text("from forq.values import check_queue_name\nx = 1\n1 / 0\n")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(CannotImport) as caught:
        load_handler("deep_one:f")
    assert str(caught.value) == (
        f"handler 'deep_one:f' cannot be imported: RuntimeError: no ({tmp_path}/deep_one.py, line 5)"
    )
    assert caught.value.traceback is not None
    frames = [line.strip() for line in caught.value.traceback.splitlines() if line.startswith("  File")]
    assert frames == [
        f'File "{tmp_path}/deep_one.py", line 3, in <module>',
        f'File "{tmp_path}/deep_two.py", line 3, in <module>',
        f'File "{tmp_path}/deep_one.py", line 5, in <module>',
    ]
    assert caught.value.traceback.endswith("\nRuntimeError: no")


def test_a_long_traceback_loses_its_beginning_and_an_unprintable_exception_has_none(tmp_path: Path) -> None:
    (tmp_path / "long_one.py").write_text(f"raise ValueError({'x' * 50!r} * 1000)\n")
    (tmp_path / "strange_one.py").write_text(
        "class Strange(Exception):\n    def __str__(self): raise SystemExit(3)\nraise Strange\n"
    )
    sys.path.insert(0, str(tmp_path))
    for name in ("long_one", "strange_one"):
        with pytest.raises(CannotImport) as caught:
            load_handler(name)
        assert len(caught.value.traceback or "") <= MAX_TRACEBACK + 2
        assert len(str(caught.value)) < 3000


def test_the_directories_of_the_queue_come_first_in_sys_path(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"def handle(data, job): return {name!r}\n")
    spec = QueueSpec.from_mapping(
        "q", {"handler": "same_name", "path": [str(tmp_path / "two"), str(tmp_path / "one")]}, "test"
    )
    assert load_handlers(spec).for_type(None)(0, None) == "two"  # type: ignore[arg-type]


def c_fork() -> int:
    """As C code does it: hooks of Python do not run."""
    return int(ctypes.CDLL(None).fork())


@pytest.mark.parametrize("fork", [os.fork, c_fork])
def test_a_forked_process_has_not_the_mark_of_its_parent(fork: Callable[[], int]) -> None:
    mark = fork_mark()
    pid = fork()
    if pid == 0:
        own = fork_mark()
        os._exit(10 * mark[0] + own[0] if own is not mark else 99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert mark[0] == 1
    assert fork_mark() is mark


def test_where_the_kernel_cannot_clear_the_mark_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_MADV_WIPEONFORK", 10_000)
    monkeypatch.setattr(handlers, "_mark", None)
    mark = fork_mark()
    pid = os.fork()
    if pid == 0:
        os._exit(mark[0])
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert mark[0] == 1
