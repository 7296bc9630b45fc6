"""How a command of forqctl is declared, and what is made of a declaration: its parser and its help.

    @Command("ping", "ask whether the supervisor answers", json="ping", examples=["ping --timeout 2s"])
    def ping(args: Namespace) -> int: ...

Shell completion, the man page and docs/reference/forqctl.md are made of the same declarations (etc/reference.py).
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
    "forqctl talks to a supervisor (forq run) over its control socket: it makes and deletes queues, pushes jobs, shows "
    "what they do, and helps when something went wrong."
)
DURATIONS = "D is a duration: 250ms, 10s, 5m, 2h, 7d, or a number of seconds."
ENVIRONMENT = {
    "FORQ_SOCKET": "the control socket, if --socket does not say it",
    "FORQ_STATE_DIR": "the state directory, whose control.sock is used if nothing else is said",
    "NO_COLOR": "no colours, also on a terminal",
    "TERM": "with dumb, no colours, and top writes plain blocks",
}
# Of every command that talks to a supervisor.
EXIT_CODES = {
    0: "done",
    1: "refused, or failed",
    2: "wrong arguments, names, data or options",
    5: "not allowed to use the socket",
    6: "no answer in time",
    7: "no supervisor there",
    130: "interrupted",
}
ALL_EXIT_CODES = {
    **EXIT_CODES,
    3: "status --check: something is not healthy; delete: processes are left that cannot be killed",
    4: "no such queue, job or schedule",
}


class Argument:
    """One argument, in the words of argparse: its names and the keywords of add_argument."""

    __slots__ = ("completes", "keywords", "names")

    def __init__(self, *names: str, completes: str = "", **keywords: Any) -> None:
        self.names = names
        self.keywords = keywords
        # What the shell offers for the value: "file", "dir", "option" or nothing.
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
    """Declares the command that the function below it carries out.

    `more`: what the summary has no room for. `json`: what --json prints; a bare name of a method of the control socket
    stands for its result. `examples`: what to type after forqctl, and what for ("ping  # is it there").
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
        """Only of this command: those of all commands would add 5 ms to a start, and the import of all modules 15."""
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
        """What --help says below the arguments."""
        from textwrap import fill

        examples = [
            line
            for typed, purpose in self.examples
            for line in ([f"  # {purpose}"] if purpose else []) + [f"  forqctl {typed}"]
        ]
        told = [fill(self.more, HELP_WIDTH), ""] if self.more else []
        return "\n".join([*told, "examples:", *examples, "", "exit codes:", *_exit_lines(self.exits)])


# Filled by the modules of forq.ctl.commands, when they are imported.
COMMANDS: dict[str, Command] = {}


def duration(name: str, help: str, **keywords: Any) -> Argument:
    """An argument whose value is a duration: --wait is wait_seconds."""
    keywords.setdefault("dest", f"{name[2:]}_seconds")
    return Argument(name, type=_seconds, metavar="D", help=help, **keywords)


def _seconds(text: str) -> float:
    from forq.values import parse_duration

    return parse_duration(text)


def given(args: Namespace, *names: str) -> dict[str, Any]:
    """Those of these arguments that were given."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


GLOBAL_ARGUMENTS = (
    Argument("--socket", completes="file", metavar="PATH", help="the control socket (default: FORQ_SOCKET)"),
    Argument("--json", action="store_true", help="print one JSON document"),
    duration("--timeout", "how long to wait for an answer (default: 30s)"),
)
# What several commands take.
NAME = Argument("name", metavar="NAME", help="the queue")
ID = Argument("id", metavar="ID", help="the job")
WAIT = duration("--wait", "give up after this time (default: never)")
PRIORITY = Argument("--priority", type=int, choices=range(10), metavar="0-9", help="0 is served first (default: 5)")
TYPE = Argument("--type", metavar="T", help="picks one of the queue's handlers")
AFTER = Argument("--after", metavar="CURSOR", help="go on where the last page ended")
NO_QUEUE = {4: "no such queue"}


class Formatter(RawDescriptionHelpFormatter):
    """Made for every argument that is added: left to itself it imports shutil, to ask how wide the terminal is."""

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
            "forqctl COMMAND --help shows the arguments of a command, examples, and its exit codes.",
        ]
    )


def _exit_lines(exits: dict[int, str]) -> list[str]:
    return [f"  {code:<5}{means}" for code, means in sorted(exits.items())]
