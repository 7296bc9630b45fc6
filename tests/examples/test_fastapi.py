"""etc/examples/fastapi: the commands of its README, and its files. tests/end_to_end/test_fastapi.py tests the rest."""

import pytest

from tests.docs.pages import ROOT
from tests.examples.guide_code import code_of
from tests.support.drive.readme import EXAMPLES, example

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.one_server


def test_the_files_are_those_of_the_guide() -> None:
    guide = code_of(ROOT / "docs/guide/fastapi.md")
    for name in ("orders.py", "web.py"):
        assert (EXAMPLES / "fastapi" / name).read_text() == guide[name]


def test_the_commands_of_the_readme_work() -> None:
    with example("fastapi") as project:
        project.follow()
