"""The modules of a guide: python blocks that begin with `# NAME.py`."""

from pathlib import Path

from tests.docs.pages import blocks


def code_of(page: Path) -> dict[str, str]:
    """Texts by file name."""
    return {
        block.text.partition("\n")[0].removeprefix("# "): block.text
        for block in blocks(page)
        if block.language == "python"
    }
