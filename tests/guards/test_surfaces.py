"""The surface for users: every --help, the completions, the public names with their signatures."""

import inspect
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest

import forq
from forq import testing
from tests.guards.recording import RECORD, RECORDED, compare, same_python
from tests.support.drive.supervisor import BIN

pytestmark = same_python
REFERENCE = Path(__file__).resolve().parents[2] / "etc/reference.py"
SUBCOMMANDS = {
    "forq": [["run"], ["app"], ["bridge"], ["pipeline"]],
    "pipeline": [["ingest"], ["audit"], ["report"], ["replay"]],
}


def output(*command: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "100", "LC_ALL": "C.UTF-8"}
    done = subprocess.run([BIN / command[0], *command[1:]], env=environment, capture_output=True, text=True, check=True)
    return f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n"


def ctl_commands() -> list[str]:
    listed = output("forqctl", "--help").partition("\ncommands:\n")[2].partition("\n\n")[0]
    names = [line.split()[0] for line in listed.splitlines() if re.match(r"  [a-z]", line)]
    assert "status" in names
    return names


def test_every_help() -> None:
    texts = [output("forqctl", "--help"), *(output("forqctl", name, "--help") for name in ctl_commands())]
    texts += [output("forq", "--help"), *(output("forq", *words, "--help") for words in SUBCOMMANDS["forq"])]
    compare("help.txt", "".join(texts))


@pytest.mark.skipif(find_spec("pyspark") is None, reason="without Spark its commands know no options")
def test_every_help_of_the_pipeline() -> None:
    texts = [output("forq", "pipeline", *words, "--help") for words in SUBCOMMANDS["pipeline"]]
    compare("help_pipeline.txt", "".join(texts))


@pytest.mark.skipif(find_spec("shtab") is None, reason="the generator needs shtab: pip install '.[dev]'")
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_completion(shell: str) -> None:
    """The command prints a committed file, which must be what the generator makes of the commands."""
    script = run_path(str(REFERENCE))["completion"](shell)
    assert output("forqctl", "completion", shell) == f"$ forqctl completion {shell}\n{script}\n"


def test_what_forqctl_imports_before_its_first_command() -> None:
    """Its start takes 30 ms: socket would add 8, typing 10. Modules of forq itself may come and go."""
    program = (
        "import sys; bare = set(sys.modules); from forq.ctl.main import main; "
        "main(['--socket', '/nonexistent/socket', 'ping']); "
        "print(*sorted(name for name in set(sys.modules) - bare if not name.startswith('forq')), sep='\\n')"
    )
    done = subprocess.run([BIN / "python", "-I", "-c", program], capture_output=True, text=True, check=True)
    if RECORD:
        (RECORDED / "start.txt").write_text(done.stdout)
    loaded, recorded = done.stdout.split(), (RECORDED / "start.txt").read_text().split()
    assert "argparse" in loaded
    # The environment may have loaded some of its modules before.
    assert set(loaded) <= set(recorded)


def test_the_public_names_and_their_signatures() -> None:
    lines = [line for name in forq.__all__ for line in described(name, getattr(forq, name))]
    lines += [line for name in sorted(errors()) for line in described(name, errors()[name])]
    compare("signatures.txt", "\n".join(lines) + "\n")


def test_the_names_for_tests_of_users_and_their_signatures() -> None:
    lines: list[str] = []
    for name in testing.__all__:
        value = getattr(testing, name)
        lines += [f"{name}{_signature(value)}"] if inspect.isfunction(value) else described(name, value)
        if inspect.isclass(value):
            lines += [f"    {line}" for base in value.__mro__[1:-1] for line in _methods(base)]
    compare("signatures_testing.txt", "\n".join(lines) + "\n")


def _methods(base: type) -> list[str]:
    """The public methods that a class inherits from one of forq.testing."""
    return list(described(base.__name__, base))[1:] if base.__module__.startswith("forq.testing") else []


def errors() -> dict[str, type]:
    from forq import errors

    return {name: each for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, Exception)}


def described(name: str, value: object) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}: {type(value).__name__}"
        return
    yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)}){_signature(value)}"
    for member in sorted(vars(value)):
        if not member.startswith("_"):
            found = inspect.getattr_static(value, member)
            function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            shown = repr(found) if isinstance(found, str | int) else _signature(function)
            yield f"    {member}: {type(found).__name__} {shown}".rstrip()


def _signature(of: object) -> str:
    try:
        # A class may move to another module.
        return re.sub(r"\bforq(\.[a-z_]+)*\.(?=[A-Z])", "", str(inspect.signature(of))) if callable(of) else ""
    except ValueError:
        return ""
