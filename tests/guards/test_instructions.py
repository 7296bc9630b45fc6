"""The server executes as many instructions per enqueue and per turn as recorded, within 5 %."""

import json
import shutil

import pytest

from benchmarks.instructions import figures
from tests.guards.recording import RECORD, RECORDED
from tests.support.thorough import only_in_test_all

MOST = 1.05


@only_in_test_all
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_no_more_instructions_than_recorded() -> None:
    path, counted = RECORDED / "instructions.json", figures()
    if RECORD:
        path.write_text(json.dumps(counted, indent=1) + "\n")
    allowed = {name: MOST * count for name, count in json.loads(path.read_text()).items()}
    assert {name: count for name, count in counted.items() if count > allowed[name]} == {}, f"recorded: {allowed}"
