"""What must not change while the code is moved: a guard writes it down as text and compares it with the recorded one.

FORQ_GUARDS=record writes the recorded texts anew; read the difference before you commit it.
"""

import os
import sys
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded"
# Others word help, signatures and errors of JSON differently.
same_python = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the texts were recorded with Python 3.11")
RECORD = os.environ.get("FORQ_GUARDS") == "record"


def compare(name: str, text: str) -> None:
    path = RECORDED / name
    if RECORD:
        path.write_text(text)
    assert text.splitlines() == path.read_text().splitlines(), f"not as recorded in {path.name}"
