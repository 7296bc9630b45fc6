"""Generates files from the declarations of the commands (`make reference`). With --check it only reports old ones.

1. The completion of forqctl for bash, zsh and fish, with shtab.
2. The man pages of forqctl and forq, with argparse-manpage. They need Python 3.11, because other versions wrap usage
   differently; forq.1 also needs Spark, for the options of forq pipeline. Otherwise a page is not written.
3. docs/reference/forqctl.md.
"""

import argparse
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from forq.cli import parser_for
from forq.ctl.command import ABOUT, ALL_EXIT_CODES, DURATIONS, ENVIRONMENT, GLOBAL_ARGUMENTS, Argument, Command
from forq.ctl.commands import all_commands
from forq.errors import EXIT_MEANINGS
from forq.settings import option_names
from forq.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
PYTHON = (3, 11)
SHELLS = ("bash", "zsh", "fish")
OPTIONS = "_forqctl_options"
COMPLETES = {
    "file": shtab.FILE,
    "dir": shtab.DIRECTORY,
    "option": {"bash": OPTIONS, "zsh": OPTIONS, "fish": f"({OPTIONS})"},
}
AMENDED = {
    # No blank after "timeout=". Only the function that bash calls can set that.
    "bash": {
        "complete -o bashdefault -F _shtab_forqctl forqctl": "_forqctl() {\n  _shtab_forqctl\n"
        "  [[ ${COMPREPLY[0]-} != *= ]] || compopt -o nospace 2>/dev/null || :\n}\n"
        "complete -o bashdefault -F _forqctl forqctl"
    },
    # `source` registers it, too; and any number of options is completed.
    "zsh": {
        "$zsh_eval_context[-1] == eval": "$zsh_eval_context[-1] != loadautofunc",
        f'"(*)::an option of the queue:{OPTIONS}"': f'"*:an option of the queue:{OPTIONS}"',
    },
}
ABOUT_FORQ = (
    "forq run starts a supervisor, which runs each queue in its own processes, restarts them when they die, and kills "
    "jobs that hang. Jobs are kept in Redis, by default in an embedded server. forqctl(1) controls it."
)
SIGNALS = {
    "TERM, INT": "running jobs get stop_grace to finish, then everything is stopped; a second signal kills at once",
    "HUP": "applies the config file as forqctl apply does, without asking; the log has the result",
}
FILES = {
    "/etc/forq/forq.toml": "settings, unless --config or FORQ_CONFIG names another file",
    "/var/lib/forq": "the default state directory of root",
    "~/.local/state/forq": "the default state directory of other users",
}


class Formatter(argparse.HelpFormatter):
    """Wraps for a man page on 80 columns, whatever the width of the current terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=72)


def forqctl_parser(*, for_man: bool) -> argparse.ArgumentParser:
    """One parser for all commands. A man page lists the global arguments once, but examples and exit codes per
    command."""
    parser = argparse.ArgumentParser(
        prog="forqctl", description=f"{ABOUT}\n\n{DURATIONS}", add_help=False, formatter_class=Formatter
    )
    for argument in GLOBAL_ARGUMENTS:
        _add(parser, argument)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in all_commands():
        below = commands.add_parser(
            command.name,
            help=command.summary,
            description=_about(command) if for_man else None,
            add_help=False,
            formatter_class=Formatter,
        )
        for argument in command.arguments if for_man else (*command.arguments, *GLOBAL_ARGUMENTS):
            _add(below, argument)
    return parser


def _add(parser: argparse.ArgumentParser, argument: Argument) -> None:
    action = parser.add_argument(*argument.names, **argument.keywords)
    if argument.completes in COMPLETES:
        action.complete = COMPLETES[argument.completes]  # type: ignore[attr-defined]


def completion(shell: str) -> str:
    """The script of shtab, with a function that completes the names of a queue's options."""
    script = shtab.complete(forqctl_parser(for_man=False), shell, preamble={shell: _option_names(shell)})
    for made, wanted in AMENDED.get(shell, {}).items():
        if made not in script:
            raise SystemExit(f"shtab {shtab.__version__} writes another script for {shell}: it lacks {made!r}")
        script = script.replace(made, wanted)
    return script


def _option_names(shell: str) -> str:
    names = option_names()
    if shell == "bash":
        return f'{OPTIONS}() {{ compgen -W "{" ".join(f"{name}=" for name in names)}" -- "$1"; }}'
    if shell == "zsh":
        described = " ".join(shlex.quote(f"{name}:{help_text}") for name, help_text in names.items())
        return f"{OPTIONS}() {{ local -a names=({described}); _describe option names -S =; }}"
    described = " ".join(shlex.quote(f"{name}=\t{help_text}") for name, help_text in names.items())
    return f"function {OPTIONS}\n  printf '%s\\n' {described}\nend"


def _about(command: Command) -> str:
    """The description in a man page. Lines that start with a blank are not filled."""
    parts = [command.more] if command.more else []
    for typed, purpose in command.examples:
        parts.append("\n".join([*([f"  # {purpose}"] if purpose else []), f"  forqctl {typed}"]))
    parts.append(f"With --json it prints {_json(command)}.")
    if command.own_exit_codes:
        parts.append(
            "Exit status: " + "; ".join(f"{code} {means}" for code, means in command.own_exit_codes.items()) + "."
        )
    return "\n\n".join(parts)


def _json(command: Command) -> str:
    is_method = re.fullmatch(r"[a-z_.]+", command.json)
    return f"the result of `{command.json}`" if is_method else command.json


def man_page(parser: argparse.ArgumentParser, about: str, sections: dict[str, list[str]]) -> str:
    """ASCII only, with quotes as typed. Without a date, which would change every day."""
    page = Manpage(parser, format="single-commands-section")
    page.description, page.source, page.manual, page.date = about, f"forq {VERSION}", "forq", ""
    for heading, lines in sections.items():
        page.add_section(heading, ">", "\n".join(lines).replace("-", "\\-"))
    head, _, body = str(page).partition("\n")
    body = body.replace("'", "\\(aq").replace("`", "\\(ga")
    body = "".join(char if char.isascii() else f"\\[u{ord(char):04X}]" for char in body)
    written = '.\\" Written by make reference: change the declarations of the commands, not this file.'
    return "\n".join([written, head, ".nh", ".ad l", body])


def _entries(meanings: dict[str, str] | dict[int, str]) -> list[str]:
    return [line for tag, means in meanings.items() for line in (".TP", f"\\fB{tag}\\fR", means)]


def forqctl_man() -> str:
    exits = dict(sorted(ALL_EXIT_CODES.items()))
    sections = {"environment": _entries(ENVIRONMENT), "exit status": _entries(exits), "see also": ["forq(1)"]}
    return man_page(forqctl_parser(for_man=True), "control a forq supervisor", sections)


def forq_man() -> str:
    parser = parser_for("app", "bridge", "pipeline")
    for each in _with_those_below(parser):
        each.formatter_class = Formatter
    about, parser.description = parser.description or "", ABOUT_FORQ
    if parser._subparsers is not None:
        parser._subparsers.title = "commands"
    sections = {
        "signals": _entries(SIGNALS),
        "files": _entries(FILES),
        "exit status": ["Of forq run:", *_entries(EXIT_MEANINGS)],
        "see also": ["forqctl(1)"],
    }
    return man_page(parser, about, sections)


def _with_those_below(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [
        parser,
        *(each for action in below for child in action.choices.values() for each in _with_those_below(child)),
    ]


def markdown() -> str:
    lines = [
        "# forqctl",
        "",
        f"{ABOUT} {DURATIONS}",
        "",
        "Written by `make reference` from the declarations in `src/forq/ctl/commands`.",
        "",
        *_table("for every command", {argument.usage(): argument.keywords["help"] for argument in GLOBAL_ARGUMENTS}),
        "",
        *_table("exit code", {str(code): means for code, means in sorted(ALL_EXIT_CODES.items())}),
        "",
        "| command | |",
        "|---|---|",
        *(f"| [{command.name}](#{command.name}) | {command.summary} |" for command in all_commands()),
    ]
    for command in all_commands():
        lines += ["", f"## {command.name}", "", *_described(command)]
    return "\n".join(lines) + "\n"


def _described(command: Command) -> list[str]:
    more = f" {command.more}" if command.more else ""
    lines = [f"{command.summary[0].upper()}{command.summary[1:]}.{more}", ""]
    if command.arguments:
        arguments = {argument.usage(): argument.keywords["help"] for argument in command.arguments}
        lines += [*_table("argument", arguments), ""]
    for typed, purpose in command.examples:
        lines += [f"    forqctl {typed}" + (f"  # {purpose}" if purpose else "")]
    lines += ["", f"With `--json` it prints {_linked(_json(command))}."]
    if command.own_exit_codes:
        own = "; ".join(f"{code} {means}" for code, means in command.own_exit_codes.items())
        lines += ["", f"Exit codes of its own: {own}."]
    return lines


def _table(title: str, meanings: dict[str, str]) -> list[str]:
    rows = [f"| `{tag}` | {means} |" for tag, means in meanings.items()]
    return [f"| {title} | |", "|---|---|", *rows]


def _linked(text: str) -> str:
    """Links method names to docs/reference/protocol.md."""
    return re.sub(
        r"`([a-z_.]+)`", lambda name: f"[{name[0]}]({METHODS[name[1]]})" if name[1] in METHODS else name[0], text
    )


def _methods() -> dict[str, str]:
    """The methods of the control socket, with links to their descriptions."""
    headings = re.findall(r"^### (.+)$", (ROOT / "docs/reference/protocol.md").read_text(), re.MULTILINE)
    anchors = {heading: re.sub(r"[^a-z_ -]", "", heading).replace(" ", "-") for heading in headings}
    return {name: f"protocol.md#{anchor}" for heading, anchor in anchors.items() for name in heading.split(", ")}


METHODS = _methods()


def generated() -> dict[Path, str]:
    texts = {ROOT / "src/forq/ctl/completion" / f"forqctl.{shell}": completion(shell) for shell in SHELLS}
    texts[ROOT / "docs/reference/forqctl.md"] = markdown()
    if sys.version_info[:2] == PYTHON:
        texts[ROOT / "etc/man/forqctl.1"] = forqctl_man()
        if find_spec("pyspark") is not None:
            texts[ROOT / "etc/man/forq.1"] = forq_man()
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(prog="reference.py")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check, old = parser.parse_args().check, []
    texts = generated()
    if not check and (left := sorted({"forq.1", "forqctl.1"} - {path.name for path in texts})):
        print(f"not written: {', '.join(left)} (they need Python 3.11, forq.1 also Spark)", file=sys.stderr)
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            old.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(text)
    if check and old:
        print(f"out of date: {', '.join(old)}; run: make reference", file=sys.stderr)
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
