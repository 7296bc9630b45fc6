"""forqctl apply: what it sends, prints and exits with."""

import json
from pathlib import Path
from typing import Any

import pytest

from forq.errors import ConfigError, PlanChanged
from tests.ctl.fake_supervisor import FakeSupervisor, forqctl

TIMEOUT = {
    "kind": "queue",
    "name": "mails",
    "key": "timeout",
    "old": "30s",
    "new": "1m",
    "effect": "live",
    "note": None,
}
GONE = {"kind": "queue", "name": "old", "key": None, "old": "m:f", "new": None, "effect": "unserved", "note": "why"}
SETTING = {"kind": "setting", "name": "capacity", "key": None, "old": "200", "new": "400", "effect": "restart"}
FAILURE = {"step": "queue mails", "code": "cannot_import", "message": "queue 'mails' is not changed", "traceback": None}


def plan(*changes: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"file": "/etc/forq.toml", "hash": "abc", "changes": list(changes), "settings": [], "warnings": [], **others}


def result(*applied: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"file": "/etc/forq.toml", "applied": list(applied), "failed": [], "settings": [], "warnings": [], **others}


def test_it_shows_the_changes_and_applies_those_with_this_hash(fake: FakeSupervisor, tmp_path: Path) -> None:
    fake.answers = {"config.plan": plan(TIMEOUT, GONE), "config.apply": result(TIMEOUT, GONE)}
    code, out, err = forqctl(fake, "apply", "forq.toml", "--yes", "--wait", "5s", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "CHANGE               OLD  NEW  EFFECT",
        "queue mails timeout  30s  1m   live",
        "queue old            m:f  -    no longer served: why",
        "applied 2 changes",
    ]
    file = str(tmp_path / "forq.toml")
    assert fake.calls == [("config.plan", {"file": file}), ("config.apply", {"file": file, "hash": "abc", "wait": 5})]


def test_without_a_file_the_supervisor_chooses_its_own(fake: FakeSupervisor) -> None:
    fake.answers = {"config.plan": plan(TIMEOUT), "config.apply": result(TIMEOUT)}
    assert forqctl(fake, "apply", "--yes")[0] == 0
    assert fake.calls == [("config.plan", {}), ("config.apply", {"hash": "abc"})]


@pytest.mark.parametrize("arguments", [["--yes"], [], ["--dry-run"]])
def test_without_changes_there_is_nothing_to_do(fake: FakeSupervisor, arguments: list[str]) -> None:
    fake.answers = {"config.plan": plan()}
    assert forqctl(fake, "apply", *arguments) == (0, "/etc/forq.toml: nothing to do\n", "")
    assert [method for method, _ in fake.calls] == ["config.plan"]


def test_a_dry_run_with_changes_exits_with_3(fake: FakeSupervisor) -> None:
    fake.answers = {"config.plan": plan(TIMEOUT)}
    code, out, err = forqctl(fake, "apply", "--dry-run", "--json")
    assert (code, json.loads(out), err) == (3, plan(TIMEOUT), "")
    assert forqctl(fake, "apply", "--dry-run")[0] == 3
    assert {method for method, _ in fake.calls} == {"config.plan"}


def test_without_a_terminal_it_needs_yes(fake: FakeSupervisor) -> None:
    fake.answers = {"config.plan": plan(TIMEOUT)}
    code, out, err = forqctl(fake, "apply", stdin=b"y\n")
    assert (code, "queue mails timeout" in out) == (2, True)
    assert err == (
        "forqctl: without a terminal nothing is applied unless --yes is given (--dry-run only shows the changes)\n"
    )
    assert forqctl(fake, "apply", "--json")[:2] == (2, "")
    assert {method for method, _ in fake.calls} == {"config.plan"}


def test_settings_and_warnings_are_on_stderr(fake: FakeSupervisor) -> None:
    fake.answers = {"config.plan": plan(settings=[SETTING], warnings=["look out"])}
    code, _, err = forqctl(fake, "apply")
    assert (code, err.splitlines()) == (
        0,
        [
            "forqctl: warning: capacity is read at start only: 200 → 400 needs a restart",
            "forqctl: warning: look out",
        ],
    )


def test_a_failed_change_is_shown_with_its_traceback(fake: FakeSupervisor) -> None:
    failed = [{**FAILURE, "traceback": "Traceback:\n  line 1"}]
    fake.answers = {"config.plan": plan(TIMEOUT, GONE), "config.apply": result(GONE, failed=failed)}
    code, out, err = forqctl(fake, "apply", "--yes")
    assert (code, out.splitlines()[-1]) == (1, "applied 1 of 2 changes")
    assert err.splitlines() == [
        "forqctl: queue 'mails' is not changed",
        "Traceback:",
        "  line 1",
        "forqctl: fix it, then run again: forqctl apply",
    ]
    code, out, _ = forqctl(fake, "apply", "--yes", "--json")
    assert (code, json.loads(out)["failed"]) == (1, failed)


def test_json_has_the_same_form_with_and_without_changes(fake: FakeSupervisor) -> None:
    fake.answers = {"config.plan": plan(settings=[SETTING])}
    code, out, _ = forqctl(fake, "apply", "--json")
    assert (code, json.loads(out)) == (0, result(settings=[SETTING]))


@pytest.mark.parametrize("error", [ConfigError("forq.toml: not valid TOML"), PlanChanged("run again")])
def test_errors_exit_with_1(fake: FakeSupervisor, error: Exception) -> None:
    fake.answers = {"config.plan": plan(TIMEOUT), "config.apply": error}
    code, _, err = forqctl(fake, "apply", "--yes")
    assert (code, err) == (1, f"forqctl: {error}\n")
