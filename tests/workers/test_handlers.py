"""Where handlers come from, and what is said when they cannot be had."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forq.errors import ConfigError
from forq.options import QueueSpec
from forq.workers.handlers import load_handler, load_handlers


@pytest.fixture(autouse=True)
def _fresh_path() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.mark.spec("Q33")
def test_a_function_or_a_module_with_handle(tmp_path: Path) -> None:
    (tmp_path / "both_kinds.py").write_text("def handle(data, job): return 1\ndef other(data, job): return 2\n")
    spec = QueueSpec.from_mapping(
        "q", {"handler": "both_kinds", "handlers": {"o": "both_kinds:other"}, "path": str(tmp_path)}, "test"
    )
    handlers = load_handlers(spec)
    assert handlers.for_type(None)(0, None) == 1  # type: ignore[arg-type]
    assert handlers.for_type("o")(0, None) == 2  # type: ignore[arg-type]


def test_a_directory_of_the_path_that_is_missing_is_named(tmp_path: Path) -> None:
    mapping = {"handler": "somewhere_else:f", "path": [str(tmp_path), str(tmp_path / "gone")]}
    with pytest.raises(ConfigError) as caught:
        load_handlers(QueueSpec.from_mapping("q", mapping, "test"))
    assert str(caught.value).endswith(f"No module named 'somewhere_else'; its path {tmp_path}/gone does not exist")


@pytest.mark.parametrize(
    ("source", "path", "says"),
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
def test_what_cannot_be_imported_is_named_with_its_reason(
    tmp_path: Path, source: str | None, path: str, says: str
) -> None:
    sys.path.insert(0, str(tmp_path))
    if source is not None:
        (tmp_path / "broken_one.py").write_text(source)
    with pytest.raises(ConfigError, match=says):
        load_handler(path)


def test_the_queue_s_own_directories_come_first_and_in_order(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same_name.py").write_text(f"def handle(data, job): return {name!r}\n")
    spec = QueueSpec.from_mapping(
        "q", {"handler": "same_name", "path": [str(tmp_path / "two"), str(tmp_path / "one")]}, "test"
    )
    assert load_handlers(spec).for_type(None)(0, None) == "two"  # type: ignore[arg-type]
