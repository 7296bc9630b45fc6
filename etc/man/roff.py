"""Man pages in plain roff: one function per thing that a page is made of. Knows nothing of forq."""


def text(words: str) -> str:
    """Nothing in it is taken for a request or an escape; hyphens can be copied."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    escaped = "".join(char if ord(char) < 128 else f"\\[u{ord(char):04X}]" for char in escaped)
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


def bold(words: str) -> str:
    return f"\\fB{text(words)}\\fR"


def title(name: str, section: int, version: str) -> list[str]:
    return [
        '.\\" Written by etc/man/write.py (make man): change the tables, not this file.',
        f'.TH {name.upper()} {section} "" "forq {version}" "forq"',
        ".nh",
        ".ad l",
    ]


def section(name: str) -> list[str]:
    return [f".SH {text(name).upper()}"]


def subsection(name: str) -> list[str]:
    return [f'.SS "{text(name)}"']


def paragraph(words: str) -> list[str]:
    return [".PP", text(words)]


def entry(tag: str, words: str) -> list[str]:
    """A tag, and what it means, indented below it."""
    return [".TP", bold(tag), text(words) or "\\&"]


def code(lines: list[str]) -> list[str]:
    return [".PP", ".RS 4", ".nf", *(text(line) for line in lines), ".fi", ".RE"]
