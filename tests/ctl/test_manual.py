"""The help, the man pages and the completion: complete, true, and up to date."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from forq import errors, exits
from forq.ctl.commands import COMMANDS, Command
from forq.ctl.main import LARGEST_EXIT_CODE, parser_of
from forq.ctl.manual import all_exits, exits_of
from forq.ctl.manual_pages import PAGES
from tests.support.fake_supervisor import forqctl

ROOT = Path(__file__).resolve().parents[2]
MAN = ROOT / "etc" / "man"
with_spark = pytest.mark.skipif(
    find_spec("pyspark") is None, reason="the options of forq pipeline are known with Spark only: make test-all"
)
REQUESTS = (".TH", ".SH", ".SS", ".PP", ".TP", ".RS", ".RE", ".nf", ".fi", ".br", ".nh", ".ad", '.\\"')


@with_spark
def test_the_man_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(MAN / "write.py"), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@with_spark
def test_an_old_man_page_is_noticed_and_written_anew(tmp_path: Path) -> None:
    for name in ("write.py", "roff.py", "forq.1"):
        shutil.copy(MAN / name, tmp_path)
    write = [sys.executable, str(tmp_path / "write.py")]
    done = subprocess.run([*write, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "not up to date: forqctl.1 (make man writes them)\n")
    assert subprocess.run(write).returncode == 0
    assert (tmp_path / "forqctl.1").read_text() == (MAN / "forqctl.1").read_text()


@pytest.mark.parametrize("page", ["forq.1", "forqctl.1"])
def test_a_man_page_has_no_mistakes(page: str) -> None:
    lines = (MAN / page).read_text().splitlines()
    assert [line for line in lines if line[:1] in (".", "'") and not line.startswith(REQUESTS)] == []
    assert [line for line in lines if not line.isascii()] == []
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed: only the requests were looked at")
    done = subprocess.run(["groff", "-ww", "-man", "-Tutf8", "-z", str(MAN / page)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_man_page_shows_words_as_they_are_typed() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-Tutf8", "-P-c", "-P-b", "-P-u", "-rLL=200n", str(MAN / "forqctl.1")]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    for page in PAGES.values():
        for _, typed in page.examples:
            assert f"forqctl {typed}\n" in shown


def test_every_command_has_a_page_and_every_page_a_command() -> None:
    assert sorted(PAGES) == sorted(command.name for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_example_can_be_typed(command: Command) -> None:
    assert PAGES[command.name].examples
    for _, typed in PAGES[command.name].examples:
        name, *arguments = shlex.split(typed.partition(" > ")[0])
        assert name == command.name
        parser_of(command).parse_intermixed_args(arguments)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_arguments_examples_and_exit_codes(command: Command) -> None:
    code, out, err = forqctl(None, command.name, "--help")
    assert (code, err) == (0, "")
    assert all(argument.keywords.get("help") for argument in command.arguments)
    below = out[out.index("examples:") :]
    assert f"forqctl {PAGES[command.name].examples[0][1]}" in below
    assert [int(line.split()[0]) for line in below[below.index("exit codes:") :].splitlines()[1:]] == [
        *exits_of(command)
    ]


def test_the_overview_has_every_command_and_every_exit_code() -> None:
    code, out, _ = forqctl(None, "--help")
    assert code == 0
    assert [command.name for command in COMMANDS if f"  {command.name} " not in out] == []
    raised = {cls.exit_code for cls in errors.BY_CODE.values() if cls.exit_code <= LARGEST_EXIT_CODE}
    assert raised <= set(all_exits())
    assert all(f"  {number:<5}{means}" in out for number, means in all_exits().items())


def test_operations_md_has_every_exit_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text[text.index("## Exit codes") :].split("\n## ")[0]
    listed = {int(number) for row in re.findall(r"^\| ([0-9, ]+) \|", table, re.MULTILINE) for number in row.split(",")}
    assert listed == set(exits.MEANINGS) | set(all_exits()) | {exits.QUEUE_GONE, exits.FENCED}


def test_bash_takes_the_completion(tmp_path: Path) -> None:
    script = tmp_path / "forqctl.bash"
    script.write_text(forqctl(None, "completion", "bash")[1])
    asked = "COMP_WORDS=(forqctl top --); COMP_CWORD=2; _forqctl; echo ${COMPREPLY[@]}"
    line = f"source {script}; complete -p forqctl; {asked}"
    done = subprocess.run(["bash", "--norc", "-euc", line], capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "complete -F _forqctl forqctl",
        "--interval --plain --count --socket --json --timeout",
    ]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_take_theirs(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(forqctl(None, "completion", shell)[1])
    assert subprocess.run([shell, "-n", str(script)], capture_output=True).returncode == 0
