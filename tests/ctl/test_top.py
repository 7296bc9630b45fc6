"""forqctl top, with and without a pseudo-terminal."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forq import errors
from forq.ctl.screen import KeyDecoder
from forq.ctl.top import QueueStats, count_text, limits_text, rate_text
from tests.ctl.fake_supervisor import FORQCTL, FakeSupervisor, environment, forqctl, queue_status, whole_status
from tests.support.drive.terminal import OnTerminal
from tests.support.drive.wait import wait_until

Open = Callable[..., OnTerminal]


@pytest.fixture
def top(fake: FakeSupervisor) -> Iterator[Open]:
    opened: list[OnTerminal] = []

    def begin(*args: str, columns: int = 80, lines: int = 24, **env: str) -> OnTerminal:
        command = [*FORQCTL, "top", "--interval", "100ms", *args]
        opened.append(OnTerminal(command, {**environment(fake), "TERM": "xterm", **env}, columns, lines))
        return opened[-1]

    yield begin
    for terminal in opened:
        terminal.close()


def numbered(count: int) -> dict[str, Any]:
    return whole_status(*[queue_status(name=f"q{number:04}", waiting=number) for number in range(count)])


def growing(per_call: int) -> Callable[[dict[str, Any]], Any]:
    """A queue whose counters grow with each status."""
    calls = iter(range(1_000_000))
    return lambda params: whole_status(queue_status(done=per_call * next(calls), children=[]))


# --plain and --json.


def test_plain_prints_one_block_per_interval_until_count(fake: FakeSupervisor) -> None:
    limits = {"rate": "50/1s", "max_active": 4, "may_begin": 0, "limited_workers": 1}
    fake.answers["status"] = whole_status(queue_status(limits=limits))
    code, out, err = forqctl(fake, "top", "--plain", "--count", "2", "--interval", "100ms")
    first, second = out.strip().split("\n\n")
    assert (code, err) == (0, "")
    assert first.splitlines()[0].endswith("forq 0.1.0, pid 10, up 1m40s: 1 queue")
    assert first.splitlines()[3:] == [
        "QUEUE   STATE    WAITING  ACTIVE  SCHEDULED  DEAD  DONE/S  FAILED/S  OLDEST  RUNNING  RESTARTS  LIMITS",
        "emails  running       12       1          4     2  -       -         1m15s   01J             2  50/1s max 4 !",
    ]
    assert second.splitlines()[4].split()[6:8] == ["0", "0"]
    assert fake.calls == [("status", {})] * 2


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": "xterm"}])
def test_output_is_plain_without_a_terminal_or_on_a_dumb_one(
    fake: FakeSupervisor, top: Open, env: dict[str, str]
) -> None:
    fake.answers["status"] = numbered(1)
    if env["TERM"] == "dumb":
        terminal = top(columns=120, **env)
        terminal.wait_for("q0000")
        assert b"\x1b[?1049h" not in terminal.written
    else:
        done = subprocess.run(
            [*FORQCTL, "top", "--count", "1"], capture_output=True, text=True, env={**environment(fake), **env}
        )
        assert "q0000" in done.stdout
        assert "\x1b" not in done.stdout


def test_json_prints_one_object_per_line_with_rates(fake: FakeSupervisor) -> None:
    fake.answers["status"] = growing(50)
    code, out, _ = forqctl(fake, "top", "--json", "--count", "3", "--interval", "200ms")
    first, *later = [json.loads(line) for line in out.splitlines()]
    assert (code, len(later)) == (0, 2)
    assert first["reachable"] is True
    assert first["supervisor"]["redis"]["ok"] is True
    assert first["queues"][0]["done_per_second"] is None
    # 50 per 0.2 s; a busy machine makes intervals longer, never shorter by half.
    assert all(0 < document["queues"][0]["done_per_second"] < 500 for document in later)


def test_plain_survives_a_restart_of_the_supervisor(fake: FakeSupervisor, tmp_path: Path) -> None:
    fake.answers["status"] = numbered(1)
    command = [*FORQCTL, "top", "--json", "--interval", "100ms"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(fake))
    assert process.stdout is not None
    try:
        lines = (json.loads(line) for line in process.stdout)
        assert next(lines)["reachable"]
        fake.close()
        lost = next(line for line in lines if not line["reachable"])
        assert "cannot reach the supervisor" in lost["error"]
        again = FakeSupervisor(fake.path)
        try:
            again.answers["status"] = numbered(2)
            assert len(next(line for line in lines if line["reachable"])["queues"]) == 2
        finally:
            again.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--interval", "10ms"], "--interval must be at least 0.1 s"),
        (["--count", "0"], "--count must be at least 1"),
    ],
)
def test_invalid_arguments_exit_with_2(fake: FakeSupervisor, args: list[str], message: str) -> None:
    assert forqctl(fake, "top", *args) == (2, "", f"forqctl: {message}\n")


def test_an_unreachable_supervisor_at_the_start_exits_with_7(tmp_path: Path) -> None:
    assert forqctl(None, "top", "--plain", "--socket", str(tmp_path / "none"))[0] == 7


def test_plain_and_status_do_not_import_rich(fake: FakeSupervisor) -> None:
    fake.answers["status"] = numbered(1)
    for command in ("['top', '--plain', '--count', '1']", "['status']"):
        code = (
            f"import sys; from forq.ctl.main import main; main({command}); "
            "print(sorted({'rich', 'forq.ctl.screen'} & set(sys.modules)), file=sys.stderr)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(fake))
        assert done.stderr == "[]\n"


def test_without_rich_the_error_names_the_extra(fake: FakeSupervisor, tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    terminal = OnTerminal([*FORQCTL, "top"], {**environment(fake), "PYTHONPATH": path})
    try:
        assert terminal.end() == 2
        assert "pip install 'forq[top]', or use --plain" in terminal.text.replace("\n", "")
    finally:
        terminal.close()


# The full screen.


def test_the_screen_shows_queues_and_restores_the_terminal(fake: FakeSupervisor, top: Open) -> None:
    fake.answers["status"] = growing(10)
    terminal = top()
    text = terminal.wait_for(lambda text: "running" in text and text.splitlines()[4].split()[6] != "-")
    assert text.splitlines()[3].split() == [
        *("QUEUE", "STATE", "WAITING", "ACTIVE", "SCHED", "DEAD", "DONE/S", "FAIL/S", "OLDEST", "RUNNING", "RESTARTS")
    ]
    terminal.press("q")
    assert terminal.end() == 0
    assert b"\x1b[?1049l" in terminal.written
    assert terminal.modes_now() == terminal.modes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_top_and_restores_the_terminal(fake: FakeSupervisor, top: Open, number: int) -> None:
    fake.answers["status"] = numbered(1)
    terminal = top()
    terminal.wait_for("q0000")
    terminal.process.send_signal(number)
    assert terminal.end() == 128 + number
    assert terminal.modes_now() == terminal.modes
    assert b"\x1b[?1049l" in terminal.written


def test_ctrl_z_restores_the_terminal_until_top_continues(fake: FakeSupervisor, top: Open) -> None:
    fake.answers["status"] = numbered(1)
    terminal = top()
    terminal.wait_for("q0000")
    terminal.press("\x1a")
    wait_until(lambda: psutil.Process(terminal.process.pid).status() == psutil.STATUS_STOPPED, what="stopped")
    assert terminal.modes_now() == terminal.modes
    # Discards what was drawn before the stop.
    terminal.read_the_rest()
    terminal.screen.reset()
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for("q0000")
    terminal.press("q")
    assert terminal.end() == 0


def test_keys_select_pause_and_resume_queues(fake: FakeSupervisor, top: Open) -> None:
    fake.answers |= {"status": numbered(3), "queue.pause": {}, "queue.resume": {}}
    terminal = top()
    terminal.wait_for("q0002")
    terminal.press("jp")
    terminal.wait_for("paused q0001")
    terminal.press("\x1b[Br")
    terminal.wait_for("resumed q0002")
    terminal.press("k\x1b[Ap")
    terminal.wait_for("paused q0000")
    requests = [(method, params["name"]) for method, params in fake.calls if method != "status"]
    assert requests == [("queue.pause", "q0001"), ("queue.resume", "q0002"), ("queue.pause", "q0000")]


def test_a_refused_request_is_shown(fake: FakeSupervisor, top: Open) -> None:
    fake.answers |= {"status": numbered(1), "queue.pause": errors.RedisUnavailable("redis is away")}
    terminal = top()
    terminal.wait_for("q0000")
    terminal.press("p")
    terminal.wait_for("q0000: redis is away")


def test_sorting_keeps_the_selected_queue(fake: FakeSupervisor, top: Open) -> None:
    fake.answers |= {"status": numbered(5), "queue.pause": {}}
    terminal = top()
    terminal.wait_for("q0004")
    terminal.press("jss")
    text = terminal.wait_for("sort: waiting")
    assert [line.split()[0] for line in text.splitlines()[4:9]] == ["q0004", "q0003", "q0002", "q0001", "q0000"]
    terminal.press("p")
    terminal.wait_for("paused q0001")


def test_enter_opens_one_queue_and_escape_returns(fake: FakeSupervisor, top: Open) -> None:
    dead = {"id": "d1", "fence": 1, "identifier": None, "died_at": 1.7e9, "error": "KeyError", "message": "no\x1b[2J"}
    queue = queue_status()
    queue["children"][0] |= {
        "jobs": ["01J", "01K"],
        "jobs_progress": [{"fraction": 0.4, "text": "page 4"}, None],
        "job_seconds": 61.0,
    }
    fake.answers |= {
        "status": whole_status(queue),
        "jobs": {"jobs": [{"id": "w1", "state": "waiting", "identifier": "w1"}], "next": None},
        "why": {"state": "waiting", "why": "it is the next one"},
        "dead.list": {"jobs": [dead], "next": None},
    }
    terminal = top()
    terminal.wait_for("emails")
    terminal.press("\r")
    text = terminal.wait_for(lambda text: "w1: it is the next one" in text and "KeyError: no\\x1b[2J" in text)
    assert "40% page 4" in text
    assert "01K" in text
    terminal.press("\x1b")
    terminal.wait_for("QUEUE")
    terminal.press("\x1b")
    assert terminal.end() == 0


def test_a_lost_supervisor_is_shown_and_top_reconnects(fake: FakeSupervisor, top: Open) -> None:
    fake.answers["status"] = numbered(1)
    terminal = top()
    terminal.wait_for("q0000")
    fake.close()
    terminal.wait_for("unreachable, retrying")
    again = FakeSupervisor(fake.path)
    try:
        again.answers["status"] = numbered(2)
        terminal.wait_for(lambda text: "q0001" in text and "not reachable" not in text)

        def hang_up(params: dict[str, Any]) -> None:
            for connection in list(again._server._connections):
                connection.close()
            again.answers["status"] = numbered(3)

        # A connection that breaks while the supervisor runs is opened again, too.
        again.answers["status"] = hang_up
        terminal.wait_for("q0002")
    finally:
        again.close()


def test_a_slow_answer_causes_no_second_status_request(fake: FakeSupervisor, top: Open) -> None:
    terminal = top()
    terminal.wait_for("no answer from the supervisor for 2s")
    assert fake.calls == [("status", {})]


@pytest.mark.parametrize(("columns", "lines"), [(40, 10), (20, 5), (10, 2), (200, 50)])
def test_the_screen_fits_any_size_and_follows_a_resize(
    fake: FakeSupervisor, top: Open, columns: int, lines: int
) -> None:
    fake.answers["status"] = numbered(100)
    terminal = top()
    terminal.wait_for("q0000")
    terminal.resize(columns, lines)
    # No line was wrapped: that would have scrolled the first one away.
    terminal.wait_for(lambda text: text.startswith("forq 0.1"))
    if columns >= 40:
        terminal.wait_for(lambda text: "q quit" in text.splitlines()[-1])
        assert "1 to " in terminal.text
        assert "WAITING" in terminal.text


def test_a_thousand_queues_are_requested_once_and_drawn_in_part(fake: FakeSupervisor, top: Open) -> None:
    fake.answers["status"] = numbered(1000)
    terminal = top()
    assert "1 to 17 of 1000" in terminal.wait_for("q0016")
    terminal.press("G")
    assert "984 to 1000 of 1000" in terminal.wait_for("q0999")
    terminal.press("g")
    terminal.wait_for("q0000")
    assert len(terminal.written) < 100_000


def test_an_unchanged_screen_is_not_redrawn(fake: FakeSupervisor, top: Open) -> None:
    fake.answers["status"] = numbered(1)
    terminal = top()
    terminal.wait_for(lambda text: "q0000" in text and text.splitlines()[4].split()[6] == "0")
    written, calls = len(terminal.written), len(fake.calls)
    wait_until(lambda: len(fake.calls) > calls + 3, what="three more requests")
    terminal.read(0)
    assert len(terminal.written) == written


# Parts of top, in this process.


def test_rates_are_computed_from_counter_differences() -> None:
    figures = QueueStats()

    def rates(done: int | None, failed: int | None, now: float) -> tuple[float | None, float | None]:
        row = figures.read(whole_status(queue_status(done=done, failed=failed)), now)[0]
        return row.done_per_second, row.failed_per_second

    assert rates(100, 1, 10.0) == (None, None)
    assert rates(150, 2, 12.0) == (25.0, 0.5)
    assert rates(None, None, 13.0) == (None, None)
    assert rates(160, 2, 22.0) == (1.0, 0.0)
    # A new queue of the same name.
    assert rates(3, 0, 23.0) == (None, None)


def test_keys_may_arrive_in_pieces_and_a_lone_escape_is_a_key() -> None:
    keys = KeyDecoder()
    assert keys.feed(b"j\x1b") == ["down"]
    assert keys.incomplete
    assert keys.feed(b"[") == []
    assert keys.feed(b"A\x1b[1;5Cq") == ["up", "", "q"]
    assert keys.feed(b"\x1b") == []
    assert keys.flush() == ["escape"]
    assert keys.feed(b"\x1b\x1b[A") == ["escape", "up"]
    assert keys.feed(b"\xc3\xa4") == ["", ""]


def test_large_numbers_are_abbreviated() -> None:
    assert [count_text(count) for count in (None, 0, 999_999, 1_234_567, 2 * 10**9, 3 * 10**12)] == [
        *(None, "0", "999999", "1.2M", "2.0G", "3.0T")
    ]
    assert [rate_text(rate) for rate in (None, 0.0, 0.26, 9.96, 41207.4)] == [None, "0", "0.3", "10.0", "41207"]
    off = {"rate": "off", "max_active": 4, "may_begin": 1, "limited_workers": 0}
    assert limits_text(off) == "max 4"
