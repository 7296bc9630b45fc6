"""completion: a static script for bash, zsh or fish, made from the table of commands."""

from __future__ import annotations

from forq.ctl.commands import COMMANDS, GLOBALS, Argument, Command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace


def completion(args: Namespace) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](), end="")
    return 0


def bash() -> str:
    takes_value = "|".join(flag for flag in _flags(*GLOBALS) if flag != "--json")
    lines = [
        "# bash completion for forqctl; install: forqctl completion bash > /etc/bash_completion.d/forqctl",
        "_forqctl() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" verb="" i',
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        '        case "${COMP_WORDS[i]}" in',
        f"            {takes_value}) ((i++)) ;;",
        "            -*) ;;",
        '            *) verb="${COMP_WORDS[i]}"; break ;;',
        "        esac",
        "    done",
        '    case "$verb:$previous" in',
        *(f"        {case}" for command in COMMANDS for case in _bash_values(command)),
        *(
            f'        *:{argument.names[0]}) COMPREPLY=($(compgen -f -- "$current")); return ;;'
            for argument in GLOBALS
            if argument.completes
        ),
        "    esac",
        '    case "$verb" in',
        f'        "") COMPREPLY=($(compgen -W "{_names()} {" ".join(_flags(*GLOBALS))}" -- "$current")) ;;',
        *(f'        {c.name}) COMPREPLY=($(compgen -W "{_words(c)}" -- "$current")) ;;' for c in COMMANDS),
        "    esac",
        "}",
        "complete -F _forqctl forqctl",
    ]
    return "\n".join(lines) + "\n"


def zsh() -> str:
    lines = [
        "#compdef forqctl",
        "# zsh completion for forqctl; install: forqctl completion zsh > a directory of $fpath, as _forqctl",
        "_forqctl() {",
        "    local state line",
        f"    _arguments -C {_zsh_specs(GLOBALS)} '1:command:->command' '*::argument:->argument'",
        "    case $state in",
        "        command)",
        "            local -a commands=(",
        *(f"                {_quoted(f'{command.name}:{command.summary}')}" for command in COMMANDS),
        "            )",
        "            _describe command commands ;;",
        "        argument)",
        "            case $line[1] in",
        *(f"                {c.name}) _arguments {_zsh_specs((*c.arguments, *GLOBALS))} ;;" for c in COMMANDS),
        "            esac ;;",
        "    esac",
        "}",
        'if [ "$funcstack[1]" = "_forqctl" ]; then _forqctl "$@"; else compdef _forqctl forqctl; fi',
    ]
    return "\n".join(lines) + "\n"


def fish() -> str:
    lines = [
        "# fish completion for forqctl; install: forqctl completion fish > ~/.config/fish/completions/forqctl.fish",
        "complete -c forqctl -f",
        *(f"complete -c forqctl {_fish_spec(argument)}" for argument in GLOBALS),
    ]
    for command in COMMANDS:
        lines.append(
            f"complete -c forqctl -n __fish_use_subcommand -a {command.name} -d {_quoted(command.summary)}",
        )
        lines += [
            f"complete -c forqctl -n '__fish_seen_subcommand_from {command.name}' {_fish_spec(argument)}"
            for argument in command.arguments
            if _is_flag(argument) or _choices(argument)
        ]
    return "\n".join(lines) + "\n"


def _bash_values(command: Command) -> list[str]:
    cases = []
    for argument in command.arguments:
        if not _is_flag(argument):
            continue
        if choices := _choices(argument):
            reply = f'compgen -W "{" ".join(choices)}" -- "$current"'
        elif argument.completes:
            reply = f'compgen -{"d" if argument.completes == "dir" else "f"} -- "$current"'
        else:
            continue
        cases.append(f"{command.name}:{argument.names[0]}) COMPREPLY=($({reply})); return ;;")
    return cases


def _words(command: Command) -> str:
    positional = [word for argument in command.arguments if not _is_flag(argument) for word in _choices(argument)]
    return " ".join([*positional, *_flags(*command.arguments, *GLOBALS)])


def _zsh_specs(arguments: tuple[Argument, ...]) -> str:
    specs = []
    for position, argument in enumerate(arguments, start=1):
        values = f"({' '.join(_choices(argument))})" if _choices(argument) else ""
        values = {"file": "_files", "dir": "_files -/"}.get(argument.completes, values)
        help_text = argument.keywords["help"].replace("[", "(").replace("]", ")").replace(":", "\\:")
        if not _is_flag(argument):
            specs.append(_quoted(f"{position}:{argument.names[0]}:{values}"))
        elif argument.keywords.get("action") == "store_true":
            specs.append(_quoted(f"{argument.names[0]}[{help_text}]"))
        else:
            specs.append(_quoted(f"{argument.names[0]}[{help_text}]:value:{values}"))
    return " ".join(specs)


def _fish_spec(argument: Argument) -> str:
    values = f" -a {_quoted(' '.join(_choices(argument)))}" if _choices(argument) else ""
    if not _is_flag(argument):
        return values.strip()
    takes_value = argument.keywords.get("action") != "store_true"
    forced = " -F" if argument.completes else ""
    described = f" -d {_quoted(argument.keywords['help'])}"
    return f"-l {argument.names[0][2:]}{' -r' if takes_value else ''}{forced}{values}{described}"


def _names() -> str:
    return " ".join(command.name for command in COMMANDS)


def _flags(*arguments: Argument) -> list[str]:
    return [argument.names[0] for argument in arguments if _is_flag(argument)]


def _choices(argument: Argument) -> list[str]:
    return [str(choice) for choice in argument.keywords.get("choices", ())]


def _is_flag(argument: Argument) -> bool:
    return argument.names[0].startswith("-")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
