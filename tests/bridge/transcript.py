"""The session of docs/reference/bridge.md: input lines ('>') and the output after each ('<')."""

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "bridge.md"
# Values that differ from run to run.
VARYING = ("fence", "since", "last", "last_seen", "enqueued_at")


def read(page: str) -> list[tuple[str, list[str]]]:
    """Each input line with its expected output."""
    block = re.search(r"^```session\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None, "the page has no session"
    session: list[tuple[str, list[str]]] = []
    # Indented lines continue the one before.
    for line in block[1].replace("\n    ", " ").splitlines():
        if line.startswith("> "):
            session.append((line[2:], []))
        else:
            session[-1][1].append(line.removeprefix("< "))
    return session


def shown(topic: str, payload: dict[str, Any]) -> str:
    return f"{topic} {json.dumps(_steady(payload))}"


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: 0 if key in VARYING else _steady(inner) for key, inner in value.items()}
    return [_steady(inner) for inner in value] if isinstance(value, list) else value
