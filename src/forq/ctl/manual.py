"""The help of forqctl in words, from the table of commands and the manual pages: what `--help` prints below the
arguments, and `forqctl --help`. etc/man/write.py makes the man page from the same."""

from __future__ import annotations

import textwrap

from forq.ctl.commands import COMMANDS, GLOBALS, Argument, Command
from forq.ctl.manual_pages import EXITS, PAGES

WIDTH = 100
ABOUT = (
    "forqctl talks to a supervisor (forq run) over its control socket: it makes and deletes queues, pushes jobs, shows "
    "what they do, and helps when something went wrong."
)
NEEDS_NO_SUPERVISOR = ("completion",)
ENVIRONMENT = {
    "FORQ_SOCKET": "the control socket, if --socket does not say it",
    "FORQ_STATE_DIR": "the state directory, whose control.sock is used if nothing else is said",
    "NO_COLOR": "no colours, also on a terminal",
    "TERM": "with dumb, no colours, and top writes plain blocks",
}


def exits_of(command: Command) -> dict[int, str]:
    """Every exit code that it may end with, and what that says."""
    common = {code: EXITS[code] for code in (0, 2)} if command.name in NEEDS_NO_SUPERVISOR else EXITS
    return dict(sorted({**common, **PAGES[command.name].exits}.items()))


def all_exits() -> dict[int, str]:
    more = {
        3: "status --check: something is not healthy; delete: processes are left that cannot be killed",
        4: "no such queue, job or schedule",
    }
    return dict(sorted({**EXITS, **more}.items()))


def shown_argument(argument: Argument) -> str:
    """`--state {waiting,dead}`, `--limit N`, `NAME`."""
    keywords = argument.keywords
    if keywords.get("action") == "store_true":
        return argument.names[0]
    choices = "{" + ",".join(str(choice) for choice in keywords.get("choices", ())) + "}"
    value = keywords.get("metavar") or (choices if "choices" in keywords else argument.names[0].lstrip("-").upper())
    return f"{argument.names[0]} {value}" if argument.names[0].startswith("-") else str(value)


def epilog(command: Command) -> str:
    page = PAGES[command.name]
    examples = [
        line
        for purpose, typed in page.examples
        for line in ([f"  # {purpose}"] if purpose else []) + [f"  forqctl {typed}"]
    ]
    exits = [f"  {code:<5}{means}" for code, means in exits_of(command).items()]
    told = [textwrap.fill(page.more, WIDTH), ""] if page.more else []
    return "\n".join([*told, "examples:", *examples, "", "exit codes:", *exits])


def overview() -> str:
    widest = max(len(command.name) for command in COMMANDS) + 2
    options = [f"  {shown_argument(argument):<16}{argument.keywords['help']}" for argument in GLOBALS]
    return "\n".join(
        [
            "usage: forqctl [--socket PATH] [--json] [--timeout D] COMMAND …",
            "",
            textwrap.fill(ABOUT, WIDTH),
            "",
            "commands:",
            *(f"  {command.name:<{widest}}{command.summary}" for command in COMMANDS),
            "",
            "for every command:",
            *options,
            "",
            "environment:",
            *(f"  {name:<16}{means}" for name, means in ENVIRONMENT.items()),
            "",
            "exit codes:",
            *(f"  {code:<5}{means}" for code, means in all_exits().items()),
            "",
            "D is a duration: 250ms, 10s, 5m, 2h, 7d, or a number of seconds.",
            "forqctl COMMAND --help shows the arguments of a command, examples, and its exit codes.",
        ]
    )
