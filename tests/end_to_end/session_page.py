"""Shell sessions of the documentation: the `sh` blocks of a page, each with the `text` block that follows it."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_END = "--- end of step, exit code "


class Step(NamedTuple):
    commands: str
    output: str


def steps(page: str) -> list[Step]:
    """The `sh` blocks in order. A step without a `text` block is expected to print nothing."""
    found: list[Step] = []
    for language, text in _BLOCK.findall(page):
        if language == "sh":
            found.append(Step(text, ""))
        elif language == "text" and found and not found[-1].output:
            found[-1] = found[-1]._replace(output=text)
    return found


def files(page: str) -> dict[str, str]:
    """The `python` blocks whose first line names a file: `# mails.py`."""
    named = [
        (re.match(r"# (\w+\.py)\n", text), text) for language, text in _BLOCK.findall(page) if language == "python"
    ]
    return {name[1]: text for name, text in named if name is not None}


def matches(expected: str, printed: str) -> bool:
    """Numbers, ids and times may differ, and so may the width of columns, and the order of processes. A line `...`
    stands for any lines, and `...` within a line for any text."""
    pattern = "".join(_pattern(line) for line in _with_sorted_processes(expected))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _with_sorted_processes(printed))) is not None


def _with_sorted_processes(text: str) -> list[str]:
    """Sorts the lines of `ps` by title: a service that starts at its first use may start before or after a queue."""
    lines = text.splitlines()
    at = [number for number, line in enumerate(lines) if re.match(r" *\d+ forq: ", line)]
    for number, line in zip(
        at, sorted((lines[number] for number in at), key=lambda line: line.split()[1:]), strict=True
    ):
        lines[number] = line
    return lines


def _pattern(line: str) -> str:
    if line.strip() == "...":
        return r"(?:.*\n)*?"
    words = [
        re.sub(
            r"\b[0-9a-f]{32}\b|\d+", lambda found: "[0-9a-f]{32}" if len(found[0]) == 32 else r"\d+", re.escape(word)
        )
        for word in line.split()
    ]
    return r"[ ]*" + r"[ ]+".join(words).replace(r"\.\.\.", ".*") + r"[ ]*\n"


class Shell:
    """One bash for all steps of a page, since steps set variables."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, commands: str) -> tuple[str, int]:
        """Returns the stdout of the commands and the exit code of the last one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{commands}echo '{_END}'$?\n")
        self._process.stdin.flush()
        printed = ""
        for line in self._process.stdout:
            before, end, code = line.partition(_END)
            if end:
                return printed + before, int(code)
            printed += line
        raise AssertionError(f"the shell has ended: {printed}{self.errors()}")

    def errors(self) -> str:
        """Ends the shell; returns the stderr of its commands."""
        return self._process.communicate()[1]
