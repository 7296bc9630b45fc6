"""Writes forqctl.1 and forq.1 beside itself, from the table of commands and the parser of forq: `make man`.

With --check it writes nothing, and ends with 1 if they are not as they should be.
"""

import argparse
import sys
from pathlib import Path

import roff

from forq.cli import parser_for
from forq.ctl.commands import COMMANDS, GLOBALS, Command
from forq.ctl.manual import ABOUT, ENVIRONMENT, all_exits, exits_of, shown_argument
from forq.ctl.manual_pages import PAGES
from forq.exits import MEANINGS
from forq.version import VERSION

HERE = Path(__file__).resolve().parent
DURATIONS = "D is a duration: 250ms, 10s, 5m, 2h, 7d, or a number of seconds."
ABOUT_FORQ = (
    "forq run starts a supervisor: a process that gives each queue processes of its own, starts them again when they "
    "die, and kills what hangs. Jobs are kept in Redis, in an embedded server if no other is named. forqctl(1) "
    "controls it."
)
SIGNALS = {
    "TERM, INT": "running jobs get stop_grace to end, then everything is stopped; the same again kills at once",
    "HUP": "refused: settings are read at start only",
}
FILES = {
    "/etc/forq/forq.toml": "settings, if neither --config nor FORQ_CONFIG names another file",
    "/var/lib/forq": "the state directory of root, if nothing else is said",
    "~/.local/state/forq": "that of others",
}


def forqctl() -> list[str]:
    lines = roff.title("forqctl", 1, VERSION)
    lines += [*roff.section("name"), "forqctl \\- control a forq supervisor"]
    usage = roff.text("[--socket PATH] [--json] [--timeout D] COMMAND ...")
    lines += [*roff.section("synopsis"), f"{roff.bold('forqctl')} {usage}"]
    lines += roff.section("description") + roff.paragraph(ABOUT) + roff.paragraph(DURATIONS)
    lines += roff.section("options")
    for argument in GLOBALS:
        lines += roff.entry(shown_argument(argument), argument.keywords["help"])
    lines += roff.section("commands")
    for command in COMMANDS:
        lines += _command(command)
    lines += roff.section("environment") + _entries(ENVIRONMENT)
    lines += roff.section("exit status") + _entries(all_exits())
    return lines + roff.section("see also") + [f"{roff.bold('forq')}(1)"]


def _command(command: Command) -> list[str]:
    page = PAGES[command.name]
    arguments = [shown_argument(argument) for argument in command.arguments]
    usage = [
        shown if "nargs" not in argument.keywords and not shown.startswith("-") else f"[{shown}]"
        for argument, shown in zip(command.arguments, arguments, strict=True)
    ]
    lines = roff.subsection(" ".join([command.name, *usage]))
    lines += roff.paragraph(f"{command.summary[0].upper()}{command.summary[1:]}. {page.more}".rstrip())
    for argument, shown in zip(command.arguments, arguments, strict=True):
        lines += roff.entry(shown, argument.keywords["help"])
    for purpose, typed in page.examples:
        lines += roff.code([*([f"# {purpose}"] if purpose else []), f"forqctl {typed}"])
    special = {code: means for code, means in exits_of(command).items() if code in page.exits}
    if special:
        lines += roff.paragraph("Exit status: " + "; ".join(f"{code} {means}" for code, means in special.items()) + ".")
    return lines


def forq() -> list[str]:
    lines = roff.title("forq", 1, VERSION)
    lines += [*roff.section("name"), "forq \\- fork per queue: job queues with a process each"]
    lines += roff.section("synopsis")
    for command in ("run", "bridge", "pipeline"):
        lines += [".br", f"{roff.bold(f'forq {command}')} ..."]
    lines += roff.section("description") + roff.paragraph(ABOUT_FORQ)
    lines += roff.section("commands")
    for name in ("run", "bridge", "pipeline"):
        lines += _parsed(f"forq {name}", _below(parser_for([name]))[name], _summary(parser_for([name]), name))
    lines += roff.section("signals") + _entries(SIGNALS)
    lines += roff.section("files") + _entries(FILES)
    lines += roff.section("exit status") + roff.paragraph("Of forq run:") + _entries(MEANINGS)
    return lines + roff.section("see also") + [f"{roff.bold('forqctl')}(1)"]


def _parsed(name: str, parser: argparse.ArgumentParser, summary: str) -> list[str]:
    lines = roff.subsection(name) + roff.paragraph(f"{summary[0].upper()}{summary[1:]}.")
    for action in parser._actions:
        if action.option_strings and "--help" not in action.option_strings:
            value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
            lines += roff.entry(f"{action.option_strings[-1]}{value}", action.help or "")
    for below, deeper in _below(parser).items():
        lines += _parsed(f"{name} {below}", deeper, _summary(parser, below))
    return lines


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def _summary(parser: argparse.ArgumentParser, name: str) -> str:
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(choice.help or name for choice in found._choices_actions if choice.dest == name)


def _entries(meanings: dict[str, str] | dict[int, str]) -> list[str]:
    return [line for tag, means in meanings.items() for line in roff.entry(str(tag), means)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="write.py")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    check = parser.parse_args().check
    old = []
    for name, lines in (("forqctl.1", forqctl()), ("forq.1", forq())):
        path, wanted = HERE / name, "\n".join(lines) + "\n"
        if not path.exists() or path.read_text() != wanted:
            old.append(name)
            if not check:
                path.write_text(wanted)
    if check and old:
        print(f"not up to date: {', '.join(old)} (make man writes them)", file=sys.stderr)
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
