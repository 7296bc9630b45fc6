"""Files that forq opens by name: close-on-exec, and no symbolic link is followed at their end."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("supervisor", "workers", "src/forq")
# Where a link does no harm, and why.
MAY_FOLLOW = {
    "src/forq/ctl/main.py": "/dev/null",
    "src/forq/output/forwarding.py": "/proc/self/fd/2, which is a link",
    "src/forq/procs/cgroups.py": "files of the kernel",
    "src/forq/procs/standard_streams.py": "/dev/null",
    "src/forq/procs/treekill.py": "files of /proc",
    "supervisor/stacks.py": "/proc/PID/fd, which are links",
    "workers/tracing.py": "the operator names it, and may mean a link such as /dev/stdout",
}


def calls_of_open() -> Iterator[tuple[str, str]]:
    """The file and the text of each function that calls os.open."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            name = str(path.relative_to(ROOT))
            if path.is_symlink() or "os.open(" not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.open":
                    yield name, f"{ast.unparse(node)} # {_flags(source, node)}"


def _flags(source: str, call: ast.Call) -> str:
    """The flags, with the names of constants and variables resolved as far as this file says."""
    text = ast.unparse(call.args[1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in text:
            text += " | " + ast.unparse(node.value)
    return text


def test_there_is_something_to_check() -> None:
    found = {file for file, _ in calls_of_open()}
    assert len(found) > 12
    assert set(MAY_FOLLOW) <= found
    for folder in FOLDERS:
        assert any(file.startswith(f"{folder}/") for file in found)


@pytest.mark.parametrize(("file", "call"), list(calls_of_open()))
def test_a_file_is_opened_close_on_exec_and_without_following_a_link(file: str, call: str) -> None:
    # open() adds the flag to those that it hands on; forqctl starts nothing.
    if file not in ("workers/tracing.py", "src/forq/ctl/main.py"):
        assert "O_CLOEXEC" in call
    if file not in MAY_FOLLOW and "O_DIRECTORY" not in call:
        assert "O_NOFOLLOW" in call, f"{file}: {call}"
