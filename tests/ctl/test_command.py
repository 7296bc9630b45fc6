"""The declarations of commands, and the help, man pages, completion and reference generated from them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from forq import errors
from forq.ctl.command import ALL_EXIT_CODES, COMMANDS, Command
from forq.ctl.commands import MODULES, all_commands
from forq.ctl.main import LARGEST_EXIT_CODE
from forq.errors import EXIT_MEANINGS, ExitCode
from tests.ctl.fake_supervisor import forqctl

ROOT = Path(__file__).resolve().parents[2]
MAN = ROOT / "etc" / "man"
REFERENCE = ROOT / "etc" / "reference.py"
DECLARED = all_commands()
each_command = pytest.mark.parametrize("command", DECLARED, ids=lambda command: command.name)
REQUESTS = (".TH", ".SH", ".SS", ".TP", ".RS", ".RE", ".B", ".nh", ".ad", '.\\"')


def test_the_index_maps_every_declared_command_to_its_module() -> None:
    for module in sorted(set(MODULES.values())):
        text = (ROOT / "src/forq/ctl/commands" / f"{module}.py").read_text()
        named = re.findall(r'^@Command\(\s*"([\w-]+)"', text, re.MULTILINE)
        assert sorted(named) == sorted(name for name, home in MODULES.items() if home == module)
    assert sorted(COMMANDS) == sorted(MODULES)
    modules = {path.stem for path in (ROOT / "src/forq/ctl/commands").glob("*.py")}
    assert modules == {"__init__", *MODULES.values()}


@pytest.mark.parametrize("name", ["ping", "pause", "jobs", "trigger"])
def test_a_command_imports_only_its_own_module(name: str) -> None:
    """Importing the modules of all commands would make every start 50 % slower."""
    typed = [name, *{"ping": [], "trigger": ["q", "key"]}.get(name, ["q"])]
    program = (
        f"import sys; from forq.ctl.main import main; main(['--socket', '/nonexistent/socket', *{typed}]); "
        "print(*(each for each in sys.modules if each.startswith('forq.ctl.commands.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"forq.ctl.commands.{MODULES[name]}"]


@pytest.mark.skipif(find_spec("shtab") is None or find_spec("argparse_manpage") is None, reason="pip install '.[dev]'")
def test_generated_pages_and_completions_are_up_to_date() -> None:
    """Without Spark, forq.1 is not checked; with a Python other than 3.11, no man page is."""
    done = subprocess.run([sys.executable, str(REFERENCE), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(find_spec("shtab") is None or find_spec("argparse_manpage") is None, reason="pip install '.[dev]'")
def test_outdated_pages_are_reported_and_regenerated(tmp_path: Path) -> None:
    for folder in ("etc/man", "docs/reference", "src/forq/ctl/completion"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    write = [sys.executable, shutil.copy(REFERENCE, tmp_path / "etc")]
    assert subprocess.run(write).returncode == 0
    page = tmp_path / "docs/reference/forqctl.md"
    page.write_text("old")
    done = subprocess.run([*write, "--check"], capture_output=True, text=True)
    wanted = "out of date: docs/reference/forqctl.md; run: make reference\n"
    assert (done.returncode, done.stderr, page.read_text()) == (1, wanted, "old")
    assert subprocess.run(write).returncode == 0
    assert page.read_text().startswith("# forqctl\n")


@pytest.mark.parametrize("page", ["forq.1", "forqctl.1"])
def test_a_man_page_has_no_formatting_errors(page: str) -> None:
    lines = (MAN / page).read_text().splitlines()
    assert [line for line in lines if line[:1] in (".", "'") and not line.startswith(REQUESTS)] == []
    assert [line for line in lines if not line.isascii()] == []
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed: only the requests were checked")
    done = subprocess.run(["groff", "-ww", "-man", "-Tutf8", "-z", str(MAN / page)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_man_page_shows_every_example_unchanged() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-Tutf8", "-P-c", "-P-b", "-P-u", "-rLL=200n", str(MAN / "forqctl.1")]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for declared in DECLARED:
        for typed, _ in declared.examples:
            assert f"forqctl {typed}\n" in shown


@each_command
def test_every_example_parses(command: Command) -> None:
    assert command.examples
    for typed, _ in command.examples:
        name, *arguments = shlex.split(typed.partition(" > ")[0])
        assert name == command.name
        command.parser().parse_intermixed_args(arguments)


@each_command
def test_the_json_note_of_a_command_names_an_existing_protocol_method(command: Command) -> None:
    methods = re.findall(r"^### (.+)$", (ROOT / "docs/reference/protocol.md").read_text(), re.MULTILINE)
    named = [name for heading in methods for name in heading.split(", ")]
    assert command.json
    if re.fullmatch(r"[a-z_.]+", command.json):
        assert command.json in named


@each_command
def test_help_has_arguments_examples_and_exit_codes(command: Command) -> None:
    code, out, err = forqctl(None, command.name, "--help")
    assert (code, err) == (0, "")
    assert all(argument.keywords.get("help") for argument in command.arguments)
    below = out[out.index("examples:") :]
    assert f"forqctl {command.examples[0][0]}" in below
    assert [int(line.split()[0]) for line in below[below.index("exit codes:") :].splitlines()[1:]] == [*command.exits]


def test_the_overview_lists_every_command_and_exit_code() -> None:
    code, out, _ = forqctl(None, "--help")
    assert code == 0
    assert [name for name in MODULES if f"  {name} " not in out] == []
    raised = {cls.exit_code for cls in errors.BY_CODE.values() if cls.exit_code <= LARGEST_EXIT_CODE}
    assert raised <= set(ALL_EXIT_CODES)
    assert all(f"  {number:<5}{means}" in out for number, means in ALL_EXIT_CODES.items())


def test_the_exit_code_page_lists_every_exit_code() -> None:
    table = (ROOT / "docs/reference/exit-codes.md").read_text()
    listed = {int(number) for row in re.findall(r"^\| ([0-9, ]+) \|", table, re.MULTILINE) for number in row.split(",")}
    assert listed == set(EXIT_MEANINGS) | set(ALL_EXIT_CODES) | {ExitCode.QUEUE_GONE, ExitCode.FENCED}


def test_bash_loads_its_completion(tmp_path: Path) -> None:
    script = tmp_path / "forqctl.bash"
    script.write_text(forqctl(None, "completion", "bash")[1])
    completed = "COMP_WORDS=(forqctl top --); COMP_CWORD=2; _forqctl; echo ${COMPREPLY[@]}"
    line = f"source {script}; complete -p forqctl; {completed}"
    done = subprocess.run(["bash", "--norc", "-euc", line], capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "complete -o bashdefault -F _forqctl forqctl",
        "--interval --plain --count --socket --json --timeout",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_parse_their_completions(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(forqctl(None, "completion", shell)[1])
    assert subprocess.run([shell, "-n", str(script)], capture_output=True).returncode == 0


def test_fish_completes_commands_values_and_option_names(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = tmp_path / "forqctl.fish"
    script.write_text(forqctl(None, "completion", "fish")[1])

    def offered(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source {script}; complete -C {shlex.quote(line)}"]
        home = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=home)
        return [each.partition("\t")[0] for each in done.stdout.splitlines()]

    assert offered("forqctl un") == ["unschedule"]
    assert offered("forqctl dead re") == ["retry"]
    assert offered("forqctl set mails max_re") == ["max_retries="]
