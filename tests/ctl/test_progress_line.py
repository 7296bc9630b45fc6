"""Progress of long commands: always shown on a terminal, elsewhere at most every ten seconds."""

import io
import sys
from pathlib import Path

import pytest

from forq import progress_line
from forq.ctl import main as ctl
from forq.progress_line import LINE_SECONDS, ProgressLine
from tests.ctl.fake_supervisor import FakeSupervisor, forqctl


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_is_printed_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = ProgressLine(lines=True, now=clock)
    for part in range(1, 26):
        clock.seconds += 1
        line.draw_bar(part, 100, f"{part} jobs pushed")
    line.clear()
    assert capsys.readouterr().err == "forqctl: 10% 10 jobs pushed\nforqctl: 20% 20 jobs pushed\n"
    clock.seconds += LINE_SECONDS
    line.draw_bar(7, 0, "7 jobs pushed")
    assert capsys.readouterr().err == "forqctl: 7 jobs pushed\n", "the length of a pipe is unknown"


def test_without_a_terminal_nothing_is_printed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = ProgressLine(now=clock)
    clock.seconds += 10 * LINE_SECONDS
    line.draw_bar(1, 2, "x")
    line.update("x")
    line.clear()
    assert capsys.readouterr().err == ""


def test_on_a_terminal_one_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, terminal = Clock(), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = ProgressLine(lines=True, now=clock)
    for part in (1, 2, 3):
        clock.seconds += LINE_SECONDS
        line.draw_bar(part, 4, f"{part} jobs pushed")
    line.clear()
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().split("\r\x1b[K")[1:] == [
        "[#######.......................]  25% 1 jobs pushed",
        "[###############...............]  50% 2 jobs pushed",
        "[######################........]  75% 3 jobs pushed",
        "",
    ]


def test_a_bulk_push_reports_progress_and_its_output_does_not_change(
    fake: FakeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["push_many"] = lambda params: {"ids": ["x"] * len(params["jobs"])}
    (tmp_path / "jobs").write_text("1\n" * 1200)
    push = ["--socket", fake.path, "push", "q", "--file", str(tmp_path / "jobs")]
    monkeypatch.setattr(progress_line, "LINE_SECONDS", 0.0)
    assert ctl.main(push) == 0
    out, err = capsys.readouterr()
    assert out == "pushed 1200 jobs to q\n"
    assert err.splitlines() == [
        f"forqctl: {percent}% {number} jobs pushed" for percent, number in ((41, 500), (83, 1000), (100, 1200))
    ]
    assert ctl.main([*push, "--json"]) == 0
    assert capsys.readouterr() == ('{"pushed":1200,"requests":3}\n', "")


def test_a_fast_push_without_a_terminal_reports_no_progress(fake: FakeSupervisor, tmp_path: Path) -> None:
    fake.answers["push_many"] = lambda params: {"ids": ["x"] * len(params["jobs"])}
    (tmp_path / "jobs").write_text("1\n" * 1200)
    assert forqctl(fake, "push", "q", "--file", "jobs", cwd=tmp_path) == (0, "pushed 1200 jobs to q\n", "")
