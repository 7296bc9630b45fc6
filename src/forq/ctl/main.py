"""The entry point of forqctl: finds the command, parses its arguments, runs it, and maps errors to exit codes."""

from __future__ import annotations

import os
import sys

from forq.ctl.command import GLOBAL_ARGUMENTS, overview
from forq.ctl.commands import MODULES, all_commands, command_named
from forq.errors import ForqError, UsageError
from forq.procs.standard_streams import open_missing_streams

INTERRUPTED = 130
# Larger codes, such as 78 for a config error, are for systemd; forqctl exits with 1 instead.
LARGEST_EXIT_CODE = 7


def main(argv: list[str] | None = None) -> int:
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot encode are escaped.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except ForqError as exc:
        from forq.ctl.output import printable

        print(f"forqctl: {printable(str(exc))}", file=sys.stderr)
        return exc.exit_code if exc.exit_code <= LARGEST_EXIT_CODE else 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone. Without this the interpreter reports it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str]) -> int:
    position = _position_of_command(argv)
    if position is None:
        return _run_without_command(argv)
    name, given = argv[position], argv[:position] + argv[position + 1 :]
    if name not in MODULES:
        raise UsageError(_unknown_command(name))
    command = command_named(name)
    parser = command.parser()
    if "--help" in given or "-h" in given:
        parser.epilog = command.epilog()
    return command.run(parser.parse_intermixed_args(given))


def _position_of_command(argv: list[str]) -> int | None:
    takes_value = [argument.names[0] for argument in GLOBAL_ARGUMENTS if "metavar" in argument.keywords]
    position = 0
    while position < len(argv):
        if not argv[position].startswith("-"):
            return position
        position += 2 if argv[position] in takes_value else 1
    return None


def _run_without_command(argv: list[str]) -> int:
    if "--version" in argv:
        from forq.version import VERSION

        print(f"forqctl {VERSION}")
        return 0
    if "--help" in argv or "-h" in argv:
        print(overview(all_commands()))
        return 0
    raise UsageError("no command given (see forqctl --help)")


def _unknown_command(name: str) -> str:
    from difflib import get_close_matches

    from forq.values import shown

    near = get_close_matches(name, MODULES, n=1, cutoff=0)
    return f"unknown command {shown(name)}: did you mean {near[0]}? (see forqctl --help)"


if __name__ == "__main__":
    sys.exit(main())
