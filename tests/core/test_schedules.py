"""When ticks are: rules, nights in which clocks change, and what is planned for ticks that are due."""

from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forq.errors import UsageError
from forq.schedules import (
    MAX_CAUGHT_UP_TICKS,
    MAX_COUNTED_TICKS,
    TICKS_PER_CALL,
    Cron,
    Every,
    Rule,
    Schedule,
    plan,
    read_cron,
    show_tick,
)

NOW_MS = 1_790_000_000_000
EXPRESSIONS = ("30 2 * * *", "0 * * * *", "*/20 * * * *", "0 0 * * *", "15 1 * * 0", "0 2,3 * * *", "* 2 * * *")
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Havana", "Asia/Kathmandu")

rules = st.one_of(
    st.builds(Every, st.integers(100, 10**7)),
    st.builds(Cron, st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES)),
)
# All of 2026, in which each of these zones changes its clocks or never does.
times = st.integers(1_767_225_600, 1_798_761_600).map(lambda seconds: seconds * 1000)


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def ticks_of(expression: str, zone: str, after: str, count: int) -> list[str]:
    rule = read_cron(expression, zone)
    return [show_tick(rule, tick) for tick in islice(rule.after(ms(after)), count)]


# Both zones, both nights: a time that does not exist, one that exists twice, and every hour.
NIGHTS = [
    ("30 2 * * *", "Europe/Berlin", "2026-03-28T23:00+01:00", "2026-03-29T03:00:00+02:00 2026-03-30T02:30:00+02:00"),
    ("30 2 * * *", "Europe/Berlin", "2026-10-24T23:00+02:00", "2026-10-25T02:30:00+02:00 2026-10-26T02:30:00+01:00"),
    (
        *("0 * * * *", "Europe/Berlin", "2026-03-29T00:30+01:00"),
        "2026-03-29T01:00:00+01:00 2026-03-29T03:00:00+02:00 2026-03-29T04:00:00+02:00",
    ),
    (
        *("0 * * * *", "Europe/Berlin", "2026-10-25T01:30+02:00"),
        "2026-10-25T02:00:00+02:00 2026-10-25T02:00:00+01:00 2026-10-25T03:00:00+01:00",
    ),
    ("30 2 * * *", "America/New_York", "2026-03-07T23:00-05:00", "2026-03-08T03:00:00-04:00 2026-03-09T02:30:00-04:00"),
    ("30 1 * * *", "America/New_York", "2026-10-31T23:00-04:00", "2026-11-01T01:30:00-04:00 2026-11-02T01:30:00-05:00"),
    (
        *("0 * * * *", "America/New_York", "2026-03-08T00:30-05:00"),
        "2026-03-08T01:00:00-05:00 2026-03-08T03:00:00-04:00 2026-03-08T04:00:00-04:00",
    ),
    (
        *("0 * * * *", "America/New_York", "2026-11-01T00:30-04:00"),
        "2026-11-01T01:00:00-04:00 2026-11-01T01:00:00-05:00 2026-11-01T02:00:00-05:00",
    ),
    # Two times fall into the gap: one tick.
    ("0,30 2 * * *", "Europe/Berlin", "2026-03-28T23:00+01:00", "2026-03-29T03:00:00+02:00 2026-03-30T02:00:00+02:00"),
    # Asked within the hour that comes a second time: its tick is over.
    ("30 2 * * *", "Europe/Berlin", "2026-10-25T02:10+01:00", "2026-10-26T02:30:00+01:00"),
]


@pytest.mark.spec("M11")
@pytest.mark.parametrize(("expression", "zone", "after", "expected"), NIGHTS)
def test_nights_in_which_clocks_change(expression: str, zone: str, after: str, expected: str) -> None:
    assert ticks_of(expression, zone, after, len(expected.split())) == expected.split()


@pytest.mark.parametrize(("zone", "year"), [("Europe/Berlin", 2026), ("America/New_York", 2027)])
def test_a_daily_job_runs_once_on_each_day_of_a_year(zone: str, year: int) -> None:
    days = [tick[:10] for tick in ticks_of("30 2 * * *", zone, f"{year}-01-01T00:00+00:00", 365)]
    assert days == [str((datetime(year, 1, 1, tzinfo=UTC) + timedelta(days=n)).date()) for n in range(365)]


@settings(max_examples=200, deadline=None)
@given(rules, times)
def test_ticks_are_later_than_asked_and_each_later_than_the_one_before(rule: Rule, after_ms: int) -> None:
    ticks = list(islice(rule.after(after_ms), 30))
    assert [after_ms, *ticks] == sorted({after_ms, *ticks})


@settings(max_examples=200, deadline=None)
@given(st.builds(Cron, st.sampled_from(EXPRESSIONS), st.sampled_from(ZONES)), times, st.integers(0, 3 * 86_400_000))
def test_the_ticks_of_a_cron_rule_are_the_same_wherever_the_search_began(rule: Cron, early_ms: int, later: int) -> None:
    """So whoever computes the next tick, from whatever tick before, finds the same."""
    late_ms = early_ms + later
    from_early = (tick for tick in rule.after(early_ms) if tick > late_ms)
    assert list(islice(from_early, 3)) == list(islice(rule.after(late_ms), 3))


@settings(max_examples=300, deadline=None)
@given(rules, times, st.integers(0, 20 * 86_400_000), st.sampled_from(("once", "all", "none")))
def test_each_due_tick_runs_or_is_missed_and_none_is_early(
    rule: Rule, from_ms: int, late_ms: int, catch_up: str
) -> None:
    tick_ms = next(rule.after(from_ms))
    now_ms = tick_ms + late_ms
    planned = plan(rule, catch_up, tick_ms, now_ms)
    assert planned.ticks == sorted(set(planned.ticks))
    assert all(tick_ms <= tick <= now_ms for tick in planned.ticks)
    next_ms = planned.next_ms
    assert next_ms is not None
    if isinstance(rule, Every):
        passed = (next_ms - tick_ms) // rule.every_ms
    else:
        passed = 1 + len(list(takewhile(lambda tick: tick < next_ms, rule.after(tick_ms))))
    assert len(planned.ticks) + planned.missed == passed
    if len(planned.ticks) < TICKS_PER_CALL:
        assert next_ms > now_ms


@pytest.mark.parametrize("rule", [Every(60_000), Cron("* * * * *", "Europe/Berlin")])
@pytest.mark.parametrize(
    ("catch_up", "late_ms", "runs", "missed"),
    [
        ("once", 0, [0], 0),
        ("once", 50_000, [0], 0),
        ("once", 200_000, [3], 3),
        ("all", 200_000, [0, 1, 2, 3], 0),
        ("none", 999, [0], 0),
        ("none", 1000, [], 1),
        ("none", 200_000, [], 4),
        ("none", 180_999, [3], 3),
    ],
)
def test_what_is_planned_for_late_ticks(rule: Rule, catch_up: str, late_ms: int, runs: list[int], missed: int) -> None:
    tick_ms = next(Cron("* * * * *", "UTC").after(NOW_MS))
    planned = plan(rule, catch_up, tick_ms, tick_ms + late_ms)
    assert [(tick - tick_ms) // 60_000 for tick in planned.ticks] == runs
    assert planned.missed == missed
    assert planned.next_ms == tick_ms + (late_ms // 60_000 + 1) * 60_000


@pytest.mark.parametrize("rule", [Every(60_000), Cron("* * * * *", "UTC")])
def test_of_very_many_missed_ticks_the_newest_are_made_up_for_some_per_call(rule: Rule) -> None:
    tick_ms = next(Cron("* * * * *", "UTC").after(NOW_MS))
    now_ms = tick_ms + 2999 * 60_000
    ran: list[int] = []
    missed, at_ms = 0, tick_ms
    while at_ms <= now_ms:
        planned = plan(rule, "all", at_ms, now_ms)
        assert len(planned.ticks) <= TICKS_PER_CALL
        ran += planned.ticks
        missed += planned.missed
        assert planned.next_ms is not None
        at_ms = planned.next_ms
    assert ran == [now_ms - number * 60_000 for number in reversed(range(MAX_CAUGHT_UP_TICKS))]
    assert missed == 3000 - MAX_CAUGHT_UP_TICKS


def test_after_years_a_cron_rule_is_planned_without_finding_every_tick() -> None:
    rule = Cron("* * * * *", "UTC")
    planned = plan(rule, "once", NOW_MS - NOW_MS % 60_000 - 10 * 365 * 86_400_000, NOW_MS)
    assert planned.ticks == [NOW_MS - NOW_MS % 60_000]
    assert planned.missed == MAX_COUNTED_TICKS + 1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "either every or cron"),
        ({"every": "5m", "cron": "* * * * *"}, "either every or cron"),
        ({"every": "5m", "zone": "UTC"}, "zone needs cron"),
        ({"every": "50ms"}, "every '50ms' is not allowed: 100 ms to 3650 days"),
        ({"every": True}, "every: duration True"),
        ({"cron": "* * * *"}, "5 fields"),
        ({"cron": "0 * * * * *"}, "5 fields"),
        ({"cron": "61 * * * *"}, "Bad minute"),
        ({"cron": "0 0 31 2 *"}, "Bad day-of-month"),
        ({"cron": "0 0 * 2 " + "1," * 60 + "1"}, "at most 100 characters"),
        ({"cron": "* * * * *", "zone": "Europe/Atlantis"}, "zone 'Europe/Atlantis' is not allowed"),
        ({"cron": "* * * * *", "zone": "../etc/passwd"}, "is not allowed"),
        ({"every": 60, "overlap": "maybe"}, "overlap 'maybe' is not allowed: skip, queue"),
        ({"every": 60, "catch_up": "twice"}, "once, all, none"),
        ({"every": 60, "jitter": "2d"}, "jitter '2d' is not allowed"),
        ({"every": 60, "priority": 10}, "priority 10 is not allowed"),
        ({"every": 60, "data": float("nan")}, "not JSON"),
        ({"every": 60, "ever": 1}, "has no setting 'ever'; did you mean every?"),
    ],
)
def test_definitions_that_make_no_sense_are_refused(given: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why.replace("?", r"\?").replace("+", r"\+")):
        Schedule.from_mapping("k", given)


@pytest.mark.parametrize("key", ["", "a b", "a:b", "x" * 65, None, 7])
def test_keys_of_schedules_are_names(key: object) -> None:
    with pytest.raises(UsageError, match="schedule key"):
        Schedule.from_mapping(key, {"every": 60})
