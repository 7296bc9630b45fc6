"""A seed determines the schedule."""

import pytest

from tests.chaos.faults import ALL_FAULTS, FAULTS
from tests.chaos.run import faults_of
from tests.chaos.schedule import draw

RATES = {"often": 60.0, "seldom": 0.1}


def test_a_seed_always_gives_the_same_strikes_and_another_seed_gives_others() -> None:
    assert draw(7, 60, RATES) == draw(7, 60, RATES)
    assert draw(7, 60, RATES) != draw(8, 60, RATES)


def test_each_fault_strikes_as_often_as_its_rate_says_and_at_least_once_within_the_run() -> None:
    strikes = draw(7, 30, RATES)
    assert [strike.fault for strike in strikes].count("often") == 30
    assert [strike.fault for strike in strikes].count("seldom") == 1
    assert strikes == sorted(strikes)
    assert all(0 < strike.at_seconds < 30 for strike in strikes)


def test_the_strikes_of_a_fault_do_not_depend_on_other_faults() -> None:
    alone = draw(7, 60, {"often": 60.0})
    assert [strike for strike in draw(7, 60, RATES) if strike.fault == "often"] == alone


def test_faults_are_named_with_commas_and_rates() -> None:
    assert faults_of("zombie,cut:30") == {"zombie": FAULTS["zombie"][0], "cut": 30.0}
    assert tuple(faults_of("")) == ALL_FAULTS


@pytest.mark.parametrize("text", ["zombi", "zombie:x", "zombie,"])
def test_an_unknown_fault_is_refused_with_the_list_of_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not allowed: NAME or NAME:PER_MINUTE, of kill_child, kill_job"):
        faults_of(text)
