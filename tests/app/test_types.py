"""Type checkers accept right uses of tasks and refuse wrong ones: mypy --strict, and pyright in strict mode."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = [Path(__file__).with_name("typed_examples.py"), Path(__file__).parents[1] / "contrib/typed_examples.py"]
WRONG = {
    (str(file), number)
    for file in EXAMPLES
    for number, line in enumerate(file.read_text().splitlines(), 1)
    if line.endswith("# wrong")
}


def test_there_are_wrong_uses() -> None:
    assert len(WRONG) >= 15


def test_mypy_refuses_exactly_the_wrong_uses(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path)]
    ran = subprocess.run([*command, "-O", "json", *map(str, EXAMPLES)], capture_output=True, text=True)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    errors = {(str(Path(each["file"]).resolve()), each["line"]) for each in found if each["severity"] == "error"}
    assert errors == WRONG, ran.stdout + ran.stderr


@pytest.mark.skipif(find_spec("basedpyright") is None, reason="basedpyright is not installed")
def test_pyright_refuses_exactly_the_wrong_uses(tmp_path: Path) -> None:
    config = {"include": [str(file) for file in EXAMPLES], "typeCheckingMode": "strict", "pythonPath": sys.executable}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--project", str(tmp_path), "--outputjson"]
    ran = subprocess.run([*command, "--pythonpath", sys.executable], capture_output=True, text=True)
    found = [each for each in json.loads(ran.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    assert {(each["file"], each["range"]["start"]["line"] + 1) for each in found} == WRONG, ran.stdout
