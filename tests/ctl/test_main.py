"""What all commands of forqctl share: errors, exit codes, timeouts, the socket, --json, color and --help."""

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest

from forq import errors
from forq.ctl.client import ControlClient, wait_for_answer
from forq.ctl.commands import MODULES
from tests.ctl.fake_supervisor import (
    FORQCTL,
    FakeSupervisor,
    environment,
    forqctl,
    on_a_terminal,
    queue_status,
    whole_status,
)


def test_json_prints_one_document_wherever_the_flag_is(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status(name="ü"))
    before = forqctl(fake, "--json", "status")
    after = forqctl(fake, "status", "--json")
    assert before == after
    assert json.loads(before[1]) == fake.answers["status"]
    assert before[1].count("\n") == 1


@pytest.mark.parametrize("cls", [*errors.BY_CODE.values()], ids=lambda cls: cls.code)
def test_an_error_prints_one_line_and_sets_its_exit_code(fake: FakeSupervisor, cls: type[errors.ForqError]) -> None:
    fake.answers["queue.pause"] = cls("no\nway")
    code, out, err = forqctl(fake, "pause", "q")
    assert code == (cls.exit_code if cls.exit_code < 8 else 1)
    assert (out, err) == ("", "forqctl: no\\nway\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stauts"], "unknown command 'stauts': did you mean status? (see forqctl --help)"),
        ([], "no command given (see forqctl --help)"),
        (["push", "q"], "push needs JSON or --file"),
        (["push", "q", "1", "--file", "x"], "push needs JSON or --file"),
        (["push", "q", "--file", "-", "--id", "1"], "--id is for a single job; with --file use --records"),
        (["create", "q", "--mode", "work"], "create needs --handler M:F, or --type T=M:F for each job type"),
        (["create", "q", "--handler", "m:f", "--set", "x"], "option 'x' is not allowed: the form is OPTION=VALUE"),
        (["set", "q"], "set needs at least one OPTION=VALUE, such as timeout=30s"),
        (["set", "q", "a=1", "--set", "a=2"], "option 'a' is given twice: '1' and '2'"),
        (["create", "q", "--handler", "m:f", "a=1", "a=1"], "option 'a' is given twice: '1' and '1'"),
        (["jobs", "q", "--limit", "0"], "--limit must be at least 1"),
        (["dead", "list", "q", "a"], "list takes neither ID nor --all"),
        (["dead", "list", "q", "--limit", "0"], "--limit must be at least 1"),
        (["dead", "show", "q"], "show needs an ID"),
        (["dead", "retry", "q"], "retry needs ID or --all"),
        (["dead", "discard", "q", "a", "--all"], "discard needs ID or --all"),
        (["dead", "retry", "q", "a", "--limit", "1"], "--limit and --after are only for list"),
    ],
)
def test_usage_errors_exit_with_2_and_send_no_request(fake: FakeSupervisor, args: list[str], message: str) -> None:
    assert forqctl(fake, *args) == (2, "", f"forqctl: {message}\n")
    assert fake.calls == []


def test_a_missing_answer_exits_with_6(fake: FakeSupervisor) -> None:
    code, _, err = forqctl(fake, "ping", "--timeout", "100ms")
    assert (code, err) == (6, f"forqctl: no answer from the supervisor at {fake.path} within 0.1 s\n")


def test_waiting_for_an_answer_times_out_without_repeating_the_status_request(fake: FakeSupervisor) -> None:
    client = ControlClient(fake.path, timeout_seconds=1.0)
    wanted = client.send("queue.drain", {"name": "q"})
    began = time.process_time()
    with pytest.raises(errors.TimedOut, match=r"no answer from the supervisor at .* within 1 s"):
        wait_for_answer(client, wanted, {}, lambda waiting, status: None, None, "", lines=False)
    assert [method for method, _ in fake.calls] == ["queue.drain", "status"]
    assert time.process_time() - began < 0.5, "it sleeps while it waits"
    client.close()


def test_an_unreachable_supervisor_exits_with_7_and_reports_path_and_reason(tmp_path: Path) -> None:
    path = str(tmp_path / "none.sock")
    message = f"forqctl: cannot reach the supervisor at {path}: "
    assert forqctl(None, "--socket", path, "ping") == (7, "", f"{message}no such file\n")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        assert forqctl(None, "ping", "--socket", path) == (7, "", f"{message}connection refused\n")


def test_the_socket_is_found_in_the_state_directory(fake: FakeSupervisor, tmp_path: Path) -> None:
    fake.answers["ping"] = {"pong": True, "pid": 10}
    (tmp_path / "control.sock").symlink_to(fake.path)
    assert forqctl(None, "ping", FORQ_STATE_DIR=str(tmp_path))[0] == 0
    assert forqctl(None, "ping", STATE_DIRECTORY=f"{tmp_path}:/other")[0] == 0


def test_color_is_used_only_on_terminals_without_no_color(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(queue_status())
    assert "\x1b[32mrunning" in on_a_terminal(fake, "status", TERM="xterm", NO_COLOR="")
    assert "\x1b" not in on_a_terminal(fake, "status", TERM="xterm", NO_COLOR="1")


@pytest.mark.parametrize("name", MODULES)
def test_every_command_has_help(name: str) -> None:
    code, out, _ = forqctl(None, name, "--help")
    assert code == 0
    assert f"usage: forqctl {name}" in out


def test_a_closed_pipe_causes_no_traceback(fake: FakeSupervisor) -> None:
    fake.answers["status"] = whole_status(*[queue_status()] * 2000)
    line = f"{' '.join(FORQCTL)} status | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(fake), timeout=30)
    assert done.stdout.startswith("QUEUE")
    assert done.stderr == ""
