"""Every command, setting and Python example of the documentation is valid; test_examples runs those that can run."""

import grp
import os
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from forq.cli import parser_for
from forq.ctl.command import GLOBAL_ARGUMENTS, Command
from forq.ctl.commands import all_commands
from forq.errors import UsageError
from forq.supervisor.config import load
from tests.docs.pages import PAGES, ROOT, Block, blocks, code_spans

COMMANDS = {command.name: command for command in all_commands()}
BLOCKS = [block for page in PAGES for block in blocks(page)]


def of_language(*languages: str) -> "pytest.MarkDecorator":
    chosen = [block for block in BLOCKS if block.language in languages]
    assert chosen
    return pytest.mark.parametrize("block", chosen, ids=str)


@of_language("python")
def test_every_python_block_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@of_language("toml")
def test_every_toml_block_is_a_valid_config_file(block: Block, tmp_path: Path) -> None:
    if "[pipeline]" in block.text and find_spec("pyspark") is None:
        pytest.skip("Spark is not installed")
    file = tmp_path / "forq.toml"
    # The group has to exist on this machine.
    own_group = grp.getgrgid(os.getgid()).gr_name
    file.write_text(re.sub(r'_group = "\w+"', f'_group = "{own_group}"', block.text))
    load({"config": str(file)}, {"FORQ_STRICT_MODES": "no"})


def typed_lines(block: Block) -> Iterator[str]:
    """The lines that a reader would type: all of a script, and those after the prompt in a session."""
    text = re.sub(r"<<'?(\w+)'?\n.*?\n\1$", "", block.text, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines():
        if block.language == "sh":
            yield line
        elif line.startswith("$ "):
            yield line[2:]


def programs(line: str) -> Iterator[list[str]]:
    """The commands of a shell line, without leading assignments, redirections and keywords."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            while command and (command[0] in {"do", "until", "if", "while", "$", "!"} or re.match(r"\w+=", command[0])):
                del command[0]
            if command:
                yield command
            command = []
        else:
            command.append(word)


def check(words: list[str]) -> None:
    """Raises UsageError or SystemExit if the arguments are wrong."""
    program, *arguments = words
    if program == "forq":
        parser = parser_for(*arguments[:1])
        if arguments[0] == "pipeline" and find_spec("pyspark") is None:
            parser.parse_known_args(arguments)
        else:
            parser.parse_args(arguments)
    elif program == "forqctl":
        name = next(word for word in arguments if word in COMMANDS)
        arguments.remove(name)
        COMMANDS[name].parser().parse_intermixed_args(arguments)


@of_language("sh", "console")
def test_every_command_of_a_block_has_valid_arguments(block: Block) -> None:
    for line in typed_lines(block):
        for words in programs(line):
            try:
                check(words)
            except (UsageError, SystemExit, StopIteration) as exc:
                raise AssertionError(f"{block}: {line}: {exc}") from exc


def test_wrong_commands_are_found() -> None:
    lines = (
        "forqctl push q '{}' --wrong 1",
        "forqctl nosuch",
        "A=1 forqctl jobs q --state none | wc",
        "forq bridge -x",
    )
    for line in lines:
        with pytest.raises((UsageError, SystemExit, StopIteration)):
            check(next(programs(line)))


def flags(command: Command) -> set[str]:
    return {
        name for argument in (*command.arguments, *GLOBAL_ARGUMENTS) for name in argument.names if name.startswith("-")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_the_prose_exists_with_these_options(page: Path) -> None:
    wrong = []
    for span in code_spans(page):
        if (typed := re.match(r"forqctl (?:\[[^]]*\] )*([a-z][\w-]*)(.*)", span)) is None:
            continue
        name, rest = typed.groups()
        used = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub(r"'[^']*'", "", rest)))
        if name not in COMMANDS:
            wrong.append(span)
        elif used - flags(COMMANDS[name]) - {"--help"}:
            wrong.append(f"{span}: {used - flags(COMMANDS[name])}")
    assert wrong == []
