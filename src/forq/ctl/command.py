"""Declarations of forqctl's commands, and the parser and help generated from them.

    @Command("ping", "check whether the supervisor answers", json="ping", examples=["ping --timeout 2s"])
    def ping(args: Namespace) -> int: ...

etc/reference.py generates shell completion, the man page and docs/reference/forqctl.md from the same declarations.
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from forq.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

    Run = Callable[[Namespace], int]

HELP_WIDTH = 100
ABOUT = (
    "forqctl controls a supervisor (forq run) over its control socket: create and delete queues, push jobs, inspect "
    "them, and fix problems."
)
DURATIONS = "D is a duration: 250ms, 10s, 5m, 2h, 7d, or a number of seconds."
ENVIRONMENT = {
    "FORQ_SOCKET": "the control socket, unless --socket is given",
    "FORQ_STATE_DIR": "the state directory; its control.sock is used by default",
    "NO_COLOR": "disables colours",
    "TERM": "if dumb: no colours, and top prints plain text",
}
# Of every command that connects to a supervisor.
EXIT_CODES = {
    0: "success",
    1: "refused or failed",
    2: "invalid arguments, names, data or options",
    5: "no permission to use the socket",
    6: "no answer in time",
    7: "no supervisor running",
    130: "interrupted",
}
ALL_EXIT_CODES = {
    **EXIT_CODES,
    3: "status --check: not healthy; apply --dry-run: changes; delete: some processes cannot be killed",
    4: "no such queue, app, job, schedule or supervisor",
}


# Of the timeout.
PART_FOR_ELSEWHERE = 0.8


class Argument:
    """One argument: its names, and the keywords for argparse's add_argument."""

    __slots__ = ("completes", "keywords", "names")

    def __init__(self, *names: str, completes: str = "", **keywords: Any) -> None:
        self.names = names
        self.keywords = keywords
        # Shell completion of the value: "file", "dir", "option" or "" for none.
        self.completes = completes

    def usage(self) -> str:
        """`--state {waiting,dead}`, `--limit N`, `NAME`."""
        name, keywords = self.names[0], self.keywords
        if keywords.get("action") == "store_true":
            return name
        choices = "{" + ",".join(str(choice) for choice in keywords.get("choices", ())) + "}"
        value = keywords.get("metavar") or (choices if "choices" in keywords else name.lstrip("-").upper())
        return f"{name} {value}" if name.startswith("-") else str(value)


class Command:
    """A decorator that declares the decorated function as a command.

    `more`: text after the summary. `json`: describes the output of --json; the name of a method of the control socket
    means its result. `examples`: arguments with an optional comment ("ping  # is it running").
    """

    __slots__ = ("arguments", "examples", "exits", "json", "more", "name", "own_exit_codes", "run", "summary")

    def __init__(
        self,
        name: str,
        summary: str,
        *arguments: Argument,
        json: str,
        examples: Sequence[str],
        more: str = "",
        exits: dict[int, str] | None = None,
        common_exits: dict[int, str] = EXIT_CODES,
    ) -> None:
        self.name = name
        self.summary = summary
        self.arguments = arguments
        self.json = json
        self.examples = [(typed, purpose) for typed, _, purpose in (each.partition("  # ") for each in examples)]
        self.more = more
        self.own_exit_codes = exits or {}
        self.exits = dict(sorted({**common_exits, **self.own_exit_codes}.items()))
        self.run: Run

    def __call__(self, run: Run) -> Run:
        self.run = run
        COMMANDS[self.name] = self
        return run

    def parser(self) -> ArgumentParser:
        """Of this command only: all parsers would add 5 ms to the start, importing all modules 15."""
        parser = Parser(
            prog=f"forqctl {self.name}", description=self.summary, formatter_class=Formatter, allow_abbrev=False
        )
        for argument in self.arguments:
            parser.add_argument(*argument.names, **argument.keywords)
        group = parser.add_argument_group("for every command")
        for argument in GLOBAL_ARGUMENTS:
            group.add_argument(*argument.names, **argument.keywords)
        return parser

    def epilog(self) -> str:
        """The part of --help below the arguments."""
        from textwrap import fill

        examples = [
            line
            for typed, purpose in self.examples
            for line in ([f"  # {purpose}"] if purpose else []) + [f"  forqctl {typed}"]
        ]
        more = [fill(self.more, HELP_WIDTH), ""] if self.more else []
        return "\n".join([*more, "examples:", *examples, "", "exit codes:", *_exit_lines(self.exits)])


# Filled when the modules of forq.ctl.commands are imported.
COMMANDS: dict[str, Command] = {}


def duration(name: str, help: str, **keywords: Any) -> Argument:
    """An argument with a duration as value; --wait is stored as wait_seconds."""
    keywords.setdefault("dest", f"{name[2:]}_seconds")
    return Argument(name, type=_seconds, metavar="D", help=help, **keywords)


def _seconds(text: str) -> float:
    from forq.values import parse_duration

    return parse_duration(text)


def given(args: Namespace, *names: str) -> dict[str, Any]:
    """The arguments among these that were given."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def elsewhere(args: Namespace) -> dict[str, Any]:
    """--on, and the time in which a supervisor elsewhere must answer. It ends before --timeout, so that the error can
    say whether the request may have been carried out."""
    limit = args.timeout_seconds
    return given(args, "on") | ({} if limit is None else {"timeout": PART_FOR_ELSEWHERE * limit})


GLOBAL_ARGUMENTS = (
    Argument(
        "--socket",
        completes="file",
        metavar="PATH",
        help="the control socket (default: FORQ_SOCKET, else the state directory's)",
    ),
    Argument("--json", action="store_true", help="print JSON"),
    duration("--timeout", "timeout for an answer (default: 30s)"),
)
# Arguments of several commands.
NAME = Argument("name", metavar="NAME", help="the queue")
ID = Argument("id", metavar="ID", help="the job")
WAIT = duration("--wait", "give up after this time (default: never)")
PRIORITY = Argument(
    "--priority", type=int, choices=range(10), metavar="0-9", help="priority; 0 goes first (default: 5)"
)
TYPE = Argument("--type", metavar="T", help="job type; selects one of the queue's handlers")
AFTER = Argument("--after", metavar="CURSOR", help="continue after the previous page")
ON = Argument(
    "--on",
    metavar="SUPERVISOR",
    help="carry it out there: the name of a processor (or its beginning), or of a host (see status --all)",
)
NO_QUEUE = {4: "no such queue"}


class Formatter(RawDescriptionHelpFormatter):
    """With a fixed width: argparse's own formatter imports shutil to find the width of the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=HELP_WIDTH)


class Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def overview(commands: Sequence[Command]) -> str:
    """forqctl --help."""
    from textwrap import fill

    widest = max(len(command.name) for command in commands) + 2
    return "\n".join(
        [
            "usage: forqctl [--socket PATH] [--json] [--timeout D] COMMAND …",
            "",
            fill(ABOUT, HELP_WIDTH),
            "",
            "commands:",
            *(f"  {command.name:<{widest}}{command.summary}" for command in commands),
            "",
            "for every command:",
            *(f"  {argument.usage():<16}{argument.keywords['help']}" for argument in GLOBAL_ARGUMENTS),
            "",
            "environment:",
            *(f"  {name:<16}{means}" for name, means in ENVIRONMENT.items()),
            "",
            "exit codes:",
            *_exit_lines(ALL_EXIT_CODES),
            "",
            DURATIONS,
            "forqctl COMMAND --help shows the arguments, examples and exit codes of a command.",
        ]
    )


def _exit_lines(exits: dict[int, str]) -> list[str]:
    return [f"  {code:<5}{means}" for code, means in sorted(exits.items())]
