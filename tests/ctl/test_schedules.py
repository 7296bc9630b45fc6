"""forqctl schedule, schedules, unschedule and trigger."""

import json

import pytest

from forq import errors
from tests.ctl.fake_supervisor import FakeSupervisor, forqctl

UPCOMING = [{"at": 1790000000.0, "local": "2026-09-21T15:33:20+02:00"}]
NIGHT = {
    "queue": "q",
    "key": "night",
    "rule": "30 2 * * *",
    "zone": "Europe/Berlin",
    "data": {"n": "é"},
    "type": None,
    "origin": "user",
    "next_at": 1790000000.0,
    "last_at": None,
    "runs": 3,
    "skipped": 1,
    "missed": 0,
}


def test_schedule_sends_its_arguments_and_shows_the_next_ticks(fake: FakeSupervisor) -> None:
    fake.answers["schedule"] = {**NIGHT, "upcoming": UPCOMING}
    flags = ["--zone", "Europe/Berlin", "--data", '{"n": "é"}', "--priority", "3", "--type", "t", "--overlap", "queue"]
    flags += ["--catch-up", "all", "--jitter", "5m"]
    out = "scheduled night of q: 30 2 * * *\n  2026-09-21T15:33:20+02:00\n"
    assert forqctl(fake, "schedule", "q", "night", "--cron", "30 2 * * *", *flags) == (0, out, "")
    given = {"cron": "30 2 * * *", "zone": "Europe/Berlin", "data": {"n": "é"}, "priority": 3, "type": "t"}
    policy = {"overlap": "queue", "catch_up": "all", "jitter": "5m"}
    assert fake.calls == [("schedule", {"name": "q", "key": "night", **given, **policy})]
    assert json.loads(forqctl(fake, "schedule", "q", "k", "--every", "5m", "--json")[1])["upcoming"] == UPCOMING
    assert fake.calls[1] == ("schedule", {"name": "q", "key": "k", "every": "5m"})


def test_a_dry_run_shows_only_the_next_ticks(fake: FakeSupervisor) -> None:
    fake.answers["schedule"] = {"upcoming": UPCOMING}
    shown = forqctl(fake, "schedule", "q", "k", "--every", "5m", "--dry-run")
    assert shown == (0, "  2026-09-21T15:33:20+02:00\n", "")
    assert fake.calls == [("schedule", {"name": "q", "key": "k", "every": "5m", "dry_run": True})]


@pytest.mark.parametrize("flags", [[], ["--every", "5m", "--cron", "* * * * *"]])
def test_schedule_requires_exactly_one_rule(fake: FakeSupervisor, flags: list[str]) -> None:
    code, _, err = forqctl(fake, "schedule", "q", "k", *flags)
    assert (code, err) == (2, "forqctl: schedule needs --every D or --cron EXPR, and not both\n")
    assert fake.calls == []


def test_schedules_prints_a_table(fake: FakeSupervisor) -> None:
    broken = {**NIGHT, "key": "b", "rule": None, "error": "zone 'X' is not allowed"}
    fake.answers["schedules"] = {"schedules": [NIGHT, broken]}
    code, out, _ = forqctl(fake, "schedules")
    header, night, bad = out.splitlines()
    assert code == 0
    assert header.split() == ["QUEUE", "KEY", "RULE", "ZONE", "NEXT", "LAST", "RUN", "RUNS", "SKIPPED", "MISSED"]
    assert "30 2 * * *" in night
    assert night.split()[-6:] == ["Europe/Berlin", "2026-09-21T14:13:20.000Z", "-", "3", "1", "0"]
    assert "zone 'X' is not allowed" in bad
    forqctl(fake, "schedules", "q")
    assert fake.calls == [("schedules", {}), ("schedules", {"name": "q"})]
    assert json.loads(forqctl(fake, "schedules", "--json")[1])["schedules"][0] == NIGHT


def test_schedules_of_one_key_shows_its_next_ticks(fake: FakeSupervisor) -> None:
    fake.answers["schedules"] = {"schedules": [{**NIGHT, "upcoming": UPCOMING}]}
    lines = forqctl(fake, "schedules", "q", "night")[1].splitlines()
    assert 'data      {"n":"é"}' in lines
    assert "type      -" in lines
    assert "next_at   2026-09-21T14:13:20.000Z" in lines
    assert lines[-1] == "  2026-09-21T15:33:20+02:00"
    assert fake.calls == [("schedules", {"name": "q", "key": "night"})]


def test_unschedule_warns_if_the_config_file_restores_the_schedule(fake: FakeSupervisor) -> None:
    fake.answers["unschedule"] = {"key": "k", "removed": True, "origin": "user"}
    assert forqctl(fake, "unschedule", "q", "k") == (0, "unscheduled k of q\n", "")
    fake.answers["unschedule"] = {"key": "k", "removed": True, "origin": "config"}
    assert "until the next start: it is defined in the config file" in forqctl(fake, "unschedule", "q", "k")[1]
    fake.answers["unschedule"] = errors.UnknownSchedule("none")
    assert forqctl(fake, "unschedule", "q", "k") == (4, "", "forqctl: none\n")


def test_trigger_prints_the_id(fake: FakeSupervisor) -> None:
    fake.answers["trigger"] = {"id": "schedule:k"}
    assert forqctl(fake, "trigger", "q", "k") == (0, "schedule:k\n", "")
    assert fake.calls == [("trigger", {"name": "q", "key": "k"})]


def test_a_paused_schedule_is_shown_as_paused(fake: FakeSupervisor) -> None:
    fake.answers["schedules"] = {"schedules": [{**NIGHT, "paused": True, "next_at": None}]}
    assert forqctl(fake, "schedules")[1].splitlines()[1].split()[-5:] == ["paused", "-", "3", "1", "0"]


def test_schedules_are_paused_and_resumed(fake: FakeSupervisor) -> None:
    fake.answers |= {"schedule.pause": {"paused": True}, "schedule.resume": {"resumed": True}}
    assert forqctl(fake, "pause-schedule", "q", "night") == (0, "night of q paused\n", "")
    assert forqctl(fake, "resume-schedule", "q", "night") == (0, "night of q resumed\n", "")
    params = {"name": "q", "key": "night"}
    assert fake.calls == [("schedule.pause", params), ("schedule.resume", params)]
    fake.answers |= {"schedule.pause": {"paused": False}, "schedule.resume": {"resumed": False}}
    assert forqctl(fake, "pause-schedule", "q", "night") == (0, "night of q was paused before\n", "")
    assert forqctl(fake, "resume-schedule", "q", "night") == (0, "night of q was not paused\n", "")
    assert json.loads(forqctl(fake, "resume-schedule", "q", "night", "--json")[1]) == {"resumed": False}
    fake.answers["schedule.pause"] = errors.UnknownSchedule("none")
    assert forqctl(fake, "pause-schedule", "q", "x") == (4, "", "forqctl: none\n")
