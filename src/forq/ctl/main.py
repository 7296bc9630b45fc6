"""The entry point of forqctl: finds the command, reads its arguments, runs it, turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter

from forq.ctl.commands import BY_NAME, GLOBALS, Command
from forq.errors import ForqError, UsageError
from forq.procs.standard_streams import open_missing_streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

INTERRUPTED = 130
HELP_WIDTH = 100
# Other codes, such as 78 for a config error in the supervisor, mean something to systemd but not here.
LARGEST_EXIT_CODE = 7


class _Formatter(RawDescriptionHelpFormatter):
    """Made for every argument that is added: left to itself it imports shutil, to ask how wide the terminal is."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal cannot show must not end in a traceback.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except ForqError as exc:
        from forq.ctl.tables import printable

        print(f"forqctl: {printable(str(exc))}", file=sys.stderr)
        return exc.exit_code if exc.exit_code <= LARGEST_EXIT_CODE else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; without this the interpreter complains once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str]) -> int:
    position = _position_of_verb(argv)
    if position is None:
        return _without_verb(argv)
    command = BY_NAME.get(argv[position])
    if command is None:
        raise UsageError(_unknown(argv[position]))
    given = argv[:position] + argv[position + 1 :]
    parser = parser_of(command)
    if "--help" in given or "-h" in given:
        from forq.ctl.manual import epilog

        parser.epilog = epilog(command)
    args = parser.parse_intermixed_args(given)
    args.timeout_seconds = _seconds(args.timeout)
    module = __import__(f"forq.ctl.verbs.{command.home}", fromlist=[command.function])
    code: int = getattr(module, command.function)(args)
    return code


def parser_of(command: Command) -> ArgumentParser:
    """Only the parser of the one command that runs: those of all commands would take longer than the rest."""
    parser = _Parser(
        prog=f"forqctl {command.name}",
        description=command.summary,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    for argument in command.arguments:
        parser.add_argument(*argument.names, **argument.keywords)
    group = parser.add_argument_group("for every command")
    for argument in GLOBALS:
        group.add_argument(*argument.names, **argument.keywords)
    return parser


def _position_of_verb(argv: list[str]) -> int | None:
    takes_value = [argument.names[0] for argument in GLOBALS if "metavar" in argument.keywords]
    position = 0
    while position < len(argv):
        if not argv[position].startswith("-"):
            return position
        position += 2 if argv[position] in takes_value else 1
    return None


def _without_verb(argv: list[str]) -> int:
    if "--version" in argv:
        from forq.version import VERSION

        print(f"forqctl {VERSION}")
        return 0
    if "--help" in argv or "-h" in argv:
        from forq.ctl.manual import overview

        print(overview())
        return 0
    raise UsageError("a command is missing (see forqctl --help)")


def _unknown(verb: str) -> str:
    from difflib import get_close_matches

    from forq.names import shown

    near = get_close_matches(verb, BY_NAME, n=1, cutoff=0)
    return f"there is no command {shown(verb)}: did you mean {near[0]}? (see forqctl --help)"


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    from forq.values import parse_duration

    return parse_duration(text)


if __name__ == "__main__":
    sys.exit(main())
