"""What must not be read in a log: whatever matches one of the patterns of `log_redact` is left out of it."""

import re
from collections.abc import Sequence

REDACTED = "[redacted]"


class Redaction:
    """Called with a text, gives it without what matches. Of a pattern with a group only what the groups match."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __call__(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(_without_groups if pattern.groups else REDACTED, text)
        return text


def _without_groups(found: re.Match[str]) -> str:
    """The match with each group in it replaced; groups inside of groups go with them."""
    text, end, told = found[0], 0, ""
    spans = sorted(
        (found.span(number) for number in range(1, found.re.groups + 1)), key=lambda span: (span[0], -span[1])
    )
    for start, stop in spans:
        start, stop = start - found.start(), stop - found.start()
        if start >= end and stop > start:
            told += text[end:start] + REDACTED
            end = stop
    return told + text[end:]
