"""Guards for things that must not change in a refactoring: each is compared with a recorded text.

FORQ_GUARDS=record records the texts again; read the difference before you commit it.
"""

import os
import sys
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded"
# Other versions word help, signatures and JSON errors differently.
same_python = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the texts were recorded with Python 3.11")
RECORD = os.environ.get("FORQ_GUARDS") == "record"


def compare(name: str, text: str) -> None:
    path = RECORDED / name
    if RECORD:
        path.write_text(text)
    assert text.splitlines() == path.read_text().splitlines(), f"not as recorded in {path.name}"
